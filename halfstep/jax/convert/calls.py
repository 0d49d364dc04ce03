"""Arrays of values, and functions inside a function: what the interpreter stands on.

A master is cast where it meets activations, what an island holds where something else reads it, and a promoted
stream is widened once for all that read it in fp32. **Emulated**, dtypes in the jaxpr say where numbers would be
narrow, but none is: fp32 carries an array of a narrow dtype, and results are rounded to it, value and gradient.

Loops, branches, remat and custom_jvp are rebuilt around the interpreted body. What is known of a value crosses
their borders where it can: a loop's slices of a master are masters, a branch returns a master if all branches do,
and a function with its own derivative rule runs on masters, rule and all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Var

from halfstep.core.errors import FormatError, UnsupportedRoleError
from halfstep.core.formats import TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision
from halfstep.jax import jaxpr as jaxprs
from halfstep.jax.convert import checks
from halfstep.jax.convert.islands import Island
from halfstep.jax.convert.values import Value, check_early_cast, common_owner, find_early_cast, in_function
from halfstep.jax.layers import round_result, to_compute
from halfstep.jax.numerics.dtypes import DType, dtype_of, format_of
from halfstep.jax.numerics.lowering import casts_of

FLOAT32 = jnp.dtype(jnp.float32)


def shown_dtype(precision: Precision) -> DType:
    """Returns the dtype in which a function sees the compute format of a precision."""
    if precision.compute == TF32 and not precision.emulate:
        return FLOAT32  # a way to multiply fp32 arrays
    try:
        return dtype_of(precision.compute)
    except FormatError:
        raise UnsupportedRoleError(
            f"compute={precision.compute} has no dtype that a function could see",
            hint="build the function from halfstep.jax layers, which round by themselves, and pass cast=False",
        ) from None


def shape_of(x: Any, dtype: DType) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, with another dtype."""
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)


