"""Whether devices may share the rows of a loss: whether it is the mean of what each computes of its own.

The function is traced with some rows and with twice as many, nothing is computed, and both programs are read side
by side. An axis that grows is one of rows, and a number in the code that grows counts them. A value is

    fixed      the same whatever the rows are
    rows       a row of it depends on its own row of the batch alone
    sum        a sum over rows, multiplied by what is fixed
    mixed      anything else, by the operation at `where`

and grows with the number of rows to a `power`: a sum by 1, a mean by 0. A loss that is fixed, or a sum by 0, is
the mean of the losses of equal parts. What is not known to keep rows apart counts as mixed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from halfstep.jax import jaxpr as jaxprs
from halfstep.jax.jaxpr import words

_ALONG = words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin cumsum cumprod cummax cummin "
    "cumlogsumexp sort top_k"
)
_MOVES = jaxprs.LAYOUT - words("gather scatter")
_LINEAR = words("add sub neg convert_element_type copy stop_gradient") | jaxprs.PASSED | jaxprs.NAMED
_EACH = (
    {name for name in jaxprs.ARITHMETIC if not name.startswith(("reduce", "cum", "scatter"))}
    | jaxprs.COMPARISON - _ALONG
    | _LINEAR
    | words("and or not xor reduce_precision nextafter bitcast_convert_type shift_left shift_right_logical")
    | words("random_bits random_split random_fold_in random_wrap random_unwrap")
)
"""What computes each element from those in the same place; random numbers are each row's own."""


class _Fact(NamedTuple):
    kind: str = "fixed"
    power: int = 0
    where: str = ""


_MIXED = _Fact("mixed")


def find_mixing(fn: Callable[..., Any], arguments: Callable[[int], Sequence[Any]]) -> str:
    """Returns what keeps devices from sharing the rows of a loss, empty if they may.

    `arguments(1)` are the shapes that the function is called with, those of `arguments(2)` have twice the rows. A
    `Weighted` says itself that sums add up.
    """
    try:
        one, shape = jax.make_jaxpr(fn, return_shape=True)(*arguments(1))
    except NameError:  # it names an axis of the mesh, so it exchanges what it needs by itself
        return ""
    if hasattr(shape[0] if isinstance(shape, tuple) else shape, "weight"):
        return ""
    two = jax.make_jaxpr(fn)(*arguments(2))
    given = [_by_shape(_Fact(), *each) for each in zip(one.jaxpr.invars, two.jaxpr.invars, strict=True)]
    loss, *_ = [*_read((one.jaxpr, one.consts), (two.jaxpr, two.consts), given), _Fact()]
    return loss.where if loss.kind == "mixed" else "it changes with their number" if loss.power else ""


def _read(one: tuple[Any, Any], two: tuple[Any, Any], given: Sequence[_Fact]) -> list[_Fact]:
    """Returns what is known of the results of a function, given twice, as a jaxpr and its constants."""
    (jaxpr, consts), (other, others) = one, two
    if [eqn.primitive for eqn in jaxpr.eqns] != [eqn.primitive for eqn in other.eqns]:
        return [_Fact("mixed", where="code that depends on the number of rows")] * len(jaxpr.outvars)
    twins = iter(other.eqns)

    def equation(eqn: Any, facts: list[_Fact]) -> list[_Fact]:
        twin, line = next(twins), jaxprs.line_of(eqn)  # none inside a library's own jit: then that of its call
        where = f"`{eqn.params.get('name', eqn.primitive.name)}` at {line}" if line else ""
        for place, (a, b) in enumerate(zip(eqn.invars, twin.invars, strict=True)):
            facts[place] = _constant(a.val, b.val) if isinstance(a, Literal) else facts[place]
        made = map(_by_shape, _results(eqn, twin, facts), eqn.outvars, twin.outvars)
        return [fact if fact.where or fact.kind != "mixed" else _Fact("mixed", where=where) for fact in made]

    constants = zip(jaxpr.constvars, map(_constant, consts, others), strict=True)
    env = dict([*constants, *zip(jaxpr.invars, given, strict=True)])
    return jaxprs.walk(jaxpr, env, lambda _: _Fact(), equation)


def _growing(one: Any, two: Any) -> list[int]:
    """Returns the axes that grow with the number of rows."""
    return [axis for axis, (m, n) in enumerate(zip(one.aval.shape, two.aval.shape, strict=True)) if m != n]


def _by_shape(fact: _Fact, one: Any, two: Any) -> _Fact:
    """Returns what is known of a value of which the axes are seen: one that grows, of rows alone."""
    count = len(_growing(one, two))
    if fact.kind == "fixed" and count == 1:
        return fact._replace(kind="rows")
    return fact if fact.kind == "mixed" or count == (fact.kind == "rows") else _MIXED


def _constant(one: Any, two: Any) -> _Fact:
    """Returns what is known of a number in the code, or of an array: those of one shape are the same."""
    if np.shape(one) != np.shape(two):
        return _MIXED
    if np.ndim(one) or isinstance(one, jax.core.Tracer) or bool(one == two) or bool(one != one):
        return _Fact()
    powers = [power for power in (1, -1) if float(two) == float(one) * 2.0**power]
    return _Fact("fixed", powers[0]) if powers else _MIXED


