"""The cross-entropy of a narrow head, whose logits become the 8-bit codes of their own gradient.

In loss/fp8.py the logits' gradient g is written in bf16, read for its amax, and read again for each layout of
its codes. Here the loss writes the codes.

1. The scale follows from a bound. Without z_loss, and before what comes in,

       g = slope (p - smoothing / n - (1 - smoothing) [target])     0 <= p, slope, smoothing <= 1

   is at most 1 in magnitude. So its scale is that of an amax of 1, for every batch and every chunk: 2^15 in e5m2,
   2^8 in e4m3. Roundings inside may exceed 1 by a little; up to 1.75 there is room.

2. The same bits as by its amax, if that is above 0.875: all amaxes from there to 1.75 have this scale. Of plain
   cross-entropy, it is above if some token gave its target less than 1/8. If none did, g lies in lower binades
   than its amax would put it in. Then numbers from 2^-29 on (in e4m3: 2^-14) still have the same bits, and smaller
   ones are off by at most 2^-32 (2^-18), as they are in any batch whose amax is 1.

3. g is rounded once, stochastically, as in loss/fp8.py. If what comes in is a power of two, no bit differs from
that.

4. Memory. A row's codes take the first half of its logits. The second halves hold the transposed codes that
   grad_weight needs, some outputs at a time: as many as there are tokens, if a row of tokens fits there.

5. Weight and input are cast once; their transposed codes are made of the codes.

`why_not_coded` says when loss/fp8.py is used instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.arrays.cast import cast_constants
from halfstep.torch.fp8 import linear
from halfstep.torch.fp8.linear import (
    CASTS_BY_NAME,
    MULTIPLE,
    Lowered,
    has_one_scale,
    lower,
    pad_rows,
    product,
    write_transpose,
)
from halfstep.torch.loss import plain as losses
from halfstep.torch.loss.plain import (
    ONCE,
    SCALES,
    Terms,
    empty_gradients,
    evenly_spaced,
    round_stochastically,
    row_losses_,
    sample_gradient,
    scale_gradients,
    split_chunks,
)
from halfstep.torch.numerics.cast import to_native
from halfstep.torch.numerics.dtypes import DTYPES, dtype_of
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.matmul import cast_parameter, first_derivative_only, rows_of
from halfstep.torch.numerics.provenance import compiling, traced


def why_not_coded(casts: Casts, terms: Terms, *, bias: bool = False) -> str:
    """Returns why the loss does not write codes; empty if it does."""
    p = casts.precision
    if casts.emulate:
        return "it is emulated"
    if not all(has_one_scale(operand) and operand.format in DTYPES for operand in (p.operand, p.grad_operand)):
        return "not all of its operands are narrow, with one scale each"
    if casts.delayed:
        return "its scales are of earlier updates"
    if terms.z_loss:
        return "z_loss has a gradient without a bound"
    return "its bias has a gradient, a sum of wider numbers" if bias else ""


def coded_losses(
    x: Tensor, values: Tensor, owner: Tensor, targets: Tensor, casts: Casts, terms: Terms, chunks: int, size: int
) -> tuple[Tensor, Tensor]:
    """Computes what `narrow_losses` does, if a gradient is needed."""
    needs = (x.requires_grad, owner.requires_grad)
    return coded_in_graph(casts.words, x, values, owner, compiling(), targets, terms[:3], chunks, needs, size)


def coded_in_graph(words: str, *given: Any) -> tuple[Tensor, Tensor]:
    """The loss as one function for dynamo's graph, which does not interpret it."""
    return CodedLoss.apply(*given, CASTS_BY_NAME[words])  # type: ignore[no-any-return]


# --- the operations, opaque to compilers