class Calls(ABC):
    """A policy, the arrays that stand for values under it, and equations that hold functions."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.emulate = policy.emulate
        self.base = base_precision(policy)
        self.base_casts = casts_of(self.base)
        self.promoted: frozenset[Var] = frozenset()
        self.island = Island(self._in_fp32)

    def carry(self, x: Any) -> Any:
        """Returns an array as it is carried: emulated, in fp32 if its dtype is narrow."""
        return x.astype(jnp.float32) if self._is_carried(jnp.result_type(x)) else x

    def _is_carried(self, dtype: Any) -> bool:
        return self.emulate and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4

    def _is_ruled(self, value: Value) -> bool:
        owner = value.owner
        return value.ruled or (owner is not None and owner.casts.precision.compute != self.base.compute)

    def _derive(self, values: Sequence[Value]) -> Value:
        """Returns what a result has from its inputs: whether it is ruled, fixed and free."""
        return Value(
            None,
            ruled=any(map(self._is_ruled, values)),
            fixed=all(value.fixed for value in values),
            free=all(value.free or value.fixed for value in values),
        )

    def _arrays(self, atoms: Sequence[Any], values: Sequence[Value]) -> list[Any]:
        return [self._array(value, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def _array(self, value: Value, aval: Any) -> Any:
        """Returns what the operation gets: a master, or what an island returns, in the dtype it appears in."""
        array = value.array
        if value.owner is None and not value.kind:
            if not value.narrow:
                return array
            if aval.dtype == FLOAT32:
                return self.island.widen(value)  # once, so that gradients of what reads it are summed in fp32
        elif value.owner is not None and value.narrow:
            array = to_compute(array, value.owner.casts)
        return self._on_grid(array, aval) if self.emulate else array.astype(aval.dtype)

    def _cross_border(self, atoms: Sequence[Any], values: Sequence[Value], narrow: Sequence[bool]) -> list[Any]:
        """Returns what crosses into a loop or out of a branch: in compute where the variable was promoted."""
        arrays = zip(self._arrays(atoms, values), narrow, strict=True)
        return [to_compute(array, self.base_casts) if each else array for array, each in arrays]

    def _in_fp32(self, value: Value) -> Any:
        """Returns a value in fp32, as masters and the inside of islands are already."""
        array = value.array
        if value.owner is not None and value.narrow:
            array = to_compute(array, value.owner.casts)
        return jnp.asarray(array, jnp.float32)

    def _on_grid(self, x: Array, aval: Any) -> Array:
        """Rounds a carried array to the dtype it stands for, value and gradient; returns any other unchanged."""
        if not self._is_carried(aval.dtype):
            return x
        fmt = format_of(aval.dtype)
        grad = self.base.grad if fmt == self.base.compute else fmt
        return round_result(x, casts_of(replace(self.base, compute=fmt, grad=grad)))

    # --- functions

    @abstractmethod
    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr."""

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        [(jaxpr, own)], (first, count) = jaxprs.functions_of(eqn), jaxprs.parts_of_scan(eqn)
        last = first + count
        fixed, ruled = all(value.fixed for value in values), any(map(self._is_ruled, values))
        # In a loop over parameters and constants alone no state is an activation, unless a matmul returns it.
        alone, opens = find_early_cast(values, eqn), jaxprs.multiplies(eqn)
        values = [replace(value, ruled=ruled) for value in values]
        checks.check_stacked(values[last:])
        held = [not fixed and not ruled and var in self.promoted for var in jaxpr.invars[first:last]]
        carried = [
            Value(
                None,
                ruled=ruled,
                fixed=fixed,
                early_cast=find_early_cast([value], eqn) if alone and opens else alone,
                narrow=narrow,
            )
            for value, narrow in zip(values[first:last], held, strict=True)
        ]
        inside, returned = [*values[:first], *carried, *values[last:]], list[Value]()

        def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            consts = [value.array for value in values[:first]]
            out = self._evaluate(jaxpr, own, in_function(inside, [*consts, *carry, *rows]))
            returned[:] = in_function(out, [None] * len(out))
            ends = self._cross_border(jaxpr.outvars[:count], out[:count], held)
            return ends, [value.array for value in out[count:]]

        carry = self._cross_border(eqn.invars[first:last], values[first:last], held)
        ends, rows = jaxprs.scan_again(eqn, body, carry, [value.array for value in values[last:]])
        each = zip(carried, ends, returned, strict=False)
        states = [replace(v, array=x, early_cast=find_early_cast([end], eqn)) for v, x, end in each]
        return states + [replace(value, ruled=ruled) for value in in_function(returned[count:], rows)]

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Runs branches, traced twice: a result is a master if all of them return masters or constants."""
        index, *operands = values
        arrays = [value.array for value in operands]
        branches = [self._as_function(*branch, operands) for branch in jaxprs.functions_of(eqn)]
        for fn, _ in branches:
            jax.eval_shape(fn, *arrays)
        each = zip(*(returned for _, returned in branches), strict=True)
        joined = [self._join_results(eqn, index, var, of) for var, of in zip(eqn.outvars, each, strict=True)]

        def as_joint(fn: Callable[..., list[Any]], returned: list[Value]) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                out = fn(*arrays)
                out = in_function(returned, out)
                return [
                    jnp.asarray(own.array, jnp.float32)
                    if value.owner is not None
                    else self._cross_border([var], [own], [value.narrow])[0]
                    for own, value, var in zip(out, joined, eqn.outvars, strict=True)
                ]

            return run

        return in_function(joined, lax.switch(index.array, [as_joint(*each) for each in branches], *arrays))

    def _join_results(self, eqn: Any, index: Value, var: Any, branches: Sequence[Value]) -> Value:
        """Returns what is known of a result, whichever branch returns it."""
        known, owner = self._derive(branches), common_owner(branches)
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
        fn, returned = self._as_function(*jaxprs.functions_of(eqn)[0], values)
        out = jaxprs.remat_again(eqn, fn)(*(value.array for value in values))
        return in_function(returned, out)

    def _as_function(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]
    ) -> tuple[Callable[..., list[Any]], list[Value]]:
        """Returns a function of arrays that runs a jaxpr on values like these, and what it then knows of them."""
        returned: list[Value] = []

        def fn(*arrays: Any) -> list[Any]:
            out = self._evaluate(jaxpr, consts, in_function(values, arrays))
            returned[:] = in_function(out, [None] * len(out))
            return [value.array for value in out]

        return fn, returned

    def _custom_jvp_on_masters(self, jaxpr: Any, eqn: Any, values: Sequence[Value]) -> list[Value] | None:
        """Runs a function with its own derivative rule, and the rule, on masters; None if that is impossible."""
        owner = common_owner(values)
        floats = all(jaxprs.is_float(atom) for atom in (*eqn.invars, *eqn.outvars))
        if owner is None or owner.looked_up or not floats:
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
        return [Value(array, kind="loss") for array in fn(*map(self.island.widen, values))]

    def _custom_jvp(
        self, jaxpr: Any, eqn: Any, fixed: Mapping[int, Value], as_value: Callable[[Any], Value]
    ) -> tuple[Callable[..., list[Any]], list[bool]]:
        """Returns a function of the inputs that are not `fixed`, by place, which evaluates the body and the rule.

        Beside it, whether each of its results is a master or a constant; known once it was traced.
        """
        [body], known = jaxprs.functions_of(eqn), list[bool]()

        def ordered(arrays: Sequence[Any], rest: Iterable[Any]) -> list[Any]:
            given, others = iter(arrays), iter(rest)
            return [next(others) if place in fixed else next(given) for place in range(len(eqn.invars))]

        def primal(*arrays: Any) -> list[Any]:
            given = ordered([as_value(array) for array in arrays], fixed.values())
            out = self._evaluate(*body, given)
            known[:] = [value.owner is not None or value.fixed for value in out]
            return [jnp.asarray(value.array, jnp.float32) for value in out]

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            like = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
            mine, rest = ([x for n, x in enumerate(like) if (n in fixed) == each] for each in (False, True))
            traced = jax.make_jaxpr(
                lambda xs, ts, rest: jax.jvp(lambda *xs: jaxprs.bind(jaxpr, eqn, ordered(xs, rest)), xs, ts)
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
