"""Finds the layers of any loss function in its jaxpr, and runs it again with taps around each.

A layer is an operation between activations and a parameter:

    matmul       dot_general, convolutions, and functions with their own derivative that multiply
    norm         a product of normalized numbers and a gain, or a norm of halfstep.jax
    embedding    rows of a parameter, looked up by the batch

Its name is that of the halfstep.jax layer around it, or of the module that owns the parameter. A scan that takes
one slice of a parameter per turn has a layer per turn, `blocks.up[3]`; what a loop uses at each turn is one layer.
Loops by `while`, branches, and sharded functions inside a loss run unwatched.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from halfstep.config.model import owner
from halfstep.jax.jaxpr import (
    ARITHMETIC,
    INLINED,
    LAYOUT,
    PASSED,
    PRODUCT,
    REMAT,
    bind,
    equations_inside,
    function_of,
    is_float,
    multiplies,
    parts_of_scan,
    remat_again,
    scan_again,
    walk,
)
from halfstep.jax.layers import SCOPE

_OURS = re.compile(rf"{SCOPE}([^/)]+)")
_ELEMENTWISE = ARITHMETIC | LAYOUT | PASSED | {"convert_element_type", "reduce_precision"}


@dataclass(frozen=True)
class Site:
    """A layer in the jaxpr."""

    name: str
    kind: str  # matmul, norm, embedding
    weight: str | None  # the parameter, if it has one
    input: int | None  # which operand enters it; None of an embedding, where what leaves it counts as that too
    entering: Any  # shape and dtype
    leaving: Any
    turns: tuple[tuple[int, bool], ...]  # of each loop around it: its length, and whether each turn is a layer


Plan = list[Any]
"""For each equation of a jaxpr a layer, the plan of the function inside, or None."""


@dataclass(frozen=True)
class _Fact:
    """What is known of a value."""

    weight: str | None = None  # the parameter that it is, or comes from alone
    fixed: bool = False  # computed from constants alone
    root: bool = False  # a root was taken on the way here: it is being normalized
    stacked: frozenset[int] = frozenset()  # the loops that take a slice of it per turn, by depth


def find_layers(closed: Any, names: Sequence[str | None]) -> Plan:
    """Returns where the layers of a function are; `names` are the parameters among its inputs."""
    return _find(closed.jaxpr, [_Fact(name) for name in names], (), ())[0]


def _find(
    jaxpr: Any, facts: Sequence[_Fact], turns: tuple[int, ...], scopes: tuple[str, ...]
) -> tuple[Plan, list[_Fact]]:
    plan: Plan = []

    def equation(eqn: Any, given: list[_Fact]) -> list[_Fact]:
        name, around = eqn.primitive.name, (*scopes, str(eqn.source_info.name_stack))
        results = [_Fact()] * len(eqn.outvars)
        if name in INLINED:
            found, results = _find(function_of(eqn).jaxpr, given, turns, around)
        elif name == "scan":
            first, count = parts_of_scan(eqn)
            along = [replace(fact, stacked=fact.stacked | {len(turns)}) for fact in given[first + count :]]
            inside, loops = [*given[:first], *[_Fact()] * count, *along], (*turns, eqn.params["length"])
            found, _ = _find(function_of(eqn).jaxpr, inside, loops, around)
        elif name in REMAT:
            found, _ = _find(eqn.params["jaxpr"], given, turns, around)
        elif (found := _site(eqn, given, turns, around)) is None:
            results = [_fact_of_result(eqn, given)] * len(eqn.outvars)
        plan.append(found)
        return results

    constants = [(var, _Fact(fixed=True)) for var in jaxpr.constvars]
    known = [*constants, *zip(jaxpr.invars, facts, strict=True)]
    return plan, walk(jaxpr, known, lambda _: _Fact(fixed=True), equation)


def _site(eqn: Any, facts: Sequence[_Fact], turns: tuple[int, ...], scopes: tuple[str, ...]) -> Site | None:
    kind, entering = _kind_of_layer(eqn, facts)
    if not kind:
        return None
    weight = next((fact for fact in facts if fact.weight is not None), _Fact())
    leaving = eqn.outvars[0].aval
    ours = _OURS.findall("/".join(scopes))  # the innermost layer of halfstep.jax around it
    return Site(
        str(ours[-1]) if ours else owner(weight.weight or ""),
        kind,
        weight.weight,
        entering,
        leaving if entering is None else eqn.invars[entering].aval,
        leaving,
        tuple((length, depth in weight.stacked) for depth, length in enumerate(turns)),
    )


def _kind_of_layer(eqn: Any, facts: Sequence[_Fact]) -> tuple[str, int | None]:
    """Returns the kind of layer that an operation is, empty if it is none, and which input enters it."""
    name = eqn.primitive.name
    floats = [i for i, atom in enumerate(eqn.invars) if is_float(atom)]
    weights = [i for i in floats if facts[i].weight is not None]
    entering = [
        i for i in floats if facts[i].weight is None and not facts[i].fixed and eqn.invars[i].aval.size > 1
    ]
    if name == "gather":
        return "embedding" if weights == [0] and not facts[1].fixed else "", None
    if not entering:
        return "", None
    own_gradient = name.startswith("custom_vjp_call")
    if weights and (name in PRODUCT or (own_gradient and multiplies(eqn))):
        return "matmul", entering[0]
    roots = own_gradient and any(each.primitive.name in ("rsqrt", "sqrt") for each in equations_inside(eqn))
    normalizes = name == "mul" and bool(weights) and any(facts[i].root for i in entering)
    return "norm" if roots or normalizes else "", entering[0]


def _fact_of_result(eqn: Any, facts: Sequence[_Fact]) -> _Fact:
    """Returns what is known of the results of an operation that is no layer."""
    floats = [fact for fact, atom in zip(facts, eqn.invars, strict=True) if is_float(atom)]
    weights = [fact for fact in floats if fact.weight is not None]
    alone = bool(weights) and all(fact.weight is not None or fact.fixed for fact in floats)
    name = eqn.primitive.name
    root = name in ("rsqrt", "sqrt") or (name in _ELEMENTWISE and any(fact.root for fact in facts))
    return _Fact(
        weights[0].weight if alone and name != "gather" else None,
        fixed=all(fact.fixed for fact in facts),
        root=root and not alone,
        stacked=frozenset().union(*(fact.stacked for fact in weights)) if alone else frozenset(),
    )


Tap = Callable[[Site, int, Array, Array], Array]
"""(layer, 0 for what enters it or 1 for what leaves it, x, its slot) -> x"""


def run_with_taps(
    jaxpr: Any, consts: Sequence[Any], plan: Plan, slots: Plan, tap: Tap, arrays: Sequence[Any]
) -> list[Any]:
    """Evaluates a jaxpr with taps at its layers; `slots` has a pair of them in the place of each layer."""
    steps = zip(plan, slots, strict=True)

    def equation(eqn: Any, arrays: list[Any]) -> list[Any]:
        (found, slot), name = next(steps), eqn.primitive.name
        if isinstance(found, Site):
            if found.input is not None:
                arrays[found.input] = tap(found, 0, arrays[found.input], slot[0])
            y, *rest = bind(jaxpr, eqn, arrays)
            if found.input is None:
                y = tap(found, 0, y, slot[0])
            return [tap(found, 1, y, slot[1]), *rest]
        if name == "scan":
            return _scan(eqn, found, slot, tap, arrays)
        if name in REMAT:
            body = eqn.params["jaxpr"]
            return remat_again(eqn, lambda xs, slot: run_with_taps(body, (), found, slot, tap, xs))(arrays, slot)
        if name in INLINED:
            inner = function_of(eqn)
            return run_with_taps(inner.jaxpr, inner.consts, found, slot, tap, arrays)
        return bind(jaxpr, eqn, arrays)

    known = zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True)
    return walk(jaxpr, known, lambda atom: atom.val, equation)


def _scan(eqn: Any, plan: Plan, slots: Plan, tap: Tap, arrays: Sequence[Any]) -> list[Any]:
    closed, (first, count) = eqn.params["jaxpr"], parts_of_scan(eqn)
    last = first + count

    def body(carry: list[Any], parts: tuple[list[Any], Plan]) -> tuple[list[Any], list[Any]]:
        rows, inside = parts
        out = run_with_taps(closed.jaxpr, closed.consts, plan, inside, tap, [*arrays[:first], *carry, *rows])
        out = _as_declared(out, closed.jaxpr.outvars)
        return out[:count], out[count:]

    carry = _as_declared(arrays[first:last], eqn.invars[first:last])
    ends, rows = scan_again(eqn, body, carry, (list(arrays[last:]), slots))
    return [*ends, *rows]


def _as_declared(arrays: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(x, atom.aval.dtype) for x, atom in zip(arrays, atoms, strict=True)]
