"""What the interpreter knows of a value: whether it is a master, a constant, or a weight that was cast too early.

    master        an fp32 array computed from parameters and constants alone, not yet cast: `owner`
    constant      computed from literals, iota, closed-over arrays; it has neither batch nor gradient: `fixed`
    narrowed      computed from parameters and constants too, but by a primitive that does not run on masters: it
                  was cast before, and its gradient is narrow: `narrowed` says of what, by what and where
    activation    all else: what depends on a batch, and the result of a matmul

A function of parameters and constants runs in fp32 on the masters, and its result is cast where it meets
activations: `x @ jnp.tril(w)` has the casts and the fp32 weight gradient of `x @ w`. If a narrowed value is
multiplied or looked up as a weight, and the policy asks for what it then cannot have, it is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from halfstep.config.model import owner as module_of
from halfstep.core.errors import PolicyError
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.functions.checks import lost_by
from halfstep.jax.functions.primitives import (
    ARITHMETIC,
    COMPARISON,
    LAYOUT,
    bind,
    is_conversion,
    is_float,
    line_of,
)
from halfstep.jax.lowering import Casts


@dataclass(frozen=True)
class Owner:
    """The parameters that a master, or a value computed from masters, comes from; and how it is cast."""

    names: tuple[str, ...]
    casts: Casts
    matrix: bool  # one of them has two axes or more, as weights do
    looked_up: bool = False  # rows by index, as of an embedding: next to another parameter, the activation
    amaxes: Any = field(default=None, compare=False)  # what scales its delayed operands (fp8.py)


@dataclass(frozen=True)
class Narrowed:
    """A parameter that was cast too early, and by what."""

    owner: Owner
    by: str


@dataclass(frozen=True)
class Value:
    """The value of a variable of the jaxpr."""

    array: Any  # in the variable's dtype; emulated, in fp32 where that is narrow
    owner: Owner | None = None  # the array is an fp32 master of these parameters, not yet cast
    ruled: bool = False  # it may be wider than the compute of the whole model, by a rule
    fixed: bool = False  # computed from constants alone, or by comparing parameters with them
    narrowed: Narrowed | None = None  # of parameters and constants alone, and not a master
    free: bool = False  # there are neither parameters in it nor floats of the batch: tables, masks, positions
    kind: str = ""  # the array is fp32, not yet cast, and this part of an island (islands.py)
    narrow: bool = False  # the variable is fp32, promoted, and the array is in the compute format (promoted.py)
    asked: Any = None  # the conversion, written down in the function, that made it fp32
    made: "Made | None" = None


@dataclass(frozen=True, eq=False)
class Made:
    """How a value came about: the equation, its inputs, and whether there are sums in it."""

    eqn: Any
    values: tuple[Value, ...]
    sums: bool


def amaxes_of(name: str, masters: Mapping[str, Any]) -> Any:
    """Returns what scales the delayed operands of a parameter's module, if there are any."""
    return masters.get(PREFIX + module_of(name))


def moved(value: Value, array: Any) -> Value:
    """Returns the same value for another function, of a loop or a branch: how it came about is not seen there."""
    return replace(value, array=array, made=None)


def merged(values: Sequence[Value]) -> Owner | None:
    """Returns the owner of a value computed from masters and constants alone, if all are cast alike."""
    owners = [value.owner for value in values if value.owner is not None]
    if not owners or not all(value.owner is not None or value.fixed for value in values):
        return None
    if any(owner.casts != owners[0].casts for owner in owners):
        return None
    names = dict.fromkeys(name for owner in owners for name in owner.names)
    matrix, looked_up = (any(owner.matrix for owner in owners), any(owner.looked_up for owner in owners))
    amaxes = owners[0].amaxes if len(names) == 1 else None
    return Owner(tuple(names), owners[0].casts, matrix, looked_up, amaxes)


def shared_owner(eqn: Any, values: Sequence[Value]) -> Owner | None:
    """Returns the owner of the result of an equation that runs on masters; None if it does not.

    Looked-up rows, or what a batch selects, are a weight if multiplied at once, an activation after arithmetic.
    """
    name = eqn.primitive.name
    owner = merged([value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)])
    if owner is None:
        return None
    works = LAYOUT if owner.looked_up else LAYOUT | ARITHMETIC | COMPARISON
    if name not in works and not is_conversion(eqn):
        return None
    selected = name == "select_n" and not values[0].fixed
    looked_up = owner.looked_up or name == "gather" or selected
    return replace(owner, looked_up=looked_up)


def wide_owner(eqn: Any, values: Sequence[Value]) -> Owner | None:
    """Returns the owner of the results of any other equation whose floats are all fp32, as masters are."""
    owner = merged([value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)])
    return None if owner is None or owner.looked_up or not _is_wide(eqn) else owner


def _is_wide(eqn: Any) -> bool:
    floats = (atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars) if is_float(atom))
    inside = (each for inner in jaxprs_in_params(eqn.params) for each in inner.eqns)
    return all(dtype == jnp.float32 for dtype in floats) and all(_is_wide(each) for each in inside)


