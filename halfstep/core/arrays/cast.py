"""Casts on a device, written once for all backends: the bits of core.rounding, in elementwise operations.

A backend passes its namespace of functions (torch, jax.numpy, mlx.core) and its conversion of dtypes; the rest is
operators and `x.view(dtype)`. Values come in as fp32, and nothing is read from the device. An operator that
assigns (`&=`) works in place where a framework can, so it is only used on an array that was made here. Three
functions round magnitudes and say which are beyond the largest number, or None if they have dealt with those; what
becomes of them, of NaN and of the sign is then the same for all.

1. **Eight exponent bits** (tf32, bf16 and their kin): `_round_patterns`. fp32 has the same exponents, so the
   numbers of the format are the fp32 patterns whose last d = 23 - y bits are zero, subnormals included. Rounding
   is an addition to the pattern and a mask; a carry moves into the exponent by itself, and past the last one it
   is inf.

2. **Fewer exponent bits** (fp16, fp8 and their kin): `_round_quanta`. Near x the numbers are multiples of

       q = max(2^E, 2^Emin) * 2^-y          E is read from the exponent bits of x

   Multiplication by a power of two is exact, so v = |x| / q is exact, and so are its integer part, its fraction
   and (integer part + 0 or 1) * q. 1 / q is made from exponent bits, because compilers may divide approximately
   but never multiply so.

3. **Any format**: `_round_integers`, for quanta that fp32 has only as subnormals and for a device that flushes
   subnormals. Integers up to 2^24 are exact in fp32, so the pattern of float(n) plus q << 23 is the pattern of n
   quanta 2^q, and where that would be a subnormal of fp32 it is n << (q + 149).

A narrow operand is multiplied by a power of two that brings its largest magnitude into the top binade of the
format. That changes no mantissa, so scaling adds no error of its own, and inv_scale = 1 / scale is exact.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from halfstep.core.errors import CastInputError, MissingAmaxError, RandomBitsError
from halfstep.core.formats import Format, Overflow
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding, check_overflow, check_rounding

# What a loss draws to round the gradient of a row of logits (torch/loss/plain.py, jax/layers.py): a word of the
# row, mixed by two multiplications (lowbias32, by C. Wellons), and from column to column 2^32 over the golden
# ratio more, whose multiples spread evenly.
GOLDEN, MIXERS = 0x9E3779B9, (0x7FEB352D, 0x846CA68B)

HISTORY = 16  # updates whose amax is remembered, for operands that are delayed

SIGN, MAGNITUDE = -(2**31), 2**31 - 1
INF, NAN = 0x7F800000, 0x7FC00000
_IMPLICIT = 1 << 23  # the bit of a significand that a pattern leaves out
_MANTISSA = _IMPLICIT - 1

Array = Any


class Arrays(NamedTuple):
    """What a cast uses of a framework."""

    xp: Any  # its namespace, with `where`, `clip`, `abs`, `floor`, `round`, `int16`, `int32` and `float32`
    astype: Callable[[Array, Any], Array]
    flushes: bool = False  # whether its floating-point operations may flush subnormals of fp32 that are inputs


class Scale(NamedTuple):
    """A power of two to multiply by, as its exponent, and where there is none."""

    power: Array
    broken: Array


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
        if self.max_exponent < -126:
            return int(math.ldexp(self.largest, 149))
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


def quantize(
    arrays: Arrays,
    x: Array,
    fmt: Format,
    overflow: Overflow,
    rounding: Rounding,
    bits: Array | None = None,
    scale: Scale | None = None,
) -> Array:
    """Rounds every element of an fp32 array to a number of `fmt`, in fp32; first times `scale`, in integers."""
    xp, plan = arrays.xp, cast_constants(fmt)
    pattern = x.view(xp.int32)
    magnitude = pattern & MAGNITUDE
    # Recognized by the pattern it had: rounding may wrap 0x7FFFFFFF around to zero.
    nan = magnitude > INF
    if scale is not None:
        nan |= scale.broken
    if plan.like_fp32 and scale is None:
        rounded, beyond = _round_patterns(arrays, magnitude, plan, overflow, rounding, bits)
    elif plan.fits_fp32 and not arrays.flushes:
        rounded, beyond = _round_quanta(arrays, x, plan, overflow, rounding, bits)
    else:
        rounded, beyond = _round_integers(arrays, magnitude, plan, rounding, bits, scale)
    if beyond is not None and overflow == "nan":
        nan |= beyond
    elif beyond is not None:
        rounded = xp.where(beyond, INF if overflow == "inf" else plan.top, rounded)
    rounded = xp.where(nan, NAN, rounded)
    pattern = pattern & SIGN
    if not fmt.has_negative_zero:
        # A zero has no sign, and the code of a negative zero is the NaN, which therefore has one.
        pattern = xp.where(nan, SIGN, xp.where(rounded == 0, 0, pattern))
    rounded |= pattern
    return rounded.view(xp.float32)


def _round_patterns(
    arrays: Arrays,
    magnitude: Array,
    plan: CastConstants,
    overflow: Overflow,
    rounding: Rounding,
    bits: Array | None,
) -> tuple[Array, Array | None]:
    """Rounds to a format with the exponents of fp32."""
    drop = 23 - plan.mantissa_bits
    unit = 1 << drop
    if drop == 0 or rounding == "truncate":
        rounded = magnitude & -unit
    elif rounding == "nearest-even":
        rounded = magnitude >> drop
        rounded &= 1
        rounded += magnitude
        rounded += unit // 2 - 1
        rounded &= -unit
    elif rounding == "nearest-away":
        rounded = magnitude + unit // 2
        rounded &= -unit
    else:
        assert bits is not None
        threshold = arrays.astype(magnitude & (unit - 1), bits.dtype) << (32 - drop)
        rounded = magnitude & -unit
        rounded += arrays.astype(bits < threshold, arrays.xp.int32) << drop
    return rounded, None if overflow == "inf" else rounded > INF - unit


def _round_quanta(
    arrays: Arrays, x: Array, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: Array | None
) -> tuple[Array, Array | None]:
    """Rounds to a format with fewer exponents than fp32, in the arithmetic of fp32.

    Every quantity is a normal number as long as q >= 2^-126, so a device may flush subnormal results.
    """
    xp = arrays.xp
    v = xp.clip(xp.abs(x), None, plan.largest if overflow == "saturate" else plan.beyond)
    # Patterns of powers of two: 2^max(E, Emin), then the quantum, then its inverse.
    power = xp.clip(v.view(xp.int32) & INF, (plan.min_exponent + 127) << 23, None)
    power -= plan.mantissa_bits << 23
    v *= ((254 << 23) - power).view(xp.float32)
    if rounding == "nearest-even":
        v = xp.round(v)
    elif rounding == "truncate":
        v = xp.floor(v)
    else:
        floor = xp.floor(v)
        v -= floor
        up = v >= 0.5 if bits is None else bits < arrays.astype(v * 2.0**32, bits.dtype)
        v = xp.where(up, floor + 1, floor)
    v *= power.view(xp.float32)
    return v.view(xp.int32), None if overflow == "saturate" else v > plan.largest


def _round_integers(
    arrays: Arrays,
    magnitude: Array,
    plan: CastConstants,
    rounding: Rounding,
    bits: Array | None,
    scale: Scale | None,
) -> tuple[Array, Array]:
    """Rounds |x| times the scale to any format: |x| = S 2^(E - 23), and the result is n quanta 2^q."""
    xp = arrays.xp
    significand, exponent = _unpack(arrays, magnitude, plan, scale)
    clamped = xp.clip(exponent, plan.min_exponent, None)
    count = _count_quanta(arrays, significand, clamped - exponent + 23 - plan.mantissa_bits, rounding, bits)
    # The code of the result if the exponent were unbounded; codes are in the order of the numbers.
    code = ((clamped - plan.min_exponent) << plan.mantissa_bits) + count
    steps = int(plan.largest / 2.0 ** (plan.max_exponent - plan.mantissa_bits))
    beyond = code > ((plan.max_exponent - plan.min_exponent) << plan.mantissa_bits) + steps
    quantum = clamped - plan.mantissa_bits
    float_of_count = arrays.astype(count, xp.float32).view(xp.int32)
    result = float_of_count + (quantum << 23)
    if plan.min_exponent - plan.mantissa_bits < -126:
        tiny = (float_of_count >> 23) + quantum <= 0
        result = xp.where(tiny, count << xp.clip(quantum + 149, 0, 24), result)
    return xp.where(count == 0, 0, result), beyond | (magnitude >= INF)


def _unpack(arrays: Arrays, magnitude: Array, plan: CastConstants, scale: Scale | None) -> tuple[Array, Array]:
    """Returns S and E with |x| * 2^power = S * 2^(E - 23); S is 2^23 or more where rounding depends on it."""
    xp, field = arrays.xp, magnitude >> 23
    mantissa = magnitude & _MANTISSA
    if scale is None and plan.min_exponent >= -126:
        # A subnormal of fp32 has the quantum of Emin whatever its own exponent is.
        return xp.where(field > 0, mantissa | _IMPLICIT, mantissa), xp.clip(field, 1, None) - 127
    normalized = arrays.astype(magnitude, xp.float32).view(xp.int32)
    tiny = field == 0
    significand = xp.where(tiny, normalized & _MANTISSA, mantissa) | _IMPLICIT
    exponent = xp.where(tiny, (normalized >> 23) - 149, field) - 127
    if scale is not None:
        # What is beyond the format stays so; a larger exponent would not fit 32 bits.
        exponent = xp.clip(exponent + scale.power, None, plan.max_exponent + 1)
    return xp.where(magnitude == 0, 0, significand), exponent


def _count_quanta(
    arrays: Arrays, significand: Array, shift: Array, rounding: Rounding, bits: Array | None
) -> Array:
    """Returns S / 2^shift as a whole number, rounded by the mode."""
    xp = arrays.xp
    # Once everything is shifted out, and half of a quantum is not reached, further shifts change nothing.
    short = xp.clip(shift, None, 25)
    floor = significand >> short
    if rounding == "truncate":
        return floor
    if rounding == "stochastic":
        assert bits is not None
        # The remainder over 2^shift in units of 2^-32; no shift may reach the width of a word.
        word = arrays.astype(significand - (floor << short), bits.dtype)
        left, right = (
            arrays.astype(by, bits.dtype) for by in (xp.clip(32 - shift, 1, 31), xp.clip(shift - 32, 0, 31))
        )
        up = bits < xp.where(shift >= 32, word >> right, word << left)
    else:
        middle = (2 * floor + 1) << short  # twice the number between n and n + 1 quanta
        up = 2 * significand + (floor & 1) > middle if rounding == "nearest-even" else 2 * significand >= middle
    return xp.where(up, floor + 1, floor)


def scale_for(arrays: Arrays, amax: Array, fmt: Format) -> Scale:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise; `amax` is fp32.

    With amax = m * 2^e and fmt.max = M * 2^E (1 <= m, M < 2) it is 2^(E - e), or half of that if m > M; 1 for amax
    0; within 2^-126 and 2^126, so that its inverse is normal too. An amax of inf or NaN has none, and everything
    scaled by it becomes NaN: saturation would turn an infinity into an ordinary number.
    """
    xp = arrays.xp
    pattern = amax.view(xp.int32) & MAGNITUDE
    # The difference of two patterns, floored by the shift, is E - e, or one less if m > M.
    power = xp.clip((cast_constants(fmt).top - pattern) >> 23, -126, 126)
    return Scale(xp.where(pattern == 0, 0, power), pattern >= INF)


