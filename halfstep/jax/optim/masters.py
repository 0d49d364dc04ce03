"""How a state holds masters and moments, and the way to fp32, which any optimizer sees, and back.

fp32          the leaf of the parameters is its own master
bf16          there is none: the leaf is widened, updated and rounded back, to nearest or stochastically
emulated      bf16 numbers in fp32 arrays, rounded back in the same way
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32, Format
from halfstep.core.philox import tensor_id
from halfstep.core.rounding import Rounding
from halfstep.jax.apply import Applied, Leaves
from halfstep.jax.cast import carried, quantize, random_bits
from halfstep.jax.dtypes import dtype_of


def widened(held: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the fp32 numbers that masters stand for."""
    return {name: leaf.astype(jnp.float32) for name, leaf in held.items()}


def hold(name: str, wide: Array, applied: Applied, *, seed: int = 0, step: Array | None = None) -> Array:
    """Returns an fp32 result as its master is held; `step` counts updates, for stochastic rounding."""
    param = applied.masters[name]
    if param.format == FP32:
        return wide
    bits: Array | None = None
    rounding: Rounding = "nearest-even"
    if param.stochastic and step is not None:
        bits, rounding = random_bits(wide.shape, seed=seed, step=step, tensor=tensor_id(name)), "stochastic"
    rounded = quantize(wide, param.format, overflow="inf", rounding=rounding, bits=bits)
    return rounded if applied.policy.emulate else rounded.astype(dtype_of(param.format))


def wide_moments(leaves: Leaves, opt_state: Any, applied: Applied) -> Any:
    """Returns an optimizer's state with its moments in fp32, as it sees them."""
    return _converted(leaves, opt_state, applied, lambda x, _: x.astype(jnp.float32))


def held_moments(leaves: Leaves, opt_state: Any, applied: Applied) -> Any:
    """Returns an optimizer's state with its moments in the formats of the policy."""
    return _converted(leaves, opt_state, applied, _narrowed)


def _converted(leaves: Leaves, opt_state: Any, applied: Applied, convert: Callable[[Array, Format], Array]) -> Any:
    flat, treedef = jax.tree.flatten(opt_state)
    owners = leaves.moments_of(opt_state)
    return jax.tree.unflatten(
        treedef,
        [x if name is None else convert(x, applied.moments[name]) for x, name in zip(flat, owners, strict=True)],
    )


def _narrowed(x: Array, fmt: Format) -> Array:
    if x.dtype != jnp.float32:
        raise HalfstepError(
            f"the optimizer itself keeps a moment in {x.dtype}",
            hint="leave the format to the policy: drop mu_dtype and the like, and write `moments=bf16`",
        )
    return carried(x, fmt).astype(dtype_of(fmt))
