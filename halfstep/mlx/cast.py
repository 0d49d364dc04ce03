"""Casts in MLX that agree with core.rounding bit for bit, eager and compiled, lazily, in few operations.

**Fewer exponent bits** than fp32 (fp16, fp8 and their kin). Near x the numbers are multiples of the quantum q =
max(2^E, 2^Emin) * 2^-y, with E from the exponent bits of x. Multiplication by a power of two is exact, so v = |x|
/ q is, and (integer part + 0 or 1) * q is. Every quantity is a normal number as long as q >= 2^-126, so a device
that flushes subnormals changes nothing. 1 / q comes from exponent bits, because a device may divide approximately
but never multiplies so. Formats whose quanta are not normal in fp32 are rounded in 64-bit integers, as
core.rounding does it.

**Native conversions.** x.astype(mx.bfloat16) and x.astype(mx.float16) round to nearest-even on every number (on a
CPU: tests try the patterns); a NaN stays NaN, though bf16 loses its sign. mx.compile keeps a pair of conversions,
where torch's compiler drops it. MLX's conversion to fp8 is not used: it turns a NaN into 448.

Nothing here is differentiable: results are detached, and a layer that casts states its own gradient. Nothing is
evaluated either: arrays stay lazy until someone reads them.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from halfstep.core.cast_constants import (
    CastConstants,
    cast_constants,
    check_amax,
    check_bits,
    check_rule,
    check_source,
    check_step,
    check_word,
    word_range,
)
from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, FP16, FP32, Format, Overflow
from halfstep.core.philox import KEY_STEPS, MULTIPLIERS
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.mlx.dtypes import dtype_of

_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1
_INF = 0x7F800000
_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF


def quantize(
    x: mx.array,
    fmt: Format,
    *,
    overflow: Overflow,
    rounding: Rounding = "nearest-even",
    bits: mx.array | None = None,
) -> mx.array:
    """Rounds every element to a number of `fmt`, carried in fp32: the emulated cast.

    `bits` is one uint32 word per element (`random_bits`), for stochastic rounding only. A NaN in a format without
    one stays NaN here, where core.rounding refuses it: refusing would mean reading the array.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    given = "none" if bits is None else f"{bits.dtype} of shape {bits.shape}"
    check_bits(rounding, given, f"{mx.uint32} of shape {x.shape}")
    plan = cast_constants(fmt)
    if plan.like_fp32:
        return _round_patterns(x, plan, overflow, rounding, bits)
    if plan.fits_fp32:
        return _with_sign(_round_quanta(x, plan, overflow, rounding, bits), x, fmt)
    return _with_sign(_round_integers(x, plan, overflow, rounding, bits), x, fmt)


def carried(x: mx.array, fmt: Format) -> mx.array:
    """Rounds as hardware does, carried in fp32; on a CPU by the native dtype, which has the same bits there.

    It differentiates like a cast: the rounding itself does not show.
    """
    return x if fmt == FP32 else _carrying(fmt)(x)  # type: ignore[no-any-return]


@cache
def _carrying(fmt: Format) -> Any:
    def forward(x: mx.array) -> mx.array:
        if fmt in (BF16, FP16) and mx.default_device().type == mx.cpu:
            return x.astype(dtype_of(fmt)).astype(mx.float32)
        return quantize(x, fmt, overflow="inf")

    stated = mx.custom_function(forward)
    stated.vjp(lambda x, g, _: g.astype(x.dtype))
    stated.jvp(lambda _, tangent: tangent.astype(mx.float32))
    return stated


def scale_for(amax: mx.array, fmt: Format) -> mx.array:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise, in fp32; 1 for amax 0.

    It stays within 2^-126 and 2^126, so that its inverse is a normal number too. An amax of inf or NaN gives NaN,
    and so does all that is scaled by it: saturation would turn an infinity into a number like any other.
    """
    pattern = _as_fp32(amax, fmt).view(mx.int32) & _MAGNITUDE
    # A pattern is (e + 127) * 2^23 plus the mantissa: the difference of two, floored, is E - e, less one
    # where m > M.
    power = (cast_constants(fmt).top - pattern) >> 23
    scale = ((mx.clip(power, -126, 126) + 127) << 23).view(mx.float32)
    scale = mx.where(pattern == 0, 1.0, scale)
    return mx.where(pattern >= _INF, math.nan, scale)


def quantize_scaled(
    x: mx.array,
    operand: Operand,
    *,
    amax: mx.array | None = None,
    overflow: Overflow = "saturate",
    rounding: Rounding = "nearest-even",
    bits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Returns a matmul operand in a narrow format, carried in fp32, and the inv_scale that undoes its scale.

    There is one scale per array, or per row along the last dimension. `amax` is that of `x` unless given;
    `delayed` operands require it, and what is larger overflows by the rule.
    """
    check_amax(operand, given=amax is not None)
    hp = _as_fp32(x, operand.format)
    if amax is None:
        amax = amax_of(hp, operand)
    scale = scale_for(amax, operand.format)
    lp = quantize(hp * scale, operand.format, overflow=overflow, rounding=rounding, bits=bits)
    return lp, 1.0 / scale


