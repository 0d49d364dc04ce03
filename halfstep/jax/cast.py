"""Casts in JAX that agree with core.rounding bit for bit, on any device, traced or not, without a host read.

They compute on 32-bit patterns, as the reference does: XLA flushes subnormals on a CPU (1e-40 + 0 is 0 there) and
has no fp64 unless asked, but integers are integers. A format with fp32's exponents takes an addition and a mask
(core.cast_constants). For any other, integers up to 2^24 are exact in fp32, so the pattern of float(n) plus q <<
23 is the pattern of n quanta 2^q, and where that would be a subnormal of fp32 it is n << (q + 149). The power of
two that scales a narrow operand is added to E before rounding, so that no product is flushed.

**Why not x.astype(bfloat16).astype(float32)?** Under jit it may be the identity: XLA is free to keep more
precision than asked for (`xla_allow_excess_precision`) and drops the pair of conversions. It never drops
`lax.reduce_precision`, which keeps subnormals with 8 exponent bits and flushes them with fewer (measured on
jax 0.10), so `carried` uses it for bf16 alone.

Nothing here is differentiable: gradients through a cast are zero, and a layer that casts states its own.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

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
from halfstep.core.formats import BF16, FP32, Format, Overflow
from halfstep.core.philox import KEY_STEPS, MULTIPLIERS
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.jax.dtypes import dtype_of

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF
_IMPLICIT = 1 << 23
_MANTISSA = _IMPLICIT - 1


def quantize(
    x: Any, fmt: Format, *, overflow: Overflow, rounding: Rounding = "nearest-even", bits: Array | None = None
) -> Array:
    """Rounds every element to a number of `fmt`, carried in fp32: the emulated cast.

    `bits` is one uint32 word per element (`random_bits`), for stochastic rounding only. A NaN in a format without
    one stays NaN here, where core.rounding refuses it: refusing would mean reading the array.
    """
    x = _checked(x, fmt, overflow, rounding, bits)
    return _quantize(x, None, bits, fmt, overflow, rounding)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def carried(x: Array, fmt: Format) -> Array:
    """Rounds as hardware does, carried in fp32: nearest-even, and infinity beyond the largest number.

    It differentiates like a cast: the rounding itself does not show.
    """
    if fmt == FP32:
        return x
    if fmt == BF16:
        return lax.reduce_precision(lax.stop_gradient(_as_fp32(x, fmt)), exponent_bits=8, mantissa_bits=7)
    return quantize(x, fmt, overflow="inf")


@carried.defjvp
def _carried_jvp(fmt: Format, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = carried(*primals, fmt)
    return y, tangents[0].astype(y.dtype)


def quantize_scaled(
    x: Any,
    operand: Operand,
    *,
    amax: Any = None,
    overflow: Overflow = "saturate",
    rounding: Rounding = "nearest-even",
    bits: Array | None = None,
    native: bool = False,
) -> tuple[Array, Array]:
    """Returns a matmul operand in a narrow format, in its JAX dtype if `native`, and the inv_scale.

    The scale, one per array or per row, is the largest power of two that keeps amax * scale <= fmt.max. `amax` is
    that of `x` unless given, in any shape that broadcasts to `x`; `delayed` operands require it, and what is
    larger overflows by the rule. An amax of inf or NaN makes everything NaN: saturation would turn an infinity
    into a number like any other.
    """
    fmt = operand.format
    check_amax(operand, given=amax is not None)
    x = _checked(x, fmt, overflow, rounding, bits)
    power, broken = _power_for(amax_of(x, operand) if amax is None else _as_fp32(amax, fmt), fmt)
    values = _quantize(x, (power, broken), bits, fmt, overflow, rounding)
    inv_scale = _float(jnp.where(broken, _NAN, (127 - power) << 23))
    return (values.astype(dtype_of(fmt)) if native else values), inv_scale


def amax_of(x: Any, operand: Operand, axes: Sequence[int] | None = None) -> Array:
    """Returns the largest magnitude of the array or of each row along `axes`, by default the last, in fp32.

    A maximum of patterns, which are in the order of the numbers, NaN above all, flushes no subnormal.
    """
    magnitude = _pattern(_as_fp32(x, operand.format)) & _MAGNITUDE
    if operand.granularity == "row":
        return _float(jnp.max(magnitude, axis=tuple(axes or (-1,)), keepdims=True, initial=0))
    return _float(jnp.max(magnitude, initial=0))


def scale_for(amax: Any, fmt: Format) -> Array:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise; NaN for inf and NaN."""
    power, broken = _power_for(_as_fp32(amax, fmt), fmt)
    return _float(jnp.where(broken, _NAN, (127 + power) << 23))


