"""The constants of a cast, and what a cast refuses, the same on every backend.

core.rounding defines a cast in numpy; each backend computes the same by its own elementwise operations, from these
constants. A format with eight exponent bits (tf32, bf16 and their kin) has the exponents of fp32, so its numbers
are the fp32 patterns whose last d = 23 - y bits are zero, subnormals included, and rounding is an addition to the
pattern followed by a mask; a carry moves into the exponent by itself, and past the last one it is inf. With fewer
exponent bits the result is a whole number of quanta, which each backend counts in the arithmetic it has.

A narrow operand is multiplied by a power of two that brings its largest magnitude into the top binade of the
format. That changes no mantissa, so scaling adds no error of its own, and inv_scale = 1 / scale is exact.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from halfstep.core.errors import RoundingError
from halfstep.core.formats import Format, Overflow
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding, check_overflow, check_rounding

# What a loss draws to round the gradient of a row of logits (torch/losses.py, jax/layers.py): a word of the row,
# mixed by two multiplications (lowbias32, by C. Wellons), and from column to column 2^32 over the golden ratio
# more, whose multiples spread evenly.
GOLDEN, MIXERS = 0x9E3779B9, (0x7FEB352D, 0x846CA68B)


class CastConstants(NamedTuple):
    """The constants of a cast to a format."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    largest: float
    beyond: float  # the number that would follow the largest; what rounds to it overflows
    like_fp32: bool  # the same exponents as fp32, and the same special values
    fits_fp32: bool  # quanta, their inverses and `beyond` are normal numbers of fp32

    @property
    def top(self) -> int:
        """The pattern of the largest number as an fp32: (exponent + 127) * 2^23 plus the mantissa."""
        return ((self.max_exponent + 126) << 23) + int(math.ldexp(self.largest, 23 - self.max_exponent))


def cast_constants(fmt: Format) -> CastConstants:
    """Returns the constants of a format, without fmt.max: dynamo cannot trace the lock of its cache."""
    width, y, bias = _constant(fmt.exponent_bits), _constant(fmt.mantissa_bits), _constant(fmt.bias)
    lowest, highest = 1 - bias, (1 << width) - 1 - bias - (fmt.specials == "ieee")
    step = math.ldexp(1.0, highest - y)
    beyond = math.ldexp(2.0, highest) - (step if fmt.specials == "fn" else 0.0)
    return CastConstants(
        mantissa_bits=y,
        min_exponent=lowest,
        max_exponent=highest,
        largest=beyond - step,
        beyond=beyond,
        like_fp32=fmt.specials == "ieee" and (lowest, highest) == (-126, 127),
        fits_fp32=lowest - y >= -126 and highest < 127,
    )


_INTEGERS = tuple(range(512))


def _constant(value: int) -> int:
    """Returns the same integer, as a constant for dynamo, which makes the fields of two formats symbolic; no shift
    or dtype can depend on a symbol, but an index into a tuple makes it a number again, with a guard.
    """
    return _INTEGERS[value + 256] - 256


def check_rule(
    fmt: Format, overflow: Overflow, rounding: Rounding = "nearest-even", *, random: bool = False
) -> None:
    """Refuses a rule that the format lacks or a device cannot follow; `random` says whether bits were given."""
    if overflow == "raise":
        raise RoundingError(
            "overflow=`raise` is not offered on a device: every cast would read the tensor, a sync",
            hint="core.rounding.cast raises; or state `saturate`, `inf` or `nan` and look at the result",
        )
    check_overflow(fmt, overflow, ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan)
    check_rounding(rounding, random=random)


def check_source(dtype: str, fmt: Format, widen: str) -> None:
    """Refuses values that fp32 does not hold exactly; `widen` is the framework's call that converts to fp32."""
    if dtype == "float64":
        raise RoundingError(
            f"float64 would be rounded twice, to fp32 and then to {fmt}: near a tie, to the wrong number",
            hint=f"{widen} accepts the first rounding",
        )
    if dtype not in ("float32", "bfloat16", "float16"):
        raise RoundingError(
            f"a cast to {fmt} takes fp32, bf16 or fp16 values, not {dtype}",
            hint=f"widen an 8-bit float exactly with {widen}; a policy does not cast integers",
        )


def check_bits(rounding: Rounding, given: str, wanted: str) -> None:
    """Refuses stochastic rounding without one random word per element; both say a dtype and a shape."""
    if rounding == "stochastic" and given != wanted:
        raise RoundingError(
            f"stochastic rounding needs `bits`, {wanted}; given: {given}",
            hint="random_bits(x.shape, seed=..., step=..., tensor=...) makes them",
        )


HISTORY = 16  # updates whose amax is remembered, for operands that are delayed


def check_amax(operand: Operand, *, given: bool) -> None:
    """Refuses a delayed operand without the amax of earlier steps."""
    if operand.amax == "delayed" and not given:
        raise RoundingError(
            f"`{operand.format}:delayed` takes its scale from earlier steps, and no `amax` was given",
            hint="pass amax=, kept from earlier steps, or use `current`",
        )


def check_step(dtype: str, shape: tuple[int, ...], *, integer: bool, count: str) -> None:
    """Refuses a step on the device that is not one integer; `count` is a dtype to count steps in."""
    if not integer or math.prod(shape) != 1:
        raise RoundingError(
            f"`step` is {dtype} of shape {shape}; random words need one integer",
            hint=f"count the steps in a scalar of {count}",
        )


def check_word(name: str, value: int, bits: int) -> None:
    """Refuses a part of a random counter that is not an unsigned integer of so many bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**bits:
        raise RoundingError(
            f"`{name}` is {value!r}; random words need an integer from 0 to {2**bits - 1}",
            hint="all replicas and shards must agree on it",
        )


def word_range(shape: int | Sequence[int], seed: int, tensor: int, start: int) -> tuple[tuple[int, ...], int, int]:
    """Checks the key of random words; returns their shape, and the first and the last block of four to draw."""
    for name, value, bits in (("seed", seed, 64), ("tensor", tensor, 32), ("start", start, 63)):
        check_word(name, value, bits)
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    return size, start // 4, -(-(start + math.prod(size)) // 4)
