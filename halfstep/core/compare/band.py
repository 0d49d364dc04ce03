"""The first step at which the curves of two ways to train differ by more than seeds explain.

Curves are looked at in hundreds of places (each step of the loss, each record of each layer), where chance alone
would cross a band drawn place by place. So the band is simultaneous: every difference is divided by the spread of
the reference's seeds at that place, and the largest over all places is compared with the largest that any two
seeds of the reference reach between themselves.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from halfstep.core.compare.gaps import CompareError

FEWEST_FOR_BAND = 3  # seeds of the reference: two make one pair, which says nothing about the spread of pairs


@dataclass(frozen=True)
class Series:
    """One number over the steps of several runs, a row for each seed: the same steps for all of them."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]  # (seeds, steps)


@dataclass(frozen=True)
class Parting:
    """The first step at which two ways to train differ by more than seeds explain, and what differs there."""

    step: int
    name: str  # of the series
    gap: float
    band: float  # the gap that seeds explain there


def band(reference: Mapping[str, Series], pairs: int) -> dict[str, NDArray[np.float64]]:
    """Returns for each series how far the mean gap of so many pairs may be from 0 at each step, by seeds alone."""
    seeds = len(next(iter(reference.values())).values)
    if seeds < FEWEST_FOR_BAND:
        raise CompareError(
            f"a band needs {FEWEST_FOR_BAND} seeds of the reference or more, and there are {seeds}",
            hint="train the reference with more seeds",
        )
    if odd := [name for name, series in reference.items() if not np.isfinite(series.values).all()]:
        raise CompareError(
            f"the reference has no band: its {odd[0]} is not finite at some step",
            hint="choose a reference that trains, such as fp32",
        )
    scales = {name: _spread_along(series.values) for name, series in reference.items()}
    largest = max(
        _largest((series.values[i] - series.values[j]) / math.sqrt(2), scales[name])
        for name, series in reference.items()
        for i, j in combinations(range(seeds), 2)
    )
    return {name: largest * math.sqrt(2 / pairs) * scale for name, scale in scales.items()}


def first_parting(a: Mapping[str, Series], b: Mapping[str, Series]) -> Parting | None:
    """Returns where A first leaves the band of the reference B; None if it never does. Rows are paired by seed.

    What is not finite has left it.
    """
    pairs = len(next(iter(b.values())).values)
    partings = []
    for name, limits in band(b, pairs).items():
        gaps = np.mean(a[name].values - b[name].values, axis=0)
        outside = np.flatnonzero(~np.isfinite(gaps) | (np.abs(gaps) > limits))
        if outside.size:
            at = outside[0]
            partings.append(Parting(int(b[name].steps[at]), name, float(gaps[at]), float(limits[at])))
    return min(partings, key=lambda parting: parting.step, default=None)


def _spread_along(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the standard deviation over seeds at each step, pooled with its neighbors: of a few seeds at one
    step it is itself mostly luck."""
    variances = np.var(values, axis=0, ddof=1)
    reach = max(2, len(variances) // 20)
    edges = np.arange(len(variances))
    sums = np.concatenate([[0.0], np.cumsum(variances)])
    low, high = np.maximum(edges - reach, 0), np.minimum(edges + reach + 1, len(variances))
    return np.asarray(np.sqrt((sums[high] - sums[low]) / (high - low)))


def _largest(differences: NDArray[np.float64], scale: NDArray[np.float64]) -> float:
    """Returns the largest of some differences in units of the spread at their place."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.abs(differences) / scale
    return float(np.nanmax(np.where(np.isfinite(ratios), ratios, 0.0), initial=0.0))
