"""Compares two sets of runs: what can be compared, the verdict, where the curves part, speed and memory.

    the same data                            the losses, and so the verdict
    and the same model and tokens per step   the curves, step by step and layer by layer
    the same model                           speed and memory

Whatever cannot be compared is left out, and `notes` say why. Runs whose data and models are both different have
nothing in common. Of logs nothing is known but their numbers: that data and model are the same is taken for
granted, and said.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from halfstep.config.schema import flatten
from halfstep.core.compare.divergence import FEWEST_FOR_BAND, Divergence, Series, band, first_divergence
from halfstep.core.compare.gaps import (
    IncomparableError,
    Verdict,
    correlation,
    seed_spread,
    steps_behind,
    unpaired_verdict,
    verdict,
)
from halfstep.tools.compare.curves import HELD_OUT, LOSS, PARTING, Curve, common_steps, stack_runs

LAST = 0.1  # of the steps: their mean training loss is compared if no loss is held out
# Settings that say nothing about what is compared, or are shown elsewhere.
NOT_SHOWN = {"title", "seed", "policy", "init_digest", "data.source"}
NOT_SHOWN |= {"training.validate_every", "training.save_every"}


@dataclass(frozen=True)
class Side:
    """One of the two ways to train."""

    name: str
    losses: tuple[float, ...]  # one for each run, infinite where it diverged
    tokens_per_second: float | None  # the median
    memory: int | None  # the largest peak, in bytes
    runs: tuple[str, ...]
    problems: tuple[str, ...]  # why runs diverged


@dataclass(frozen=True)
class Comparison:
    """The answer. `verdict` is None if the losses cannot be compared."""

    a: Side
    b: Side
    verdict: Verdict | None
    measure: str  # which loss it is about
    seeds: tuple[int, ...]  # of the pairs; empty if the runs share none, and are compared unpaired
    correlation: float | None  # of the losses of pairs
    behind: int | None  # how many more steps the worse side needs to reach the better one's loss
    spread: float | None  # of the reference over seeds
    parting: Divergence | None
    parting_unknown: str  # why there is no band
    first_difference: int | None  # the first step at which a training loss differs at all
    settings: tuple[tuple[str, Any, Any], ...]  # those that differ
    notes: tuple[str, ...]
    curves: tuple[dict[str, Series], dict[str, Series]] | None  # of A and B, for the page
    limits: Mapping[str, Any] | None  # the band of each series

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data, without the curves."""
        data = asdict(replace(self, curves=None, limits=None))
        del data["curves"], data["limits"]
        return data | {"settings": {key: [a, b] for key, a, b in self.settings}}