def amax_of(x: mx.array, operand: Operand) -> mx.array:
    """Returns the largest magnitude of the array or of each row, as the operand's granularity asks, in fp32."""
    magnitude = mx.abs(mx.stop_gradient(x))
    if operand.granularity == "row":
        return magnitude.max(axis=-1, keepdims=True).astype(mx.float32)
    if magnitude.size == 0:
        return mx.zeros(())
    return magnitude.max().astype(mx.float32)


def split(x: mx.array) -> tuple[mx.array, mx.array]:
    """An fp32 master as the nearest bf16, ties away from zero, and the int16 remainder that makes it exact."""
    if x.dtype != mx.float32:
        raise RoundingError(
            f"`x` is {x.dtype}, not {mx.float32}",
            hint="split takes the fp32 master; widen others with x.astype(mx.float32)",
        )
    bits = mx.stop_gradient(x).view(mx.uint32)
    # (bits + 0x8000) >> 16, halved first so that the sum stays within 32 bits.
    hi = ((bits >> 15) + 1) >> 1
    lo = bits & 0xFFFF
    nan = (bits & _MAGNITUDE) > _INF
    hi = mx.where(nan, (bits >> 16) & 0x8000 | 0x7FC0, hi)
    lo = mx.where(nan, 0, lo)
    return hi.astype(mx.uint16).view(mx.bfloat16), lo.astype(mx.uint16).view(mx.int16)


def join(hi: mx.array, lo: mx.array) -> mx.array:
    """The fp32 number that `split` took apart."""
    if (hi.dtype, lo.dtype) != (mx.bfloat16, mx.int16) or hi.shape != lo.shape:
        raise RoundingError(
            f"`hi` is {hi.dtype} of shape {hi.shape} and `lo` {lo.dtype} of shape {lo.shape}; they are bf16 and "
            "int16, two halves of one array",
            hint="pass both results of the same split",
        )
    upper = mx.stop_gradient(hi).view(mx.uint16).astype(mx.int32) << 16
    lower = lo.astype(mx.int32)
    lower = mx.where((upper & 0x7FFFFFFF) == 0, mx.maximum(lower, 0), lower)  # core.split.join says why
    return (upper + lower).view(mx.float32)


def random_bits(
    shape: int | Sequence[int], *, seed: int, step: int | mx.array, tensor: int, start: int = 0
) -> mx.array:
    """core.philox.random_bits in uint32; under mx.compile `step` should be an array: an integer is compiled in."""
    size, first, last = word_range(shape, seed, tensor, start)
    if not isinstance(step, mx.array):
        check_word("step", step, 32)
        step = mx.array(step, mx.uint64)
    else:
        integer = mx.issubdtype(step.dtype, mx.integer)
        check_step(str(step.dtype), step.shape, integer=integer, count="mx.uint32")
    # The keys of all rounds are one array, and all words have one shape, so that compiled rounds share kernels:
    # numbers would be compiled into each.
    parts = (seed & _WORD, KEY_STEPS[0]), (seed >> 32, KEY_STEPS[1])  # each with what it grows by
    keys = [(part + turn * stride) & _WORD for turn in range(10) for part, stride in parts]
    constants = mx.array([*keys, tensor, first], mx.uint64)
    block = mx.arange(last - first, dtype=mx.uint64) + constants[21]  # arange counts in fp64, so it starts at zero
    c0, c1 = block & _WORD, block >> 32
    c2, c3 = (mx.broadcast_to(word, block.shape) for word in (constants[20], step.astype(mx.uint64) & _WORD))
    for turn in range(10):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32) ^ c1 ^ constants[2 * turn], product1 & _WORD
        c2, c3 = (product0 >> 32) ^ c3 ^ constants[2 * turn + 1], product0 & _WORD
    lanes = mx.stack([c0, c1, c2, c3], axis=-1).astype(mx.uint32)
    return lanes.reshape(-1)[start - 4 * first :][: math.prod(size)].reshape(size)


