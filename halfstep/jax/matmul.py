"""The casted matmul: one contraction, three matmuls (core.precision), each in its own formats.

`casted_dot` derives them from any contraction that `lax.dot_general` takes, with the weight on either side. Sums
are fp32, and every matmul states its precision: by default, an fp32 one is TF32 on NVIDIA and bf16 on a TPU. JAX's
own rule would round grad_weight to the operands' dtype before the cast to the master widens it again; here an fp32
weight gradient is fp32 from the sum on.

A narrow operand has one scale, or one for each index that the matmul at hand does not sum over (`row`): a weight
has a scale for each output in the first matmul, and one for each input in the second. On NVIDIA XLA hands fp8
operands to cuBLAS; `Precision.HIGHEST` turns fast accumulation off.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.refusal import twice_error
from halfstep.core.roles import Operand, is_narrow
from halfstep.jax.cast import amax_of, carried, quantize_scaled
from halfstep.jax.dtypes import DType
from halfstep.jax.lowering import Casts, carrier_of

Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
"""((contracted of the left, of the right), (batch of the left, of the right)), as in lax.dot_general."""

Pasts = tuple[Array | None, Array | None]
"""The amaxes of earlier updates that scale the two operands of a matmul, if they are delayed."""

_FULL = lax.Precision.HIGHEST
_FLOAT32 = jnp.dtype(jnp.float32)


def as_dimensions(dimension_numbers: Any) -> Dimensions:
    """Returns dimension numbers as hashable tuples."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    return (_axes(left), _axes(right)), (_axes(left_batch), _axes(right_batch))


def _axes(axes: Any) -> Axes:
    return tuple(int(axis) for axis in axes)