def judge(
    names: tuple[str, str],
    a: Sequence[Curve],
    b: Sequence[Curve],
    *,
    delta: float | None = None,
    share: float | None = None,
    paired: bool = True,
) -> Comparison:
    """Compares runs of A with runs of B, the reference.

    `delta` is the gap that does not matter, and so is `share` of the reference's loss. Runs of the same seed are
    pairs unless `paired` is False.
    """
    notes: list[str] = []
    a, b, seeds = _pairs(a, b, notes) if paired else (list(a), list(b), ())
    notes += [note for curve in (*a, *b) for note in curve.notes]
    data = _same(a, b, _data)
    model = _same(a, b, lambda start: start["config"].get("model"))
    batches = _same(a, b, lambda start: start.get("tokens_per_step"))
    if data is False and model is False:
        raise IncomparableError(
            f"{names[0]} and {names[1]} differ in both data and model: nothing of them can be compared",
            hint="compare runs of the same data (then their losses) or of the same model (then speed and memory)",
        )
    if None in (data, model):
        what = "first weights, data and its order in a pair" if seeds else "which data and model it is of"
        notes.append(f"a log does not say {what}: they are taken to be the same")
    if data is False:
        notes.append("the runs have other data, so their losses say nothing about each other")
    if model is False:
        notes.append("the runs have other models: their held-out losses are compared, but not curves and speed")
    elif batches is False:
        notes.append("the updates have other numbers of tokens, so the curves cannot be compared step by step")
    losses, measure = _losses(a, b, notes) if data is not False else (None, "")
    reference = losses[1] if losses is not None else []
    spread = seed_spread(reference) if len(reference) > 1 and all(map(math.isfinite, reference)) else None
    if share is not None and losses is not None:
        delta = share * abs(statistics.fmean(losses[1]))
    delta = (spread or 0.0) / 2 if delta is None else delta  # one run decides nothing, whatever delta is
    decided = None if losses is None else _decide(names, *losses, delta, paired=bool(seeds))
    drawn = _curves(a, b) if data is not False and model is not False and batches is not False else None
    parting, unknown, limits = _part(drawn)
    has_speed = model is not False
    sides = [
        Side(
            name,
            () if losses is None else tuple(losses[i]),
            _median([curve.tokens_per_second for curve in curves]) if has_speed else None,
            max((curve.memory for curve in curves if curve.memory), default=None) if has_speed else None,
            tuple(curve.name for curve in curves),
            tuple(dict.fromkeys(curve.problem for curve in curves if curve.problem)),
        )
        for i, (name, curves) in enumerate(zip(names, (a, b), strict=True))
    ]
    different = None if drawn is None or not seeds else _first_difference(drawn)
    together = correlation(*losses) if losses is not None and seeds else None
    behind = _behind(a, b, decided) if decided is not None and drawn is not None else None
    about = (
        measure,
        seeds,
        together,
        behind,
        spread,
        parting,
        unknown,
        different,
        _settings(a, b),
        tuple(notes),
        drawn,
        limits,
    )
    return Comparison(sides[0], sides[1], decided, *about)


