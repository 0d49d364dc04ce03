"""Short runs to compare: the same weights, data and order of the data for every way to train, several seeds.

Every run has a folder of its own, OUT/WAY/seed-N, so an interrupted run continues where it was, and a finished
one is not trained again. Single-process runs train in this process; several ranks are started by torchrun.

What the two words of a command line name, runs and logs that are there or policies to train, is decided here too.
"""

import dataclasses
import gc
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.config.load import load, read_policy, setting_named, to_toml
from halfstep.config.run import RunConfig
from halfstep.core.compare.gaps import CompareError, CompareInputError, IncomparableError
from halfstep.core.errors import PolicyError, ScalingError
from halfstep.core.policy import read
from halfstep.tools import probe
from halfstep.tools.compare.curves import Curve, read_run
from halfstep.tools.compare.logs import EVENT_FILE, FILES, read_log, read_logs, read_trackio, split_trackio
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus
from halfstep.training.loop import Loop
from halfstep.training.paths import EVENTS
from halfstep.training.run import folder
from halfstep.training.run.folder import holds_run
from halfstep.training.run.health import DivergedError
from halfstep.training.run.resume import open_run
from halfstep.training.telemetry.progress import StepProgress, drop_refusals

# Called with steps done, and what is being trained.
OnProgress = Callable[[int, str], None]
Hooks = tuple[Callable[[int], None], Callable[[str], None]]  # for steps and for warnings
RECORDS = 20  # of each layer, over a run


class StoppedError(CompareError):
    """The user stopped before all runs were trained."""


@dataclass(frozen=True)
class Way:
    """One way to train: what to call it, and its settings; the seed is set for each run."""

    name: str
    config: RunConfig
    ranks: int = 1


def train_policies(
    config: RunConfig,
    policies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    on_progress: OnProgress = lambda done, words: None,
    *,
    out: Path,
    device: str | None = None,
) -> dict[str, dict[int, Curve]]:
    """Trains a recipe under several policies with several seeds; returns each policy's runs by seed."""
    config = shorten(config, steps)
    ways = [Way(policy, dataclasses.replace(config, policy=policy)) for policy in policies]
    return train_ways(ways, seeds, on_progress, out=out, device=device)