def find_narrowed(values: Sequence[Value], by: str) -> Narrowed | None:
    """Returns which weight was cast early in a value that depends on parameters and constants alone, if any."""
    if not all(value.owner is not None or value.fixed or value.narrowed is not None for value in values):
        return None
    narrowed = None
    for value in values:
        if value.owner is not None and value.owner.looked_up:
            return None  # an activation
        if narrowed is None and value.owner is not None and value.owner.matrix:
            narrowed = Narrowed(value.owner, by)
        narrowed = narrowed or value.narrowed
    return narrowed


def check_narrowed(eqn: Any, narrowed: Narrowed | None) -> None:
    """Refuses a value in a weight's place whose master was lost."""
    lost = lost_by(narrowed.owner.casts.precision) if narrowed is not None else ""
    if narrowed is not None and lost:
        name = narrowed.owner.names[0]
        raise PolicyError(
            f"{place_of(eqn)} takes what {narrowed.by} computed from `{name}`, but {lost} would not reach it",
            hint="widen the parameter before that with `.astype(jnp.float32)`, and cast the result: it then comes "
            f"from the parameter itself, in fp32; or give `{module_of(name)}` a rule with `compute=fp32`; if it "
            "is an activation, mark it: jax.ad_checkpoint.checkpoint_name(array, 'activation')",
        )


def place_of(eqn: Any) -> str:
    """Describes an equation for messages."""
    return f"`{eqn.primitive.name}` at {line_of(eqn)}"


def custom_jvp(
    evaluate: Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]],
    jaxpr: Any,
    eqn: Any,
    values: Sequence[Value],
) -> list[Value] | None:
    """Runs a function with its own derivative rule, and the rule, on the masters; None if that is impossible."""
    owner = merged(values)
    if owner is None or owner.looked_up or not all(is_float(atom) for atom in (*eqn.invars, *eqn.outvars)):
        return None
    places = [place for place, value in enumerate(values) if value.owner is not None]
    fixed = [value for value in values if value.owner is None]
    closed, masters = eqn.params["call_jaxpr"], [values[place].array for place in places]
    known: list[bool] = []

    def ordered(owned: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        mine, others = iter(owned), iter(rest)
        return [next(mine) if place in places else next(others) for place in range(len(values))]

    def primal(*arrays: Any) -> list[Any]:
        given = ordered([Value(array, owner) for array in arrays], fixed)
        out = evaluate(closed.jaxpr, closed.consts, given)
        known[:] = [value.owner is not None or value.fixed for value in out]
        return [jnp.asarray(value.array, jnp.float32) for value in out]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        like = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        mine, rest = ([s for p, s in enumerate(like) if (p in places) == own] for own in (True, False))
        traced = jax.make_jaxpr(
            lambda xs, ts, rest: jax.jvp(lambda *xs: bind(jaxpr, eqn, ordered(xs, rest)), xs, ts)
        )(tuple(mine), tuple(mine), rest)
        given = [*(Value(array, owner) for array in (*primals, *tangents)), *fixed]
        out = evaluate(traced.jaxpr, traced.consts, given)
        for value in out:
            check_narrowed(eqn, value.narrowed)
        wide = [jnp.asarray(value.array, jnp.float32) for value in out]
        return wide[: len(eqn.outvars)], wide[len(eqn.outvars) :]

    jax.eval_shape(primal, *masters)
    if not all(known):
        return None
    fn = jax.custom_jvp(primal)
    fn.defjvp(rule)
    return [Value(array, owner) for array in fn(*masters)]


def wide_jvp(
    evaluate: Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]],
    jaxpr: Any,
    eqn: Any,
    arrays: Sequence[Any],
) -> list[Value]:
    """Runs a function with its own derivative rule, and the rule, as an island: all of it in fp32."""
    closed = eqn.params["call_jaxpr"]
    like = tuple(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars)

    def run(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        out = evaluate(jaxpr, consts, [Value(array, kind="loss") for array in given])
        return [jnp.asarray(value.array, jnp.float32) for value in out]

    def primal(*arrays: Any) -> list[Any]:
        return run(closed.jaxpr, closed.consts, arrays)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        traced = jax.make_jaxpr(lambda xs, ts: jax.jvp(lambda *xs: bind(jaxpr, eqn, xs), xs, ts))(like, like)
        out = run(traced.jaxpr, traced.consts, (*primals, *tangents))
        return out[: len(eqn.outvars)], out[len(eqn.outvars) :]

    fn = jax.custom_jvp(primal)
    fn.defjvp(rule)
    return [Value(array, kind="loss") for array in fn(*arrays)]


def fits(value: Value, largest: float) -> bool:
    """Returns whether a value is one number, spread or not, and known to be no larger than that."""
    if value.made is not None and value.made.eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
        return fits(value.made.values[0], largest)
    known = not isinstance(value.array, jax.core.Tracer) and jnp.ndim(value.array) == 0
    return known and abs(float(value.array)) <= largest


def is_biased(eqn: Any, values: Sequence[Value]) -> bool:
    """Returns whether a promoted array in compute meets parameters alone, as a result of a layer its bias."""
    floats = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)]
    return all(value.narrow or value.owner is not None for value in floats) and any(
        value.narrow and value.owner is None for value in floats
    )
