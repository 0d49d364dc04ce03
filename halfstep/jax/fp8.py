"""Delayed scaling: operands that are scaled by the amaxes of earlier updates (`compute=e4m3:delayed`).

For each module with delayed operands the state has the amaxes of its last HISTORY updates, of each of its three
operands (x, the weight, the incoming gradient) and of several micro-batches the largest; a skipped update leaves
them. The largest scales the next update; until there is one, an operand is scaled by its own.

**How an amax leaves a backward pass.** A step is a pure function, and a gradient is all that comes out of its
backward pass. So a matmul takes the three amaxes that scale it as an input, and the gradient of that input is
defined to be the amaxes of its three operands. JAX sums the gradients of an input that is used twice: a module
that one pass uses n times reports the sum of its amaxes, at most n times the largest.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from halfstep.core.arrays.cast import HISTORY

OPERANDS = 3
PREFIX = "amax."  # before a module's name: its amaxes, among the parameters of a function and in a saved state


def empty_history() -> Array:
    """Returns the history of a module before the first update: (OPERANDS, HISTORY), the newest update first."""
    return jnp.zeros((OPERANDS, HISTORY), jnp.float32)


def scaling_amaxes(histories: Mapping[str, Array]) -> dict[str, Array]:
    """Returns what scales the operands of each module, as inputs of a loss function; 0 if there is none yet."""
    return {f"{PREFIX}{name}": jnp.max(history, axis=1) for name, history in histories.items()}


def update_histories(histories: Mapping[str, Array], amaxes: Mapping[str, Any], finite: Array) -> dict[str, Array]:
    """Returns the histories after an update with these amaxes; unchanged if it was not finite."""
    following = {}
    for name, old in histories.items():
        # A step may be finite although an operand was not, if nothing that is trained depends on it.
        newest = jnp.nan_to_num(amaxes[f"{PREFIX}{name}"], nan=0.0, posinf=0.0)
        shifted = jnp.concatenate([newest[:, None], old[:, :-1]], axis=1)
        following[name] = jnp.where(finite, shifted, old)
    return following
