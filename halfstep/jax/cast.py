"""Casts in JAX that agree with core.rounding bit for bit, on any device, traced or not, without a host read.

core.rounding defines the result: which neighbor a number becomes in each mode, what overflow makes of it,
that a NaN stays the quiet NaN of its sign. Here the same result is made on 32-bit patterns, as the reference makes
it: XLA flushes subnormals on a CPU (1e-40 + 0 is 0 there) and has no fp64 unless asked, but integers are integers.

**Eight exponent bits** (tf32, bf16 and their kin). fp32 has the same exponents, so the numbers of the format
are the fp32 patterns whose last d = 23 - y bits are zero, subnormals included, and rounding is an addition to
the pattern followed by a mask; a carry moves into the exponent by itself, and past the last one it is inf.

**Other exponents** (fp16, fp8 and any with a bias of their own). With |x| = S * 2^(E - 23) and the quantum 2^q,
q = max(E, Emin) - y, the number of quanta is n = S >> shift, plus 0 or 1 by what was shifted out, and the result
is n * 2^q. Integers up to 2^24 are exact in fp32, so the pattern of float(n) plus q << 23 is the pattern of the
result, and where that would be a subnormal of fp32 it is n << (q + 149).

**Why not x.astype(bfloat16).astype(float32)?** Under jit it may be the identity: XLA is free to keep more
precision than asked for (`xla_allow_excess_precision`) and drops the pair of conversions. It never drops
`lax.reduce_precision`, which keeps subnormals with 8 exponent bits and flushes them with fewer (measured on
jax 0.10), so `carried` uses it for bf16 alone.

**Scaling.** A narrow operand is multiplied by a power of two that brings its largest magnitude into the top
binade of the format. A power of two changes no mantissa: it is added to E before the rounding, so scaling adds no
error of its own, and inv_scale = 1 / scale is exact.

Nothing here is differentiable: gradients through a cast are zero, and a layer that casts states its own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from halfstep.core.cast_constants import Plan, check_rule, check_word, plan_of
from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, FP32, Format, Overflow
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.jax.dtypes import dtype_of

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_IMPLICIT = 1 << 23
_MANTISSA = _IMPLICIT - 1
_WIDENED = ("float32", "bfloat16", "float16")


def quantize(
    x: Any,
    fmt: Format,
    *,
    overflow: Overflow,
    rounding: Rounding = "nearest-even",
    bits: Array | None = None,
) -> Array:
    """Rounds every element to a number of `fmt`, carried in fp32: the emulated cast.

    `x` is fp32, or bf16 or fp16, which fp32 holds exactly. `bits` is one uint32 word for each element, for
    stochastic rounding only; `random_bits` makes them. A NaN in a format that has none stays NaN here, where
    core.rounding refuses it: to refuse, the array would have to be read.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    _check_bits(x, rounding, bits)
    return _quantize(x, None, bits, fmt, overflow, rounding)


def carried(x: Array, fmt: Format) -> Array:
    """The emulated cast as hardware does it, in fp32: nearest-even, and infinity beyond the largest number.

    The bits are those of `quantize`, but for a NaN's payload.
    """
    if fmt == FP32:
        return x
    if fmt == BF16:
        return lax.reduce_precision(lax.stop_gradient(_as_fp32(x, fmt)), exponent_bits=8, mantissa_bits=7)
    return quantize(x, fmt, overflow="inf")


def to_native(x: Any, fmt: Format, *, overflow: Overflow) -> Array:
    """Rounds to nearest, ties to even, into the JAX dtype of `fmt`, by the stated rule of overflow.

    XLA's own fp8 casts make NaN of what is beyond the largest number, and MLX's and torch's do not. Here the
    conversion gets numbers of the format alone, which it cannot change. A NaN stays NaN; its code is XLA's choice.
    """
    dtype = dtype_of(fmt)
    return quantize(x, fmt, overflow=overflow).astype(dtype)


