"""The casted matmul: one contraction, three matmuls (core.precision), each in its own formats.

`casted_dot` derives them from any contraction that `lax.dot_general` takes, with the weight on either side. Sums
are fp32, and every matmul states its precision: by default, an fp32 one is TF32 on NVIDIA and bf16 on a TPU. JAX's
own rule would round grad_weight to the operands' dtype before the cast to the master widens it again; here an fp32
weight gradient is fp32 from the sum on.

A narrow operand has one scale, or one for each index that the matmul at hand does not sum over (`row`): a weight
has a scale for each output in the first matmul, and one for each input in the second. On NVIDIA XLA hands fp8
operands to cuBLAS; `Precision.HIGHEST` turns fast accumulation off.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.refusal import twice_error
from halfstep.core.roles import Operand, is_narrow
from halfstep.jax.numerics.cast import amax_of, carried, quantize_scaled
from halfstep.jax.numerics.dtypes import DType
from halfstep.jax.numerics.lowering import Casts, carrier_of

Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
"""((contracted of the left, of the right), (batch of the left, of the right)), as in lax.dot_general."""

Lowering = tuple[Operand, Array | None]
"""The format of an operand, and the amax of earlier updates that scales it, if it is delayed."""

_FULL = lax.Precision.HIGHEST
_FLOAT32 = jnp.dtype(jnp.float32)


def as_dimensions(dimension_numbers: Any) -> Dimensions:
    """Returns dimension numbers as hashable tuples."""
    contracted, batch = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
    return contracted, batch  # type: ignore[return-value]


def plain_dot(a: Array, b: Array, dims: Dimensions) -> Array:
    """Multiplies in fp32; JAX differentiates it."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=_FULL, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def casted_dot(
    x: Array, weight: Array, past: Array | None, dims: Dimensions, casts: Casts, weight_first: bool
) -> Array:
    """Multiplies x, in the compute format, by a weight in its own dtype; its gradients are the other two matmuls.

    `past`: the amaxes that scale delayed x, weight and gradient; its own gradient is the new ones (fp8.py).
    """
    p, w = casts.precision, in_compute(weight, casts)
    as_x, as_w, _ = _lowerings(casts, past)
    pair, lowerings = ((w, x), (as_w, as_x)) if weight_first else ((x, w), (as_x, as_w))
    return _matmul(*pair, dims, lowerings, p.compute, casts)


def _lowerings(casts: Casts, past: Array | None) -> tuple[Lowering, Lowering, Lowering]:
    """Returns how x, the weight and the gradient are lowered."""
    of_x, of_w, of_g = (None, None, None) if past is None else (past[0], past[1], past[2])
    operand = casts.precision.operand
    return (operand, of_x), (operand, of_w), (casts.precision.grad_operand, of_g)


def _casted_backward(
    dims: Dimensions, casts: Casts, weight_first: bool, kept: tuple[Array, Array, Array | None], g: Array
) -> tuple[Array, Array, Array | None]:
    (x, weight, past), p = kept, casts.precision
    as_x, as_w, as_g = _lowerings(casts, past)
    if casts.emulate:
        g = carried(g, p.grad)
    # XLA computes the cast of the weight once for all of its uses.
    w = in_compute(weight, casts)
    of_x, of_weight = (_swap_sides(dims), dims) if weight_first else (dims, _swap_sides(dims))
    grad_input = _operand_gradient(g, w, of_x, not weight_first, (as_g, as_w), p.grad, casts)
    # XLA may drop a conversion to bf16 and back, so a gradient held wider than its format is rounded instead.
    held = FP32 if weight.dtype == jnp.float32 else p.grad_weight
    grad_weight = _operand_gradient(g, x, of_weight, weight_first, (as_g, as_x), held, casts)
    if held != p.grad_weight:
        grad_weight = carried(grad_weight, p.grad_weight)
    amaxes = None
    if past is not None:  # of the operands that have one scale, for their history
        pairs = ((x, p.operand), (w, p.operand), (g, p.grad_operand))
        one = [is_narrow(operand.format) and operand.granularity == "tensor" for _, operand in pairs]
        found = (amax_of(*pair) if has_one else jnp.float32(0) for pair, has_one in zip(pairs, one, strict=True))
        amaxes = jnp.stack([*found])
    return grad_input.astype(x.dtype), grad_weight.astype(weight.dtype), amaxes


casted_dot.defvjp(
    lambda x, weight, past, *rest: (casted_dot(x, weight, past, *rest), (x, weight, past)), _casted_backward
)


