"""The numbers of a run over its steps, and what a chart shows of them.

A chart has at most LIMIT points that keep every spike, and a smooth line. Of each bucket of neighbors the smallest
and the largest value stay, in their order, and a gap if it holds a value that is not finite: a spike of one step
is just as tall in the chart of a million steps. The smooth line is the mean over a window centered on each step,
narrowed at both ends; an exponential average would lag behind a falling loss.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from halfstep.report.number_format import number

NAMES = ("loss", "tokens_per_second", "grad_norm", "learning_rate", "scale", "memory", "skipped")
LIMIT = 2000
# A smooth line has no spikes to keep.
SMOOTH_LIMIT = 500
# The window of the smooth line is this share of the steps, and at least 5 of them.
WINDOW = 1 / 50
# Six digits are more than a screen shows; fewer bytes make a lighter page.
_DIGITS = 6


@dataclass(frozen=True)
class Series:
    """Values over steps, in order of steps; NaN for a gap."""

    steps: Sequence[int] | NDArray[np.int64]
    values: Sequence[float] | NDArray[np.float64]

    @property
    def numbers(self) -> NDArray[np.float64]:
        """The finite values."""
        values = np.asarray(self.values, dtype=np.float64)
        return values[np.isfinite(values)]

    @property
    def num_gaps(self) -> int:
        """How many values are not finite."""
        return len(self.values) - len(self.numbers)


@final
class StepHistory:
    """The steps that count, in their order: eight numbers each, so a million of them take 64 MB."""

    def __init__(self) -> None:
        self._steps, self._columns = array("q"), {name: array("d") for name in NAMES}
        self._last: Any = None  # the last event, unless it was dropped

    def add(self, step: int, event: Any) -> None:
        """Adds a step, which must come after those that are here."""
        self._steps.append(step)
        for name, column in self._columns.items():
            value = event.get(name)
            # Most are plain numbers, and there may be millions: `number` is for the others.
            column.append(value if type(value) is float else number(value))
        self._last = event

    def drop_from(self, step: int) -> None:
        """Forgets a step and all after it."""
        kept = bisect_left(self._steps, step)
        if kept < len(self._steps):
            self._last = None
            del self._steps[kept:]
            for column in self._columns.values():
                del column[kept:]

    def column(self, name: str) -> Series:
        """Returns one number over steps."""
        return Series(np.array(self._steps), np.array(self._columns[name]))

    def latest(self, name: str) -> float | None:
        """Returns a number of the last step that has it; NaN if it was not a number."""
        recorded = None if self._last is None else self._last.get(name)
        if recorded is not None:
            return number(recorded)
        known = self.column(name).numbers
        return float(known[-1]) if len(known) else None

    @property
    def last(self) -> int:
        """The last step, or 0."""
        return self._steps[-1] if self._steps else 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)


def downsample(series: Series, limit: int = LIMIT) -> Series:
    """Returns at most `limit` points: both ends, and the extremes and a gap of each bucket."""
    total = len(series.values)
    if total <= limit:
        return series
    values = np.asarray(series.values, dtype=np.float64)
    finite = np.isfinite(values)
    kept_of_each = 2 if finite.all() else 3
    edges = np.linspace(0, total, (limit - 2) // kept_of_each + 1).astype(int)
    kept = {0, total - 1}
    for start, stop in pairwise(edges):
        kept |= _extremes(values[start:stop], finite[start:stop], int(start))
    order = sorted(kept)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order])


def smooth(series: Series) -> Series:
    """Returns the centered mean of the finite values around each step; a gap stays a gap."""
    values = np.asarray(series.values, dtype=np.float64)
    total = len(values)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(total)
    reach = np.minimum(max(2, round(total * WINDOW / 2)), np.minimum(place, total - 1 - place))
    first, last = place - reach, place + reach + 1
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return Series(series.steps, np.where(finite, mean, math.nan))


def as_data(series: Series, limit: int = LIMIT) -> dict[str, list[int] | list[float | None]]:
    """Returns `x` and `y` for JSON, null for a gap."""
    short = downsample(series, limit)
    return {"x": [int(step) for step in short.steps], "y": [_round_digits(float(value)) for value in short.values]}


def _extremes(values: NDArray[np.float64], finite: NDArray[np.bool_], offset: int) -> set[int]:
    kept = set()
    if finite.any():
        kept |= {
            offset + int(np.where(finite, values, np.inf).argmin()),
            offset + int(np.where(finite, values, -np.inf).argmax()),
        }
    if not finite.all():
        kept.add(offset + int(finite.argmin()))
    return kept


def _round_digits(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
