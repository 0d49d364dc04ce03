"""What a tensor looks like to a format, in sums that merge.

`TensorStats.of(x, format, scale)` says what the cast of x * scale to the format would do, without training in that
format. The statistics of two halves of a tensor, two ranks or two steps are the sum of both: counts, exponents and
power sums (signal = sum x^2, noise = sum (x - y)^2, in fp64) add, of amax and amin the larger and the smaller
stay. y is the number that comes back: y = cast(x * scale) / scale, to nearest-even, saturating. From the sums
follows the one number that compares formats whatever the magnitude of the tensor,

    SQNR = 10 log10(signal / noise)  dB

Where nothing overflows or underflows, ExMy gives 6.02 y + 13.5 dB on normally distributed numbers (measured, and
tested): every mantissa bit halves the error. Two more numbers say how far a format is from its limits:

    headroom = log2(max of the format / amax)       binades left above the largest element
    kurtosis = mean x^4 / (mean x^2)^2              3 for normally distributed numbers; outliers make it large

Counts describe the scaled tensor, as the format sees it; amax, amin,
exponents and power sums describe x itself, so that steps with different scales can be merged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import CastInputError, StateError, UnsupportedFormatError
from halfstep.core.formats import FP32, Format
from halfstep.core.rounding import as_format, as_fp32, cast, overflows

# floor(log2 |x|) of every nonzero fp32 number is from -149 to 127.
FIRST_EXPONENT = FP32.min_exponent - FP32.mantissa_bits
NUM_EXPONENTS = FP32.max_exponent - FIRST_EXPONENT + 1
_COUNTS = ("count", "zeros", "nans", "infs", "overflow", "underflow", "subnormal")
_POWER_SUMS = ("signal", "noise", "fourth")


class Losses:
    """What follows from sums over the elements of a cast."""

    count: int
    overflow: int
    underflow: int
    signal: float
    noise: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in decibels; inf without noise, NaN without signal."""
        return sqnr_db(self.signal, self.noise)

    @property
    def overflow_fraction(self) -> float:
        """Elements that are lost at the top, among all; NaN when there are none at all, as for other fractions."""
        return _fraction(self.overflow, self.count)

    @property
    def underflow_fraction(self) -> float:
        """Nonzero elements that become zero, among all."""
        return _fraction(self.underflow, self.count)


