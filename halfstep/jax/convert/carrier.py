"""Between what the interpreter knows of a value and the array that an operation takes.

A master is cast where it meets activations, what an island holds where something else reads it, and a promoted
stream is widened once for all that read it in fp32. **Emulated**, dtypes in the jaxpr say where numbers would be
narrow, but none is: fp32 carries an array of a narrow dtype, and results are rounded to it, value and gradient.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Var

from halfstep.core.errors import FormatError, UnsupportedRoleError
from halfstep.core.formats import TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision
from halfstep.jax.convert.islands import Island
from halfstep.jax.convert.values import Value
from halfstep.jax.jaxpr import is_floating
from halfstep.jax.layers import batch_to_compute, round_result, to_compute
from halfstep.jax.numerics.dtypes import DType, dtype_of, format_of
from halfstep.jax.numerics.lowering import casts_of

FLOAT32 = jnp.dtype(jnp.float32)


class Carrier:
    """A policy, the casts where no rule applies, and the arrays that stand for values under it."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.emulate = policy.emulate
        self.base = base_precision(policy)
        self.base_casts = casts_of(self.base)
        self.promoted: frozenset[Var] = frozenset()
        self.island = Island(self._in_fp32)

    def traced_leaf(self, leaf: Any) -> Any:
        """Returns a leaf of a batch as the function sees it: in the compute dtype if floating, else unchanged."""
        return shape_of(leaf, appears(self.base)) if is_floating(leaf) else leaf

    def entering_leaf(self, leaf: Any) -> Any:
        """Returns what the interpreter gets for a leaf of a batch: cast, or rounded if emulated."""
        return batch_to_compute(jnp.asarray(leaf), self.base_casts) if is_floating(leaf) else leaf

    def carry(self, x: Any) -> Any:
        """Returns an array as it is carried: emulated, in fp32 if its dtype is narrow."""
        return x.astype(jnp.float32) if self._is_carried(jnp.result_type(x)) else x

    def _is_carried(self, dtype: Any) -> bool:
        return self.emulate and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4

    def _is_ruled(self, value: Value) -> bool:
        owner = value.owner
        return value.ruled or (owner is not None and owner.casts.precision.compute != self.base.compute)

    def _derived(self, values: Sequence[Value]) -> Value:
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
                return self.island.widened(value)  # once, so that gradients of what reads it are summed in fp32
        elif value.owner is not None and value.narrow:
            array = to_compute(array, value.owner.casts)
        return self._on_grid(array, aval) if self.emulate else array.astype(aval.dtype)

    def _crossing(self, atoms: Sequence[Any], values: Sequence[Value], narrow: Sequence[bool]) -> list[Any]:
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


def appears(precision: Precision) -> DType:
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