def split(x: Array) -> tuple[Array, Array]:
    """Returns an fp32 master as the nearest bf16, ties away from zero, and the int16 remainder (core.split)."""
    if x.dtype != jnp.float32:
        raise RoundingError(
            f"`x` is {x.dtype}, not float32",
            hint="split takes the fp32 master; widen others with x.astype(jnp.float32)",
        )
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.uint32)
    # (bits + 0x8000) >> 16, halved first so that the sum stays within 32 bits.
    hi = ((bits >> 15) + jnp.uint32(1)) >> 1
    nan = (bits & _MAGNITUDE) > _INF
    hi = jnp.where(nan, (bits >> 16) & 0x8000 | 0x7FC0, hi).astype(jnp.uint16)
    lo = jnp.where(nan, jnp.uint32(0), bits & 0xFFFF).astype(jnp.uint16)
    return lax.bitcast_convert_type(hi, jnp.bfloat16), lax.bitcast_convert_type(lo, jnp.int16)


def join(hi: Array, lo: Array) -> Array:
    """Returns the fp32 number that `split` took apart."""
    if (hi.dtype, lo.dtype) != (jnp.bfloat16, jnp.int16) or hi.shape != lo.shape:
        raise RoundingError(
            f"`hi` is {hi.dtype} of shape {hi.shape} and `lo` {lo.dtype} of shape {lo.shape}; they are bfloat16 "
            "and int16, two halves of one array",
            hint="pass both results of the same split",
        )
    upper = lax.bitcast_convert_type(lax.stop_gradient(hi), jnp.uint16).astype(jnp.uint32) << 16
    lower = lo.astype(jnp.int32)
    lower = jnp.where((upper & _MAGNITUDE) == 0, jnp.maximum(lower, 0), lower)  # core.split.join says why
    return _float(upper + lax.bitcast_convert_type(lower, jnp.uint32))


def random_bits(shape: int | Sequence[int], *, seed: int, step: int | Array, tensor: int, start: int = 0) -> Array:
    """core.philox.random_bits in uint32; under jit `step` should be an array: a new integer compiles again."""
    size, first, last = word_range(shape, seed, tensor, start)
    if isinstance(step, int):
        check_word("step", step, 32)
        step = jnp.asarray(step, jnp.uint32)
    else:
        integer = jnp.issubdtype(step.dtype, jnp.integer)
        check_step(str(step.dtype), tuple(step.shape), integer=integer, count="jnp.int32")
    ascending = jnp.arange(last - first, dtype=jnp.uint32)
    low = ascending + np.uint32(first & _WORD)
    high = np.uint32(first >> 32) + (low < np.uint32(first & _WORD)).astype(jnp.uint32)
    words = _philox(low, high, np.uint32(tensor), step.reshape(()).astype(jnp.uint32), seed)
    lanes = jnp.stack(words, axis=-1)
    return lanes.reshape(-1)[start - 4 * first :][: math.prod(size)].reshape(size)


