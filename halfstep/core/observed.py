"""What the monitor sees of each layer: the numbers of every step, and what a sample says.

**Every step**, of a fixed slice of each tensor, in `COLUMNS`. All can be had by comparing magnitudes with three
constants of the format (`limits`), so no backend casts anything for them:

    count         elements looked at
    amax          the largest finite magnitude
    overflow      what rounds to more than the format's largest number; infinities and NaN too
    underflow     what is not zero and rounds to zero
    subnormal     what rounds to a nonzero number with less than full precision

Numbers of two micro-batches, steps or ranks merge (`merge`): amax by the maximum, the rest by sums. A narrow
operand (fp8) is scaled first, as its layer does it, by the power of two that the slice's own amax gives.

**A sample** describes whole tensors of a part of a batch: exponents, SQNR, headroom, kurtosis (core.stats), and
what each of `SPECS` would have lost (core.stats.what_if). `Observation` holds sums that merge, `Sample` is what is
written.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.core.arrays.cast import cast_constants
from halfstep.core.formats import FP32, Format, parse
from halfstep.core.precision import Precision
from halfstep.core.roles import is_narrow, print_value
from halfstep.core.stats.tensors import TensorStats, headroom_bits
from halfstep.core.stats.what_if import SPECS, SignalLost, signal_lost

# What enters a layer (an embedding: what leaves it), and the gradient of what leaves.
ROLES = ("activation", "gradient")
SAMPLED_ROLES = (*ROLES, "weight")
COLUMNS = ("count", "amax", "overflow", "underflow", "subnormal")
COUNT, AMAX, OVERFLOW, UNDERFLOW, SUBNORMAL = range(len(COLUMNS))
# Of the slices of a layer's weights at one update; NaN where there is nothing to say.
WEIGHT_COLUMNS = ("norm", "gradient_norm", "update_norm", "lost")
SLICE = 4096


@dataclass(frozen=True)
class LayerInfo:
    """A layer that is watched, as the model names it."""

    name: str
    kind: str  # matmul, norm, embedding, other
    formats: Mapping[str, str]  # {role: format}, of `SAMPLED_ROLES`; a narrow operand as a policy writes it

    @classmethod
    def of(cls, name: str, kind: str, precision: Precision, held: Format) -> "LayerInfo":
        """Returns a layer that runs in a precision, with a weight held in a format."""
        formats = [str(precision.compute), str(precision.grad)]
        for place, operand in enumerate(precision.operands if kind == "matmul" else ()):
            if is_narrow(operand.format):
                formats[place] = print_value(operand)
        return cls(name, kind, dict(zip(SAMPLED_ROLES, (*formats, str(held)), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON."""
        return {"name": self.name, "kind": self.kind, "formats": dict(self.formats)}

    def format(self, role: str) -> Format:
        """Returns the format that numbers of a role have here."""
        return parse(self.formats[role].partition(":")[0])


# --- every step


class Limits(NamedTuple):
    """Magnitudes, exact in fp32, between which a format holds numbers with full precision."""

    overflow: float  # from here on, what is finite rounds to more than the largest number; infinite for fp32
    underflow: float  # up to here, what is not zero rounds to zero
    subnormal: float  # below, what is above `underflow` rounds to a subnormal number


@cache
def limits(format: Format) -> Limits:
    """Returns the limits of a format, rounding to nearest even."""
    constants = cast_constants(format)
    normal = math.ldexp(1.0, constants.min_exponent)
    if format == FP32:  # no number lies between two neighbors: nothing finite overflows, and nothing underflows
        return Limits(math.inf, 0.0, normal)
    half = math.ldexp(0.5, constants.min_exponent - constants.mantissa_bits)
    # A tie goes to the even one. A format that reserves its all-ones code (fn) ends on an even one.
    overflow = np.float32((constants.largest + constants.beyond) / 2)
    if format.specials == "fn":
        overflow = np.nextafter(overflow, np.float32(math.inf))
    return Limits(float(overflow), half, normal - half)


