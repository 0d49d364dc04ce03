"""The reference cast: fp32 to any format and back, on integers, bit for bit.

**Codes count magnitudes.** Without their sign, the codes 0, 1, 2, ... of ExMy are the numbers of the format in
ascending order, across the border of the subnormals and across every power of two. So to round a number is to
choose between two neighboring integers, and a carry out of the mantissa is not a special case.

**One number, two scales.** Every nonzero fp32 number is exactly

    |x| = S * 2^(E - 23)      with an integer 2^23 <= S < 2^24      (subnormals are normalized first)

A format with y mantissa bits and smallest normal exponent Emin spaces its numbers near x by the quantum

    2^q     with q = max(E, Emin) - y         (the max makes all subnormals share the quantum of Emin)

In quanta |x| is S / 2^shift, with shift = q - (E - 23) = 23 - y + max(0, Emin - E), never negative. Hence

    floor     = S >> shift                               the number below or at x, in quanta
    remainder = S - (floor << shift)                     what is left; the fraction is remainder / 2^shift
    code      = ((max(E, Emin) - Emin) << y) + floor     the same number below, as a code

and the mode decides whether the code goes up by one:

    nearest-even     fraction > 1/2, or = 1/2 and the code below is odd      (floor and code agree in parity)
    nearest-away     fraction >= 1/2
    truncate         never
    stochastic       random word < fraction * 2^32, for a uniform 32-bit word: so the probability is the
                     fraction, exact values never move, and a smaller word never rounds lower

The probability is exact up to shift = 32; beyond, it is the fraction rounded down to a multiple of 2^-32, so a
number below 2^-32 of the smallest subnormal always becomes zero.

**Overflow** means that this code, with an unbounded exponent, is beyond the format's largest number. Infinity
reads as 2^128, so it overflows every format. The rule says what an overflow becomes:

    inf         an infinity of the same sign (formats that have one)
    nan         a NaN (formats that have one)
    saturate    the largest number of the same sign
    raise       a RoundingError that counts them and shows the first

There is no default: native casts disagree (1000 to e4m3 is 448 in torch 2.13 and MLX, NaN in torch 2.11 and
JAX), so the caller states it.

**NaN stays NaN**: the quiet one with no payload, with the sign of the input. The fnuz formats have one NaN, whose
code is the sign bit alone; it decodes to a negative NaN, and zero has no sign: what rounds to -0 is +0. A format
without NaN refuses one. No floating-point arithmetic is done on values, so a CPU that flushes subnormals changes
nothing.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import (
    CastInputError,
    CastOverflowError,
    RandomBitsError,
    UnsupportedFormatError,
    did_you_mean,
    one_of,
)
from halfstep.core.formats import FP32, Format, Overflow

Rounding = Literal["nearest-even", "nearest-away", "truncate", "stochastic"]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Integers = NDArray[np.int64]

# int64 temporaries of this many elements stay in a core's cache: three times faster than whole tensors.
_BLOCK = 2**15
# Every shift beyond 24 + 32 gives the same result, and int64 has no shift by 64 or more.
_MAX_SHIFT = 62
_NONE = np.empty(0, np.uint32)


def cast(
    x: NDArray[Any],
    format: Format | str,
    *,
    overflow: Overflow,
    rounding: Rounding = "nearest-even",
    bits: Words | None = None,
) -> Floats:
    """Rounds every element to a number of `format`; the result is fp32, which holds them all exactly.

    `bits` is one random 32-bit word per element (`philox.random_bits`), for stochastic rounding only.
    """
    format = as_format(format)
    values = as_fp32(x, format)
    lacking = {"inf": not format.has_inf, "nan": not format.has_nan}
    check_overflow(format, overflow, [rule for rule in get_args(Overflow) if not lacking.get(rule)])
    words = _random_words(values, rounding, bits)
    _refuse_nan(values, format)
    if overflow == "raise" and (beyond := overflows(values, format, rounding=rounding, bits=bits)).any():
        raise CastOverflowError(
            f"{_first(beyond, values)} beyond {format}, whose largest number is {format.max:g}",
            hint="scale the tensor down, or state another rule, such as overflow=`saturate`",
        )
    result = np.empty(values.size, np.float32)
    patterns = values.reshape(-1).view(np.uint32)
    for block in _blocks(values.size):
        codes = _round(patterns[block], format, overflow, rounding, words[block])
        result[block] = _read(codes, format)
    return result.reshape(values.shape)


def overflows(
    x: NDArray[Any], format: Format | str, *, rounding: Rounding = "nearest-even", bits: Words | None = None
) -> NDArray[np.bool_]:
    """Returns where the overflow rule of `cast` applies: at infinities, and numbers beyond the format."""
    format = as_format(format)
    values = as_fp32(x, format)
    words = _random_words(values, rounding, bits)
    result = np.empty(values.size, np.bool_)
    patterns = values.reshape(-1).view(np.uint32)
    for block in _blocks(values.size):
        magnitude = patterns[block].astype(np.int64) & 0x7FFFFFFF
        rounded = _pack(*_unpack(magnitude, FP32), format, rounding, words[block])
        result[block] = (rounded > _special(format).max) & (magnitude <= 0x7F800000)
    return result.reshape(values.shape)


def encode(values: NDArray[Any], format: Format | str) -> NDArray[np.unsignedinteger[Any]]:
    """Returns the codes of numbers that `format` holds exactly, in the smallest unsigned type that fits them.

    A code is right-aligned: tf32 has 19 bits in a uint32. A number the format lacks is refused, -0 in an fnuz
    format included, so that `decode` returns the same bits (except for NaN, which becomes canonical).
    """
    format = as_format(format)
    numbers = as_fp32(values, format)
    _refuse_nan(numbers, format)
    patterns = numbers.reshape(-1).view(np.uint32)
    storage: Any = np.uint8 if format.bits <= 8 else np.uint16 if format.bits <= 16 else np.uint32
    codes = np.empty(numbers.size, storage)
    for block in _blocks(numbers.size):
        codes[block] = _round(patterns[block], format, format.native_overflow)
    changed = decode(codes, format).view(np.uint32) != patterns
    changed &= ~np.isnan(numbers.reshape(-1))
    if changed.any():
        raise CastOverflowError(
            f"{_first(changed, numbers)} not a number of {format}, so there is no code for it",
            hint="round first, with cast(values, format, overflow=...)",
        )
    return codes.reshape(numbers.shape)


def decode(codes: NDArray[Any], format: Format | str) -> Floats:
    """Returns the numbers of codes, in fp32: the inverse of `encode`."""
    format = as_format(format)
    codes, limit = np.asarray(codes), 2**format.bits
    if codes.dtype.kind not in "ui" or (codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < limit):
        raise CastInputError(
            f"codes of {format} are integers from 0 to {limit - 1}; given: {codes.dtype} values",
            hint="view the array as unsigned integers, and right-align codes that are stored in upper bits",
        )
    flat = codes.reshape(-1)
    result = np.empty(codes.size, np.float32)
    for block in _blocks(codes.size):
        result[block] = _read(flat[block].astype(np.int64), format)
    return result.reshape(codes.shape)


def _round(
    patterns: Words, format: Format, overflow: Overflow, rounding: Rounding = "truncate", words: Words = _NONE
) -> Integers:
    special = _special(format)
    magnitude = patterns.astype(np.int64) & 0x7FFFFFFF
    code = _pack(*_unpack(magnitude, FP32), format, rounding, words)
    too_large = code > special.max
    nan = magnitude > 0x7F800000
    if overflow == "nan":
        nan |= too_large
    code[too_large] = special.inf if overflow == "inf" else special.max
    sign = np.where(patterns >> 31, special.sign, 0)
    if not format.has_negative_zero:
        sign[code == 0] = 0
    code[nan] = special.nan
    # In an fnuz format the NaN is the sign bit alone, so joining the sign to it changes nothing.
    return code | sign


def _read(codes: Integers, format: Format) -> Floats:
    special = _special(format)
    negative, magnitude = codes & special.sign, codes & (special.sign - 1)
    pattern = _pack(*_unpack(magnitude, format), FP32)
    beyond = magnitude > special.max
    pattern[beyond] = np.where(magnitude[beyond] == special.inf, 0x7F800000, 0x7FC00000)
    if not format.has_negative_zero:
        pattern[codes == special.nan] = 0x7FC00000
    return np.where(negative, pattern | 0x80000000, pattern).astype(np.uint32).view(np.float32)


def _unpack(magnitude: Integers, format: Format) -> tuple[Integers, Integers]:
    """Returns S and E of codes without sign, for S * 2^(E - 23); zero has S = 0 and an E below all others."""
    field = magnitude >> format.mantissa_bits
    significand = magnitude & (2**format.mantissa_bits - 1)
    significand += np.where(field, 2**format.mantissa_bits, 0)
    unit = np.maximum(field, 1) - format.bias - format.mantissa_bits
    # An integer below 2^53 is exact in fp64, whose exponent field is then floor(log2), or -1023 for zero.
    log2 = (significand.astype(np.float64).view(np.int64) >> 52) - 1023
    return significand << np.minimum(23 - log2, 23), unit + log2


def _pack(
    significand: Integers,
    exponent: Integers,
    format: Format,
    rounding: Rounding = "truncate",
    words: Words = _NONE,
) -> Integers:
    """Returns the codes that S * 2^(E - 23) round to, as if exponents were unbounded."""
    clamped = np.maximum(exponent, format.min_exponent)
    shift = np.minimum(23 - format.mantissa_bits + clamped - exponent, _MAX_SHIFT)
    floor = significand >> shift
    code = ((clamped - format.min_exponent) << format.mantissa_bits) + floor
    remainder = significand - (floor << shift)
    match rounding:
        case "nearest-even":
            code += 2 * remainder + (floor & 1) > 1 << shift
        case "nearest-away":
            code += 2 * remainder >= 1 << shift
        case "stochastic":
            code += words < (remainder << 32) >> shift
    return code


class _Special(NamedTuple):
    """Special codes; `max` is the largest finite number, -1 means that there is no such code."""

    max: int
    inf: int
    nan: int
    sign: int


@cache
def _special(format: Format) -> _Special:
    sign = 1 << (format.bits - 1)
    inf = (2**format.exponent_bits - 1) << format.mantissa_bits
    return {
        "ieee": _Special(max=inf - 1, inf=inf, nan=inf + 2 ** (format.mantissa_bits - 1), sign=sign),
        "fn": _Special(max=sign - 2, inf=-1, nan=sign - 1, sign=sign),
        "f": _Special(max=sign - 1, inf=-1, nan=-1, sign=sign),
        "fnuz": _Special(max=sign - 1, inf=-1, nan=sign, sign=sign),
    }[format.specials]


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


def as_format(format: Format | str) -> Format:
    """Returns a format, given itself or its name."""
    return Format.parse(format) if isinstance(format, str) else format


def as_fp32(x: NDArray[Any], format: Format) -> Floats:
    """Returns the input as fp32, if fp32 holds it exactly."""
    x = np.asarray(x)
    if x.dtype == np.float32 or x.dtype == np.float16:
        return np.ascontiguousarray(x, np.float32).reshape(x.shape)
    if x.dtype == np.float64:
        raise CastInputError(
            f"float64 would be rounded twice, to fp32 and then to {format}: near a tie, to the wrong number",
            hint="x.astype(np.float32) accepts the first rounding",
        )
    raise CastInputError(
        f"a cast takes float32 or float16 values, not {x.dtype}",
        hint="widen a narrower float exactly with x.astype(np.float32); integers are not cast by a policy",
    )


def check_overflow(format: Format, overflow: Overflow, legal: Sequence[str]) -> None:
    """Refuses an overflow rule that is not legal."""
    if overflow not in legal:
        raise UnsupportedFormatError(
            f"{format} cannot overflow by the rule `{overflow}`; it allows {one_of(legal)}",
            hint=did_you_mean(str(overflow), legal, otherwise="`saturate` works in every format"),
        )


def check_rounding(rounding: Rounding, *, random: bool) -> None:
    """Refuses an unknown rounding, and random bits (if `random`) for a rounding that uses none."""
    if rounding not in get_args(Rounding):
        raise CastInputError(
            f"unknown rounding `{rounding}`; it is {one_of(get_args(Rounding))}",
            hint=did_you_mean(str(rounding), get_args(Rounding), otherwise="`nearest-even` is what hardware does"),
        )
    if random and rounding != "stochastic":
        raise RandomBitsError(
            f"random bits were given, but `{rounding}` uses none",
            hint="drop `bits`, or ask for rounding=`stochastic`",
        )


def _random_words(values: Floats, rounding: Rounding, bits: Words | None) -> Words:
    check_rounding(rounding, random=bits is not None)
    if rounding != "stochastic":
        return _NONE
    if bits is None or bits.dtype != np.uint32 or bits.shape != values.shape:
        given = "none" if bits is None else f"{bits.dtype} of shape {bits.shape}"
        raise RandomBitsError(
            f"stochastic rounding needs `bits`, uint32 of shape {values.shape}; given: {given}",
            hint="philox.random_bits(x.shape, seed=..., step=..., tensor=...) makes them",
        )
    return bits.reshape(-1)


def _refuse_nan(values: Floats, format: Format) -> None:
    nan = np.isnan(values)
    if not format.has_nan and nan.any():
        raise CastOverflowError(
            f"{_first(nan, values)} NaN, which {format} does not have",
            hint="find where it came from; no number can replace it",
        )


def _first(mask: NDArray[np.bool_], values: Floats) -> str:
    """Says how many there are, and the first: `3 of 10 values (the first at index (0, 2): 1000.0) are`."""
    flat = int(np.flatnonzero(mask)[0])
    index = tuple(int(i) for i in np.unravel_index(flat, values.shape))
    count, verb = int(mask.sum()), "is" if mask.sum() == 1 else "are"
    return f"{count} of {values.size} values (the first at index {index}: {values[index]!s}) {verb}"