def scale_for(amax: Any, fmt: Format) -> Array:
    """The largest power of two that keeps amax * scale <= fmt.max, elementwise, in fp32.

    With amax = m * 2^e and fmt.max = M * 2^E (1 <= m, M < 2) it is 2^(E - e), or half of it where m > M. It
    is 1 for amax 0, and stays within 2^-126 and 2^126, so that its inverse is a normal number too: below
    about fmt.max * 2^-126 an array no longer fills the format, and nothing is lost to overflow.
    An amax that is inf or NaN has no scale: it gives NaN, and all that is scaled by it becomes NaN.
    Saturation would otherwise turn an infinity into a number like any other.
    """
    power, broken = _power_for(_as_fp32(amax, fmt), fmt)
    return _power_of_two(power, broken)


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
    """A matmul operand in a narrow format, and the inv_scale that undoes its scale.

    One scale an array (inv_scale is a scalar), or one a row, that is for each index of all dimensions but
    the last (inv_scale keeps the last with size 1). The scale follows the amax of `x`, unless `amax` is
    given, of any shape that broadcasts to `x`: it must be for `delayed` operands, where it comes from earlier
    steps; what is larger overflows by rule.
    The values are numbers of the format in fp32, or in its JAX dtype where `native`; both are the same.
    """
    fmt = operand.format
    if operand.amax == "delayed" and amax is None:
        raise RoundingError(
            f"`{fmt}:delayed` takes its scale from earlier steps, and no `amax` was given",
            hint="pass amax=, kept from earlier steps, or use `current`",
        )
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    _check_bits(x, rounding, bits)
    power, broken = _power_for(amax_of(x, operand) if amax is None else _as_fp32(amax, fmt), fmt)
    values = _quantize(x, (power, broken), bits, fmt, overflow, rounding)
    return (values.astype(dtype_of(fmt)) if native else values), _power_of_two(-power, broken)


def amax_of(x: Any, operand: Operand, axes: Sequence[int] | None = None) -> Array:
    """The largest magnitude of the array or of each row, as the operand's granularity asks, in fp32.

    A row runs along `axes`, which keep their place with size 1; the last dimension unless said otherwise. Patterns
    without sign stand in the order of the numbers, NaN above all, and a maximum of integers flushes no subnormal.
    """
    magnitude = _pattern(_as_fp32(x, operand.format)) & _MAGNITUDE
    if operand.granularity == "row":
        found = jnp.max(magnitude, axis=tuple(axes or (-1,)), keepdims=True, initial=0)
    else:
        found = jnp.max(magnitude, initial=0)
    return _float(found)


def split(x: Any) -> tuple[Array, Array]:
    """core.split in JAX: the nearest bf16, ties away from zero, and the int16 remainder that makes it exact."""
    if jnp.asarray(x).dtype != jnp.float32:
        raise RoundingError(
            f"`x` is {jnp.asarray(x).dtype}, not float32",
            hint="split takes the fp32 master; widen others with x.astype(jnp.float32)",
        )
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    nan = (pattern & _MAGNITUDE) > _INF
    hi = jnp.where(nan, (pattern >> 16) & 0x8000 | 0x7FC0, ((pattern >> 15) + 1) >> 1)
    lo = jnp.where(nan, 0, pattern & 0xFFFF)
    return (
        lax.bitcast_convert_type(hi.astype(jnp.uint16), jnp.bfloat16),
        lax.bitcast_convert_type(lo.astype(jnp.uint16), jnp.int16),
    )


def join(hi: Array, lo: Array) -> Array:
    """The fp32 number that `split` took apart."""
    if hi.dtype != jnp.bfloat16 or lo.dtype != jnp.int16 or hi.shape != lo.shape:
        raise RoundingError(
            f"`hi` is {hi.dtype} of shape {hi.shape} and `lo` {lo.dtype} of shape {lo.shape}; a split has a "
            "bfloat16 and an int16 half of one shape",
            hint="pass both results of the same split",
        )
    upper = lax.bitcast_convert_type(hi, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(upper + lo.astype(jnp.uint32), jnp.float32)


_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def random_bits(shape: int | Sequence[int], *, seed: int, step: int | Array, tensor: int, start: int = 0) -> Array:
    """core.philox.random_bits, word for word, in uint32.

    `step` may be an integer scalar, traced or on the device, which is not read; under jit it should be: a Python
    integer that changes compiles anew at each step.
    """
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(size, dtype=np.int64))
    for name, value, limit in (("seed", seed, 64), ("tensor", tensor, 32), ("start", start, 63)):
        check_word(name, value, limit)
    if isinstance(step, int):
        check_word("step", step, 32)
        step = jnp.asarray(step, jnp.uint32)
    elif not jnp.issubdtype(step.dtype, jnp.integer) or step.size != 1:
        raise RoundingError(
            f"`step` is {step.dtype} of shape {tuple(step.shape)}; random words need one integer",
            hint="count the steps in a scalar of jnp.int32",
        )
    first, last = start // 4, -(-(start + count) // 4)
    ascending = jnp.arange(last - first, dtype=jnp.uint32)
    low = ascending + np.uint32(first & _WORD)
    high = np.uint32(first >> 32) + (low < np.uint32(first & _WORD)).astype(jnp.uint32)
    words = _philox(low, high, np.uint32(tensor), step.reshape(()).astype(jnp.uint32), seed)
    lanes = jnp.stack(words, axis=-1)
    return lanes.reshape(-1)[start - 4 * first :][:count].reshape(size)


