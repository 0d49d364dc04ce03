"""Casts in JAX that agree with core.rounding bit for bit, on any device, traced or not, without a host read.

The arithmetic is core.arrays.cast. XLA flushes subnormals on a CPU (1e-40 + 0 is 0 there) and has no fp64 unless
asked, so all of it is done in integers, and the power of two that scales a narrow operand is added to the exponent
before rounding: no product is flushed.

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

from halfstep.core.arrays import cast as shared
from halfstep.core.arrays.cast import MAGNITUDE, Arrays, Scale, check_amax, check_bits, check_rule
from halfstep.core.formats import BF16, FP32, Format, Overflow
from halfstep.core.philox import round_keys, rounds
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.jax.numerics.dtypes import dtype_of

ARRAYS = Arrays(jnp, jnp.astype, flushes=True)
_WORD = 0xFFFFFFFF


def quantize(
    x: Any, fmt: Format, *, overflow: Overflow, rounding: Rounding = "nearest-even", bits: Array | None = None
) -> Array:
    """Rounds every element to a number of `fmt`, carried in fp32: the emulated cast.

    `bits` is one uint32 word per element (`random_bits`), for stochastic rounding only. A NaN in a format without
    one stays NaN here, where core.rounding refuses it: refusing would mean reading the array.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    check_bits(rounding, bits, jnp.dtype(jnp.uint32), x.shape)
    return _quantize(x, fmt, overflow, rounding, bits, None)


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


def quantize_scaled(x: Any, operand: Operand, *, amax: Any = None, native: bool = False) -> tuple[Array, Array]:
    """Returns a matmul operand in a narrow format, saturated, in its JAX dtype if `native`; and the inv_scale.

    The scale, one per array or per row, is the largest power of two that keeps amax * scale <= fmt.max. `amax` is
    that of `x` unless given, in any shape that broadcasts to `x`; `delayed` operands require it. An amax of inf or
    NaN makes everything NaN: saturation would turn an infinity into a number like any other.
    """
    fmt = operand.format
    check_amax(operand, given=amax is not None)
    x = _as_fp32(x, fmt)
    scale = shared.scale_for(ARRAYS, amax_of(x, operand) if amax is None else _as_fp32(amax, fmt), fmt)
    values = _quantize(x, fmt, "saturate", "nearest-even", None, scale)
    inv_scale = shared.power_of_two(ARRAYS, -scale.power, scale.broken)
    return (values.astype(dtype_of(fmt)) if native else values), inv_scale


def amax_of(x: Any, operand: Operand, axes: Sequence[int] | None = None) -> Array:
    """Returns the largest magnitude of the array or of each row along `axes`, by default the last, in fp32.

    A maximum of patterns, which are in the order of the numbers, NaN above all, flushes no subnormal.
    """
    magnitude = _as_fp32(x, operand.format).view(jnp.int32) & MAGNITUDE
    if operand.granularity == "row":
        return jnp.max(magnitude, axis=tuple(axes or (-1,)), keepdims=True, initial=0).view(jnp.float32)
    return jnp.max(magnitude, initial=0).view(jnp.float32)


def scale_for(amax: Any, fmt: Format) -> Array:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise; NaN for inf and NaN."""
    return shared.power_of_two(ARRAYS, *shared.scale_for(ARRAYS, _as_fp32(amax, fmt), fmt))


def split(x: Array) -> tuple[Array, Array]:
    """Returns an fp32 master as the nearest bf16, ties away from zero, and the int16 remainder (core.split)."""
    hi, lo = shared.split(ARRAYS, lax.stop_gradient(x))
    return hi.view(jnp.bfloat16), lo


def join(hi: Array, lo: Array) -> Array:
    """Returns the fp32 number that `split` took apart."""
    return shared.join(ARRAYS, lax.stop_gradient(hi), lo)


def random_bits(shape: int | Sequence[int], *, seed: int, step: int | Array, tensor: int, start: int = 0) -> Array:
    """core.philox.random_bits in uint32; under jit `step` should be an array: a new integer compiles again."""
    size, first, last = shared.word_range(shape, seed, tensor, start)
    if isinstance(step, int):
        shared.check_word("step", step, 32)
        step = jnp.asarray(step, jnp.uint32)
    else:
        shared.check_step(step, integer=jnp.issubdtype(step.dtype, jnp.integer), count="jnp.int32")
    ascending = jnp.arange(last - first, dtype=jnp.uint32)
    low = ascending + np.uint32(first & _WORD)
    high = np.uint32(first >> 32) + (low < np.uint32(first & _WORD)).astype(jnp.uint32)
    counter = jnp.broadcast_arrays(low, high, np.uint32(tensor), step.reshape(()).astype(jnp.uint32))
    keys = [(np.uint32(k0), np.uint32(k1)) for k0, k1 in round_keys((seed & _WORD, seed >> 32))]
    lanes = jnp.stack(rounds(counter, keys, _product), axis=-1)
    return lanes.reshape(-1)[start - 4 * first :][: math.prod(size)].reshape(size)


def _product(a: Array, b: int) -> tuple[Array, Array]:
    """Returns the high and the low word of a 64-bit product, from 16-bit parts whose sums fit 32 bits."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, np.uint32(b & 0xFFFF), np.uint32(b >> 16)
    t = a1 * b0 + (a0 * b0 >> 16)
    u = a0 * b1 + (t & 0xFFFF)
    return a1 * b1 + (t >> 16) + (u >> 16), a * np.uint32(b)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    x: Array, fmt: Format, overflow: Overflow, rounding: Rounding, bits: Array | None, scale: Scale | None
) -> Array:
    return shared.quantize(ARRAYS, x, fmt, overflow, rounding, bits, scale)


def _as_fp32(x: Any, fmt: Format) -> Array:
    if getattr(x, "dtype", None) != np.float64:  # which JAX would narrow silently
        x = jnp.asarray(x)
    shared.check_source(x.dtype.name, fmt, "x.astype(jnp.float32)")
    return jnp.asarray(x).astype(jnp.float32)
