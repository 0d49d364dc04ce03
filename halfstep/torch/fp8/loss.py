"""A linear layer with narrow operands and the cross-entropy of its logits, which nobody else sees (losses.py).

1. Forward: the layer's own product (linear.py) makes the logits in compute, and the loss writes their gradient g
   over them. Rows that pad the tokens have a target that is ignored, so their gradient is zero.

2. Backward: the layer's own two products of g. What comes in, s, is one number: it multiplies the inverse of g's
   scale, by which each sum is multiplied before its single rounding. So if s is a power of two, no bit differs
   from the layer followed by the loss; for another s, bf16 and the narrow format round g and not s g.

3. Delayed: the history holds the amax of s g, as that of the layer alone does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.fp8.delayed import History
from halfstep.torch.fp8.linear import amaxes_of, gradients, narrow_linear, output, padded
from halfstep.torch.losses import ONCE, SCALES, Terms, row_losses, row_losses_, sample_of
from halfstep.torch.lowering import Casts
from halfstep.torch.matmul import once, rows_of
from halfstep.torch.tracing import compiling, traced


def narrow_losses(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, targets: Tensor, casts: Casts,
    history: History | None, terms: Terms, size: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As losses.linear_losses, of a layer with narrow operands."""
    trained = x.requires_grad or owner.requires_grad or (bias is not None and bias.requires_grad)
    if not (torch.is_grad_enabled() and trained):
        logits = rows_of(narrow_linear(x, values, owner, bias, casts, history))
        return row_losses(logits, targets, logits.shape[1], *terms)[0].sum(), None
    assert casts.loss_in_graph is not None
    given = (x, values, owner, bias, *amaxes_of(history, casts, trained=True), compiling())
    return casts.loss_in_graph(f"loss {casts.words}", *given, targets, *terms, size)


class NarrowLoss(torch.autograd.Function):
    """The sum of the losses of x W^T + b, in fp32; the probe's gradient is the amax of each operand."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        owner: Tensor,
        bias: Tensor | None,
        history: Tensor | None,
        probe: Tensor | None,
        compiled: bool,
        targets: Tensor,
        ignored: int,
        smoothing: float,
        cap: float,
        z_loss: float,
        size: int,
        casts: Casts,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum, and a part of the logits' gradient of `size` elements."""
        ctx.casts, ctx.compiled, ctx.delayed, ctx.shape = casts, compiled, history is not None, x.shape
        with traced(compiled):
            tokens, rows, factor = targets.shape[0], padded(rows_of(x), casts), SCALES.get(casts.compute, 1.0)
            logits, kept = output(rows, values, bias, history, casts, rows.shape[0])
            targets = F.pad(targets, (0, rows.shape[0] - tokens), value=ignored)
            losses = row_losses_(logits, targets, logits.shape[1], ignored, smoothing, cap, z_loss, factor)
            sample = sample_of(logits[:tokens], size, factor)
            ctx.mark_non_differentiable(sample)
            ctx.save_for_backward(logits, *kept)
            return losses.sum(), sample

    @staticmethod
    @once(*ONCE)
    def backward(ctx: Any, s: Tensor, _: Any = None) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each input."""
        casts, needs, (g, *kept) = ctx.casts, ctx.needs_input_grad, ctx.saved_tensors
        with traced(ctx.compiled):
            factor, tokens = s / SCALES.get(casts.compute, 1.0), ctx.shape[:-1].numel()
            given = (g, tokens, (needs[0], needs[2], needs[3]), casts, ctx.delayed, factor)
            dx, dw, db, amaxes = gradients(kept, *given)
            dx = dx if dx is None else dx.view(ctx.shape)
        return dx, None, dw, db, None, amaxes, *[None] * 8
