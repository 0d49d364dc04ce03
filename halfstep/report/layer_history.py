"""What the monitor recorded of each layer over a run: columns of numbers, and sampled distributions.

Each `layers` event becomes a column, `VIEWS` by layers. Every number is a "more is worse", so columns that lie
close together merge by their maximum, and a bad step stays visible however long the run was. Each `sample` event
becomes a histogram of exponents per layer and role; those merge by their sums. When there are too many of either,
those of the same 2, 4, 8, ... steps merge: a page takes the same memory however long the run was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from halfstep.report.number_format import number

VIEWS = (
    *("activation.amax", "activation.overflow", "activation.underflow"),
    *("gradient.amax", "gradient.overflow", "gradient.underflow"),
    *("weight.lost", "weight.update"),
)
_COUNTED = ("count", "amax", "overflow", "underflow")
RECORDED = (
    *(("activation", name) for name in _COUNTED),
    *(("gradient", name) for name in _COUNTED),
    *(("weight", name) for name in ("lost", "norm", "update_norm")),
)
ROLES = ("activation", "gradient", "weight")
KEPT = 1024  # columns; a page shows fewer
SAMPLES = 128
Event = Mapping[str, Any]
Values = NDArray[np.float32]


@dataclass
class Layer:
    """A layer that was watched, as the last session describes it."""

    name: str
    kind: str
    formats: dict[str, str]


@dataclass(frozen=True)
class Column:
    """The numbers of the steps after `after` and up to `last`, by view and layer; NaN where there is none."""

    after: int
    last: int
    values: Values

    def merge(self, later: "Column") -> "Column":
        """Returns both as one: of each number the larger."""
        mine = np.full_like(later.values, np.nan)
        mine[:, : self.values.shape[1]] = self.values
        return Column(self.after, later.last, np.fmax(mine, later.values))


@dataclass(frozen=True)
class Distribution:
    """Histograms of one or more samples: (layer, role) to counts by exponent."""

    last: int  # its step
    why: str
    histograms: dict[tuple[int, str], dict[int, float]]

    def merge(self, later: "Distribution") -> "Distribution":
        """Returns both as one, at the later step."""
        sums = {key: dict(counts) for key, counts in self.histograms.items()}
        for key, counts in later.histograms.items():
            mine = sums.setdefault(key, {})
            for exponent, amount in counts.items():
                mine[exponent] = mine.get(exponent, 0) + amount
        return Distribution(later.last, later.why, sums)


@final
@dataclass
class LayerHistory:
    """The layers of a run over its steps."""

    layers: list[Layer] = field(default_factory=list)
    samples: list[Distribution] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)  # in the order of steps
    newest: Event | None = None  # the last sample, whole
    _rows: dict[str, int] = field(default_factory=dict)  # of a layer, by its name
    _order: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # of the lists in events

    def monitor(self, event: Event) -> None:
        """Takes the layers of a session, in the order in which its events list them."""
        order = []
        for one in event.get("layers") or ():
            name, formats = str(one.get("name")), one.get("formats")
            row = self._rows.setdefault(name, len(self.layers))
            if row == len(self.layers):
                self.layers.append(Layer(name, "", {}))
            self.layers[row].kind = str(one.get("kind"))
            known = formats.items() if isinstance(formats, Mapping) else ()
            self.layers[row].formats = {str(role): str(written) for role, written in known}
            order.append(row)
        self._order = np.array(order, np.int64)

    def add(self, event: Event) -> None:
        """Takes a `layers` event."""
        last = int(event["step"])
        after = min(int(number(event.get("since") or 0)), last - 1)
        values = np.full((len(VIEWS), len(self.layers)), np.nan, np.float32)
        values[:, self._order] = _views(_numbers(event, len(self._order)))
        self.columns.append(Column(after, last, values))
        if len(self.columns) >= KEPT:
            self.columns = coarse(self.columns, KEPT // 2)

    def sample(self, event: Event) -> None:
        """Takes a `sample` event."""
        histograms = {}
        known = {name: row for name, row in self._rows.items() if isinstance(event["layers"].get(name), Mapping)}
        for name, row in known.items():
            for role in ROLES:
                sampled = event["layers"][name].get(role)
                counts = _histogram(sampled.get("exponents")) if isinstance(sampled, Mapping) else {}
                if counts:
                    histograms[row, role] = counts
        self.newest = event
        self.samples.append(Distribution(int(event["step"]), str(event.get("why")), histograms))
        if len(self.samples) >= SAMPLES:
            self.samples = coarse(self.samples, SAMPLES // 2)

    def drop_from(self, step: int) -> None:
        """Forgets what was recorded at a step and after it."""
        self.columns = [column for column in self.columns if column.last < step]
        self.samples = [one for one in self.samples if one.last < step]
        if self.newest is not None and int(self.newest["step"]) >= step:
            self.newest = None


Part = TypeVar("Part", Column, Distribution)


def coarse(parts: Sequence[Part], most: int) -> list[Part]:
    """Merges neighbors until there are at most `most` parts, in the order of steps."""
    width, merged = 1, list(parts)
    while len(merged) > most:
        width *= 2
        bins: dict[int, Part] = {}
        for part in merged:
            place = (part.last - 1) // width
            bins[place] = bins[place].merge(part) if place in bins else part
        merged = list(bins.values())
    return merged


def _views(numbers: Values) -> Values:
    """Returns `VIEWS` of numbers, which are in the order of `RECORDED`."""
    at = dict(zip(RECORDED, numbers, strict=True))
    shown = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for role in ("activation", "gradient"):
            seen = np.where(at[role, "count"] > 0, at[role, "count"], np.nan)
            shown += [np.where(np.isnan(seen), np.nan, at[role, "amax"])]
            shown += [at[role, name] / seen for name in ("overflow", "underflow")]
        shown += [at["weight", "lost"], at["weight", "update_norm"] / at["weight", "norm"]]
    return np.stack(shown)


def _numbers(event: Event, length: int) -> Values:
    """Returns the lists of `RECORDED`; NaN where a number is missing, or a whole list, or has another length."""
    lists = []
    for role, name in RECORDED:
        table = event.get(role)
        given = table.get(name) if isinstance(table, Mapping) else None
        lists.append(given if isinstance(given, list | tuple) and len(given) == length else [None] * length)
    with np.errstate(over="ignore"):
        return np.array(lists, np.float32).reshape(len(RECORDED), length)  # None is NaN


def _histogram(counts: Any) -> dict[int, float]:
    """Returns counts by exponent, of exponents that fp32 has."""
    known = counts.items() if isinstance(counts, Mapping) else ()
    read = {number(exponent): number(amount) for exponent, amount in known}
    return {int(exponent): n for exponent, n in read.items() if abs(exponent) < 150 and 0 < n < math.inf}