def power_of_two(arrays: Arrays, power: Array, broken: Array) -> Array:
    """Returns 2^power in fp32, and NaN where it is broken.

    As bits: a NaN constant differs from itself, and a compiler would not merge two casts of the same array.
    """
    return arrays.xp.where(broken, NAN, (power + 127) << 23).view(arrays.xp.float32)


def split(arrays: Arrays, x: Array) -> tuple[Array, Array]:
    """Returns the int16 patterns of the nearest bf16, ties away from zero, and of the remainder (core.split)."""
    xp = arrays.xp
    if not str(x.dtype).endswith("float32"):
        raise CastInputError(
            f"split takes the float32 master, not {x.dtype}", hint="convert it to fp32, or keep a master in fp32"
        )
    pattern = x.view(xp.int32)
    # (pattern + 0x8000) >> 16 on the unsigned pattern, halved first so that the sum does not overflow.
    hi = ((pattern >> 15) + 1) >> 1
    nan = (pattern & MAGNITUDE) > INF
    hi = xp.where(nan, ((pattern >> 16) & 0x8000) | 0x7FC0, hi)
    return arrays.astype(hi, xp.int16), arrays.astype(xp.where(nan, 0, pattern), xp.int16)


def join(arrays: Arrays, hi: Array, lo: Array) -> Array:
    """Returns the fp32 number that `split` took apart, of a bf16 array and an int16 one."""
    xp = arrays.xp
    kinds = str(hi.dtype).rpartition(".")[2], str(lo.dtype).rpartition(".")[2]
    if kinds != ("bfloat16", "int16") or hi.shape != lo.shape:
        raise CastInputError(
            f"join takes bfloat16 and int16 of one shape, not {hi.dtype} of {tuple(hi.shape)} and {lo.dtype} of "
            f"{tuple(lo.shape)}",
            hint="pass both results of the same split",
        )
    upper = arrays.astype(hi.view(xp.int16), xp.int32) << 16
    lower = arrays.astype(lo, xp.int32)
    lower = xp.where((upper & MAGNITUDE) == 0, xp.clip(lower, 0, None), lower)  # core.split.join says why
    return (upper + lower).view(xp.float32)


