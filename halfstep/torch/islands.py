"""Islands to build with: torch's functions and modules of the same names, fp32 inside, with or without a policy.

    softmax, layer_norm, rms_norm     fp32 inside, backward too; the result in the dtype of the input
    cross_entropy                     fp32 inside and out
    linear_cross_entropy              of x W^T + b: logits are in the dtype of x, and nobody else sees them

Under torch.compile too. `prepare` gives these modules the format of their role, as it does torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.torch import layers
from halfstep.torch.layers import casts_like, linear
from halfstep.torch.losses import Terms, in_torch, mean_of, row_cross_entropy
from halfstep.torch.tracing import transforming


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """`F.softmax`, fp32 inside."""
    return torch.softmax(_wide(input), dim).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, fp32 inside."""
    return F.layer_norm(_wide(input), list(normalized_shape), _wide(weight), _wide(bias), eps).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm`, fp32 inside."""
    return F.rms_norm(_wide(input), list(normalized_shape), _wide(weight), eps).to(input.dtype)


def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, **settings: Any) -> Tensor:
    """`F.cross_entropy`, fp32 inside and out."""
    return F.cross_entropy(_wide(input), _wide(target), _wide(weight), **settings)


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunks: int = 1,
) -> Tensor:
    """`cross_entropy(linear(input, weight, bias), target)` in fewer passes and less memory.

    Everything is multiplied in the dtype of the input, whatever the weight is held in; the gradients of weight and
    bias are fp32. `softcap` makes logits softcap tanh(logits / softcap), `z_loss` times log(sum(exp(logits)))^2 is
    added to each loss. With `chunks` > 1 the logits of one part of the tokens exist at a time, and none later.

    The logits' gradient is written over them in the forward pass, unless `reduction` is "none".
    """
    if reduction not in ("none", "mean", "sum"):
        raise HalfstepError(f"reduction is {reduction!r}", hint="it is 'none', 'mean' or 'sum'")
    if target.shape != input.shape[:-1] or target.is_floating_point():
        raise HalfstepError(
            f"target is {str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}, and input has "
            f"{tuple(input.shape[:-1])} rows",
            hint="give the index of a class for each row of input",
        )
    terms, casts = Terms(ignore_index, label_smoothing, softcap, z_loss), casts_like(input)
    if reduction == "none":
        logits = linear(input, weight, bias, casts).flatten(0, -2)
        rows = in_torch if transforming() else row_cross_entropy
        return rows(logits, target.flatten(), terms).view(target.shape)
    total, _ = layers.linear_cross_entropy(input, weight, bias, target, casts, terms, chunks)
    return total if reduction == "sum" else mean_of(total, target, ignore_index)


class Softmax(nn.Softmax):
    """`nn.Softmax`, fp32 inside."""

    halfstep_island = True

    def forward(self, input: Tensor) -> Tensor:
        """Returns shares that sum to one."""
        return softmax(input, -1 if self.dim is None else self.dim)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, fp32 inside."""

    halfstep_island = True

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, fp32 inside."""

    halfstep_island = True

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`, fp32 inside and out."""

    halfstep_island = True

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss."""
        settings = {name: getattr(self, name) for name in ("ignore_index", "reduction", "label_smoothing")}
        return cross_entropy(input, target, self.weight, **settings)


def _wide(tensor: Any) -> Any:
    """Widens to fp32; float64 stays, and so do class indices and None."""
    narrow = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if narrow else tensor