def _round_patterns(
    x: mx.array, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: mx.array | None
) -> mx.array:
    pattern = x.view(mx.int32)
    magnitude = pattern & _MAGNITUDE
    drop = 23 - plan.mantissa_bits
    unit, largest = 1 << drop, _INF - (1 << drop)
    if drop == 0 or rounding == "truncate":
        rounded = magnitude & -unit
    elif rounding == "nearest-even":
        rounded = (((magnitude >> drop) & 1) + magnitude + (unit // 2 - 1)) & -unit
    elif bits is None:
        rounded = (magnitude + unit // 2) & -unit
    else:
        threshold = (magnitude & (unit - 1)).astype(mx.uint32) << (32 - drop)
        rounded = (magnitude & -unit) + (bits < threshold).astype(mx.int32) * unit
    if overflow == "saturate":
        rounded = mx.minimum(rounded, largest)
    # What went beyond the largest number is an infinity already. A NaN is known by the pattern it had:
    # rounding may have wrapped 0x7FFFFFFF around to zero.
    nan = magnitude > _INF
    if overflow == "nan":
        nan = nan | (rounded > largest)
    return (mx.where(nan, _NAN, rounded) | (pattern & _SIGN)).view(mx.float32)


def _round_quanta(
    x: mx.array, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: mx.array | None
) -> mx.array:
    """Rounds to a format with fewer exponents than fp32; returns patterns of magnitudes, NaN among them."""
    magnitude = mx.minimum(mx.abs(x), plan.largest if overflow == "saturate" else plan.beyond)
    # Patterns of powers of two: 2^max(E, Emin), then the quantum, then its inverse.
    power = mx.maximum(magnitude.view(mx.int32) & _INF, (plan.min_exponent + 127) << 23)
    power = power - (plan.mantissa_bits << 23)
    v = magnitude * ((254 << 23) - power).view(mx.float32)
    if rounding == "nearest-even":
        v = mx.round(v)
    else:
        floor = mx.floor(v)
        fraction = v - floor
        if rounding == "truncate":
            v = floor
        elif bits is None:
            v = floor + (fraction >= 0.5).astype(mx.float32)
        else:
            v = floor + (bits < (fraction * 2.0**32).astype(mx.uint32)).astype(mx.float32)
    result = v * power.view(mx.float32)
    nan = mx.isnan(x)
    if overflow == "nan":
        nan = nan | (result > plan.largest)
    pattern = result.view(mx.int32)
    if overflow == "inf":
        pattern = mx.where(result > plan.largest, _INF, pattern)
    return mx.where(nan, _NAN, pattern)


def _round_integers(
    x: mx.array, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: mx.array | None
) -> mx.array:
    """Does the same in integers, as core.rounding does: |x| = S 2^(E - 23), and the result is n quanta 2^q."""
    magnitude = x.view(mx.int32) & _MAGNITUDE
    field = magnitude >> 23
    raw = (magnitude & 0x7FFFFF) + mx.where(field > 0, 1 << 23, 0)
    log2 = _log2(raw)
    significand = (raw << (23 - log2)).astype(mx.int64)
    exponent = mx.maximum(field, 1) - 150 + log2
    clamped = mx.maximum(exponent, plan.min_exponent)
    shift = mx.minimum(23 - plan.mantissa_bits + clamped - exponent, 62).astype(mx.int64)
    floor = significand >> shift
    remainder = significand - (floor << shift)
    one = mx.array(1, mx.int64)
    if rounding == "nearest-even":
        floor = floor + (2 * remainder + (floor & 1) > (one << shift)).astype(mx.int64)
    elif rounding == "nearest-away":
        floor = floor + (2 * remainder >= (one << shift)).astype(mx.int64)
    elif bits is not None:
        floor = floor + (bits.astype(mx.int64) < ((remainder << 32) >> shift)).astype(mx.int64)

    # n 2^q as an fp32 pattern: a shift where it is subnormal, an addition to the exponent of n elsewhere.
    count, quantum = floor.astype(mx.int32), clamped - plan.mantissa_bits
    log2 = _log2(count)
    normal = log2 + quantum >= -126
    wide = count.astype(mx.float32).view(mx.int32) + (quantum << 23)
    narrow = count << mx.where(normal, 0, quantum + 149)
    pattern = mx.where(count == 0, 0, mx.where(normal, wide, narrow))
    beyond = pattern > plan.top  # infinity reads as 2^128, whose pattern it is
    nan = magnitude > _INF
    if overflow == "nan":
        nan = nan | beyond
    pattern = mx.where(beyond, _INF if overflow == "inf" else plan.top, pattern)
    return mx.where(nan, _NAN, pattern)


def _log2(count: mx.array) -> mx.array:
    """Returns floor(log2 n) of integers 0 < n < 2^25; 0 for 0."""
    return mx.maximum((count.astype(mx.float32).view(mx.int32) >> 23) - 127, 0)


def _with_sign(pattern: mx.array, x: mx.array, fmt: Format) -> mx.array:
    sign = x.view(mx.int32) & _SIGN
    if not fmt.has_negative_zero:
        # Zero has no sign, and the code of negative zero is the NaN, which therefore has one.
        sign = mx.where(pattern == 0, 0, mx.where(pattern == _NAN, _SIGN, sign))
    return (pattern | sign).view(mx.float32)


def _as_fp32(x: mx.array, fmt: Format) -> mx.array:
    """Returns the input in fp32 and detached, or refuses what fp32 does not hold exactly."""
    check_source(str(x.dtype).rpartition(".")[2], fmt, "x.astype(mx.float32)")
    return mx.stop_gradient(x).astype(mx.float32)