def shorten(config: RunConfig, steps: int) -> RunConfig:
    """Returns the settings of a run of `steps` steps that is trained for a comparison."""
    training = dataclasses.replace(
        config.training, steps=steps, validate_every=steps, keep_last=1, loggers=(), measure_ceiling=False
    )
    monitor = dataclasses.replace(config.monitor, every=max(1, steps // RECORDS), sample_every=0)
    return dataclasses.replace(config, training=training, monitor=monitor)


def train_ways(
    ways: Sequence[Way],
    seeds: Sequence[int],
    on_progress: OnProgress = lambda done, words: None,
    *,
    out: Path,
    device: str | None = None,
    on_warning: Callable[[str], None] = lambda words: None,
) -> dict[str, dict[int, Curve]]:
    """Trains each way with each seed, seed by seed, so that what was interrupted leaves whole pairs.

    `on_warning` gets each warning of the runs once, such as that this machine has to emulate a format.
    """
    corpora: dict[str, Corpus] = {}
    warned: set[str] = set()
    done = 0

    def warn(words: str) -> None:
        if words not in warned:
            warned.add(words)
            on_warning(words)

    curves: dict[str, dict[int, Curve]] = {way.name: {} for way in ways}
    for seed in seeds:
        for way in ways:
            words, before = f"{way.name}, seed {seed}", done

            def report(step: int, words: str = words, before: int = before) -> None:
                on_progress(before + step, words)

            report(0)
            config = dataclasses.replace(way.config, seed=seed)
            place = out / folder_name(way) / f"seed-{seed}"
            curve = read_finished(place)
            if curve is None and way.ranks > 1:
                curve = _train_ranks(config, way.ranks, place, device)
            elif curve is None:
                curve = _train(config, place, corpora, device, (report, warn))
            if (curve.about.get("device") or {}).get("kind") == "cpu":
                curve = dataclasses.replace(curve, memory=None)  # of the process, which has trained other runs too
            curves[way.name][seed] = curve
            done += config.training.steps
    on_progress(done, "")
    return curves


def folder_name(way: Way) -> str:
    """Returns the folder of a way to train: its name where that can be one, and what tells its settings apart."""
    settings = [dataclasses.asdict(dataclasses.replace(way.config, seed=0, title="")), way.ranks]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9.-]+', '-', way.name)[:40].strip('-.')}-{digest}"


def _train(config: RunConfig, out: Path, corpora: dict[str, Corpus], device: str | None, hooks: Hooks) -> Curve:
    """Trains one run, or the rest of it; what diverged is a result and not an error."""
    opened = open_run(out) if folder.has_config(out) else None
    if opened is not None:
        config = opened.config
    data = config.data
    source = repr((data.source, data.validation, config.model.vocabulary))
    if source not in corpora:
        corpora[source] = load_corpus(data.source, data.validation, config.model.vocabulary)
    ran = None if opened is None else opened.policy
    gc.collect()  # a run and its model refer to each other: what earlier runs held is not freed otherwise
    policy, choice = probe.resolve(config, device, ran=ran)
    loop = Loop(
        config,
        policy,
        out,
        opened=opened,
        choice=choice,
        device=device,
        warnings=policy.warnings,
        corpus=corpora[source],
        progress=lambda total, start, stream: _Report(total, start, *hooks),
    )
    try:
        outcome = loop.run()
    except (ScalingError, DivergedError):
        return read_run(out)
    if not outcome.finished:
        raise StoppedError(
            f"stopped at step {outcome.step} of `{out}`",
            hint="the same command continues; nothing is trained twice",
        )
    return read_run(out)


def _train_ranks(config: RunConfig, ranks: int, out: Path, device: str | None) -> Curve:
    """Trains one run, or the rest of it, by processes that torchrun starts; their log is beside its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe, log = (out.with_name(f"{out.name}{ending}") for ending in (".toml", ".log"))
    recipe.write_text(to_toml(config), encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "halfstep"]
    words = ["train", str(recipe), "--out", str(out), "--resume", *(["--device", device] if device else [])]
    with log.open("ab") as file:
        code = subprocess.run([sys.executable, *launch, *words], stdout=file, stderr=file, check=False).returncode
    if (curve := read_finished(out)) is not None:
        return curve
    raise CompareError(
        f"{ranks} ranks did not finish `{out}` (exit code {code})",
        hint=f"`{log}` says why; the same command continues",
    )


def read_finished(out: Path) -> Curve | None:
    """Returns a run that has finished or diverged; None if there is something left to train."""
    if not (out / EVENTS).exists():
        return None
    try:
        curve = read_run(out)
    except CompareInputError:  # it has not made a step
        return None
    return curve if curve.finished or curve.problem else None


class _Report(StepProgress):
    """The progress of one of several runs: their caller shows it."""

    def __init__(self, total: int, start: int, report: Callable[[int], None], warn: Callable[[str], None]):
        super().__init__(total, start, drop_refusals(None))
        self._report, self._warn = report, warn

    def note(self, text: str) -> None:
        """Passes warnings on; the other lines of a run are in its record."""
        if text.startswith("warning: "):
            self._warn(text)

    def update(self, step: int, **_: Any) -> None:
        """Reports the step."""
        self._report(step)


# What A and B may be: runs that are there, logs, or policies to train.

_WHAT = "a run folder, a folder of runs (one for each seed), a loss log or a folder of logs, or a policy"


@dataclass(frozen=True)
class Training:
    """What is to be trained on both sides, and how."""

    recipe: str
    seeds: tuple[int, ...]
    steps: int | None = None
    both: tuple[str, ...] = ()  # settings, as --set gives them
    own: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of A and of B
    ranks: tuple[int, int] = (1, 1)


def names_existing_runs(given: str) -> bool:
    """Whether A or B names something to read, and not a policy to train."""
    path = Path(given)
    looks = (
        path.suffix in FILES
        or split_trackio(given) is not None
        or EVENT_FILE in path.name
        or ("/" in given and path.suffix != ".toml")
    )
    return looks or (path.exists() and path.suffix != ".toml")


def read_side(given: str, column: str | None = None) -> list[Curve]:
    """Returns the runs of a run folder, a folder of runs, or a log."""
    project, path = split_trackio(given), Path(given)
    if project is not None:
        return read_trackio(*project, column)
    if not path.exists():
        raise CompareInputError(f"there is no file or folder `{given}`", hint=f"name {_WHAT}")
    if not path.is_dir():
        return [read_run(path.parent)] if path.name == EVENTS else read_log(path, column)
    if holds_run(path):
        return [read_run(path)]
    if runs := sorted(each for each in path.iterdir() if each.is_dir() and holds_run(each)):
        return [read_run(each) for each in runs]
    if any(path.glob(f"{EVENT_FILE}*")):
        return read_log(path, column)
    if curves := read_logs(path, column):
        return curves
    raise CompareInputError(f"`{path}` holds no run and no log", hint=f"name {_WHAT}")


def resolve_ways(policies: tuple[str, str], training: Training) -> tuple[Way, Way]:
    """Returns the two ways to train that a command line describes."""
    first, second = (_way(policies[i], training, i) for i in (0, 1))
    if first.config == second.config and first.ranks == second.ranks:
        raise CompareInputError(
            f"A and B are the same: {first.name} with the same settings",
            hint="name two policies, or change a setting of one side: --set-a training.compile=true",
        )
    if first.name == second.name:
        first = dataclasses.replace(first, name=f"{first.name} (A)")
        second = dataclasses.replace(second, name=f"{second.name} (B)")
    return first, second


def _way(given: str, training: Training, side: int) -> Way:
    try:
        policy = read_policy(given)
        read(policy)
    except PolicyError as error:
        raise CompareInputError(
            f"`{given}` is neither a file or folder nor a policy: {error.message}",
            hint=f"name {_WHAT}" + (f"; {error.hint}" if error.hint else ""),
        ) from None
    own, ranks = training.own[side], training.ranks[side]
    if named := [each for each in (*training.both, *own) if setting_named(each) in ("seed", "policy")]:
        raise CompareInputError(
            f"`{named[0]}`: A and B are the policies, and --seeds says how many seeds each gets",
            hint="leave it out",
        )
    config = load(training.recipe, [*training.both, *own, f"policy={policy}"])
    if ranks > 1 and config.backend != "torch":
        raise CompareInputError(
            f"{ranks} ranks are started by torchrun, and the backend is {config.backend}", hint="use torch"
        )
    config = shorten(config, training.steps or config.training.steps)
    parts = [*own, *([f"{ranks} ranks"] if ranks > 1 else [])]
    return Way(", ".join([given, *parts]), config, ranks)


def check_alike(first: RunConfig, second: RunConfig) -> None:
    """Refuses to train what could not be compared: other data, or another model."""
    for name in ("data", "model"):
        if getattr(first, name) != getattr(second, name):
            raise IncomparableError(
                f"A and B would be trained with different settings of {name}.*: their losses would say nothing "
                "about each other",
                hint="give such a setting to both, with --set",
            )
