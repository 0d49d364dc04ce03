"""Islands to build with: torch's functions and modules of the same names, fp32 inside, with or without a policy.

    softmax, layer_norm, rms_norm     fp32 inside, backward too; the result in the dtype of the input
    cross_entropy                     fp32 inside and out

Under torch.compile too. `prepare` gives these modules the format of their role, as it does torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
