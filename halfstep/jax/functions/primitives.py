"""JAX's primitives for interpret.py: which kinds there are, and how to bind an equation of one again.

`bind` runs an equation as it stands, whatever functions it holds. `bind_wide` runs one with fp32 in place of every
narrower float, on masters and on emulated arrays: only primitives of the lists below, which mean the same in any
dtype.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.extend.source_info_util import summarize

from halfstep.core.formats import BF16, FP16, Format
from halfstep.jax.cast import carried
from halfstep.jax.dtypes import dtype_of
from halfstep.jax.lowering import Casts

_OURS = Path(__file__).parents[1]  # halfstep/jax


def words(*lines: str) -> frozenset[str]:
    """Returns the words of some lines."""
    return frozenset(" ".join(lines).split())


LAYOUT = words(
    "transpose reshape broadcast_in_dim squeeze expand_dims slice dynamic_slice gather rev copy concatenate split",
    "pad stop_gradient sharding_constraint reshard scatter dynamic_update_slice tile stack",
)
"""Primitives that move values without changing them."""

ARITHMETIC = words(
    "add sub mul div neg abs sign max min integer_pow pow square sqrt rsqrt cbrt exp exp2 expm1 log log1p tanh",
    "logistic erf erfc erf_inv sin cos tan atan2 rem floor ceil round clamp select_n",
    "asin acos atan sinh cosh asinh acosh atanh scatter-add scatter-sub scatter-mul scatter-min scatter-max",
    "reduce_sum reduce_max reduce_min reduce_prod cumsum cumprod cummax cummin cumlogsumexp",
)
BROADCASTING = words("add sub mul div max min pow atan2 rem clamp select_n")
"""Arithmetic that stretches axes of size 1, and scalars."""

EXACT = words("add sub mul max min neg abs select_n")
"""Arithmetic that gives the same in a narrow format as in fp32 and then rounded."""

COMPARISON = words("eq ne lt le gt ge is_finite argmax argmin")
PRODUCT = words("dot_general conv_general_dilated")
ALGORITHMS: dict[Any, Format] = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: BF16,
    lax.DotAlgorithmPreset.F16_F16_F32: FP16,
}
"""The operands of algorithms that sum in fp32, as matmuls here do: not every device knows them by name."""

ISLANDS = {"exp": "softmax", "exp2": "softmax", "rsqrt": "norm", "sqrt": "norm", "log": "loss"}
"""The role that a primitive indicates."""

PASSED = words("optimization_barrier device_put")
"""Primitives that return each array unchanged."""

NAMED = words("name")
"""checkpoint_name, which marks an activation."""

INLINED = words("jit pjit closed_call core_call")
REMAT = words("remat2 remat checkpoint")


def line_of(eqn: Any) -> str:
    """Returns where in the user's code an equation comes from."""
    return str(summarize(eqn.source_info))


def is_ours(eqn: Any) -> bool:
    """Returns whether an equation is a layer of this package, which states its own casts and gradients."""
    about = (getattr(inner, "debug_info", None) for inner in jaxprs_in_params(eqn.params))
    files = [str(getattr(each, "func_filename", "") or "") for each in about]
    return bool(files) and all(_OURS in Path(file).parents for file in files)


def multiplies(eqn: Any) -> bool:
    """Returns whether the functions inside an equation multiply."""
    inside = (each for inner in jaxprs_in_params(eqn.params) for each in inner.eqns)
    return any(each.primitive.name in PRODUCT or multiplies(each) for each in inside)


def is_float(atom: Any) -> bool:
    """Returns whether a variable or literal holds floats."""
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def is_conversion(eqn: Any) -> bool:
    """Returns whether an equation converts floats to another floating dtype."""
    return eqn.primitive.name == "convert_element_type" and is_float(eqn.invars[0]) and is_float(eqn.outvars[0])


def parts_of_scan(eqn: Any) -> tuple[int, int]:
    """Returns how many constants and how many carried values a scan has; it runs along its other inputs.

    The ranks tell, as those lose an axis inside; the equation's own fields have other names in jax 0.10 and 0.11.
    """
    jaxpr = eqn.params["jaxpr"].jaxpr
    along = sum(out.aval.ndim != inside.aval.ndim for out, inside in zip(eqn.invars, jaxpr.invars, strict=True))
    pairs = zip(eqn.outvars, jaxpr.outvars, strict=True)
    carried = sum(out.aval.ndim == inside.aval.ndim for out, inside in pairs)
    return len(eqn.invars) - along - carried, carried


