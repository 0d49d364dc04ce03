"""The first step at which the curves of two ways to train differ by more than seeds explain.

Curves are looked at in hundreds of places (each step of the loss, each record of each layer), where chance alone
would cross a band drawn place by place. So the band is simultaneous, by a maximum over all places:

1. Differences become comparable: each is divided by the spread of the reference's seeds, one number for each kind
   of series, over all steps and layers. A spread for each place would come from a few seeds, and where these
   happen to lie close together everything would seem to part.
2. For any two seeds of the reference, the largest difference over all places is taken.
3. Largest values of many follow Gumbel's distribution. Its 99 % quantile, by the mean and the standard deviation
   of those of all pairs, is the band; or the largest pair itself, if that is larger.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from halfstep.core.compare.gaps import SURE, IncomparableError

FEWEST_FOR_BAND = 4  # seeds of the reference: they make six pairs, two of them independent
EULER = 0.5772156649015329  # the mean of Gumbel's standard distribution


@dataclass(frozen=True)
class Series:
    """One number over the steps of several runs, a row for each seed: the same steps for all of them."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]  # (seeds, steps)
    kind: str  # series of one kind are assumed to vary alike: the loss, or the gradients of layers


@dataclass(frozen=True)
class Divergence:
    """The first step at which two ways to train differ by more than seeds explain, and what differs there."""

    step: int
    name: str  # of the series
    gap: float
    band: float  # the gap that seeds explain there


def band(reference: Mapping[str, Series], runs: int) -> dict[str, NDArray[np.float64]]:
    """Returns how far seeds alone may move the mean of so many runs from the reference's, at each step."""
    seeds = len(next(iter(reference.values())).values)
    if seeds < FEWEST_FOR_BAND:
        raise IncomparableError(
            f"a band needs {FEWEST_FOR_BAND} seeds of the reference or more, and there are {seeds}",
            hint="train the reference with more seeds",
        )
    if odd := [name for name, series in reference.items() if not np.isfinite(series.values).all()]:
        raise IncomparableError(
            f"the reference has no band: its {odd[0]} is not finite at some step",
            hint="choose a reference that trains, such as fp32",
        )
    spreads = _spreads(reference)
    if not any(spreads.values()):  # the seeds have changed nothing, so anything else is more than they do
        return {name: np.zeros(len(series.steps)) for name, series in reference.items()}
    largest = [_largest(reference, spreads, i, j) for i, j in combinations(range(seeds), 2)]
    scale = float(np.std(largest, ddof=1)) * math.sqrt(6) / math.pi
    quantile = float(np.mean(largest)) + scale * (-math.log(-math.log(SURE)) - EULER)
    limit = max(quantile, *largest) * math.sqrt(1 / runs + 1 / seeds)
    return {name: np.full(len(series.steps), limit * spreads[name]) for name, series in reference.items()}


def first_divergence(a: Mapping[str, Series], b: Mapping[str, Series]) -> Divergence | None:
    """Returns where A first leaves the band of the reference B; None if it never does.

    What is not finite has left it.
    """
    found = []
    for name, limits in band(b, len(next(iter(a.values())).values)).items():
        gaps = np.mean(a[name].values, axis=0) - np.mean(b[name].values, axis=0)
        outside = np.flatnonzero(~np.isfinite(gaps) | (np.abs(gaps) > limits))
        if outside.size:
            at = outside[0]
            found.append(Divergence(int(b[name].steps[at]), name, float(gaps[at]), float(limits[at])))
    return min(found, key=lambda each: each.step, default=None)


def _spreads(reference: Mapping[str, Series]) -> dict[str, float]:
    """Returns the standard deviation over seeds for each series: one for all of its kind."""
    variances: dict[str, list[NDArray[np.float64]]] = {}
    for series in reference.values():
        variances.setdefault(series.kind, []).append(np.var(series.values, axis=0, ddof=1))
    pooled = {kind: math.sqrt(np.concatenate(parts).mean()) for kind, parts in variances.items()}
    return {name: pooled[series.kind] for name, series in reference.items()}


def _largest(reference: Mapping[str, Series], spreads: Mapping[str, float], i: int, j: int) -> float:
    """Returns the largest difference of two seeds over all places, in units of the spread of a difference."""
    return max(
        float(np.max(np.abs(series.values[i] - series.values[j]))) / (math.sqrt(2) * spreads[name])
        for name, series in reference.items()
        if spreads[name]
    )