def in_compute(parameter: Array, casts: Casts) -> Array:
    """Casts a parameter to the compute format."""
    p = parameter.astype(casts.compute)
    return carried(p, casts.precision.compute) if casts.emulate else p


def _operand_gradient(
    g: Array,
    other: Array,
    dims: Dimensions,
    first: bool,
    lowerings: tuple[Lowering, Lowering],
    out: Format,
    casts: Casts,
) -> Array:
    """Returns the gradient of one operand: g contracted with the other operand over the other's own axes.

    `dims` name the axes of this operand before those of the other; `first` is whether it was the left one, so that
    its own axes come first in g.
    """
    (mine, others), (my_batch, other_batch) = dims
    batch = len(my_batch)
    kept_of_other = _free_axes(other.ndim, others, other_batch)
    my_kept_count = g.ndim - batch - len(kept_of_other)
    start = batch + my_kept_count if first else batch
    over = tuple(range(start, start + len(kept_of_other)))
    rows = ((over, kept_of_other), (tuple(range(batch)), other_batch))
    result = _matmul(g, other, rows, lowerings, out, casts)
    # Axes of the result: the batch, my own, then those that were contracted, in the order the other has them.
    contracted = tuple(mine[place] for place in sorted(range(len(others)), key=others.__getitem__))
    my_kept = _free_axes(batch + my_kept_count + len(mine), mine, my_batch)
    order = (*my_batch, *my_kept, *contracted)
    return lax.transpose(result, sorted(range(len(order)), key=order.__getitem__))


def _swap_sides(dims: Dimensions) -> Dimensions:
    (left, right), (left_batch, right_batch) = dims
    return (right, left), (right_batch, left_batch)


def _free_axes(rank: int, contracted: Axes, batch: Axes) -> Axes:
    return tuple(axis for axis in range(rank) if axis not in contracted and axis not in batch)


def _matmul(
    a: Array, b: Array, dims: Dimensions, lowerings: tuple[Lowering, Lowering], out: Format, casts: Casts
) -> Array:
    """Multiplies in the formats of the operands, sums in fp32 and returns the result in `out`."""
    formats = tuple(operand.format for operand, _ in lowerings)
    if not casts.emulate and not any(is_narrow(fmt) for fmt in formats):
        tf32 = set(formats) == {TF32}
        return _sum_of_products(_store(a, formats[0]), _store(b, formats[1]), dims, carrier_of(out), tf32=tf32)
    (a, a_inv), (b, b_inv) = (
        _lower(t, *lowering, axes, casts.emulate)
        for t, lowering, axes in zip((a, b), lowerings, dims[0], strict=True)
    )
    y = _sum_of_products(a, b, dims, _FLOAT32)
    kept = [len(_free_axes(t.ndim, dims[0][side], dims[1][side])) for side, t in enumerate((a, b))]
    for side, inv in enumerate((a_inv, b_inv)):
        if inv is not None:
            beside = (0, kept[1]) if side == 0 else (kept[0], 0)
            y = y * _align_scales(inv, dims[0][side], dims[1][side], *beside)
    return _store(y, out, emulate=casts.emulate)


def _store(x: Array, fmt: Format, *, emulate: bool = False) -> Array:
    """Returns an array in a format: in its dtype, or emulated as its numbers in fp32."""
    return carried(x, fmt) if emulate else x.astype(carrier_of(fmt))


def _sum_of_products(a: Array, b: Array, dims: Dimensions, out: DType, *, tf32: bool = False) -> Array:
    """Sums exact products of the operands in fp32."""
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else _FULL
    if a.dtype != b.dtype and not (a.dtype.itemsize == b.dtype.itemsize == 1):
        # No device multiplies such a pair; fp32 holds both, and gives the same products.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def _lower(
    x: Array, operand: Operand, past: Array | None, axes: Axes, emulate: bool
) -> tuple[Array, Array | None]:
    """Returns an operand in its format, and what undoes its scale; a row runs along the contracted axes."""
    fmt = operand.format
    if is_narrow(fmt):
        x = differentiable_once(x)
        own = amax_of(x, operand, axes)
        amax: Array | None = own
        if operand.amax == "delayed":  # without a history, quantize_scaled refuses it
            amax = None if past is None else jnp.where(past > 0, past, own)
            x = jnp.where(jnp.isinf(x), jnp.asarray(jnp.nan, x.dtype), x)  # earlier amaxes do not show it
        return quantize_scaled(x, operand, amax=amax, native=not emulate)
    return _store(x, fmt, emulate=emulate), None