def _philox(c0: Array, c1: Array, c2: Any, c3: Array, seed: int) -> tuple[Array, Array, Array, Array]:
    k0, k1 = seed & _WORD, seed >> 32
    c0, c1, c2, c3 = jnp.broadcast_arrays(c0, c1, c2, c3)
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint32(k0), low1, high0 ^ c3 ^ np.uint32(k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Array, b: int) -> tuple[Array, Array]:
    """Returns the high and the low word of a 64-bit product, from 16-bit parts whose sums fit 32 bits."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, np.uint32(b & 0xFFFF), np.uint32(b >> 16)
    t = a1 * b0 + (a0 * b0 >> 16)
    u = a0 * b1 + (t & 0xFFFF)
    return a1 * b1 + (t >> 16) + (u >> 16), a * np.uint32(b)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _quantize(
    x: Array,
    scale: tuple[Array, Array] | None,
    bits: Array | None,
    fmt: Format,
    overflow: Overflow,
    rounding: Rounding,
) -> Array:
    """Casts x * 2^power; `scale` is the power, and where there is none."""
    plan = cast_constants(fmt)
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = (pattern & _MAGNITUDE).astype(jnp.int32)
    nan = magnitude > _INF
    if scale is None and plan.like_fp32:
        rounded = _round_patterns(magnitude, plan, rounding, bits)
        beyond = rounded >= _INF
    else:
        rounded, beyond = _round_quanta(magnitude, scale, plan, rounding, bits)
    if scale is not None:
        nan |= scale[1]
    if overflow == "nan":
        nan |= beyond
    else:
        most = _INF if overflow == "inf" else int(np.float32(plan.largest).view(np.int32))
        rounded = jnp.where(beyond, most, rounded)
    sign = pattern & _SIGN
    if not fmt.has_negative_zero:
        # A zero has no sign here, and the one NaN has the code of a negative zero.
        sign = jnp.where(nan, _SIGN, jnp.where(rounded == 0, np.uint32(0), sign))
    rounded = jnp.where(nan, _NAN, rounded)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint32) | sign, jnp.float32)


def _round_patterns(magnitude: Array, plan: CastConstants, rounding: Rounding, bits: Array | None) -> Array:
    """Rounds to a format with fp32's exponents; what went beyond it is an infinity already."""
    magnitude = jnp.minimum(magnitude, _INF)
    drop = 23 - plan.mantissa_bits
    unit = 1 << drop
    floor = magnitude & -unit
    if drop == 0 or rounding == "truncate":
        return floor
    if rounding == "nearest-even":
        return (magnitude + ((magnitude >> drop) & 1) + (unit // 2 - 1)) & -unit
    if rounding == "nearest-away":
        return (magnitude + unit // 2) & -unit
    assert bits is not None
    threshold = (magnitude & (unit - 1)).astype(jnp.uint32) << (32 - drop)
    return floor + jnp.where(bits < threshold, unit, 0)


def _round_quanta(
    magnitude: Array,
    scale: tuple[Array, Array] | None,
    plan: CastConstants,
    rounding: Rounding,
    bits: Array | None,
) -> tuple[Array, Array]:
    """Rounds to any other format; returns patterns, and where the result is beyond its largest number."""
    significand, exponent = _unpack(magnitude, plan, scale)
    clamped = jnp.maximum(exponent, plan.min_exponent)
    shift = 23 - plan.mantissa_bits + clamped - exponent
    count = _count_quanta(significand, shift, rounding, bits)
    # The code of the result if the exponent were unbounded; codes are in the order of the numbers.
    code = ((clamped - plan.min_exponent) << plan.mantissa_bits) + count
    steps = int(plan.largest / 2.0 ** (plan.max_exponent - plan.mantissa_bits))
    beyond = code > ((plan.max_exponent - plan.min_exponent) << plan.mantissa_bits) + steps
    quantum = clamped - plan.mantissa_bits
    float_of_count = _pattern(count.astype(jnp.float32))
    result = float_of_count + (quantum << 23)
    if plan.min_exponent - plan.mantissa_bits < -126:
        tiny = (float_of_count >> 23) + quantum <= 0
        result = jnp.where(tiny, count << jnp.minimum(quantum + 149, 24), result)
    return jnp.where(count == 0, 0, result), beyond | (magnitude >= _INF)


def _unpack(magnitude: Array, plan: CastConstants, scale: tuple[Array, Array] | None) -> tuple[Array, Array]:
    """Returns S and E with |x| * 2^power = S * 2^(E - 23); S is 2^23 or more where rounding depends on it."""
    field = magnitude >> 23
    if scale is None and plan.min_exponent >= -126:
        # A subnormal of fp32 has the quantum of Emin whatever its own exponent is.
        return (magnitude & _MANTISSA) | jnp.where(field > 0, _IMPLICIT, 0), jnp.maximum(field, 1) - 127
    whole = _pattern(magnitude.astype(jnp.float32))
    tiny = field == 0
    significand = jnp.where(tiny, whole, magnitude) & _MANTISSA | _IMPLICIT
    exponent = jnp.where(tiny, (whole >> 23) - 149, field) - 127
    if scale is not None:
        # What is beyond the format stays so; a larger exponent would not fit 32 bits.
        exponent = jnp.minimum(exponent + scale[0], plan.max_exponent + 1)
    return jnp.where(magnitude == 0, 0, significand), exponent


def _count_quanta(significand: Array, shift: Array, rounding: Rounding, bits: Array | None) -> Array:
    """Returns S / 2^shift as a whole number, rounded by the mode."""
    # Once everything is shifted out, and half of a quantum is not reached, further shifts change nothing.
    short = jnp.minimum(shift, 25)
    floor = significand >> short
    remainder = significand - (floor << short)
    if rounding == "nearest-even":
        return floor + jnp.where(2 * remainder + (floor & 1) > (1 << short), 1, 0)
    if rounding == "nearest-away":
        return floor + jnp.where(2 * remainder >= (1 << short), 1, 0)
    if rounding == "truncate":
        return floor
    assert bits is not None
    # remainder / 2^shift in units of 2^-32; no shift may reach the width of a word.
    word = remainder.astype(jnp.uint32)
    up, down = jnp.clip(32 - shift, 1, 31), jnp.clip(shift - 32, 0, 31)
    threshold = jnp.where(shift >= 32, word >> down.astype(jnp.uint32), word << up.astype(jnp.uint32))
    return floor + jnp.where(bits < threshold, 1, 0)


def _power_for(amax: Array, fmt: Format) -> tuple[Array, Array]:
    """Returns the logarithm of the scale, within +-126 so that its inverse is normal, and where there is none."""
    pattern = _pattern(amax) & _MAGNITUDE
    # With amax = m * 2^e and fmt.max = M * 2^E it is E - e, less one where m > M: patterns differ by that.
    power = jnp.clip((cast_constants(fmt).top - pattern) >> 23, -126, 126)
    return jnp.where(pattern == 0, 0, power), pattern >= _INF


def _pattern(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(pattern: Array) -> Array:
    return lax.bitcast_convert_type(pattern, jnp.float32)


def _as_fp32(x: Any, fmt: Format) -> Array:
    if getattr(x, "dtype", None) != np.float64:  # which JAX would narrow silently
        x = jnp.asarray(x)
    check_source(x.dtype.name, fmt, "x.astype(jnp.float32)")
    return jnp.asarray(x).astype(jnp.float32)


def _checked(x: Any, fmt: Format, overflow: Overflow, rounding: Rounding, bits: Array | None) -> Array:
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    given = "none" if bits is None else f"{bits.dtype} of shape {tuple(bits.shape)}"
    check_bits(rounding, given, f"uint32 of shape {tuple(x.shape)}")
    return x