def _results(eqn: Any, twin: Any, given: list[_Fact]) -> list[_Fact]:
    name = eqn.primitive.name
    if name in jaxprs.CALLS:
        return _read(jaxprs.functions_of(eqn)[0], jaxprs.functions_of(twin)[0], given)
    if name == "scan" and eqn.params["length"] == twin.params["length"]:
        return _scan(eqn, twin, given)
    worst = next((fact for fact in given if fact.kind == "mixed"), None)
    return [worst or _result(eqn, twin, given)] * len(eqn.outvars)


def _scan(eqn: Any, twin: Any, given: list[_Fact]) -> list[_Fact]:
    """A state that a turn returns as something else is mixed, and so may be others that come from it."""
    first, count = jaxprs.parts_of_scan(eqn)
    last, before = first + count, None
    while given != before:
        before = given
        out = _read(jaxprs.functions_of(eqn)[0], jaxprs.functions_of(twin)[0], given)
        states = [a if a == b else _MIXED for a, b in zip(given[first:last], out, strict=False)]
        given = [*given[:first], *states, *given[last:]]
    return [*given[first:last], *out[count:]]


def _result(eqn: Any, twin: Any, given: list[_Fact]) -> _Fact:
    """Returns what is known of the result of an operation whose operands are not mixed."""
    name, kinds, powers = eqn.primitive.name, {fact.kind for fact in given}, {fact.power for fact in given} or {0}
    if name in _EACH:
        return _of_each(name, given, kinds)
    axes = [_growing(a, b) for a, b in zip(eqn.invars, twin.invars, strict=True)]
    if name == "dot_general":
        return _of_product(eqn, given, axes)
    linear, power = name in _MOVES | {"reduce_sum"}, max(powers)
    if len(powers) > 1 or (not linear and (power or "sum" in kinds)) or {"rows", "sum"} <= kinds:
        return _MIXED
    made, along = _growing(eqn.outvars[0], twin.outvars[0]), _along(eqn)
    if "rows" not in kinds:
        return _MIXED if along & {*made} else _Fact(max(kinds, default="fixed"), power)
    if any(along & {*each} for each in axes):
        return _Fact("sum", power + 1) if name == "reduce_sum" else _MIXED
    return _Fact("rows", power) if made and _stay_apart(eqn, axes, made[0]) else _MIXED


def _along(eqn: Any) -> set[int]:
    """Returns the axes along which an operation works."""
    if eqn.primitive.name == "pad":
        return {axis for axis, padded in enumerate(eqn.params["padding_config"]) if any(padded)}
    given = (eqn.params.get(key) for key in ("axes", "axis", "dimension", "dimensions"))
    return {int(axis) for each in given if each is not None for axis in np.ravel(each)}


def _of_each(name: str, given: Sequence[_Fact], kinds: set[str]) -> _Fact:
    powers = [fact.power for fact in given]
    if name in ("mul", "div"):
        power = powers[0] + powers[1] * (1 if name == "mul" else -1)
        known = given[1].kind != "sum" or (name == "mul" and given[0].kind == "fixed")
    else:
        power = powers[0]
        known = len({*powers}) == 1 and (name in _LINEAR or (power == 0 and "sum" not in kinds))
    return _Fact(max(kinds), power) if known and not {"rows", "sum"} <= kinds else _MIXED


def _of_product(eqn: Any, given: Sequence[_Fact], axes: Sequence[list[int]]) -> _Fact:
    """A product is linear in each operand; rows of one meet the same rows of the other, or none."""
    kinds, power = [fact.kind for fact in given], sum(fact.power for fact in given)
    if kinds == ["rows", "rows"]:
        place, pairs = tuple(axis for (axis,) in axes), eqn.params["dimension_numbers"]
        summed, batched = (place in [*zip(*sides, strict=True)] for sides in pairs)
        return _Fact("sum", power + 1) if summed else _Fact("rows", power) if batched else _MIXED
    return _Fact(max(kinds), power) if "fixed" in kinds else _MIXED


def _stay_apart(eqn: Any, axes: Sequence[list[int]], made: int) -> bool:
    """Returns whether each row of the result is made of one row of each operand that has any."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    if name == "conv_general_dilated":
        return axes == [[params["dimension_numbers"].lhs_spec[0]], []] and params["batch_group_count"] == 1
    if name == "gather":
        numbers, (operand, index) = params["dimension_numbers"], axes
        if operand and index:
            batched = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
            return (*operand, *index) in [*batched]
        whole = all(params["slice_sizes"][axis] == shapes[0][axis] for axis in operand)
        return whole and len(shapes[1]) - 1 not in index
    if name == "reshape":
        return math.prod(shapes[0][: axes[0][0]]) == math.prod(shapes[1][:made])
    sizes = {shape[axis] for shape, each in zip(shapes, axes, strict=False) for axis in each}
    return name in _ALONG | _MOVES and sizes == {shapes[len(axes)][made]}