@jax.custom_jvp
def differentiable_once(x: Array) -> Array:
    """Returns a tensor, and refuses to differentiate it twice: a narrow operand has no second derivative."""
    return x


@differentiable_once.defjvp
def _refuse_twice(*_: Any) -> Any:
    raise twice_error()


def _align_scales(inv_scale: Array, contracted: Axes, batch: Axes, before: int, after: int) -> Array:
    """Moves an operand's scales to the axes its rows have in the result: the batch, the left's, the right's."""
    if inv_scale.ndim == 0:
        return inv_scale
    kept = _free_axes(inv_scale.ndim, contracted, batch)
    sizes = [[inv_scale.shape[axis] for axis in axes] for axes in (batch, kept)]
    rows = lax.transpose(inv_scale, (*batch, *kept, *contracted))
    return rows.reshape(*sizes[0], *(1,) * before, *sizes[1], *(1,) * after)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(a: Array, b: Array, dims: Dimensions, out: Format, casts: Casts) -> Array:
    """Multiplies two activations in compute and returns `out`; emulated, nothing is rounded inside attention."""
    fmt = FP32 if casts.emulate else casts.precision.compute
    return _matmul(a, b, dims, ((Operand(fmt), None),) * 2, FP32 if casts.emulate else out, casts)


def _product_backward(
    dims: Dimensions, out: Format, casts: Casts, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    fmt = FP32 if casts.emulate else casts.precision.compute
    lowerings, flipped = ((Operand(fmt), None),) * 2, _swap_sides(dims)
    return (
        _operand_gradient(g, kept[1], dims, True, lowerings, fmt, casts),
        _operand_gradient(g, kept[0], flipped, False, lowerings, fmt, casts),
    )


product.defvjp(lambda a, b, *rest: (product(a, b, *rest), (a, b)), _product_backward)


def as_matmul(x: Array, weight: Array, dims: Any, side: int) -> tuple[Array, Array, Any]:
    """Returns an activation as rows and a weight as a matrix of (in, out), or a stack of each; and the axes.

    `side` is the operand that is the weight. Without this a gradient sums over several axes, a batch is between
    them, or rows come transposed, which XLA's CPU backend cannot do with bf16 operands and an fp32 sum (jax
    0.10.2). The result is (rows, out), and that of stacks is a stack.
    """
    contracted, batch = dims
    of_x, of_weight = (tuple(contracted[1 - side]), tuple(contracted[side]))
    stack_x, stack_weight = (tuple(batch[1 - side]), tuple(batch[side]))
    free_x, free_weight = _free_axes(x.ndim, of_x, stack_x), _free_axes(weight.ndim, of_weight, stack_weight)
    size, rows, out = (
        math.prod(t.shape[axis] for axis in axes) for t, axes in ((x, of_x), (x, free_x), (weight, free_weight))
    )
    stack = (math.prod(x.shape[axis] for axis in stack_x),) if stack_x else ()
    x = lax.transpose(x, (*stack_x, *free_x, *of_x)).reshape(*stack, rows, size)
    weight = lax.transpose(weight, (*stack_weight, *of_weight, *free_weight)).reshape(*stack, size, out)
    first, same = len(stack), tuple(range(len(stack)))
    return x, weight, (((first + 1,), (first,)), (same, same))


def convolve(eqn: Any, x: Array, master: Array, casts: Casts) -> Array:
    """Convolves x by a weight as an equation does, each of the three convolutions in its own formats.

    The weight gradient takes fp32 operands: XLA's results are no wider than those.
    """
    p, held = casts.precision, partial(_store, emulate=casts.emulate)

    def conv(x: Array, w: Array) -> Array:
        full = (lax.Precision.HIGHEST,) * 2
        return eqn.primitive.bind(x, w, **{**eqn.params, "precision": full, "preferred_element_type": None})

    @jax.custom_vjp
    def three(x: Array, master: Array) -> Array:
        return held(conv(x, held(master, p.compute)), p.compute)

    def backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        x, master = kept
        g, w = held(g, p.grad), held(master, p.compute)
        (grad_input,) = jax.linear_transpose(lambda t: conv(t, w), x)(g)
        wide_x, wide_g = x.astype(jnp.float32), g.astype(jnp.float32)
        (grad_weight,) = jax.linear_transpose(lambda t: conv(wide_x, t), master)(wide_g)
        return held(grad_input, p.grad), carried(grad_weight, p.grad_weight)

    three.defvjp(lambda x, master: (three(x, master), (x, master)), backward)
    return three(x, master)
