"""Functions inside a function: loops, branches, remat and custom_jvp, rebuilt around the interpreted body.

What is known of a value crosses their borders where it can: a loop's slices of a master are masters, a branch
returns a master if all branches do, and a function with its own derivative rule runs on masters, rule and all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfstep.jax.convert import checks
from halfstep.jax.convert.carrier import Carrier
from halfstep.jax.convert.values import Value, check_early_cast, common_owner, find_early_cast
from halfstep.jax.jaxpr import bind, function_of, is_float, multiplies, parts_of_scan, remat_again, scan_again


class Calls(Carrier, ABC):
    """Runs equations that hold functions. How a function itself is evaluated is up to the interpreter."""

    @abstractmethod
    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr."""

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        closed, (first, count) = eqn.params["jaxpr"], parts_of_scan(eqn)
        last = first + count
        fixed = all(value.fixed for value in values)
        # In a loop over parameters and constants alone no state is an activation, unless a matmul returns it.
        alone, opens = find_early_cast(values, eqn), multiplies(eqn)
        early = [find_early_cast([v], eqn) if alone and opens else alone for v in values[first:last]]
        ruled = any(map(self._is_ruled, values))
        values = [replace(value, ruled=ruled) for value in values]
        consts, along = values[:first], values[last:]
        checks.check_stacked(along)
        held = [not fixed and not ruled and var in self.promoted for var in closed.jaxpr.invars[first:last]]
        returned: list[Value] = []

        def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            states = [
                Value(array, ruled=ruled, fixed=fixed, early_cast=each, narrow=narrow)
                for array, each, narrow in zip(carry, early, held, strict=True)
            ]
            given = [*(value.in_another_function(value.array) for value in consts), *states]
            given += [value.in_another_function(row) for value, row in zip(along, rows, strict=True)]
            out = self._evaluate(closed.jaxpr, closed.consts, given)
            returned[:] = [value.in_another_function(None) for value in out]
            ends = self._crossing(closed.jaxpr.outvars[:count], out[:count], held)
            return ends, [value.array for value in out[count:]]

        carry = self._crossing(eqn.invars[first:last], values[first:last], held)
        ends, rows = scan_again(eqn, body, carry, [value.array for value in along])
        states = [
            Value(array, ruled=ruled, fixed=fixed, early_cast=find_early_cast([value], eqn), narrow=narrow)
            for value, array, narrow in zip(returned[:count], ends, held, strict=True)
        ]
        stacked = zip(returned[count:], rows, strict=True)
        return states + [replace(value, array=array, ruled=ruled) for value, array in stacked]

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Runs branches, traced twice: a result is a master if all of them return masters or constants."""
        index, *operands = values
        arrays = [value.array for value in operands]
        branches = [self._as_function(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
        for fn, _ in branches:
            jax.eval_shape(fn, *arrays)
        each = zip(*(returned for _, returned in branches), strict=True)
        joined = [self._joined(eqn, index, var, of) for var, of in zip(eqn.outvars, each, strict=True)]

        def as_joined(fn: Callable[..., list[Any]], returned: list[Value]) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                out = [replace(value, array=array) for array, value in zip(fn(*arrays), returned, strict=True)]
                return [
                    jnp.asarray(own.array, jnp.float32)
                    if value.owner is not None
                    else self._crossing([var], [own], [value.narrow])[0]
                    for own, value, var in zip(out, joined, eqn.outvars, strict=True)
                ]

            return run

        out = lax.switch(index.array, [as_joined(*branch) for branch in branches], *arrays)
        return [replace(value, array=array) for value, array in zip(joined, out, strict=True)]

    def _joined(self, eqn: Any, index: Value, var: Any, branches: Sequence[Value]) -> Value:
        """Returns what is known of a result, whichever branch returns it."""
        known, owner = self._derived(branches), common_owner(branches)
        return Value(
            None,
            owner,
            ruled=known.ruled,
            fixed=index.fixed and known.fixed,
            early_cast=None if owner is not None else find_early_cast(branches, eqn),
            free=known.free and index.free,
            narrow=owner is None and var in self.promoted and not known.ruled and not known.free,
        )

    def _remat(self, eqn: Any, values: list[Value]) -> list[Value]:
        fn, returned = self._as_function(eqn.params["jaxpr"], (), values)
        out = remat_again(eqn, fn)(*(value.array for value in values))
        return [replace(value, array=array) for array, value in zip(out, returned, strict=True)]

    def _as_function(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]
    ) -> tuple[Callable[..., list[Any]], list[Value]]:
        """Returns a function of arrays that runs a jaxpr on values like these, and what it then knows of them."""
        returned: list[Value] = []

        def fn(*arrays: Any) -> list[Any]:
            args = [value.in_another_function(array) for value, array in zip(values, arrays, strict=True)]
            out = self._evaluate(jaxpr, consts, args)
            returned[:] = [value.in_another_function(None) for value in out]
            return [value.array for value in out]

        return fn, returned

    def _custom_jvp_on_masters(self, jaxpr: Any, eqn: Any, values: Sequence[Value]) -> list[Value] | None:
        """Runs a function with its own derivative rule, and the rule, on masters; None if that is impossible."""
        owner = common_owner(values)
        if owner is None or owner.looked_up or not all(is_float(atom) for atom in (*eqn.invars, *eqn.outvars)):
            return None
        fixed = {place: value for place, value in enumerate(values) if value.owner is None}
        fn, known = self._custom_jvp(jaxpr, eqn, fixed, lambda array: Value(array, owner))
        masters = [value.array for value in values if value.owner is not None]
        jax.eval_shape(fn, *masters)
        if not all(known):
            return None
        return [Value(array, owner) for array in fn(*masters)]

    def _custom_jvp_in_island(self, jaxpr: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """Runs a function with its own derivative rule, and the rule, as an island: all of it in fp32."""
        fn, _ = self._custom_jvp(jaxpr, eqn, {}, lambda array: Value(array, kind="loss"))
        return [Value(array, kind="loss") for array in fn(*map(self.island.widened, values))]

    def _custom_jvp(
        self, jaxpr: Any, eqn: Any, fixed: Mapping[int, Value], as_value: Callable[[Any], Value]
    ) -> tuple[Callable[..., list[Any]], list[bool]]:
        """Returns a function of the inputs that are not `fixed`, by place, which evaluates the body and the rule.

        Beside it, whether each of its results is a master or a constant; known once it was traced.
        """
        closed, known = function_of(eqn), list[bool]()

        def ordered(arrays: Sequence[Any], rest: Iterable[Any]) -> list[Any]:
            given, others = iter(arrays), iter(rest)
            return [next(others) if place in fixed else next(given) for place in range(len(eqn.invars))]

        def primal(*arrays: Any) -> list[Any]:
            given = ordered([as_value(array) for array in arrays], fixed.values())
            out = self._evaluate(closed.jaxpr, closed.consts, given)
            known[:] = [value.owner is not None or value.fixed for value in out]
            return [jnp.asarray(value.array, jnp.float32) for value in out]

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            like = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
            mine, rest = ([x for n, x in enumerate(like) if (n in fixed) == each] for each in (False, True))
            traced = jax.make_jaxpr(
                lambda xs, ts, rest: jax.jvp(lambda *xs: bind(jaxpr, eqn, ordered(xs, rest)), xs, ts)
            )(tuple(mine), tuple(mine), rest)
            given = [*(as_value(array) for array in (*primals, *tangents)), *fixed.values()]
            out = self._evaluate(traced.jaxpr, traced.consts, given)
            for value in out:
                check_early_cast(eqn, value.early_cast)
            wide = [jnp.asarray(value.array, jnp.float32) for value in out]
            return wide[: len(eqn.outvars)], wide[len(eqn.outvars) :]

        fn = jax.custom_jvp(primal)
        fn.defjvp(rule)
        return fn, known
