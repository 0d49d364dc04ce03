"""Islands to build with: torch's functions and modules of the same names, fp32 inside, with or without a policy.

    softmax, layer_norm, rms_norm     fp32 inside, backward too; the result in the dtype of the input
    cross_entropy                     fp32 inside and out
    linear_cross_entropy              of x W^T + b, whose logits are not kept

Under torch.compile too. `prepare` gives these modules the format of their role, as it does torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.core.errors import LossError
from halfstep.torch import layers
from halfstep.torch.convert.functions.mode import WATCHERS, current_mode
from halfstep.torch.convert.functions.products import LINEAR
from halfstep.torch.fp8.delayed import History
from halfstep.torch.layers import CastedLinear, casts_like, linear
from halfstep.torch.loss.plain import (
    REDUCTIONS,
    Terms,
    check_targets,
    mean_loss,
    row_cross_entropy,
    torch_row_losses,
)
from halfstep.torch.numerics.lowering import Casts, island
from halfstep.torch.numerics.provenance import transforming


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
    weight: Tensor | nn.Linear,
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

    Of a layer, `linear_cross_entropy(x, self.head, target)`, it has the layer's parameters and precision. Of a
    weight inside a model with a policy it is computed in the policy's compute format, as `F.linear` is; elsewhere
    in the dtype of the input, whatever the weight is held in. The gradients of weight and bias are fp32. `softcap`
    makes logits softcap tanh(logits / softcap), `z_loss` times log(sum(exp(logits)))^2 is added to each loss.

    The logits' gradient is written over them in the forward pass, and with `chunks` > 1 the logits of one part of
    the tokens exist at a time, and none later. Neither if `reduction` is "none".
    """
    layer = None
    if not isinstance(weight, Tensor):
        layer = weight
        if not isinstance(layer, nn.Linear) or bias is not None:
            raise LossError(
                f"the weight is `{type(layer).__name__}`" + (" with a bias beside it" if bias is not None else ""),
                hint="pass an nn.Linear, which has its bias itself, or a weight and a bias",
            )
        weight, bias = layer.weight, layer.bias
    terms = Terms(ignore_index, label_smoothing, softcap, z_loss)
    _check_loss(input, weight, target, bias, terms, reduction, chunks)
    casts, history = _casts_of(input, layer)
    fused = (casts.direct or casts.wide is not None) and casts.loss is torch.float32 and not casts.emulate
    if reduction != "none" and fused:
        total, _ = layers.linear_cross_entropy(input, weight, bias, target, casts, terms, chunks, history=history)
        return total if reduction == "sum" else mean_loss(total, target, ignore_index)
    logits = linear(input, weight, bias, casts, history=history).flatten(0, -2)
    if not fused or transforming():
        rows = island(torch_row_losses(island(logits, "loss", casts), target.flatten(), terms), "loss", casts)
    else:
        rows = row_cross_entropy(logits, target.flatten(), terms, casts.precision.kept_bits)
    if reduction == "none":
        return rows.view(target.shape)  # type: ignore[no-any-return]
    return rows.sum() if reduction == "sum" else mean_loss(rows.sum(), target, ignore_index)


def _casts_of(input: Tensor, layer: nn.Module | None) -> tuple[Casts, History | None]:
    """Returns the precision of a layer, of the model whose code runs, or of the input; amaxes if it is delayed."""
    if isinstance(layer, CastedLinear):
        of_loss = layer.halfstep.loss_casts if torch.compiler.is_compiling() else None
        return of_loss or layer.casts or casts_like(input), layer.halfstep.history
    mode = current_mode()
    if mode is None or mode.scope.leaf:
        return casts_like(input), None
    if WATCHERS:
        WATCHERS[-1](mode.scope, linear_cross_entropy, (input,), {}, LINEAR, "")
    return mode.scope.casts, None


def _check_loss(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, terms: Terms, reduction: str, chunks: int
) -> None:
    if reduction not in REDUCTIONS:
        raise LossError(f"reduction is {reduction!r}", hint="it is 'none', 'mean' or 'sum'")
    check_targets(target, input.shape[:-1])
    if target.dtype is not torch.int64:
        raise LossError(
            f"targets are {str(target.dtype).removeprefix('torch.')}, and classes are int64", hint="target.long()"
        )
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not weight.is_floating_point():
        given = f"{str(weight.dtype).removeprefix('torch.')} of shape {tuple(weight.shape)}"
        raise LossError(
            f"the weight is {given}, and the input has {input.shape[-1]} features",
            hint="it has a row for each class, as that of nn.Linear",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LossError(
            f"the bias has shape {tuple(bias.shape)}, and there are {weight.shape[0]} classes",
            hint="it has a number for each class",
        )
    if not 0.0 <= terms.label_smoothing <= 1.0:
        raise LossError(f"label_smoothing is {terms.label_smoothing}", hint="it is between 0 and 1")
    for name in ("softcap", "z_loss"):
        if not 0.0 <= getattr(terms, name) < float("inf"):
            raise LossError(f"{name} is {getattr(terms, name)}", hint="it is a positive number, or 0 for none")
    if chunks < 1:
        raise LossError(f"a loss in {chunks} chunks", hint="1 is all tokens at once; more take less memory")


class Softmax(nn.Softmax):
    """`nn.Softmax`, fp32 inside."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns shares that sum to one."""
        return softmax(input, -1 if self.dim is None else self.dim)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, fp32 inside."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, fp32 inside."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`, fp32 inside and out."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss."""
        settings = {name: getattr(self, name) for name in ("ignore_index", "reduction", "label_smoothing")}
        return cross_entropy(input, target, self.weight, **settings)


def _wide(tensor: Any) -> Any:
    """Widens to fp32; float64 stays, and so do class indices and None."""
    narrow = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if narrow else tensor