def _pairs(
    a: Sequence[Curve], b: Sequence[Curve], notes: list[str]
) -> tuple[list[Curve], list[Curve], tuple[int, ...]]:
    """Returns the runs in pairs of the same seed, or all of them if they share none."""
    by_seed = [{curve.seed: curve for curve in curves if curve.seed is not None} for curves in (a, b)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if seeds and all(len(known) == len(curves) for known, curves in zip(by_seed, (a, b), strict=True)):
        if alone := len(a) + len(b) - 2 * len(seeds):
            notes.append(f"{alone} run{'s' if alone > 1 else ''} without a partner of the same seed left out")
        return [by_seed[0][seed] for seed in seeds], [by_seed[1][seed] for seed in seeds], tuple(seeds)
    notes.append("the runs share no seeds, so their means are compared: the intervals hold the luck of all seeds")
    return list(a), list(b), ()


def _same(a: Sequence[Curve], b: Sequence[Curve], read: Callable[[Mapping[str, Any]], Any]) -> bool | None:
    """Whether all runs agree in what is read of their start; None if that is unknown of one of them."""
    values = [read(curve.about) if curve.about else None for curve in (*a, *b)]
    return None if None in values else all(value == values[0] for value in values)


def _data(start: Mapping[str, Any]) -> Any:
    return (start.get("data") or {}).get("digest"), start["config"].get("model", {}).get("vocabulary")


def _behind(a: Sequence[Curve], b: Sequence[Curve], found: Verdict) -> int | None:
    """Returns how many more steps the worse side needs, at the slope of its mean training loss."""
    worse = list(a if found.mean > 0 else b)
    steps = common_steps(worse).get(LOSS)
    if steps is None or not math.isfinite(found.mean) or not found.mean:
        return None
    mean = np.mean(stack_runs(worse, {LOSS: steps})[LOSS].values, axis=0)
    return steps_behind(steps, mean, abs(found.mean))


def _losses(
    a: Sequence[Curve], b: Sequence[Curve], notes: list[str]
) -> tuple[tuple[list[float], list[float]], str]:
    """Returns the losses to compare, and what they are: held out at the last common step, or of training."""
    finite = [curve for curve in (*a, *b) if curve.held_out != math.inf]
    steps = common_steps(finite) if finite else {}
    if not finite or HELD_OUT in steps:
        last = int(steps[HELD_OUT][-1]) if finite else 0
        word = f"held-out loss at step {last:,}"
        found = [[_held_out(curve, last) for curve in curves] for curves in (a, b)]
    elif all(curve.held_out is not None for curve in (*a, *b)):
        word = "held-out loss at the end of each run"
        notes.append(f"the runs end at other steps: A at {_ends(a)}, B at {_ends(b)}")
        found = [[float(curve.held_out or 0.0) for curve in curves] for curves in (a, b)]
    elif LOSS in steps:
        window = steps[LOSS][-max(1, round(LAST * len(steps[LOSS]))) :]
        word = f"mean training loss of steps {window[0]:,} to {window[-1]:,}"
        found = [[_mean(curve, window) for curve in curves] for curves in (a, b)]
    else:
        raise IncomparableError("the runs have no step in common", hint="compare runs that log the same steps")
    return (found[0], found[1]), word


def _ends(curves: Sequence[Curve]) -> str:
    return " or ".join(f"{step:,}" for step in sorted({curve.step for curve in curves}))


def _held_out(curve: Curve, step: int) -> float:
    if curve.held_out == math.inf:
        return math.inf
    steps, values = curve.series[HELD_OUT]
    return float(values[np.searchsorted(steps, step)])


def _mean(curve: Curve, window: Any) -> float:
    steps, values = curve.series[LOSS]
    mean = float(np.mean(values[np.searchsorted(steps, window)]))
    return mean if math.isfinite(mean) else math.inf


def _decide(names: tuple[str, str], a: list[float], b: list[float], delta: float, *, paired: bool) -> Verdict:
    if not all(map(math.isfinite, b)):
        raise IncomparableError(
            f"a run of the reference, {names[1]}, diverged: nothing can be compared with it",
            hint="name the runs that train second, or a lower optimizer.rate for both with --set",
        )
    return verdict([x - y for x, y in zip(a, b, strict=True)], delta) if paired else unpaired_verdict(a, b, delta)


def _curves(a: Sequence[Curve], b: Sequence[Curve]) -> tuple[dict[str, Series], dict[str, Series]] | None:
    steps = {name: at for name, at in common_steps([*a, *b]).items() if name.startswith(PARTING)}
    return (stack_runs(a, steps), stack_runs(b, steps)) if steps else None


def _part(
    drawn: tuple[dict[str, Series], dict[str, Series]] | None,
) -> tuple[Divergence | None, str, dict[str, Any] | None]:
    if drawn is None:
        return None, "", None
    a, b = drawn
    finite = [name for name in b if np.isfinite(b[name].values).all()]
    seeds = len(b[finite[0]].values) if finite else 0
    if seeds < FEWEST_FOR_BAND:
        return None, f"a band needs {FEWEST_FOR_BAND} runs of the reference or more, and there are {seeds}", None
    a, b = ({name: series[name] for name in finite} for series in drawn)
    return first_divergence(a, b), "", band(b, len(a[finite[0]].values))


def _first_difference(drawn: tuple[dict[str, Series], dict[str, Series]]) -> int | None:
    a, b = (series.get(LOSS) for series in drawn)
    if a is None or b is None:
        return None
    other = np.flatnonzero(np.any(a.values != b.values, axis=0))
    return int(a.steps[other[0]]) if other.size else None


def _settings(a: Sequence[Curve], b: Sequence[Curve]) -> tuple[tuple[str, Any, Any], ...]:
    """Returns the settings in which the two ways differ, the policy that ran first."""
    if not (a[0].about and b[0].about):
        return ()
    was, now = ({"policy": x[0].about["policy"]} | _flat(x[0].about) for x in (b, a))
    keys = [key for key in {**now, **was} if now.get(key) != was.get(key)]
    return tuple((key, now.get(key), was.get(key)) for key in keys)


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in flatten(about["config"]).items() if key not in NOT_SHOWN}
    return shown | {"ranks": about.get("ranks", 1), "device": (about.get("device") or {}).get("name")}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.median(known) if known else None