def check_rule(
    fmt: Format, overflow: Overflow, rounding: Rounding = "nearest-even", *, random: bool = False
) -> None:
    """Refuses a rule that the format lacks or a device cannot follow; `random` says whether bits were given."""
    if overflow == "raise":
        raise CastInputError(
            "overflow=`raise` is not offered on a device: every cast would read the tensor, a sync",
            hint="core.rounding.cast raises; or state `saturate`, `inf` or `nan` and look at the result",
        )
    check_overflow(fmt, overflow, ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan)
    check_rounding(rounding, random=random)


def check_source(dtype: str, fmt: Format, widen: str) -> None:
    """Refuses values that fp32 does not hold exactly; `widen` is the framework's call that converts to fp32."""
    if "float64" in dtype:
        raise CastInputError(
            f"float64 would be rounded twice, to fp32 and then to {fmt}: near a tie, to the wrong number",
            hint=f"{widen} accepts the first rounding",
        )
    if dtype.rpartition(".")[2] not in ("float32", "bfloat16", "float16"):
        raise CastInputError(
            f"a cast to {fmt} takes fp32, bf16 or fp16 values, not {dtype}",
            hint=f"widen an 8-bit float exactly with {widen}; a policy does not cast integers",
        )


def check_bits(rounding: Rounding, bits: Array | None, dtype: Any, shape: Sequence[int]) -> None:
    """Refuses stochastic rounding without one random word per element, of a dtype that backends choose."""
    if rounding == "stochastic" and (bits is None or bits.dtype != dtype or bits.shape != shape):
        given = "none" if bits is None else f"{bits.dtype} of shape {tuple(bits.shape)}"
        raise RandomBitsError(
            f"stochastic rounding needs `bits`, {dtype} of shape {tuple(shape)}; given: {given}",
            hint="random_bits(x.shape, seed=..., step=..., tensor=...) makes them",
        )


