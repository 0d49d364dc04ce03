"""`halfstep tune`: the narrowest formats that a run tolerates, module by module.

1.  The reference: the base policy, trained for a while with several seeds.
2.  The study: each module alone in each format, by what the gradient notices (torch/instruments/tuning.py).
3.  Costs: the time of each layer in each format on this device, or the bytes its matmuls read where the device
    lacks a format; then everything runs emulated.
4.  The search (search.py). Each policy it asks about is trained with the same seeds as the reference, and the gaps
    of the held-out losses decide (core/compare).

Everything that took time is kept in OUT/tune.json as soon as it is known: the same command continues there.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.config.reading import read_bytes
from halfstep.core.compare.gaps import Verdict, seed_spread, verdict
from halfstep.core.errors import OptionError, StudyError
from halfstep.core.policy import Policy
from halfstep.core.roles import Operand, is_narrow, parse_value
from halfstep.tools.tune.rules import ModuleRule, apply_assignment, formats_of
from halfstep.tools.tune.search import Assignment, Option, SearchResult, search
from halfstep.tools.tune.targets import Target
from halfstep.training.files import make_folder, write_whole

KEPT = "tune.json"
MOST_KEPT = 64 * 2**20  # bytes of it
SEED = 0  # the first; the study is made with it

# Called with the steps that are trained, and what is being done.
OnProgress = Callable[[int, str], None]


@dataclass(frozen=True)
class Settings:
    """The question of a search; a folder holds one."""

    target: str
    base: str
    compute: tuple[str, ...]
    grad: tuple[str, ...]
    budget: str
    steps: int
    seeds: int
    most_seeds: int
    policies: int

    def __post_init__(self) -> None:
        if self.budget != "same" and not 0 <= _number(self.budget) < math.inf:
            raise OptionError(
                f"--budget {self.budget} is not a budget",
                hint="write `same`, or how much higher the held-out loss may be, such as 0.01",
            )
        if self.seeds < 2 or self.most_seeds < self.seeds:
            raise OptionError(
                f"--seeds {self.seeds}, --most-seeds {self.most_seeds}: a gap has a spread from two seeds on",
                hint="write --seeds 4 --most-seeds 12",
            )
        for name, number in (("steps", self.steps), ("policies", self.policies)):
            if number < 1:
                raise OptionError(f"--{name} {number} is not a number of {name}", hint="give 1 or more")
        for role, text in self.asked:
            if parse_value(role, text).amax == "delayed":  # type: ignore[union-attr]
                raise OptionError(
                    f"--{role} {text}: a delayed scale comes from earlier updates, and a study has none",
                    hint=f"tune with `{text.replace(':delayed', '')}`, and write `delayed` into the policy",
                )

    @property
    def asked(self) -> list[tuple[str, str]]:
        """The formats to try, each with its role."""
        return [(role, text) for role in ("compute", "grad") for text in getattr(self, role)]


@dataclass(frozen=True)
class Evaluation:
    """One policy, trained and compared with the base."""

    policy: str
    modules: tuple[str, ...]  # those that are not as in the base
    cost: float
    damage: float
    gaps: tuple[float, ...]
    verdict: Verdict
    met: bool


@dataclass
class TuneResult:
    """What a search found."""

    settings: Settings
    unit: str  # of costs: `s` or `bytes`
    lacking: str  # why costs are bytes
    reference: tuple[float, ...]  # held-out losses of the base
    delta: float
    base_cost: float
    rows: dict[str, list[Option]]  # the options of each module, the base first
    kept: dict[str, str]  # modules that stay in the base, and why
    found: SearchResult
    policy: Policy
    wanted: list[ModuleRule]
    evaluations: list[Evaluation] = field(default_factory=list)
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether a policy narrower than the base meets the budget."""
        return bool(self.found.steps)

    @property
    def chosen(self) -> Evaluation | None:
        """The policy that was found, as it was compared."""
        return next((each for each in self.evaluations if each.met and each.policy == str(self.policy)), None)

    @property
    def best(self) -> Evaluation | None:
        """Of the policies that were compared, the one with the smallest gap."""
        return min(self.evaluations, key=lambda each: each.verdict.mean, default=None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class Tuner:
    """One search, and what it knows."""

    def __init__(self, target: Target, settings: Settings, out: Path, on_progress: OnProgress):
        self.target, self.settings, self.out = target, settings, out
        self.base, self.unit, self.lacking = self._resolve_base()
        for pair in self._pairs():  # a policy that cannot be is refused before anything is trained
            self._with_option("module", Option(*pair))
        self._on_progress, self._done, self._words = on_progress, 0, ""
        self.known: dict[str, Any] = self._read()
        self.evaluations: list[Evaluation] = []

    def run(self) -> TuneResult:
        """Searches, and returns what was found."""
        s = self.settings
        reference = self._losses(self.base, range(SEED, SEED + s.seeds), "the base")
        self.reference, self.delta = [*reference], self._delta(reference)
        study = self._study()
        costs = study["costs"]
        self.modules = {name: self._options(of, costs[name]) for name, of in study["damages"].items()}
        self.base_cost = sum(options[0].cost for options in self.modules.values())
        found = search(self.modules, self._meets, s.policies)
        policy, wanted = apply_assignment(self.base, list(self.modules), found.assignment)
        return TuneResult(
            s, self.unit, self.lacking, tuple(reference), self.delta, self.base_cost, self.modules, study["kept"],
            found, policy, wanted, self.evaluations, self.target.note,
        )  # fmt: skip

    def _resolve_base(self) -> tuple[Policy, str, str]:
        """Returns the base, emulated if the device lacks a format; then costs are in bytes."""
        from halfstep.torch.instruments.tuning import unsupported_formats

        base = Policy.parse(self.settings.base)
        asked = [parse_value(role, text) for role, text in self.settings.asked]
        formats = [operand.format for operand in asked if isinstance(operand, Operand)]
        lacking = unsupported_formats([*formats, base.compute.format], self.target.device)
        if not lacking and not base.emulate:
            return base, "s", ""
        why = next(iter(lacking.values()), "the base says `emulate`")
        return dataclasses.replace(base, emulate=True), "bytes", why

    def _delta(self, reference: Sequence[float]) -> float:
        if not all(map(math.isfinite, reference)):
            raise StudyError(
                f"`{self.base}` itself diverges: its held-out losses are {[round(x, 4) for x in reference]}",
                hint="train it first, with a learning rate that it bears, or name another --base",
            )
        if self.settings.budget != "same":
            return float(self.settings.budget)
        spread = seed_spread(reference)
        if spread == 0:
            raise StudyError(
                "the seeds make no difference: all runs of the base end at the same held-out loss",
                hint="a factory must not set the random state; or give the budget as a number, --budget 0.01",
            )
        return spread / 2

    # --- what takes time

    def _losses(self, policy: Policy, seeds: Sequence[int], words: str) -> list[float]:
        """Returns the losses of some seeds, infinite where a run diverged; trains what is not known."""
        known = self.known["losses"].setdefault(str(policy), {})
        for seed in seeds:
            before, self._words = self._done, f"{words}, seed {seed}"
            if str(seed) not in known:
                loss = self.target.train(policy, seed, self.settings.steps, self._reporter(before))
                known[str(seed)] = None if loss is None or not math.isfinite(loss) else loss
                self._write()
            self._advance(before + self.settings.steps)
        losses = [known[str(seed)] for seed in seeds]
        return [math.inf if loss is None else loss for loss in losses]

    def _study(self) -> dict[str, Any]:
        """Returns the damage of each format in each role of each module, and the costs of layers."""
        if "study" in self.known:
            return self.known["study"]  # type: ignore[no-any-return]
        self._words = "the model to study"
        study = self.target.study(self.base, SEED, self.settings.steps, self._reporter(self._done))
        layers, kept = [], dict[str, str]()
        ruled = {name: each.sources["compute"] for name, each in self.base.resolve(study.names).items()}
        for layer in study.layers:
            if ruled.get(layer.name) is not None:
                kept[layer.name] = f"the base has a rule for it, `{ruled[layer.name]}`"
            elif layer.misfit and self._tries_fp8():  # emulated or not: the policy is for a device that has fp8
                kept[layer.name] = layer.misfit
            else:
                layers.append(layer)
        if not layers:
            raise StudyError(
                "there is no matmul to tune" + "".join(f"; `{name}`: {why}" for name, why in [*kept.items()][:1]),
                hint="name a --base without rules for them",
            )
        damages = self.known.setdefault("damages", {})
        for number, layer in enumerate(layers, 1):
            if layer.name in damages:
                continue
            found: dict[str, dict[str, float]] = {"compute": {}, "grad": {}}
            for role, text in self.settings.asked:
                self._words = f"matmul {number} of {len(layers)}: {layer.name} with {role} in {text}"
                self._advance(self._done)
                option = Option(compute=text) if role == "compute" else Option(grad=text)
                found[role][text] = study.descent_lost(self._with_option(layer.name, option))
            damages[layer.name] = found
            self._write()
        costs = {layer.name: self._costs(layer, study) for layer in layers}
        self.known["study"] = {"damages": self.known.pop("damages"), "costs": costs, "kept": kept}
        self._write()
        return self.known["study"]  # type: ignore[no-any-return]

    def _tries_fp8(self) -> bool:
        operands = [parse_value("compute", text) for text in self.settings.compute]
        return any(isinstance(operand, Operand) and is_narrow(operand.format) for operand in operands)

    def _costs(self, layer: Any, study: Any) -> dict[str, float]:
        """Returns what each pair of formats costs in a layer, by `compute grad`."""
        self._words = f"costs of {layer.name}"
        if self.unit == "s":
            from halfstep.torch.instruments.tuning import time_options

            policies = {" ".join(pair): self._with_option(layer.name, Option(*pair)) for pair in self._pairs()}
            key = repr((layer.sizes, layer.rows, layer.bias))
            if key not in self.known.setdefault("timed", {}):
                self.known["timed"][key] = time_options(study, layer, policies, compiled=self.target.compiled)
            return self.known["timed"][key]  # type: ignore[no-any-return]
        costs = {}
        for pair in self._pairs():
            forward, backward = formats_of(self.base, *pair)
            costs[" ".join(pair)] = layer.num_bytes(forward.format.bits, backward.format.bits)
        return costs

    def _pairs(self) -> list[tuple[str, str]]:
        """Returns the options of a module: gradients are narrow only where operands are, or no matmul gains."""
        computes = self.settings.compute
        return [("", ""), *((c, g) for c in computes for g in ("", *self.settings.grad))]

    def _options(self, damages: dict[str, dict[str, float]], costs: dict[str, float]) -> list[Option]:
        """Returns the options of a module, the base first, from what was studied of it."""
        of_compute, of_grad = ({"": 0.0} | damages[role] for role in ("compute", "grad"))
        return [Option(c, g, of_compute[c] + of_grad[g], costs[f"{c} {g}"]) for c, g in self._pairs()]

    def _with_option(self, name: str, option: Option) -> Policy:
        """Returns the base with an option for one module."""
        return apply_assignment(self.base, [name], {name: option})[0]

    # --- the question that the search asks

    def _meets(self, assignment: Assignment) -> bool:
        s, (policy, _) = self.settings, apply_assignment(self.base, list(self.modules), assignment)
        words = f"policy {len(self.evaluations) + 1} of at most {s.policies}: "
        words, count = f"{words}{len(assignment)} of {len(self.modules)} modules narrow", s.seeds
        while True:
            seeds = range(SEED, SEED + count)
            self.reference += self._losses(self.base, seeds[len(self.reference) :], "the base")
            pairs = zip(self._losses(policy, seeds, words), self.reference[:count], strict=True)
            gaps = [a - b for a, b in pairs]
            known = verdict(gaps, self.delta)
            met = known.kind == "same" if s.budget == "same" else known.interval90[1] <= self.delta
            more = known.more_seeds
            if met or known.kind != "cannot tell" or not more or count + more > s.most_seeds:
                break
            count += more
        modules = self.modules
        cost = self.base_cost - sum(modules[name][0].cost - each.cost for name, each in assignment.items())
        damage = sum(each.damage for each in assignment.values())
        self.evaluations.append(Evaluation(str(policy), tuple(assignment), cost, damage, tuple(gaps), known, met))
        return met

    # --- the folder, and the bar

    def _read(self) -> dict[str, Any]:
        path, asked = self.out / KEPT, dataclasses.asdict(self.settings)
        if not path.exists():
            make_folder(self.out)
            return {"settings": json.loads(json.dumps(asked)), "losses": {}}
        try:
            known: dict[str, Any] = json.loads(read_bytes(str(path), MOST_KEPT))
            settings = known["settings"]
        except (ValueError, KeyError, TypeError):
            raise StudyError(f"`{path}` is damaged", hint="name another folder with --out") from None
        for name, value in json.loads(json.dumps(asked)).items():
            if settings.get(name) != value and name not in ("policies", "most_seeds", "budget"):
                raise StudyError(
                    f"`{self.out}` holds a search with {name} = {settings.get(name)}, and this one has {value}",
                    hint="name another folder with --out, or repeat the command that it was made with",
                )
        return known

    def _write(self) -> None:
        self.known["settings"] = dataclasses.asdict(self.settings)
        write_whole(self.out / KEPT, (json.dumps(self.known, indent=1) + "\n").encode())

    def _reporter(self, before: int) -> Callable[[int], None]:
        return lambda step: self._advance(before + step)

    def _advance(self, done: int) -> None:
        self._done = done
        self._on_progress(done, self._words)
