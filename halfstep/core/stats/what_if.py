"""What another format would have lost of a tensor: the cast that a layer in that format would make, and its error.

A spec names a format and how it is scaled. The scale is a power of two that brings the largest magnitude into the
top binade of the format, as for the operands of a casted layer, so nothing overflows and what is lost is small:

    fp16, bf16              as they are, without a scale
    e4m3, e5m2              one scale for the tensor
    e4m3:row, e5m2:row      one for each row, along the last dimension
    e4m3:block, ...:block   one for each 32 consecutive elements of a row; the last block may be shorter

The numbers follow from the cast itself, y = cast(x * scale) / scale, to nearest even and saturating:

    overflow     finite elements that round to more than the largest number, or whose scale is NaN because their
                 tensor, row or block holds an infinity or a NaN: in that format they are lost
    underflow    nonzero elements that become zero
    noise        sum (x - y)^2 in fp64, and signal = sum x^2, over elements that are finite before and after
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.core.arrays.cast import cast_constants
from halfstep.core.formats import Format, parse
from halfstep.core.rounding import as_fp32, cast, overflows
from halfstep.core.stats.tensors import Losses

SPECS = ("bf16", "fp16", "e4m3", "e4m3:row", "e4m3:block", "e5m2", "e5m2:row", "e5m2:block")
BLOCK = 32
Scaled = Literal["no", "tensor", "row", "block"]


class Spec(NamedTuple):
    """A format, and what has a scale of its own."""

    format: Format
    scaled: Scaled


@cache
def spec_of(text: str) -> Spec:
    """Reads one of `SPECS`."""
    name, _, scaled = text.partition(":")
    format = parse(name)
    return Spec(format, scaled or ("no" if format.bits > 8 else "tensor"))  # type: ignore[arg-type]


@dataclass(frozen=True)
class SignalLost(Losses):
    """What a cast loses, in sums that merge."""

    count: int = 0  # elements, of every kind
    overflow: int = 0
    underflow: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def merge(self, other: "SignalLost") -> "SignalLost":
        """Returns the sums of both."""
        return SignalLost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    __add__ = merge


def signal_lost(x: NDArray[Any], spec: str) -> SignalLost:
    """Returns what a spec loses of a tensor: the reference for what backends compute."""
    format, scaled = spec_of(spec)
    values = as_fp32(x, format)
    count, values = values.size, groups(values, scaled)
    scale = np.ones((1, 1), np.float32)
    if scaled != "no":
        with np.errstate(invalid="ignore"):
            scale = scales_of(np.abs(values).max(axis=-1, keepdims=True, initial=0), format)
    scale = np.broadcast_to(scale, values.shape)
    kept = np.isfinite(values) & np.isfinite(scale)
    x_kept, by = values[kept], scale[kept]
    y = cast(x_kept * by, format, overflow="saturate")
    exact, back = x_kept.astype(np.float64), y.astype(np.float64) / by.astype(np.float64)
    lost = np.isfinite(values) & ~kept
    return SignalLost(
        count,
        overflow=int(overflows(x_kept * by, format).sum() + lost.sum()),
        underflow=int(((y == 0) & (x_kept != 0)).sum()),
        signal=float(np.square(exact).sum()),
        noise=float(np.square(exact - back).sum()),
    )


def groups(values: NDArray[np.float32], scaled: Scaled) -> NDArray[np.float32]:
    """Returns the elements as a matrix whose rows have a scale each; zeros fill the last block of a row."""
    if scaled in ("no", "tensor") or values.ndim == 0:
        return values.reshape(1, -1)
    rows = values.reshape(-1, max(values.shape[-1], 1))
    if scaled == "row":
        return rows
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[-1] % BLOCK)))
    return padded.reshape(-1, BLOCK)


def scales_of(amax: NDArray[np.float32], format: Format) -> NDArray[np.float32]:
    """Returns the largest power of two that keeps amax * scale within the format; 1 for 0, NaN for inf and NaN.

    Between 2^-126 and 2^126, so that the inverse is a normal number too; from exponent bits, as backends do it.
    """
    pattern = np.asarray(amax, np.float32).view(np.int32).astype(np.int64) & 0x7FFFFFFF
    power = np.clip((cast_constants(format).top - pattern) >> 23, -126, 126)
    scale = np.ldexp(np.float32(1), np.where(pattern == 0, 0, power).astype(np.int32))
    return np.where(pattern >= 0x7F800000, np.float32(math.nan), scale).astype(np.float32)