def bind(jaxpr: Any, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates one equation as its own jaxpr: primitives differ in how they are called."""
    inputs = {atom: x for atom, x in zip(eqn.invars, arrays, strict=True) if not isinstance(atom, Literal)}
    alone = jaxpr.replace(constvars=(), invars=list(inputs), outvars=eqn.outvars, eqns=[eqn])
    return jax.core.eval_jaxpr(alone, (), *inputs.values())


def bind_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation with fp32 in place of every narrower float, in its arrays and its parameters."""
    wide = [jnp.asarray(x, jnp.float32) if is_floating(x) else x for x in arrays]
    kind, _, combined = eqn.primitive.name.partition("-")
    if kind == "scatter" and combined:
        # It holds the function that combines two numbers, in their dtype, so that is built again.
        kept = {k: eqn.params[k] for k in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [getattr(lax, f"scatter_{combined}")(*wide, **kept)]
    narrow = {k: v for k, v in eqn.params.items() if isinstance(v, np.dtype) and jnp.issubdtype(v, jnp.floating)}
    out = eqn.primitive.bind(*wide, **{**eqn.params, **dict.fromkeys(narrow, jnp.dtype(jnp.float32))})
    return list(out) if eqn.primitive.multiple_results else [out]


def fits_exactly(number: Any, dtype: Any) -> bool:
    """Returns whether a number is one of a dtype."""
    return np.ndim(number) == 0 and bool(np.float32(number) == np.asarray(number).astype(dtype).astype(np.float32))


def is_floating(x: Any) -> bool:
    """Returns whether an array or a number is floating."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def as_matmul(x: Array, weight: Array, dims: Any, side: int) -> tuple[Array, Array, Any]:
    """Returns an activation as rows and a weight as a matrix of (in, out), or a stack of each; and the axes.

    `side` is the operand that is the weight. Without this a gradient sums over several axes, or a batch is between
    them, which XLA's CPU backend cannot do with bf16 operands and an fp32 sum (jax 0.10.2). The result of weight
    and rows is (out, rows), and that of stacks is a stack.
    """
    contracted, batch = dims
    of_x, of_weight = (tuple(contracted[1 - side]), tuple(contracted[side]))
    stack_x, stack_weight = (tuple(batch[1 - side]), tuple(batch[side]))
    free_x, free_weight = (_others(x.ndim, of_x + stack_x), _others(weight.ndim, of_weight + stack_weight))
    size, rows, out = (
        math.prod(t.shape[axis] for axis in axes) for t, axes in ((x, of_x), (x, free_x), (weight, free_weight))
    )
    stack = (math.prod(x.shape[axis] for axis in stack_x),) if stack_x else ()
    x = lax.transpose(x, (*stack_x, *free_x, *of_x)).reshape(*stack, rows, size)
    weight = lax.transpose(weight, (*stack_weight, *of_weight, *free_weight)).reshape(*stack, size, out)
    first, same = len(stack), tuple(range(len(stack)))
    mine = ((first,), (first + 1,)) if side == 0 else ((first + 1,), (first,))
    return x, weight, (mine, (same, same))


def _others(rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in axes)


def convolve(eqn: Any, x: Array, master: Array, casts: Casts) -> Array:
    """Convolves x by a weight. The weight gradient takes fp32 operands: XLA's results are no wider than those."""
    p = casts.precision

    def conv(x: Array, w: Array) -> Array:
        full = (lax.Precision.HIGHEST,) * 2
        return eqn.primitive.bind(x, w, **{**eqn.params, "precision": full, "preferred_element_type": None})

    def held(x: Array, fmt: Format) -> Array:
        return carried(x, fmt) if casts.emulate else x.astype(dtype_of(fmt))

    @jax.custom_vjp
    def three(x: Array, master: Array) -> Array:
        return held(conv(x, held(master, p.compute)), p.compute)

    def forward(x: Array, master: Array) -> tuple[Array, tuple[Array, Array]]:
        return three(x, master), (x, master)

    def backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        x, master = kept
        g, w = held(g, p.grad), held(master, p.compute)
        (grad_input,) = jax.linear_transpose(lambda t: conv(t, w), x)(g)
        wide_x, wide_g = x.astype(jnp.float32), g.astype(jnp.float32)
        (grad_weight,) = jax.linear_transpose(lambda t: conv(wide_x, t), master)(wide_g)
        return held(grad_input, p.grad), carried(grad_weight, p.grad_weight)

    three.defvjp(forward, backward)
    return three(x, master)
