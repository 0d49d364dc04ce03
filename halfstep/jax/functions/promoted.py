"""Which fp32 values of a jaxpr are the stream itself, promoted by a table, and not an island that was asked for.

JAX promotes: bf16 activations plus an fp32 table are fp32, and so is all that follows, matmuls included. In the
jaxpr such a value looks like one that was widened on purpose. What tells them apart is where they go: an island
is converted back, a promoted stream is multiplied as it is. So the values that reach an operand of a matmul in
fp32 are held in the compute format (interpret.py), unless the function itself asked for fp32, with `astype`.

A program without such a matmul has none of these values, and nothing changes in it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, Var

from halfstep.jax.dtypes import DType
from halfstep.jax.functions.primitives import INLINED, PRODUCT, REMAT, is_float, parts_of_scan

_FLOAT32 = jnp.dtype(jnp.float32)
_ASKED = ("astype", "asarray", "array", "convert_element_type")


def find_promoted(jaxpr: Any, compute: DType, parameters: int) -> frozenset[Var]:
    """Returns the fp32 variables that reach a matmul; `parameters` is how many of the inputs are parameters.

    A parameter that appears in fp32 has a rule, and what is multiplied by it is fp32 by right.
    """
    if compute == _FLOAT32:
        return frozenset()
    ruled: set[Var] = set()
    _mark_ruled(jaxpr, [var for var in jaxpr.invars[:parameters] if var.aval.dtype == _FLOAT32], ruled)
    promoted: set[Var] = set()
    while True:  # what a loop carries is known after a second look
        before = len(promoted)
        _mark_promoted(jaxpr, promoted, ruled)
        if len(promoted) == before:
            return frozenset(promoted)


def is_asked(eqn: Any) -> bool:
    """Returns whether a conversion was written down, with `astype` or `asarray`, and is not a promotion.

    The functions between the primitive and the caller tell: promotions of Flax and JAX are named so.
    """
    traceback = getattr(eqn.source_info, "traceback", None)
    names = [frame.function_name for frame in traceback.frames] if traceback is not None else []
    for name in names:
        if "promote" in name or "ufunc" in name:
            return False
        if name in _ASKED:
            return not any("promote" in outer for outer in names[names.index(name) : names.index(name) + 4])
    return False


def _mark_ruled(jaxpr: Any, given: Sequence[Any], ruled: set[Var]) -> None:
    ruled.update(given)
    for eqn in jaxpr.eqns:
        for inner in bodies(eqn):
            pairs = zip(eqn.invars[len(eqn.invars) - len(inner.invars) :], inner.invars, strict=True)
            _mark_ruled(inner, [var for atom, var in pairs if is_in(atom, ruled)], ruled)
        if any(is_in(atom, ruled) for atom in eqn.invars):
            ruled.update(eqn.outvars)


def _mark_promoted(jaxpr: Any, promoted: set[Var], ruled: set[Var]) -> None:
    for eqn in reversed(jaxpr.eqns):
        inside = bodies(eqn)
        for inner in inside:
            outs = list(zip(eqn.outvars, inner.outvars, strict=True))
            if eqn.primitive.name == "scan":  # what a step takes over is what the step before it returned
                first, count = parts_of_scan(eqn)
                outs += zip(inner.invars[first : first + count], inner.outvars[:count], strict=True)
            promoted.update(var for out, var in outs if is_in(out, promoted) and _is_wide(var))
            _mark_promoted(inner, promoted, ruled)
            ins = zip(eqn.invars[len(eqn.invars) - len(inner.invars) :], inner.invars, strict=True)
            promoted.update(atom for atom, var in ins if var in promoted and _is_wide(atom))
        if inside:
            continue
        if eqn.primitive.name in PRODUCT:
            reaches = not any(is_in(atom, ruled) for atom in eqn.invars)
        else:
            reaches = any(var in promoted for var in eqn.outvars)
        if reaches:
            promoted.update(atom for atom in eqn.invars if _is_wide(atom))


def bodies(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation runs on its last inputs, in order, and whose results are its own."""
    name, params = eqn.primitive.name, eqn.params
    if name in INLINED:
        return [params.get("jaxpr", params.get("call_jaxpr")).jaxpr]
    if name == "scan":
        return [params["jaxpr"].jaxpr]
    if name == "cond":
        return [branch.jaxpr for branch in params["branches"]]
    return [params["jaxpr"]] if name in REMAT else []


def is_in(atom: Any, variables: set[Var] | frozenset[Var]) -> bool:
    """Returns whether an input of an equation is one of these variables."""
    return not isinstance(atom, Literal) and atom in variables


def _is_wide(atom: Any) -> bool:
    return not isinstance(atom, Literal) and is_float(atom) and atom.aval.dtype == _FLOAT32
