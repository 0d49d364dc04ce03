"""How a state holds masters and moments, and the way to fp32, which any optimizer sees, and back.

    fp32          the leaf of the parameters is its own master
    fp32:split    the leaf is the nearest bf16, and the state has the int16 remainder beside it (core.split)
    bf16          there is none: the leaf is widened, updated and rounded back, to nearest or stochastically
    emulated      bf16 numbers in fp32 arrays, rounded back in the same way

**Which numbers does a loss function see?** Where everything that uses a split master computes in bf16, its bf16
half, in fp32: XLA drops the way there and back, so a matmul reads the half as it lies. Elsewhere the whole.
The gradient is fp32 in both cases, and is the master's.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from halfstep.core.errors import UnsupportedOptimizerError
from halfstep.core.formats import FP32
from halfstep.core.philox import tensor_id
from halfstep.core.rounding import Rounding
from halfstep.jax.convert.apply import Applied
from halfstep.jax.numerics.cast import carried, join, quantize, random_bits, split
from halfstep.jax.numerics.dtypes import dtype_of


def widen_masters(
    held: Mapping[str, Array], remainders: Mapping[str, Array], halves: Collection[str] = ()
) -> dict[str, Array]:
    """Returns the fp32 numbers that masters stand for; of those in `halves`, the numbers of the bf16 half."""
    joined = {name: join(held[name], lo) for name, lo in remainders.items() if name not in halves}
    return {name: joined.get(name, leaf.astype(jnp.float32)) for name, leaf in held.items()}


def hold(
    wide: Mapping[str, Array], applied: Applied, *, seed: int = 0, step: Array | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns masters in their own formats, from their fp32 numbers, and the remainders of split ones.

    `step` counts updates, for stochastic rounding; without it all are rounded to nearest.
    """
    held, remainders = {}, {}
    for name, x in wide.items():
        param = applied.masters[name]
        if param.split:
            held[name], remainders[name] = split(x)
        elif param.format == FP32:
            held[name] = x
        else:
            bits = None
            if param.stochastic and step is not None:
                bits = random_bits(x.shape, seed=seed, step=step, tensor=tensor_id(name))
            rounding: Rounding = "nearest-even" if bits is None else "stochastic"
            rounded = quantize(x, param.format, overflow="inf", rounding=rounding, bits=bits)
            held[name] = rounded if applied.policy.emulate else rounded.astype(dtype_of(param.format))
    return held, remainders


def widen_moments(opt_state: Any, applied: Applied) -> Any:
    """Returns an optimizer's state with its moments in fp32, as it sees them."""
    return applied.leaves.map_moments(lambda _, x: x.astype(jnp.float32), opt_state)


def narrow_moments(opt_state: Any, applied: Applied) -> Any:
    """Returns an optimizer's state with its moments in the formats of the policy."""

    def narrow(name: str, x: Array) -> Array:
        if x.dtype != jnp.float32:
            raise UnsupportedOptimizerError(
                f"the optimizer itself keeps a moment in {x.dtype}",
                hint="leave the format to the policy: drop mu_dtype and the like, and write `moments=bf16`",
            )
        fmt = applied.moments[name]
        return carried(x, fmt).astype(dtype_of(fmt))

    return applied.leaves.map_moments(narrow, opt_state)
