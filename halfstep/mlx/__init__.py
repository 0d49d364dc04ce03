"""The MLX backend: how a policy runs on MLX arrays.

    from halfstep.mlx import prepare
    run = prepare(model, optimizer, "bf16-mixed")        # any mlx.nn model, any mlx optimizer
    result = run.step(loss_fn, micro_batches)            # loss_fn(model, batch)

Importing this package imports no framework: each public name is loaded when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.core.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.mlx.cast import quantize as quantize
    from halfstep.mlx.layers import CastedLinear as CastedLinear
    from halfstep.mlx.layers import Norm as Norm
    from halfstep.mlx.layers import attention as attention
    from halfstep.mlx.layers import cross_entropy as cross_entropy
    from halfstep.mlx.layers import layer_norm as layer_norm
    from halfstep.mlx.layers import linear as linear
    from halfstep.mlx.layers import rms_norm as rms_norm
    from halfstep.mlx.layers import softmax as softmax
    from halfstep.mlx.step import Run as Run
    from halfstep.mlx.step import StepResult as StepResult
    from halfstep.mlx.step import prepare as prepare

_HOMES = {
    "CastedLinear": "halfstep.mlx.layers",
    "Norm": "halfstep.mlx.layers",
    "Run": "halfstep.mlx.step",
    "StepResult": "halfstep.mlx.step",
    "attention": "halfstep.mlx.layers",
    "cross_entropy": "halfstep.mlx.layers",
    "layer_norm": "halfstep.mlx.layers",
    "linear": "halfstep.mlx.layers",
    "prepare": "halfstep.mlx.step",
    "quantize": "halfstep.mlx.cast",
    "rms_norm": "halfstep.mlx.layers",
    "softmax": "halfstep.mlx.layers",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep.mlx' has no attribute {name!r}")
    try:
        import_module("mlx.core")
    except ImportError as error:  # mlx is missing, or it is there without the library of a device
        raise HalfstepError(
            f"`halfstep.mlx.{name}` needs mlx, which cannot be imported: {error}",
            hint="pip install 'halfstep[mlx]'",
        ) from error
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
