"""Whether devices may share the rows of a loss: whether it is the mean of what each computes of its own.

The function is traced with some rows and with twice as many, nothing is computed, and both programs are read side
by side. An axis that grows is one of rows, and a number in the code that grows counts them. A value is

    FIXED      the same whatever the rows are
    ROWS       a row of it depends on its own row of the batch alone
    SUM        a sum over rows, multiplied by what is fixed
    a string   anything else: the operation that mixed rows, empty if its line is not known

and grows with the number of rows to a `power`: a sum by 1, a mean by 0. A loss that is fixed, or a sum by 0, is
the mean of the losses of equal parts. What is not known to keep rows apart mixes them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from halfstep.jax import jaxpr as jaxprs
from halfstep.jax.jaxpr import words

FIXED, ROWS, SUM = range(3)

_MOVES = jaxprs.LAYOUT - words("gather scatter dynamic_slice dynamic_update_slice") | jaxprs.PASSED | jaxprs.NAMED
_LINEAR = _MOVES | words("add sub neg convert_element_type reduce_sum")
_MIXES = words("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
_OTHERS = (
    "sort top_k and or not xor reduce_precision nextafter bitcast_convert_type shift_left shift_right_logical"
)
_APART = _LINEAR | jaxprs.LAYOUT | jaxprs.ARITHMETIC - _MIXES | jaxprs.COMPARISON | jaxprs.PRODUCT | words(_OTHERS)
"""What may keep rows apart: sizes and axes then say whether it does."""


class _Fact(NamedTuple):
    kind: int = FIXED
    power: int = 0


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
    return loss if isinstance(loss, str) else "it changes with their number" if loss.power else ""


def _read(one: tuple[Any, Any], two: tuple[Any, Any], given: Sequence[_Fact | str]) -> list[_Fact | str]:
    """Returns what is known of the results of a function, given twice, as a jaxpr and its constants."""
    (jaxpr, consts), (other, others) = one, two
    if [eqn.primitive for eqn in jaxpr.eqns] != [eqn.primitive for eqn in other.eqns]:
        return ["code that depends on the number of rows"] * len(jaxpr.outvars)
    twins = iter(other.eqns)

    def equation(eqn: Any, facts: list[_Fact | str]) -> list[_Fact | str]:
        twin, line = next(twins), jaxprs.line_of(eqn)  # none inside a library's own jit: then that of its call
        where = f"`{eqn.params.get('name', eqn.primitive.name)}` at {line}" if line else ""
        for place, (a, b) in enumerate(zip(eqn.invars, twin.invars, strict=True)):
            facts[place] = _constant(a.val, b.val) if isinstance(a, Literal) else facts[place]
        made = zip(_results(eqn, twin, facts), eqn.outvars, twin.outvars, strict=True)
        return [_by_shape(*each) or where for each in made]

    constants = zip(jaxpr.constvars, map(_constant, consts, others), strict=True)
    env = dict([*constants, *zip(jaxpr.invars, given, strict=True)])
    return jaxprs.walk(jaxpr, env, lambda _: _Fact(), equation)


def _growing(one: Any, two: Any) -> list[int]:
    """Returns the axes that grow with the number of rows."""
    return [axis for axis, (m, n) in enumerate(zip(one.aval.shape, two.aval.shape, strict=True)) if m != n]


def _by_shape(fact: _Fact | str, one: Any, two: Any) -> _Fact | str:
    """Returns what is known of a value of which the axes are seen: one that grows, of rows alone."""
    count = len(_growing(one, two))
    if isinstance(fact, str) or (fact.kind != ROWS and count == 0):
        return fact
    return fact._replace(kind=ROWS) if fact.kind != SUM and count == 1 else ""


def _constant(one: Any, two: Any) -> _Fact | str:
    """Returns what is known of a number in the code, or of an array: those of one shape are the same."""
    if np.shape(one) != np.shape(two):
        return ""
    if np.ndim(one) or isinstance(one, jax.core.Tracer) or bool(one == two) or bool(one != one):
        return _Fact()
    return next((_Fact(FIXED, power) for power in (1, -1) if float(two) == float(one) * 2.0**power), "")


def _results(eqn: Any, twin: Any, given: list[_Fact | str]) -> list[_Fact | str]:
    name = eqn.primitive.name
    if name in jaxprs.CALLS or (name == "scan" and eqn.params["length"] == twin.params["length"]):
        out = _read(jaxprs.functions_of(eqn)[0], jaxprs.functions_of(twin)[0], given)
        first, count = jaxprs.parts_of_scan(eqn) if name == "scan" else (0, 0)
        # A state that a turn returns as something else is not known, and so may be others that come from it.
        return out if given[first : first + count] == out[:count] else [""] * len(out)
    mixed = next((fact for fact in given if isinstance(fact, str)), None if eqn.outvars else "")
    return [_result(eqn, twin, given) if mixed is None else mixed] * len(eqn.outvars)


def _result(eqn: Any, twin: Any, given: Sequence[Any]) -> _Fact | str:
    """Returns what is known of the result of an operation whose operands are known."""
    name, kinds, powers = eqn.primitive.name, [fact.kind for fact in given], [fact.power for fact in given]
    kind, power = max(kinds, default=FIXED), max(powers, default=0)
    atoms, twins = [*eqn.invars, eqn.outvars[0]], [*twin.invars, twin.outvars[0]]
    *axes, made = map(_growing, atoms, twins)
    if name in jaxprs.PRODUCT | words("mul div"):  # linear in each operand, but for a divisor
        power = powers[0] + powers[1] * (-1 if name == "div" else 1)
        known = kinds.count(SUM) < 2 and (name != "div" or kinds[1] != SUM)
    else:
        known = len({*powers}) < 2 and (name in _LINEAR or (power == 0 and kind != SUM))
    if ROWS in kinds:
        known &= SUM not in kinds and _stay_apart(eqn, axes, made)
        if name in ("reduce_sum", "dot_general") and not made:
            kind, power = SUM, power + 1
    elif made:  # of what has none; random numbers are each row's own
        rows = name.startswith(("broadcast", "iota", "random", "tile"))
        known &= rows and eqn.params.get("dimension") not in made
    return _Fact(kind, power) if known else ""


def _stay_apart(eqn: Any, axes: Sequence[list[int]], made: list[int]) -> bool:
    """Returns whether each row of the result, if it has any, is made of one row of each operand that has."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [atom.aval.shape for atom in (*eqn.invars, eqn.outvars[0])]
    if name not in _APART:
        return name.startswith("random")
    if name == "conv_general_dilated":
        return axes == [[params["dimension_numbers"].lhs_spec[0]], []]
    if name == "gather" and all(axes):
        return axes[0][0] in params["dimension_numbers"].operand_batching_dims
    if name == "reshape":
        return math.prod(shapes[0][: axes[0][0]]) == math.prod(shapes[1][: made[0]])
    along = {int(axis) for key in ("axis", "dimension", "dimensions") for axis in np.ravel(params.get(key, ()))}
    sizes = {shape[axis] for shape, each in zip(shapes, (*axes, made), strict=True) for axis in each}
    return len(sizes) == 1 and not along.intersection(*axes)