@torch.library.custom_op("halfstep::coded_cross_entropy_", mutates_args=("logits",))
def coded_row_losses_(
    logits: Tensor, targets: Tensor, words: str, ignored: int, smoothing: float, cap: float
) -> Tensor:
    """Returns the loss of each row in fp32; codes of its gradient are written over the first half of the row."""
    casts, terms, width = CASTS_BY_NAME[words], Terms(ignored, smoothing, cap), logits.shape[1]
    codes, factor = _codes(logits, casts), SCALES.get(casts.compute, 1.0)
    scale = gradient_scale(casts) / factor
    if losses.has_kernel(logits):
        given = (logits, codes, targets, width, terms, factor, scale)
        return losses.kernels().losses_and_codes(*given)  # type: ignore[no-any-return]
    made, _, grads = losses.losses_in_steps(logits, targets, terms)
    grads = round_stochastically(grads * factor, logits, targets, casts.precision.kept_bits) * scale
    codes.copy_(to_native(grads, casts.precision.grad_operand.format, overflow="saturate"))
    return made


@coded_row_losses_.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@torch.library.custom_op("halfstep::coded_gradients", mutates_args=())
def coded_gradients(
    logits: Tensor, x: Tensor, w: Tensor, x_inv: Tensor, w_inv: Tensor, g_inv: Tensor, needs: list[bool],
    words: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns grad_input and grad_weight from what `coded_row_losses_` wrote; one that is not needed is empty.

    x and w are codes. The other halves of the logits are written to, which hold nothing: the arguments mean the
    same after it.
    """
    casts = CASTS_BY_NAME[words]
    grad_input, grad_weight = _empty_gradients(x, w, needs, casts)
    if needs[0]:
        given = (_codes(logits, casts), write_transpose(w).t(), g_inv, w_inv)
        torch._scaled_mm(*given, out_dtype=casts.grad, out=grad_input)
    if needs[1]:
        _write_grad_weight(logits, write_transpose(x), g_inv, x_inv, grad_weight, casts)
    return grad_input, grad_weight


@coded_gradients.register_fake
def _(logits: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, w, rest[-2], CASTS_BY_NAME[rest[-1]])


@torch.library.custom_op("halfstep::coded_cross_entropy", mutates_args=())
def coded_chunks(
    x: Tensor, w: Tensor, x_inv: Tensor, w_inv: Tensor, chunks: int, targets: Tensor, needs: list[bool],
    words: str, ignored: int, smoothing: float, cap: float, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes what plain.linear_gradients does, with codes; both gradients are fp32."""
    casts, terms = CASTS_BY_NAME[words], (ignored, smoothing, cap)
    parts = split_chunks(x, chunks, MULTIPLE)
    total, grad_input, grad_weight, _, sample = empty_gradients(x, w, [*needs, False], w.shape[0], parts, size)
    w_t = write_transpose(w) if needs[0] else w
    g_inv = torch.full((), 1.0 / gradient_scale(casts), device=x.device)
    start = 0
    for rows, wanted in zip(parts, split_chunks(targets, chunks, MULTIPLE), strict=True):
        first, stop = start == 0, start + rows.shape[0]
        logits = _logits(Lowered(rows, x_inv), Lowered(w, w_inv), casts)
        sample = sample_before(logits, wanted, size, terms, casts) if first else sample
        found = coded_row_losses_(logits, wanted, words, *terms).sum()
        total = found if first else total + found
        if needs[0]:
            torch._scaled_mm(  # a name for its arguments would keep the logits
                _codes(logits, casts), w_t.t(), g_inv, w_inv, out_dtype=torch.float32, out=grad_input[start:stop]
            )
        if needs[1]:
            more = grad_weight if first else torch.empty_like(grad_weight)
            _write_grad_weight(logits, write_transpose(rows), g_inv, x_inv, more, casts)
            grad_weight = more if first else grad_weight.add_(more)
            del more
        start = stop
        del logits  # before the next are made
    return total, grad_input, grad_weight, sample


@coded_chunks.register_fake
def _(
    x: Tensor, w: Tensor, x_inv: Any, w_inv: Any, chunks: int, targets: Any, needs: list[bool], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = split_chunks(x, chunks, MULTIPLE)
    total, dx, dw, _, sample = empty_gradients(x, w, [*needs, False], w.shape[0], parts, rest[-1])
    return total, dx, dw, sample


# --- their parts


def gradient_scale(casts: Casts) -> float:
    """Returns the scale of a gradient that is at most 1: the largest power of two that the format holds."""
    return 2.0 ** cast_constants(casts.precision.grad_operand.format).max_exponent


def _codes(logits: Tensor, casts: Casts) -> Tensor:
    """Returns the first half of each row's memory."""
    return logits.view(dtype_of(casts.precision.grad_operand.format))[:, : logits.shape[1]]


def _logits(x: Lowered, w: Lowered, casts: Casts) -> Tensor:
    return product(x, w, casts.precision.compute, casts.compute, casts, fast=casts.fast)


def _write_grad_weight(
    logits: Tensor, x_t: Tensor, g_inv: Tensor, x_inv: Tensor, out: Tensor, casts: Casts
) -> None:
    """Writes g^T x, some outputs at a time; no sum is taken apart, so no number changes."""
    g = _codes(logits, casts)
    tokens, width = g.shape
    fits = tokens <= width
    room = logits.data.view(g.dtype)[:, width:]  # to autograd, nothing that was kept has changed
    step = tokens if fits else max(MULTIPLE, linear.CODES // tokens // MULTIPLE * MULTIPLE)
    for start in range(0, width, step):
        some, into = g[:, start : start + step], out[start : start + step]
        count = some.shape[1]
        some = write_transpose(some, room[:count, :tokens] if fits else None)
        torch._scaled_mm(some, x_t.t(), g_inv, x_inv, out_dtype=out.dtype, out=into)


def sample_before(logits: Tensor, targets: Tensor, size: int, terms: Sequence[Any], casts: Casts) -> Tensor:
    """Returns a part of the logits' gradient before its codes, of its sampled rows alone."""
    factor, (tokens, width) = SCALES.get(casts.compute, 1.0), logits.shape
    if not size:
        return logits.new_empty(0, dtype=torch.float32)
    rows = evenly_spaced(torch.arange(tokens, device=logits.device)[:, None].expand(tokens, width), size)[:, 0]
    g = logits[rows]
    row_losses_(g, targets[rows], width, *Terms(*terms), factor)
    return sample_gradient(g, size, factor)


def _empty_gradients(x: Tensor, w: Tensor, needs: Sequence[bool], casts: Casts) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if needs[0] else 0, dtype=casts.grad)
    return dx, w.new_empty(w.shape if needs[1] else 0, dtype=casts.grad_weight)


# --- with gradients


class CodedLoss(torch.autograd.Function):
    """The sum of the losses of x W^T, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        owner: Tensor,
        compiled: bool,
        targets: Tensor,
        terms: tuple[int, float, float],
        chunks: int,
        needs: tuple[bool, bool],
        size: int,
        casts: Casts,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum, and a part of the logits' gradient of `size` elements."""
        ctx.casts, ctx.compiled, ctx.shape, ctx.chunks = casts, compiled, x.shape, chunks
        ctx.needs = [*needs]
        with traced(compiled):
            rows, operand = pad_rows(rows_of(x), casts), casts.precision.operand
            targets = F.pad(targets, (0, rows.shape[0] - targets.shape[0]), value=terms[0])
            a, b = lower(rows, operand, casts), lower(cast_parameter(values, casts), operand, casts)
            kept = [a.values, b.values, a.inv_scale, b.inv_scale]
            if chunks > 1:
                given = (chunks, targets, ctx.needs, casts.words, *terms, size)
                total, *kept, sample = coded_chunks(*kept, *given)
            else:
                logits = _logits(a, b, casts)
                sample = sample_before(logits, targets, size, terms, casts)
                total = coded_row_losses_(logits, targets, casts.words, *terms).sum()
                kept = [logits, *kept]
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(sample)
        return total, sample

    @staticmethod
    @first_derivative_only(*ONCE)
    def backward(ctx: Any, s: Tensor, _: Any = None) -> tuple[Tensor | None, ...]:
        casts, needs, tokens = ctx.casts, ctx.needs, ctx.shape[:-1].numel()
        if ctx.chunks > 1:
            dx, dw = scale_gradients(ctx.saved_tensors, needs, s, casts)
        else:
            dx, dw = coded_gradients(*ctx.saved_tensors, s * (1.0 / gradient_scale(casts)), needs, casts.words)
        grad_input = dx[:tokens].view(ctx.shape) if needs[0] else None
        return grad_input, None, dw if needs[1] else None, *[None] * 7