@dataclass(frozen=True)
class TensorStats(Losses):
    """Sums over the elements of one or more tensors, as one format sees them."""

    format: Format
    count: int = 0  # elements, of every kind
    zeros: int = 0  # elements that are zero before the cast
    nans: int = 0  # NaN before the cast
    infs: int = 0  # infinities before the cast
    overflow: int = 0  # finite elements that round to more than the format's largest number
    underflow: int = 0  # nonzero elements that round to zero
    subnormal: int = 0  # elements that round to a nonzero number with less than full precision
    amax: float = 0.0  # the largest finite magnitude
    amin: float = math.inf  # the smallest nonzero magnitude; infinity when there is none
    signal: float = 0.0  # sum of squares of the finite elements
    noise: float = 0.0  # sum of squares of the errors that the saturating cast makes in them
    fourth: float = 0.0  # sum of fourth powers of the finite elements
    exponents: tuple[int, ...] = (0,) * NUM_EXPONENTS  # finite elements, by floor(log2 |x|) - FIRST_EXPONENT

    @classmethod
    def empty(cls, format: Format | str) -> "TensorStats":
        """Returns the statistics of nothing: merging them changes nothing."""
        return cls(as_format(format))

    @classmethod
    def of(cls, x: NDArray[Any], format: Format | str, scale: float = 1.0) -> "TensorStats":
        """Returns the statistics of one tensor; `scale` multiplies it before the cast and is undone after it."""
        format = as_format(format)
        values = as_fp32(x, format)
        finite = values[np.isfinite(values)]
        scale = _fp32_scale(scale)
        with np.errstate(over="ignore"):  # counted as overflow
            scaled = finite * np.float32(scale)
        rounded = cast(scaled, format, overflow="saturate")
        # Few elements can overflow: those that a saturating cast leaves at the top.
        top = scaled[np.abs(rounded) == format.max]
        magnitude, nonzero = np.abs(rounded), np.abs(finite[finite != 0])
        exact = finite.astype(np.float64)
        return cls(
            format,
            count=values.size,
            zeros=finite.size - nonzero.size,
            nans=int(np.isnan(values).sum()),
            infs=int(np.isinf(values).sum()),
            overflow=int(overflows(top, format).sum()),
            underflow=int(((rounded == 0) & (finite != 0)).sum()),
            subnormal=int(((magnitude > 0) & (magnitude < format.smallest_normal)).sum()),
            amax=float(nonzero.max(initial=0.0)),
            amin=float(nonzero.min(initial=math.inf)),
            signal=float(np.square(exact).sum()),
            noise=float(np.square(exact - rounded.astype(np.float64) / scale).sum()),
            fourth=float(np.square(np.square(exact)).sum()),
            exponents=_exponents(nonzero),
        )

    def merge(self, other: "TensorStats") -> "TensorStats":
        """Returns the statistics of both together."""
        if self.format != other.format:
            raise UnsupportedFormatError(
                f"statistics of {self.format} and of {other.format} cannot be merged: they answer different "
                "questions",
                hint="keep one set of statistics for each format",
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*_COUNTS, *_POWER_SUMS)}
        return TensorStats(
            self.format,
            **sums,
            amax=max(self.amax, other.amax),
            amin=min(self.amin, other.amin),
            exponents=tuple(a + b for a, b in zip(self.exponents, other.exponents, strict=True)),
        )

    __add__ = merge

    @property
    def headroom_bits(self) -> float:
        """Binades between the largest magnitude, unscaled, and the format's; negative beyond it, NaN for zeros."""
        return headroom_bits(self.amax, self.format)

    @property
    def kurtosis(self) -> float:
        """mean x^4 / (mean x^2)^2 of the finite elements; NaN without signal."""
        finite = self.count - self.nans - self.infs
        return finite * self.fourth / self.signal**2 if self.signal else math.nan

    @property
    def subnormal_fraction(self) -> float:
        """Elements that become subnormal, among all."""
        return _fraction(self.subnormal, self.count)

    @property
    def zero_fraction(self) -> float:
        """Elements that were zero already, among all."""
        return _fraction(self.zeros, self.count)

    @property
    def nonfinite_fraction(self) -> float:
        """NaN and infinities, among all."""
        return _fraction(self.nans + self.infs, self.count)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON without NaN or infinity: no `amin` is null, and `exponents` are {exponent: count}."""
        written = {name: getattr(self, name) for name in (*_COUNTS, "amax", *_POWER_SUMS)}
        exponents = {str(FIRST_EXPONENT + i): n for i, n in enumerate(self.exponents) if n}
        amin = None if math.isinf(self.amin) else self.amin
        return {"format": str(self.format), **written, "amin": amin, "exponents": exponents}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> "TensorStats":
        """Reads what `to_dict` wrote, exactly."""
        expected = [field.name for field in fields(cls)]
        if sorted(written) != sorted(expected):
            raise StateError(
                f"{cls.__name__} is written as {', '.join(expected)}; given: {', '.join(written)}",
                hint="it was written by another version of halfstep, or is something else",
            )
        given = dict(written)
        given["format"] = Format.parse(given["format"])
        given["amin"] = math.inf if given["amin"] is None else given["amin"]
        sparse = {int(exponent): n for exponent, n in given["exponents"].items()}
        given["exponents"] = tuple(sparse.get(FIRST_EXPONENT + i, 0) for i in range(NUM_EXPONENTS))
        return cls(**given)


def sqnr_db(signal: float, noise: float) -> float:
    """Returns signal to quantization noise in decibels; inf without noise, NaN without signal."""
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def headroom_bits(amax: float, format: Format) -> float:
    """Returns log2(largest number of the format / amax), NaN for an amax of zero."""
    return math.log2(format.max) - math.log2(amax) if 0 < amax < math.inf else math.nan


def _fp32_scale(scale: float) -> float:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(scale))
    if not 0 < rounded < math.inf:
        raise CastInputError(
            f"a scale of {scale} cannot be undone; it must be positive and finite in fp32",
            hint="the scale of an all-zero tensor is 1",
        )
    return rounded


def _exponents(magnitudes: NDArray[np.float32]) -> tuple[int, ...]:
    # frexp has its significand in [1/2, 1), so its exponent is one more than floor(log2).
    index = np.frexp(magnitudes)[1] - 1 - FIRST_EXPONENT
    return tuple(np.bincount(index, minlength=NUM_EXPONENTS).tolist())


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