def plain_dot(a: Array, b: Array, dims: Dimensions) -> Array:
    """Multiplies in fp32; JAX differentiates it."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=_FULL, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def casted_dot(
    x: Array, weight: Array, past: Array | None, dims: Dimensions, casts: Casts, weight_first: bool
) -> Array:
    """Multiplies x, in the compute format, by a weight as it is held; its gradients are the other two matmuls.

    `past`: the amaxes of x, weight and gradient that scale delayed operands; its gradient is those met (fp8.py).
    """
    p, w = casts.precision, in_compute(weight, casts)
    of_x, of_w, _ = _each(past)
    pair, pasts = ((w, x), (of_w, of_x)) if weight_first else ((x, w), (of_x, of_w))
    return _matmul(*pair, dims, (p.operand, p.operand), p.compute, casts, pasts)


def _each(past: Array | None) -> tuple[Array | None, Array | None, Array | None]:
    return (None, None, None) if past is None else (past[0], past[1], past[2])


def _casted_backward(
    dims: Dimensions, casts: Casts, weight_first: bool, kept: tuple[Array, Array, Array | None], g: Array
) -> tuple[Array, Array, Array | None]:
    (x, weight, past), p = kept, casts.precision
    of_inputs, of_w, of_g = _each(past)
    if casts.emulate:
        g = carried(g, p.grad)
    # XLA computes the cast of the weight once for all of its uses.
    w, operands = in_compute(weight, casts), (p.grad_operand, p.operand)
    of_x, of_weight = (_flipped(dims), dims) if weight_first else (dims, _flipped(dims))
    grad_input = _transposed(g, w, of_x, not weight_first, operands, p.grad, casts, (of_g, of_w))
    # XLA may drop a conversion to bf16 and back, so a gradient held wider than its format is rounded instead.
    held = FP32 if weight.dtype == jnp.float32 else p.grad_weight
    grad_weight = _transposed(g, x, of_weight, weight_first, operands, held, casts, (of_g, of_inputs))
    if held != p.grad_weight:
        grad_weight = carried(grad_weight, p.grad_weight)
    each = ((x, p.operand), (w, p.operand), (g, p.grad_operand))
    met = None if past is None else jnp.stack([_met(t, operand) for t, operand in each])
    return grad_input.astype(x.dtype), grad_weight.astype(weight.dtype), met


casted_dot.defvjp(
    lambda x, weight, past, *rest: (casted_dot(x, weight, past, *rest), (x, weight, past)), _casted_backward
)


def _met(x: Array, operand: Operand) -> Array:
    """Returns the amax of an operand that has one scale, for its history."""
    return amax_of(x, operand) if is_narrow(operand.format) and operand.granularity == "tensor" else jnp.float32(0)


def in_compute(parameter: Array, casts: Casts) -> Array:
    """Casts a parameter to the compute format."""
    p = parameter.astype(casts.compute)
    return carried(p, casts.precision.compute) if casts.emulate else p


def _transposed(
    g: Array,
    other: Array,
    dims: Dimensions,
    first: bool,
    operands: tuple[Operand, Operand],
    out: Format,
    casts: Casts,
    pasts: Pasts = (None, None),
) -> Array:
    """Returns the gradient of one operand: g contracted with the other operand over the other's own axes.

    `dims` name the axes of this operand before those of the other; `first` is whether it was the left one, so that
    its own axes come first in g.
    """
    (mine, others), (my_batch, other_batch) = dims
    batch = len(my_batch)
    kept_of_other = _kept(other.ndim, others, other_batch)
    my_kept_count = g.ndim - batch - len(kept_of_other)
    start = batch + my_kept_count if first else batch
    over = tuple(range(start, start + len(kept_of_other)))
    rows = ((over, kept_of_other), (tuple(range(batch)), other_batch))
    result = _matmul(g, other, rows, operands, out, casts, pasts)
    # Axes of the result: the batch, my own, then those that were contracted, in the order the other has them.
    contracted = tuple(mine[place] for place in sorted(range(len(others)), key=others.__getitem__))
    my_kept = _kept(batch + my_kept_count + len(mine), mine, my_batch)
    order = (*my_batch, *my_kept, *contracted)
    return lax.transpose(result, sorted(range(len(order)), key=order.__getitem__))


def _flipped(dims: Dimensions) -> Dimensions:
    (left, right), (left_batch, right_batch) = dims
    return (right, left), (right_batch, left_batch)


def _kept(rank: int, contracted: Axes, batch: Axes) -> Axes:
    return tuple(axis for axis in range(rank) if axis not in contracted and axis not in batch)


def _matmul(
    a: Array,
    b: Array,
    dims: Dimensions,
    operands: tuple[Operand, Operand],
    out: Format,
    casts: Casts,
    pasts: Pasts = (None, None),
) -> Array:
    """Multiplies in the formats of the operands, sums in fp32 and returns the result in `out`."""
    formats = tuple(operand.format for operand in operands)
    if not casts.emulate and not any(is_narrow(fmt) for fmt in formats):
        tf32 = set(formats) == {TF32}
        return _sum_of_products(_held(a, formats[0]), _held(b, formats[1]), dims, carrier_of(out), tf32=tf32)
    (a, a_inv), (b, b_inv) = (
        _lower(t, operand, axes, casts.emulate, past)
        for t, operand, axes, past in zip((a, b), operands, dims[0], pasts, strict=True)
    )
    y = _sum_of_products(a, b, dims, _FLOAT32)
    kept = [len(_kept(t.ndim, dims[0][side], dims[1][side])) for side, t in enumerate((a, b))]
    if a_inv is not None:
        y = y * _aligned(a_inv, dims[0][0], dims[1][0], before=0, after=kept[1])
    if b_inv is not None:
        y = y * _aligned(b_inv, dims[0][1], dims[1][1], before=kept[0], after=0)
    return carried(y, out) if casts.emulate else _held(y, out)


def _held(x: Array, fmt: Format) -> Array:
    return x.astype(carrier_of(fmt))


def _sum_of_products(a: Array, b: Array, dims: Dimensions, out: DType, *, tf32: bool = False) -> Array:
    """Sums exact products of the operands as they are, in fp32."""
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else _FULL
    if a.dtype != b.dtype and not (a.dtype.itemsize == b.dtype.itemsize == 1):
        # No device multiplies such a pair; fp32 holds both, and gives the same products.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def _lower(
    x: Array, operand: Operand, axes: Axes, emulate: bool, past: Array | None
) -> tuple[Array, Array | None]:
    """Returns an operand in its format, and what undoes its scale; a row runs along the contracted axes."""
    fmt = operand.format
    if is_narrow(fmt):
        x = once(x)
        own = amax_of(x, operand, axes)
        amax: Array | None = own
        if operand.amax == "delayed":  # without a history, quantize_scaled refuses it
            amax = None if past is None else jnp.where(past > 0, past, own)
            x = jnp.where(jnp.isinf(x), jnp.asarray(jnp.nan, x.dtype), x)  # earlier amaxes do not show it
        return quantize_scaled(x, operand, amax=amax, native=not emulate)
    return carried(x, fmt) if emulate else _held(x, fmt), None


@jax.custom_jvp
def once(x: Array) -> Array:
    """Returns a tensor that becomes narrow: its gradient is known, and that of the gradient is refused."""
    return x


@once.defjvp
def _refuse_twice(*_: Any) -> Any:
    raise twice_error()


def _aligned(inv_scale: Array, contracted: Axes, batch: Axes, *, before: int, after: int) -> Array:
    """Moves an operand's scales to the axes its rows have in the result: the batch, the left's, the right's."""
    if inv_scale.ndim == 0:
        return inv_scale
    kept = _kept(inv_scale.ndim, contracted, batch)
    sizes = [[inv_scale.shape[axis] for axis in axes] for axes in (batch, kept)]
    rows = lax.transpose(inv_scale, (*batch, *kept, *contracted))
    return rows.reshape(*sizes[0], *(1,) * before, *sizes[1], *(1,) * after)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(a: Array, b: Array, dims: Dimensions, out: Format, casts: Casts) -> Array:
    """Multiplies two activations in compute and returns `out`; emulated, nothing is rounded inside attention."""
    fmt = FP32 if casts.emulate else casts.precision.compute
    return _matmul(a, b, dims, (Operand(fmt),) * 2, FP32 if casts.emulate else out, casts)


def _product_backward(
    dims: Dimensions, out: Format, casts: Casts, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    fmt = FP32 if casts.emulate else casts.precision.compute
    operands, flipped = (Operand(fmt),) * 2, _flipped(dims)
    return (
        _transposed(g, kept[1], dims, True, operands, fmt, casts),
        _transposed(g, kept[0], flipped, False, operands, fmt, casts),
    )


product.defvjp(lambda a, b, *rest: (product(a, b, *rest), (a, b)), _product_backward)