def check_amax(operand: Operand, *, given: bool) -> None:
    """Refuses a delayed operand without the amax of earlier steps."""
    if operand.amax == "delayed" and not given:
        raise MissingAmaxError(
            f"`{operand.format}:delayed` takes its scale from earlier steps, and no `amax` was given",
            hint="pass amax=, kept from earlier steps, or use `current`",
        )


def check_step(step: Array, *, integer: bool, count: str) -> None:
    """Refuses a step on the device that is not one integer; `count` is a dtype to count steps in."""
    if not integer or math.prod(step.shape) != 1:
        raise RandomBitsError(
            f"`step` is {step.dtype} of shape {tuple(step.shape)}; random words need one integer",
            hint=f"count the steps in a scalar of {count}",
        )


def check_word(name: str, value: int, bits: int) -> None:
    """Refuses a part of a random counter that is not an unsigned integer of so many bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**bits:
        raise RandomBitsError(
            f"`{name}` is {value!r}; random words need an integer from 0 to {2**bits - 1}",
            hint="all replicas and shards must agree on it",
        )


def word_range(shape: int | Sequence[int], seed: int, tensor: int, start: int) -> tuple[tuple[int, ...], int, int]:
    """Checks the key of random words; returns their shape, and the first and the last block of four to draw."""
    for name, value, bits in (("seed", seed, 64), ("tensor", tensor, 32), ("start", start, 63)):
        check_word(name, value, bits)
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    return size, start // 4, -(-(start + math.prod(size)) // 4)