def merge(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Returns the columns (in the last dimension) of both together."""
    both: NDArray[Any] = one + other
    both[..., AMAX] = np.maximum(one[..., AMAX], other[..., AMAX])
    return both


# --- what a monitor prints


@dataclass(frozen=True)
class LayerNumbers:
    """The numbers of one layer, of the steps since the copy before."""

    layer: LayerInfo
    activation: dict[str, float]  # by COLUMNS
    gradient: dict[str, float]  # the same, times the loss scale, as the backward pass has it
    weight: dict[str, float]  # by WEIGHT_COLUMNS, of the last update; NaN where there is nothing to say

    def headroom(self, role: str) -> float:
        """Returns the bits between the largest magnitude and the format's; NaN if nothing was seen."""
        return headroom_bits(getattr(self, role)["amax"], self.layer.format(role))

    def share(self, role: str, column: str) -> float:
        """Returns a count as a share of the elements that were looked at; NaN if none was."""
        numbers = getattr(self, role)
        return numbers[column] / numbers["count"] if numbers["count"] else float("nan")


def name_numbers(layers: Sequence[LayerInfo], numbers: NDArray[Any], weights: NDArray[Any]) -> list[LayerNumbers]:
    """Returns the numbers (layers, ROLES, COLUMNS) and (layers, WEIGHT_COLUMNS) by layer and name."""
    rows = []
    for info, row, weight in zip(layers, numbers, weights, strict=True):
        roles = {role: dict(zip(COLUMNS, map(float, row[i]), strict=True)) for i, role in enumerate(ROLES)}
        of_weight = dict(zip(WEIGHT_COLUMNS, map(float, weight), strict=True))
        rows.append(LayerNumbers(info, **roles, weight=of_weight))
    return rows


def format_table(numbers: list[LayerNumbers]) -> list[str]:
    """Returns the layers as lines of text: lost updates first, then the least headroom."""
    if not numbers:
        return []

    def order(row: LayerNumbers) -> tuple[float, float]:
        lost = np.nan_to_num(row.weight["lost"], nan=0.0)
        return -round(float(lost), 3), float(np.nan_to_num(row.headroom("activation"), nan=np.inf))

    width = max(len(row.layer.name) for row in numbers)
    lines = [f"{'layer':<{width}}  format  headroom  overflow  underflow  gradient  underflow  updates lost"]
    for row in sorted(numbers, key=order):
        shares = [row.share("activation", c) for c in ("overflow", "underflow")]
        lines.append(
            f"{row.layer.name:<{width}}  {row.layer.format('activation')!s:<6}  "
            f"{_bits(row.headroom('activation'))}  "
            f"{_percent(shares[0], 8)}  {_percent(shares[1], 9)}  {_bits(row.headroom('gradient'))}  "
            f"{_percent(row.share('gradient', 'underflow'), 9)}  {_percent(row.weight['lost'], 12)}"
        )
    return lines


def _bits(number: float) -> str:
    return f"{'-':>8}" if np.isnan(number) else f"{number:>5.1f} b".rjust(8)


def _percent(number: float, width: int) -> str:
    return "-".rjust(width) if np.isnan(number) else f"{number:.2%}".rjust(width)


# --- samples


@dataclass(frozen=True)
class Sample:
    """The numbers of one tensor in a `sample` event. A number that does not exist is None."""

    format: str  # what it is carried in: sqnr and headroom are about this one
    count: int
    amax: float
    sqnr: float | None  # dB; None without signal, and where the cast is `exact`
    exact: bool  # every finite element is a number of the format
    headroom: float | None  # bits
    kurtosis: float | None
    exponents: Mapping[int, int]  # {floor(log2 |x|): finite elements}
    what_if: Mapping[str, Mapping[str, Any]]  # {spec: {sqnr, exact, overflow, underflow}}, the last two as shares

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON without NaN or infinity."""
        exponents = {str(exponent): n for exponent, n in self.exponents.items()}
        return {
            **vars(self),
            "exponents": exponents,
            "what_if": {k: dict(lost) for k, lost in self.what_if.items()},
        }


@dataclass(frozen=True)
class Observation:
    """The sums behind a sample; those of two micro-batches or ranks merge into those of both."""

    stats: TensorStats
    what_if: Mapping[str, SignalLost] = field(default_factory=dict)

    @classmethod
    def of(cls, x: NDArray[Any], format: Format, specs: Sequence[str] = SPECS) -> "Observation":
        """Observes one tensor, in numpy: the reference."""
        return cls(TensorStats.of(x, format), {spec: signal_lost(x, spec) for spec in specs})

    def merge(self, other: "Observation") -> "Observation":
        """Returns the sums of both."""
        what_if = {spec: lost + other.what_if[spec] for spec, lost in self.what_if.items()}
        return replace(self, stats=self.stats + other.stats, what_if=what_if)

    __add__ = merge

    def sample(self) -> Sample:
        """Returns what is written: dB and bits to a hundredth, shares to four digits."""
        stats = self.stats
        return Sample(
            str(stats.format),
            stats.count,
            _digits(stats.amax) or 0.0,
            *_decibels(stats.sqnr_db),
            _hundredths(stats.headroom_bits),
            _digits(stats.kurtosis),
            {int(exponent): n for exponent, n in stats.to_dict()["exponents"].items()},
            {spec: _what_was_lost(lost) for spec, lost in self.what_if.items()},
        )


def first_rows(
    batch: Any, share: float, leaves: Sequence[Any], change_leaves: Callable[..., Any]
) -> tuple[Any, float]:
    """Returns a share of the rows of a batch, at least one, of all arrays with as many as the first; which share.

    `change_leaves` changes what is in a batch, as the framework's own functions on trees do.
    """
    sizes = [leaf.shape[0] for leaf in leaves if getattr(leaf, "ndim", 0)]
    if not sizes:
        return batch, 1.0
    kept = max(1, int(sizes[0] * share))

    def cut(leaf: Any) -> Any:
        return leaf[:kept] if getattr(leaf, "ndim", 0) and leaf.shape[0] == sizes[0] else leaf

    return change_leaves(cut, batch), kept / sizes[0]


def samples(
    layers: Iterable[LayerInfo], observations: Iterable[tuple[str, str, Observation]]
) -> dict[str, dict[str, Sample]]:
    """Returns the sample of each role of each layer, of observations by layer and role, several merged."""
    merged: dict[str, dict[str, Observation]] = {info.name: {} for info in layers}
    for layer, role, new in observations:
        before = merged[layer].get(role)
        merged[layer][role] = new if before is None else before + new
    return {name: {role: each.sample() for role, each in roles.items()} for name, roles in merged.items()}


def _what_was_lost(lost: SignalLost) -> dict[str, Any]:
    sqnr, exact = _decibels(lost.sqnr_db)
    shares = {"overflow": lost.overflow_fraction, "underflow": lost.underflow_fraction}
    return {"sqnr": sqnr, "exact": exact, **{name: _digits(share) for name, share in shares.items()}}


def _decibels(sqnr_db: float) -> tuple[float | None, bool]:
    return _hundredths(sqnr_db), sqnr_db == math.inf


def _hundredths(number: float) -> float | None:
    return round(number, 2) if math.isfinite(number) else None


def _digits(number: float) -> float | None:
    return float(f"{number:.4g}") if math.isfinite(number) else None
