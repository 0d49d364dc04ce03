"""The cross-entropy of a linear layer with narrow operands, whose logits are not kept (plain.py).

1. Forward: the layer's own product (linear.py) makes the logits in compute, and the loss writes their gradient g
   over them. Rows that pad the tokens have a target that is ignored, so their gradient is zero.

2. Of g, the loss writes only the bits of mantissa that its narrow format keeps, rounded stochastically, so that
   each number is right on average (plain.round_stochastically). To the nearest, e5m2 turns 0.04 into 0.0391
   and 0.96 into 1, in every token alike: the shares of a token no longer add up, and training drives them away
   from those of the text. A GPT-2 of 124M ended 0.019 nats above bf16 after 1000 steps, docs/measurements/fp8.md.
   The gradients of other layers have no such order, and are rounded to nearest.

3. Backward: the layer's own two products of g. What comes in, s, is one number: it multiplies the inverse of g's
   scale, by which each sum is multiplied before its single rounding. So if s is a power of two, no bit differs
   from a layer whose logits have the gradient s g; for another s, the formats round g and not s g.

4. Delayed: the history holds the amax of s g, as that of the layer alone does.

5. In chunks, as in plain.py: x is scaled by the amax of all tokens, so the logits and the loss are the same. The
   gradient of a chunk is scaled by its own amax, which is at most that of all, and its products leave in fp32.
   Delayed operands have one chunk: their scale needs s, which comes later.

6. With one scale per tensor, as in `fp8-mixed`, a gradient that has a bound needs no amax: coded.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.refusal import NARROW_ONCE
from halfstep.torch.fp8.delayed import History
from halfstep.torch.fp8.linear import (
    CASTS_BY_NAME,
    amaxes_of,
    gradients,
    has_one_scale,
    lower,
    narrow_in_graph,
    output,
    pad_rows,
)
from halfstep.torch.loss.coded import coded_losses, sample_before, why_not_coded
from halfstep.torch.loss.plain import (
    ONCE,
    SCALES,
    Terms,
    add_or_begin,
    empty_gradients,
    linear_losses,
    row_losses,
    row_losses_,
    scale_gradients,
    split_chunks,
)
from halfstep.torch.numerics.cast import amax_of
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.matmul import first_derivative_only, refuse_transforms, rows_of
from halfstep.torch.numerics.provenance import compiling, traced


def narrow_losses(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, targets: Tensor, casts: Casts,
    history: History | None, terms: Terms, chunks: int = 1, size: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes what plain.linear_losses does, for a layer with narrow operands."""
    if not x.numel():  # nothing to scale
        assert casts.wide is not None
        return linear_losses(x, values, owner, bias, targets, casts.wide, terms)
    refuse_transforms(*NARROW_ONCE)
    past = amaxes_of(history, casts, trained=any(t is not None and t.requires_grad for t in (x, owner, bias)))
    return losses_of_narrow_layer(x, values, owner, bias, targets, casts, past, terms, chunks, size)


