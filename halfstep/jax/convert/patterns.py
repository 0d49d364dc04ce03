"""What is found in a jaxpr by its shape, before it is evaluated.

**The promoted stream.** JAX promotes: bf16 activations plus an fp32 table are fp32, and so is all that follows,
matmuls included. In the jaxpr such a value looks like one that was widened on purpose. What tells them apart is
where they go: an island is converted back, a promoted stream is multiplied in fp32. So the values that reach an
operand of a matmul in fp32 are held in the compute format (interpret.py), unless the function itself asked for
fp32, with `astype`. A program without such a matmul has none of these values, and nothing changes in it.

**What the backward pass computes again.** These keep only their input for it:

    activation    what is computed from one array alone, element by element, with a tanh, logistic or erf in it.
                  Written out, `gelu` is eight operations: run one by one they round eight times, and keep an array
                  as large as the layer. So it is one: fp32 inside, compute out, as in halfstep's own layers and in
                  the kernels of torch
    softmax       exp(x - max) over its sum. Differentiated as written, it keeps exp(x - max) in fp32, twice
                  the size of x
    pick          the number at one index of each row, as a cross-entropy picks the logit of its label. As it is
                  written, its gradient is an array of zeros with one number in each row, as large as the logits;
                  here it is a comparison, which XLA fuses with the sum that it enters
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal, Var

from halfstep.jax.jaxpr import (
    INLINED,
    LAYOUT,
    PRODUCT,
    REMAT,
    bind_wide,
    frames_of,
    functions_of,
    inputs_of,
    is_float,
    parts_of_scan,
    words,
)
from halfstep.jax.numerics.dtypes import DType

_FLOAT32 = jnp.dtype(jnp.float32)
_CONVERSIONS = ("astype", "asarray", "array", "convert_element_type")
_CURVES = words("tanh logistic erf erfc")
_POINTWISE = _CURVES | words("add sub mul div neg abs max min square integer_pow")


# --- the promoted stream


def find_promoted(jaxpr: Any, compute: DType, parameters: int) -> frozenset[Var]:
    """Returns the fp32 variables that reach a matmul; `parameters` is how many of the inputs are parameters.

    A parameter that appears in fp32 has a rule, and what is multiplied by it is fp32 on purpose.
    """
    if compute == _FLOAT32:
        return frozenset()
    ruled: set[Var] = set()
    _mark_results(jaxpr, [var for var in jaxpr.invars[:parameters] if var.aval.dtype == _FLOAT32], ruled)
    promoted: set[Var] = set()
    while True:  # what a loop carries is known after a second look
        before = len(promoted)
        _mark_promoted(jaxpr, promoted, ruled)
        if len(promoted) == before:
            return frozenset(promoted)


def is_explicit(eqn: Any) -> bool:
    """Returns whether a conversion was written down, with `astype` or `asarray`, and is not a promotion.

    The functions between the primitive and the caller show it: promotions of Flax and JAX are named so.
    """
    names = [frame.function_name for frame in frames_of(eqn)]
    for name in names:
        if "promote" in name or "ufunc" in name:
            return False
        if name in _CONVERSIONS:
            return not any("promote" in outer for outer in names[names.index(name) : names.index(name) + 4])
    return False


def depends(jaxpr: Any, inputs: Sequence[Var]) -> bool:
    """Returns whether the first result of a jaxpr depends on some of its inputs, as far as a gradient goes."""
    reached: set[Var] = set()
    _mark_results(jaxpr, inputs, reached, but="stop_gradient")
    return _is_in(jaxpr.outvars[0], reached)


def _mark_results(jaxpr: Any, given: Sequence[Any], marked: set[Var], but: str = "") -> None:
    """Marks what is computed from some inputs, by other primitives than the one named."""
    marked.update(given)
    for eqn in jaxpr.eqns:
        for inner, inputs in _bodies(eqn):
            _mark_results(inner, [var for atom, var in inputs if _is_in(atom, marked)], marked)
        if eqn.primitive.name != but and any(_is_in(atom, marked) for atom in eqn.invars):
            marked.update(eqn.outvars)


def _mark_promoted(jaxpr: Any, promoted: set[Var], ruled: set[Var]) -> None:
    """Marks what leads to a matmul in fp32, from the last equation to the first."""
    for eqn in reversed(jaxpr.eqns):
        bodies = _bodies(eqn)
        for inner, inputs in bodies:
            outs = list(zip(eqn.outvars, inner.outvars, strict=True))
            if eqn.primitive.name == "scan":  # what a turn takes over is what the turn before it returned
                first, count = parts_of_scan(eqn)
                outs += zip(inner.invars[first : first + count], inner.outvars[:count], strict=True)
            promoted.update(var for out, var in outs if _is_in(out, promoted) and _is_wide(var))
            _mark_promoted(inner, promoted, ruled)
            promoted.update(atom for atom, var in inputs if var in promoted and _is_wide(atom))
        if bodies:
            continue
        if eqn.primitive.name in PRODUCT:
            leads = not any(_is_in(atom, ruled) for atom in eqn.invars)
        else:
            leads = any(var in promoted for var in eqn.outvars)
        if leads:
            promoted.update(atom for atom in eqn.invars if _is_wide(atom))


def _bodies(eqn: Any) -> list[tuple[Any, list[tuple[Any, Var]]]]:
    """Returns the jaxprs that an equation runs and whose results are its own, each with its inputs in pairs.

    A pair is an input of the equation and the variable of the jaxpr that it becomes.
    """
    if eqn.primitive.name not in INLINED | REMAT | {"scan", "cond"}:
        return []
    return [
        (inner, list(zip(inputs_of(eqn, inner, eqn.invars), inner.invars, strict=True)))
        for inner, _ in functions_of(eqn)
    ]


def _is_in(atom: Any, variables: set[Var] | frozenset[Var]) -> bool:
    """Returns whether an input of an equation is one of these variables."""
    return not isinstance(atom, Literal) and atom in variables


def _is_wide(atom: Any) -> bool:
    return not isinstance(atom, Literal) and is_float(atom) and atom.aval.dtype == _FLOAT32


# --- what the backward pass computes again


@dataclass(frozen=True, eq=False)
class Activation:
    """A function of one array: the equations that compute it, the last of which gives the result."""

    root: Var
    eqns: tuple[Any, ...]

    def __call__(self, x: Array) -> Array:
        """Computes it in fp32."""
        env: dict[Any, Any] = {self.root: x}
        for eqn in self.eqns:
            arrays = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            env[eqn.outvars[0]] = bind_wide(eqn, arrays)[0]
        result: Array = env[self.eqns[-1].outvars[0]]
        return result


@dataclass(frozen=True)
class Softmax:
    """A softmax of one array, over some axes."""

    root: Var
    axes: tuple[int, ...]


def find_recomputed(jaxpr: Any) -> dict[Var, Activation | Softmax]:
    """Returns the functions of a jaxpr that are computed again, by the variable of each result."""
    uses = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var))
    uses.update(atom for atom in jaxpr.outvars if isinstance(atom, Var))
    return dict([*_activations(jaxpr, uses), *_softmaxes(jaxpr, uses)])


def _activations(jaxpr: Any, uses: Counter[Var]) -> Iterator[tuple[Var, Activation]]:
    roots: dict[Var, Var] = {}  # of what is computed from one array alone
    regions: dict[Var, list[Any]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _POINTWISE:
            inputs = {roots.get(atom, atom) for atom in eqn.invars if not isinstance(atom, Literal)}
            [out], (root, *others) = eqn.outvars, inputs or {eqn.outvars[0]}
            if not others and is_float(out) and out.aval.shape and root.aval.shape == out.aval.shape:
                roots[out] = root
                regions.setdefault(root, []).append(eqn)
    for root, eqns in regions.items():
        inside = Counter(atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var))
        results = [eqn.outvars[0] for eqn in eqns if uses[eqn.outvars[0]] > inside[eqn.outvars[0]]]
        curved = any(eqn.primitive.name in _CURVES for eqn in eqns)
        if curved and len(eqns) > 1 and results == [eqns[-1].outvars[0]]:
            yield results[0], Activation(root, tuple(eqns))


def _softmaxes(jaxpr: Any, uses: Counter[Var]) -> Iterator[tuple[Var, Softmax]]:
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def before(atom: Any, *names: str) -> Any:
        """Returns the equation of a variable, past what moves or converts it, if it is one of these."""
        while (eqn := None if isinstance(atom, Literal) else made.get(atom)) is not None:
            if eqn.primitive.name in names:
                return eqn
            atoms = [each for each in eqn.invars if not isinstance(each, Literal)]
            past = eqn.primitive.name in LAYOUT | {"convert_element_type", "max"} and len(atoms) == 1
            if not past:
                return None
            atom = atoms[0]
        return None

    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "div":
            continue
        power, total = (made.get(a) if isinstance(a, Var) else None for a in eqn.invars)
        if power is None or power.primitive.name != "exp" or total is None or uses[power.outvars[0]] != 2:
            continue
        summed, shifted = before(eqn.invars[1], "reduce_sum"), before(power.invars[0], "sub")
        if summed is None or shifted is None or before(summed.invars[0], "exp") is not power:
            continue
        x, largest = shifted.invars[0], before(shifted.invars[1], "reduce_max")
        of_x = largest is not None and isinstance(x, Var) and largest.invars[0] is x
        if of_x and largest.params["axes"] == summed.params["axes"] and shifted.outvars[0] is power.invars[0]:
            yield eqn.outvars[0], Softmax(x, tuple(summed.params["axes"]))


def is_pick(eqn: Any) -> bool:
    """Returns whether an equation gathers one number from each row, along the last axis."""
    if eqn.primitive.name != "gather":
        return False
    (operand, indices), numbers = (atom.aval for atom in eqn.invars), eqn.params["dimension_numbers"]
    last, rows = operand.ndim - 1, operand.shape[:-1]
    along = tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (last,)
    each = tuple(numbers.operand_batching_dims) == tuple(range(last)) and indices.shape == (*rows, 1, 1)
    return bool(rows) and along and each


def pick_numbers(eqn: Any, wide: Array, x: Array, indices: Array) -> Array:
    """Returns the numbers of x at the indices, in fp32; their gradient is that of `wide`, which is x in fp32."""

    @jax.custom_vjp
    def pick(wide: Array, x: Array, indices: Array) -> Array:
        numbers: Array = lax.gather_p.bind(x, indices, **eqn.params)
        return numbers.astype(jnp.float32)

    def backward(indices: Array, g: Array) -> tuple[Array, None, None]:
        shape = (*g.shape[:-1], x.shape[-1])
        hit = lax.broadcasted_iota(indices.dtype, shape, g.ndim - 1) == indices[..., 0]
        return jnp.where(hit, g, 0.0), None, None

    pick.defvjp(lambda wide, x, indices: (pick(wide, x, indices), indices), backward)
    return pick(wide, x, indices)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def recomputed_softmax(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns the softmax in fp32; the backward pass computes it again from x."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=axes)


def _softmax_backward(axes: tuple[int, ...], x: Array, g: Array) -> tuple[Array]:
    x = lax.optimization_barrier(x)  # without, XLA notices that it computed this before, and keeps that
    y = jax.nn.softmax(x.astype(jnp.float32), axis=axes)
    return ((y * (g - jnp.sum(g * y, axis=axes, keepdims=True))).astype(x.dtype),)


recomputed_softmax.defvjp(lambda x, axes: (recomputed_softmax(x, axes), x), _softmax_backward)
