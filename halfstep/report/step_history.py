"""The steps of a run as columns of numbers: all of them, or for a very long run as many as its charts can show.

Up to ROWS steps are kept as they are. Of a longer run, two selections are kept, each at most about as long:

    even     every second step, then every fourth, and so on: what means and medians are taken from
    peaks    of each bucket of neighbors the steps at which a number is smallest, largest, or first not finite;
             a bucket is BUCKET steps, and twice as many when there are too many of them

So a page takes the same memory however long the run was, and its charts still show a spike of one step.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from halfstep.report.number_format import number
from halfstep.report.series import Series

NAMES = ("loss", "tokens_per_second", "grad_norm", "learning_rate", "scale", "memory", "skipped")
ROWS = 1 << 18
BUCKET = 64

_WIDTH = 1 + len(NAMES)  # the step, and its numbers
_COLUMN = {name: place for place, name in enumerate(NAMES, 1)}
Rows = NDArray[np.float64]


@final
class StepHistory:
    """The steps that count, in their order."""

    def __init__(self, rows: int = ROWS):
        self._limit = rows
        self._fresh = array("d")  # rows one after the other, each step of them
        self._even = self._peaks = np.empty((0, _WIDTH))
        self._stride, self._width = 1, BUCKET  # of `even`, and of a bucket of `peaks`, in steps
        self._last: Any = None  # the last event, unless it was dropped
        self._cached: tuple[Rows, Rows] | None = None

    def add(self, step: int, event: Any) -> None:
        """Adds a step, which must come after those that are here."""
        fresh = self._fresh
        fresh.append(step)
        # Most are plain numbers, and there may be millions: `number` is for the others.
        fresh.extend([value if type(value) is float else number(value) for value in map(event.get, NAMES)])
        self._last, self._cached = event, None
        if len(fresh) >= self._limit * _WIDTH:
            self._select()

    def drop_from(self, step: int) -> None:
        """Forgets a step and all after it."""
        fresh = self._fresh
        kept = bisect_left(range(len(fresh) // _WIDTH), step, key=lambda row: int(fresh[row * _WIDTH]))
        if kept * _WIDTH < len(fresh) or (kept == 0 and len(self._peaks)):
            del fresh[kept * _WIDTH :]
            self._last = self._cached = None
        if kept == 0:
            self._even, self._peaks = (rows[rows[:, 0] < step] for rows in (self._even, self._peaks))

    def column(self, name: str) -> Series:
        """Returns one number over steps, with every extreme."""
        return self._series(self._rows[0], name)

    def even(self, name: str) -> Series:
        """Returns one number over evenly spaced steps."""
        return self._series(self._rows[1], name)

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
        rows = self._rows[0]
        return int(rows[-1, 0]) if len(rows) else 0

    def __len__(self) -> int:
        return len(self._rows[0])

    def __iter__(self) -> Iterator[int]:
        return (int(step) for step in self._rows[0][:, 0])

    def _series(self, rows: Rows, name: str) -> Series:
        return Series(rows[:, 0].astype(np.int64), rows[:, _COLUMN[name]], whole=self._stride == 1)

    @property
    def _rows(self) -> tuple[Rows, Rows]:
        if self._cached is None:
            fresh = self._copy()
            if not len(self._peaks):
                self._cached = fresh, fresh
            else:
                every = np.concatenate([self._even, self._peaks, fresh])
                _, places = np.unique(every[:, 0], return_index=True)
                self._cached = every[places], np.concatenate([self._even, self._select_stride(fresh)])
        return self._cached

    def _select(self) -> None:
        rows = self._copy()
        del self._fresh[:]
        self._peaks = np.concatenate([self._peaks, _extremes(rows, self._width)])
        while len(self._peaks) > self._limit:
            self._width *= 2
            self._peaks = _extremes(self._peaks, self._width)
        self._even = np.concatenate([self._even, self._select_stride(rows)])
        while len(self._even) >= self._limit:
            self._stride *= 2
            self._even = self._select_stride(self._even)

    def _copy(self) -> Rows:
        return np.array(self._fresh, dtype=np.float64).reshape(-1, _WIDTH)

    def _select_stride(self, rows: Rows) -> Rows:
        chosen: Rows = rows[(rows[:, 0] - 1) % self._stride == 0]
        return chosen


def _extremes(rows: Rows, width: int) -> Rows:
    """Returns the first row, the last, and the extremes of each bucket of `width` steps, in every column."""
    bucket = (rows[:, 0] - 1) // width
    ends = np.flatnonzero(np.diff(bucket, append=np.inf))  # the last row of each bucket
    starts = np.concatenate([[0], ends[:-1] + 1])
    kept = np.zeros(len(rows), dtype=bool)
    kept[[0, -1]] = True
    for column in range(1, _WIDTH):
        values = rows[:, column]
        finite = np.isfinite(values)
        kept[np.lexsort((np.where(finite, values, np.inf), bucket))[starts]] = True
        kept[np.lexsort((np.where(finite, values, -np.inf), bucket))[ends]] = True
        gaps = np.flatnonzero(~finite)
        kept[gaps[np.unique(bucket[gaps], return_index=True)[1]]] = True
    return rows[kept]