def losses_of_narrow_layer(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, targets: Tensor, casts: Casts,
    past: tuple[Tensor | None, Tensor | None], terms: Terms, chunks: int, size: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same where amaxes of earlier updates are known, as in the graph of compiled code."""
    needs = (x.requires_grad, owner.requires_grad, bias is not None and bias.requires_grad)
    if not (torch.is_grad_enabled() and any(needs)):
        logits = rows_of(narrow_in_graph(casts.words, chunks, x, values, owner, bias, *past, compiling()))
        return row_losses(logits, targets, logits.shape[1], *terms)[0].sum(), None
    if not why_not_coded(casts, terms, bias=bias is not None):
        return coded_losses(x, values, owner, targets, casts, terms, chunks, size)
    given = (x, values, owner, bias, *past, compiling())
    return loss_in_graph(casts.words, *given, targets, tuple(terms), 1 if casts.delayed else chunks, needs, size)


def loss_in_graph(words: str, *given: Any) -> tuple[Tensor, Tensor]:
    """The loss as one function for dynamo's graph, which does not interpret it."""
    return NarrowLoss.apply(*given, CASTS_BY_NAME[words])  # type: ignore[no-any-return]


@torch.library.custom_op("halfstep::narrow_cross_entropy", mutates_args=())
def chunk_gradients(
    rows: Tensor, values: Tensor, bias: Tensor | None, targets: Tensor, chunks: int, needs: list[bool], words: str,
    ignored: int, smoothing: float, cap: float, z_loss: float, factor: float, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes what plain.linear_gradients does, for a layer with narrow operands."""
    casts, width = CASTS_BY_NAME[words], values.shape[0]
    operand = casts.precision.operand
    amax = amax_of(rows, operand) if has_one_scale(operand) else None
    parts, start = split_chunks(rows, chunks), 0
    total, grad_input, *sums, sample = empty_gradients(rows, values, needs, width, parts, size)
    for some, wanted in zip(parts, split_chunks(targets, chunks), strict=True):
        tokens, first, some = some.shape[0], start == 0, pad_rows(some, casts)
        codes = lower(some, operand, casts, amax)
        logits, kept = output(some, values, bias, None, casts, some.shape[0], known=codes)
        wanted = F.pad(wanted, (0, some.shape[0] - tokens), value=ignored)
        terms = (ignored, smoothing, cap, z_loss)
        sample = sample_before(logits[:tokens], wanted, size, terms, casts) if first else sample
        losses = row_losses_(logits, wanted, width, *terms, factor, casts.precision.kept_bits).sum()
        total = losses if first else total + losses
        dx, *others, _ = gradients(kept, logits, tokens, (needs[0], needs[1], needs[2]), casts, False, wide=True)
        if dx is not None:
            grad_input[start : start + tokens] = dx
        for summed, more in zip(sums, others, strict=True):
            if more is not None:
                add_or_begin(summed, more, first)
        start += tokens
        del logits, kept, codes, dx, others  # before the next are made
    return total, grad_input, sums[0], sums[1], sample


@chunk_gradients.register_fake
def _(rows: Tensor, values: Tensor, bias: Any, _: Any, chunks: int, needs: list[bool], *rest: Any) -> Any:
    return empty_gradients(rows, values, needs, values.shape[0], split_chunks(rows, chunks), rest[-1])


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
        terms: tuple[int, float, float, float],
        chunks: int,
        needs: tuple[bool, bool, bool],
        size: int,
        casts: Casts,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum, and a part of the logits' gradient of `size` elements."""
        ctx.casts, ctx.compiled, ctx.delayed, ctx.shape = casts, compiled, history is not None, x.shape
        ctx.chunks, ctx.needs, factor, tokens = chunks, needs, SCALES.get(casts.compute, 1.0), targets.shape[0]
        if chunks > 1:
            given = (chunks, [*needs], casts.words, *terms, factor, size)
            total, *kept, sample = chunk_gradients(rows_of(x), values, bias, targets, *given)
        else:
            with traced(compiled):
                rows = pad_rows(rows_of(x), casts)
                logits, kept = output(rows, values, bias, history, casts, rows.shape[0])
                targets = F.pad(targets, (0, rows.shape[0] - tokens), value=terms[0])
                sample = sample_before(logits[:tokens], targets, size, terms, casts)
                kept_bits = casts.precision.kept_bits
                total = row_losses_(logits, targets, logits.shape[1], *terms, factor, kept_bits).sum()
                kept = [logits, *kept]
        ctx.mark_non_differentiable(sample)
        ctx.save_for_backward(*kept)
        return total, sample

    @staticmethod
    @first_derivative_only(*ONCE)
    def backward(ctx: Any, s: Tensor, _: Any = None) -> tuple[Tensor | None, ...]:
        casts, factor, amaxes = ctx.casts, s / SCALES.get(ctx.casts.compute, 1.0), None
        if ctx.chunks > 1:
            dx, dw, db = scale_gradients(ctx.saved_tensors, ctx.needs, factor, casts)
        else:
            g, *kept = ctx.saved_tensors
            with traced(ctx.compiled):
                given = (g, ctx.shape[:-1].numel(), ctx.needs, casts, ctx.delayed, factor)
                dx, dw, db, amaxes = gradients(kept, *given)
        dx = dx if dx is None else dx.view(ctx.shape)
        return dx, None, dw, db, None, amaxes, *[None] * 7
