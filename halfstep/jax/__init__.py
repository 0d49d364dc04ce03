"""The JAX backend: how a policy runs on JAX arrays.

Importing it imports nothing; each public name is loaded when it is used, and JAX with it.

    state = init(params, optimizer, "fp16-mixed")      params: any pytree; optimizer: any optax transform
    step = make_step(loss_fn, optimizer)               loss_fn(params, batch[, rng]) -> loss | (loss, aux)
    state, result = step(state, batch)

Islands and matmuls with formats of their own reach a loss function through the functions here: each takes a
`Casts` last, as `cross_entropy(logits, targets, casts_for("bf16-mixed"))`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.core.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.jax.cast import quantize as quantize
    from halfstep.jax.layers import attention as attention
    from halfstep.jax.layers import casts_for as casts_for
    from halfstep.jax.layers import cross_entropy as cross_entropy
    from halfstep.jax.layers import dot_general as dot_general
    from halfstep.jax.layers import layer_norm as layer_norm
    from halfstep.jax.layers import linear as linear
    from halfstep.jax.layers import rms_norm as rms_norm
    from halfstep.jax.layers import softmax as softmax
    from halfstep.jax.step import State as State
    from halfstep.jax.step import StepResult as StepResult
    from halfstep.jax.step import Weighted as Weighted
    from halfstep.jax.step import check as check
    from halfstep.jax.step import init as init
    from halfstep.jax.step import make_step as make_step
    from halfstep.jax.step import summary as summary

_HOMES = {
    "State": "halfstep.jax.step",
    "StepResult": "halfstep.jax.step",
    "Weighted": "halfstep.jax.step",
    "attention": "halfstep.jax.layers",
    "casts_for": "halfstep.jax.layers",
    "check": "halfstep.jax.step",
    "cross_entropy": "halfstep.jax.layers",
    "dot_general": "halfstep.jax.layers",
    "init": "halfstep.jax.step",
    "layer_norm": "halfstep.jax.layers",
    "linear": "halfstep.jax.layers",
    "make_step": "halfstep.jax.step",
    "quantize": "halfstep.jax.cast",
    "rms_norm": "halfstep.jax.layers",
    "softmax": "halfstep.jax.layers",
    "summary": "halfstep.jax.step",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep.jax' has no attribute {name!r}")
    try:
        import_module("jax")
        import_module("optax")
    except ImportError as error:  # one of them is missing, or JAX is there without the library of a device
        raise HalfstepError(
            f"`halfstep.jax.{name}` needs jax and optax, which cannot be imported: {error}",
            hint="pip install 'halfstep[jax]'",
        ) from error
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
