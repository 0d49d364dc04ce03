"""The PyTorch backend: how a policy runs on torch tensors.

    from halfstep.torch import prepare
    run = prepare(model, optimizer, "bf16-mixed")        # any nn.Module, any torch.optim optimizer, or a list
    result = run.step(loss_fn, micro_batches)            # loss_fn(batch)

To build with: `CastedLinear` multiplies in its own precision; `LayerNorm`, `RMSNorm`, `Softmax`,
`CrossEntropyLoss` and the functions `layer_norm`, `rms_norm`, `softmax`, `cross_entropy` are torch's, fp32 inside.
`linear` and `attention` take a `Casts` last: `linear(x, weight, None, casts_for("bf16-mixed"))`.

Importing this package imports no framework: each public name is loaded when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.core.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.torch.cast import quantize as quantize
    from halfstep.torch.islands import CrossEntropyLoss as CrossEntropyLoss
    from halfstep.torch.islands import LayerNorm as LayerNorm
    from halfstep.torch.islands import RMSNorm as RMSNorm
    from halfstep.torch.islands import Softmax as Softmax
    from halfstep.torch.islands import cross_entropy as cross_entropy
    from halfstep.torch.islands import layer_norm as layer_norm
    from halfstep.torch.islands import rms_norm as rms_norm
    from halfstep.torch.islands import softmax as softmax
    from halfstep.torch.layers import CastedLinear as CastedLinear
    from halfstep.torch.layers import Norm as Norm
    from halfstep.torch.layers import attention as attention
    from halfstep.torch.layers import casts_for as casts_for
    from halfstep.torch.layers import linear as linear
    from halfstep.torch.optim.adamw import AdamW as AdamW
    from halfstep.torch.optim.muon import Muon as Muon
    from halfstep.torch.step import Run as Run
    from halfstep.torch.step import StepResult as StepResult
    from halfstep.torch.step import prepare as prepare

_HOMES = {
    "AdamW": "halfstep.torch.optim.adamw",
    "CastedLinear": "halfstep.torch.layers",
    "CrossEntropyLoss": "halfstep.torch.islands",
    "LayerNorm": "halfstep.torch.islands",
    "Muon": "halfstep.torch.optim.muon",
    "Norm": "halfstep.torch.layers",
    "RMSNorm": "halfstep.torch.islands",
    "Run": "halfstep.torch.step",
    "Softmax": "halfstep.torch.islands",
    "StepResult": "halfstep.torch.step",
    "attention": "halfstep.torch.layers",
    "casts_for": "halfstep.torch.layers",
    "cross_entropy": "halfstep.torch.islands",
    "layer_norm": "halfstep.torch.islands",
    "linear": "halfstep.torch.layers",
    "prepare": "halfstep.torch.step",
    "quantize": "halfstep.torch.cast",
    "rms_norm": "halfstep.torch.islands",
    "softmax": "halfstep.torch.islands",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep.torch' has no attribute {name!r}")
    try:
        import_module("torch")
    except ImportError as error:  # torch is missing, or it is there without the library of a device
        raise HalfstepError(
            f"`halfstep.torch.{name}` needs torch, which cannot be imported: {error}",
            hint="pip install 'halfstep[torch]'",
        ) from error
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
