"""What `halfstep tune TARGET` may be: a recipe, or a function of the user's that makes a model and its data.

recipe             its runs are run folders (compare/runs.py), and the study begins where the reference ended
module:factory     returns model, optimizer, loss_fn, batches, held_out, and is called for each run with the
                   random state of its seed, which also decides the order of the batches; with one batch, as
                   for `halfstep audit`, it is trained on and judged by
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from halfstep.config.load import load, recipe_names
from halfstep.config.run import RunConfig
from halfstep.core.errors import (
    FactoryError,
    OptionError,
    SettingConflictError,
    SettingPolicyError,
    TargetError,
    did_you_mean,
    one_of,
)
from halfstep.core.policy import PRESETS, Policy, read
from halfstep.tools.audit.targets import call, find, is_factory

Report = Callable[[int], None]


class Target(Protocol):
    """Something that can be trained for a while under any policy."""

    compiled: bool
    named: str | None  # the policy that it comes with
    note: str  # what to know about its numbers

    @property
    def device(self) -> Any:
        """The device, as the framework names it; None is the first."""

    def train(self, policy: Policy, seed: int, steps: int, report: Report) -> float:
        """Trains it; returns the held-out loss, infinite if the run diverged."""

    def study(self, base: Policy, seed: int, steps: int, report: Report) -> Any:
        """Returns it as it is after so many steps in the base, to see what its gradients notice."""


def target_of(name: str, overrides: tuple[str, ...], out: Path, device: str | None) -> Target:
    """Returns what a name stands for."""
    if is_factory(name):
        if overrides or device is not None:
            option = f"--set {overrides[0]}" if overrides else f"--device {device}"
            raise OptionError(
                f"{option} is for recipes, and `{name}` is a function that decides it",
                hint="change what the function returns",
            )
        return FactoryTarget(name)
    if name not in recipe_names() and not name.endswith(".toml"):
        raise TargetError(
            f"`{name}` is neither a recipe nor module:factory",
            hint=did_you_mean(name, recipe_names(), f"recipes are {', '.join(recipe_names())}"),
        )
    config = load(name, overrides)
    if config.backend != "torch":
        raise SettingConflictError(
            f"backend {config.backend}: `halfstep tune` runs on torch", hint="--set backend=torch"
        )
    return RecipeTarget(config, out / "runs", device)


class RecipeTarget:
    """A recipe, trained in run folders."""

    note = ""

    def __init__(self, config: RunConfig, out: Path, device: str | None):
        quiet = dataclasses.replace(config.monitor, on=False)
        self.config, self.out, self.device = dataclasses.replace(config, monitor=quiet), out, device
        self.compiled = bool(config.training.compile)
        self.named = None if read(config.policy).base == "auto" else config.policy

    def train(self, policy: Policy, seed: int, steps: int, report: Report) -> float:
        """Trains a run folder, or what is left of it."""
        return self._curve(policy, seed, steps, report).held_out  # type: ignore[no-any-return]

    def study(self, base: Policy, seed: int, steps: int, report: Report) -> Any:
        """Loads the weights of the reference's run, and batches that come after it."""
        from halfstep.torch.instruments.tuning import STUDY_BATCHES, study_of
        from halfstep.training.data.batches import make_batches
        from halfstep.training.data.load import load_corpus
        from halfstep.training.run.trained import open_trained

        folder = Path(self._curve(base, seed, steps, report).name)
        session = open_trained(folder, self.device, policy=str(base), weights="model").session
        data = self.config.data
        corpus = load_corpus(data.source, data.validation, self.config.model.vocabulary)
        batches = make_batches(dataclasses.replace(self.config, seed=seed), corpus.train)
        return study_of(session, [batches.at(steps + i)[0] for i in range(STUDY_BATCHES)], base)

    def _curve(self, policy: Policy, seed: int, steps: int, report: Report) -> Any:
        from halfstep.tools.compare.runs import train_policies

        given = self.config, [str(policy)], [seed], steps, lambda done, _: report(done)
        return train_policies(*given, out=self.out, device=self.device)[str(policy)][seed]


class FactoryTarget:
    """What a factory makes."""

    compiled = False
    named: str | None = None

    def __init__(self, name: str):
        from halfstep.torch.instruments.tuning import device_of_factory

        self._name, self._factory = name, find(*name.split(":"))
        made = self._make(0)
        self.device: str | None = device_of_factory(made)
        one = "it gives one batch, which is trained on and judged by: there is no held-out loss"
        self.note = one if len(made) == 4 else ""

    def train(self, policy: Policy, seed: int, steps: int, report: Report) -> float:
        """Trains a new model."""
        loss: float = self._trial(policy, seed).train(steps, report)
        return loss

    def study(self, base: Policy, seed: int, steps: int, report: Report) -> Any:
        """Trains a new model, and keeps it."""
        trial = self._trial(base, seed)
        trial.train(steps, report)
        return trial.study()

    def _trial(self, policy: Policy, seed: int) -> Any:
        from halfstep.torch.instruments.tuning import Trial

        return Trial(lambda: self._make(seed), policy, seed)

    def _make(self, seed: int) -> tuple[Any, ...]:
        from halfstep.torch.instruments.tuning import FACTORY_HINT, call_seeded

        made = call(lambda: call_seeded(self._factory, seed), self._name)
        if not isinstance(made, tuple) or len(made) not in (4, 5):
            count = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
            without = ", and no data to train on" if isinstance(made, tuple) and len(made) < 4 else ""
            raise FactoryError(f"`{self._name}` returned {count}{without}", hint=FACTORY_HINT)
        return made


def base_of(target: Target, given: str | None) -> Policy:
    """Returns the policy to start from: the one given, the target's own, or by what the device multiplies."""
    from halfstep.core.formats import BF16
    from halfstep.torch.instruments.tuning import unsupported_formats

    text = given or target.named
    if text is None:
        text = "fp32" if unsupported_formats([BF16], target.device) else "bf16-mixed"
    if read(text).base == "auto":
        raise SettingPolicyError(
            f"`{text}` measures which precision is fastest, and that is where a search begins",
            hint=f"name the base with --base: {one_of(PRESETS)}",
        )
    return Policy.parse(text)