def _philox(c0: Array, c1: Array, c2: Any, c3: Array, seed: int) -> tuple[Array, Array, Array, Array]:
    k0, k1 = seed & _WORD, seed >> 32
    c0, c1, c2, c3 = jnp.broadcast_arrays(c0, c1, c2, c3)
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint32(k0), low1, high0 ^ c3 ^ np.uint32(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Array, b: int) -> tuple[Array, Array]:
    """The high and the low word of a 64-bit product, from 16-bit parts, no sum of which exceeds 32 bits."""
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
    """The cast of x * 2^power; `scale` is the power, and where there is none."""
    plan = plan_of(fmt)
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


def _round_patterns(magnitude: Array, plan: Plan, rounding: Rounding, bits: Array | None) -> Array:
    """Patterns of the cast to a format with fp32's exponents; what went beyond it is an infinity already."""
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
    magnitude: Array, scale: tuple[Array, Array] | None, plan: Plan, rounding: Rounding, bits: Array | None
) -> tuple[Array, Array]:
    """Patterns of the cast to any other format, and where the result is beyond its largest number."""
    significand, exponent = _unpack(magnitude, plan, scale)
    clamped = jnp.maximum(exponent, plan.min_exponent)
    shift = 23 - plan.mantissa_bits + clamped - exponent
    count = _count_quanta(significand, shift, rounding, bits)
    # The code of the result, were the exponent unbounded; codes stand in the order of the numbers.
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


def _unpack(magnitude: Array, plan: Plan, scale: tuple[Array, Array] | None) -> tuple[Array, Array]:
    """S and E with |x| * 2^power = S * 2^(E - 23). S is whole, 2^23 or more, where the rounding depends on it."""
    field = magnitude >> 23
    if scale is None and plan.min_exponent >= -126:
        # A subnormal of fp32 has the quantum of Emin whatever its own exponent is.
        return (magnitude & _MANTISSA) | jnp.where(field > 0, _IMPLICIT, 0), jnp.maximum(field, 1) - 127
    whole = _pattern(magnitude.astype(jnp.float32))
    tiny = field == 0
    significand = jnp.where(tiny, whole, magnitude) & _MANTISSA | _IMPLICIT
    exponent = jnp.where(tiny, (whole >> 23) - 149, field) - 127
    if scale is not None:
        # What is beyond the format stays so; an exponent that is larger still would leave 32 bits.
        exponent = jnp.minimum(exponent + scale[0], plan.max_exponent + 1)
    return jnp.where(magnitude == 0, 0, significand), exponent


def _count_quanta(significand: Array, shift: Array, rounding: Rounding, bits: Array | None) -> Array:
    """S / 2^shift as a whole number by the mode of rounding."""
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
    """The logarithm of `scale_for`, and where there is no scale."""
    pattern = _pattern(amax) & _MAGNITUDE
    # A pattern is (e + 127) * 2^23 plus the mantissa: the difference of two, floored, is E - e, less one
    # where m > M.
    power = jnp.clip((plan_of(fmt).top - pattern) >> 23, -126, 126)
    return jnp.where(pattern == 0, 0, power), pattern >= _INF


def _power_of_two(power: Array, broken: Array) -> Array:
    return _float(jnp.where(broken, _NAN, (power + 127) << 23))


def _pattern(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(pattern: Array) -> Array:
    return lax.bitcast_convert_type(pattern, jnp.float32)


def _as_fp32(x: Any, fmt: Format) -> Array:
    dtype = getattr(x, "dtype", None)
    if dtype == np.float64:
        raise RoundingError(
            f"float64 would be rounded twice, to fp32 and then to {fmt}: near a tie, to the wrong number",
            hint="x.astype(jnp.float32) accepts the first rounding",
        )
    x = jnp.asarray(x)
    if x.dtype.name not in _WIDENED:
        raise RoundingError(
            f"a cast to {fmt} takes fp32, bf16 or fp16 values, not {x.dtype}",
            hint="widen an 8-bit float exactly with x.astype(jnp.float32); integers are not cast by a policy",
        )
    return x.astype(jnp.float32)


def _check_bits(x: Array, rounding: Rounding, bits: Array | None) -> None:
    if rounding == "stochastic" and (bits is None or bits.dtype != jnp.uint32 or bits.shape != x.shape):
        given = "none" if bits is None else f"{bits.dtype} of shape {tuple(bits.shape)}"
        raise RoundingError(
            f"stochastic rounding needs `bits`, uint32 of shape {tuple(x.shape)}; given: {given}",
            hint="random_bits(x.shape, seed=..., step=..., tensor=...) makes them",
        )
