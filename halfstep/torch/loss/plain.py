"""Cross-entropy of narrow logits, fp32 inside, and of a linear layer whose logits are not kept.

torch widens logits before their loss: those of 32 x 1024 tokens and 50,304 columns, 3.3 GB, become four tensors of
6.6 GB in eager mode. Here no number of them is ever stored in fp32 (kernels/cross_entropy.py):

**Rows** (`RowCrossEntropy`) of the caller's logits. Forward, they are read once. Backward, they are read once
more, and the gradient is written to memory of its own, because the caller may read the logits later. Each row's
incoming gradient is in it before it is rounded.

**A linear layer** (`LinearCrossEntropy`), x W^T + b. The logits are ours alone, so their gradient g is written
over them in the forward pass. What comes in later, s, is one number:

    grad_input = s (g W)        grad_weight = s (g^T x)        grad_bias = s sum(g)

Each is summed in fp32 and multiplied there, before it is rounded. So g holds differences of shares, at most 1, and
neither 1 / tokens nor a loss scale. In fp16 it is multiplied by 2^14, which keeps shares from 2^-28 on normal, and
s is divided by it.

**A layer of a third-party model**, compiled: the graph shows the layer that made the logits (fusion/loss.py).

**Chunks.** With n > 1, tokens are taken in n parts of one size, and the logits of one part exist at a time. What
is kept for the backward pass is the gradients, in fp32. Each chunk more saves memory of logits, and costs a pass
over the weight's gradient. Logits of 2 GB and more are made in chunks unasked: what they save is a sixth of all
memory of a GPT-2 124M, and what they cost less than a hundredth of its step.

**Where.** The kernel is for NVIDIA GPUs with Triton; elsewhere the operations compute the same in torch's
functions. torch.func gets torch's functions too; second derivatives are refused.
"""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from halfstep.core.arrays.cast import GOLDEN, MIXERS
from halfstep.core.errors import LossError
from halfstep.core.formats import Format
from halfstep.torch.kernels import has_triton
from halfstep.torch.numerics.cast import quantize
from halfstep.torch.numerics.dtypes import NARROW
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.matmul import first_derivative_only, matmul, rows_of, tensor_core_padding
from halfstep.torch.numerics.provenance import compiling, transforming

LEAN_CHUNKS = 4  # a quarter of the logits is less than what two or three layers keep; each costs a pass
# What chunks that nobody asked for have at least: on an H200, at 700 TFLOP/s and 4 TB/s, a pass over the weight's
# gradient takes a twentieth of the time of the matmuls of 4096 tokens.
LARGE_CHUNK, TOKENS_OF_CHUNK = 10**9, 4096  # bytes of logits, tokens


class Terms(NamedTuple):
    """What the loss of a row consists of; the arguments of torch's `cross_entropy`, and two that it lacks."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0  # logits are softcap tanh(logits / softcap); 0 for none
    z_loss: float = 0.0  # times the square of log(sum(exp(logits)))


# fp16 has no exponent to spare for shares of a vocabulary.
SCALES = {torch.float16: 2.0**14}
ONCE = (
    "cross-entropy in one pass over the logits",
    "compute it in torch's own functions, of logits in fp64: F.cross_entropy(linear(x).double(), targets)",
)
REDUCTIONS = ("none", "mean", "sum")

PLAIN = Terms()
_WORD = 0xFFFFFFFF

# --- the operations, opaque to compilers


def operation(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that writes to nothing an operation of torch, for compilers and for modes that watch.

    In eager mode its kernel is called directly: an operation that is written in Python costs 30 us more of host
    time.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, function, mutates_args=())

        @wraps(function)
        def call(logits: Tensor, *rest: Any) -> Any:
            if compiling() or not has_kernel(logits) or type(logits) is not Tensor or _len_torch_dispatch_stack():
                return op(logits, *rest)
            return function(logits, *rest)

        call.register_fake = op.register_fake  # type: ignore[attr-defined]
        return call

    return decorate


@operation("halfstep::cross_entropy")
def row_losses(
    logits: Tensor, targets: Tensor, width: int, ignored: int, smoothing: float, cap: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row in fp32, and the logarithm of its sum of exponentials."""
    terms = Terms(ignored, smoothing, cap, z_loss)
    if has_kernel(logits):
        return kernels().losses(logits, targets, width, terms)  # type: ignore[no-any-return]
    return losses_in_steps(logits[:, :width], targets, terms)[:2]


@row_losses.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_rows(logits), _empty_rows(logits)


@operation("halfstep::cross_entropy_grad")
def row_gradients(
    logits: Tensor, targets: Tensor, lses: Tensor, factors: Tensor, width: int, ignored: int, smoothing: float,
    cap: float, z_loss: float, kept: int = 0,
) -> Tensor:  # fmt: skip
    """Returns the gradient of each row's loss, times its factor, in the dtype of the logits; `kept` as below."""
    terms = Terms(ignored, smoothing, cap, z_loss)
    grads = logits.new_empty(logits.shape)
    if has_kernel(logits):
        kernels().gradients(logits, grads, targets, lses, factors, width, terms, kept)
    else:
        made = losses_in_steps(logits[:, :width], targets, terms)[2] * factors[:, None]
        _store(grads, round_stochastically(made, logits[:, :width], targets, kept), width)
    return grads


@row_gradients.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("halfstep::cross_entropy_", mutates_args=("logits",))
def row_losses_(
    logits: Tensor, targets: Tensor, width: int, ignored: int, smoothing: float, cap: float, z_loss: float,
    factor: float, kept: int = 0,
) -> Tensor:  # fmt: skip
    """Returns the loss of each row in fp32; `factor` times their gradient is written over the logits.

    With `kept` bits of mantissa, rounded stochastically; 0 keeps all of them.
    """
    terms = Terms(ignored, smoothing, cap, z_loss)
    if has_kernel(logits):
        given = (logits, targets, width, terms, factor, kept)
        return kernels().losses_and_gradients(*given)  # type: ignore[no-any-return]
    losses, _, grads = losses_in_steps(logits[:, :width], targets, terms)
    _store(logits, round_stochastically(grads * factor, logits[:, :width], targets, kept), width)
    return losses


@row_losses_.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return _empty_rows(logits)


@torch.library.custom_op("halfstep::linear_cross_entropy", mutates_args=())
def linear_gradients(
    rows: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, chunks: int, needs: list[bool], width: int,
    ignored: int, smoothing: float, cap: float, z_loss: float, factor: float, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the sum of losses of x W^T + b, `factor` times its gradients, and some of the logits' own.

    One operation, because a compiler that sees the parts keeps the logits of all chunks for later. All are fp32. A
    gradient that is not needed is empty.
    """
    parts, start = split_chunks(rows, chunks), 0
    total, grad_input, grad_weight, grad_bias, sample = empty_gradients(rows, w, needs, width, parts, size)
    for some, wanted in zip(parts, split_chunks(targets, chunks), strict=True):
        first = start == 0
        logits = _logits(some, w, b)
        losses = row_losses_(logits, wanted, width, ignored, smoothing, cap, z_loss, factor).sum()
        total = losses if first else total + losses
        sample = sample_gradient(logits[:, :width], size, factor) if first else sample
        if needs[0]:
            grad_input[start : start + some.shape[0]] = matmul(logits, w, torch.float32)
        if needs[1] and rows.is_cuda:  # whose matmul adds to a sum by itself
            torch.ops.aten.addmm.dtype_out(  # a name for its arguments would keep the logits
                grad_weight, logits.t(), some, torch.float32, beta=0 if first else 1, out=grad_weight
            )
        elif needs[1]:
            add_or_begin(grad_weight, matmul(logits.t(), some, torch.float32), first)
        if needs[2]:
            add_or_begin(grad_bias, logits.sum(0, dtype=torch.float32), first)
        start += some.shape[0]
        del logits  # before the next are made
    return total, grad_input, grad_weight, grad_bias, sample


@linear_gradients.register_fake
def _(rows: Tensor, w: Tensor, b: Any, _: Any, chunks: int, needs: list[bool], width: int, *rest: Any) -> Any:
    return empty_gradients(rows, w, needs, width, split_chunks(rows, chunks), rest[-1])


def empty_gradients(
    rows: Tensor, w: Tensor, needs: Sequence[bool], width: int, parts: Sequence[Tensor], size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns memory for a sum of losses, needed gradients, and a sample of that of the first part's logits."""
    shapes = (rows.shape, w.shape, w.shape[:1])
    wanted = [shape if needed else 0 for shape, needed in zip(shapes, needs, strict=True)]
    logits = rows.new_empty(1, 1).expand(parts[0].shape[0], width)
    sampled = evenly_spaced(logits, size).numel() if size else 0
    total, *grads = (rows.new_empty(shape, dtype=torch.float32) for shape in ((), *wanted, sampled))
    return total, *grads  # type: ignore[return-value]


def sample_gradient(g: Tensor, size: int, factor: float) -> Tensor:
    """Returns a part of the logits' gradient in fp32, in one dimension; empty if `size` is 0."""
    return (evenly_spaced(g, size) if size else g[:0, :0]).reshape(-1).float() / factor


def evenly_spaced(x: Tensor, size: int) -> Tensor:
    """Returns a view of at most `size` elements: whole rows if they fit, evenly spaced over dimensions before."""
    for dim in range(x.dim() - 1, -1, -1):
        there = x.shape[dim]
        kept = min(there, max(size, 1))
        step = there // max(kept, 1)
        if kept < there:
            start = (there - (kept - 1) * step - 1) // 2
            x = x[(slice(None),) * dim + (slice(start, start + (kept - 1) * step + 1, step),)]
        size //= max(kept, 1)
    return x


def add_or_begin(total: Tensor, more: Tensor, first: bool) -> None:
    """Adds to a sum, or begins it."""
    if first:
        total.copy_(more)
    else:
        total.add_(more)


def torch_row_losses(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """Returns the loss of each row in torch's own functions, in fp32."""
    ignored, smoothing, cap, z_loss = terms
    z = logits.float()
    z = cap * torch.tanh(z / cap) if cap else z
    losses = F.cross_entropy(z, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="none")
    if not z_loss:
        return losses
    return losses + z_loss * torch.where(targets != ignored, torch.logsumexp(z, -1), 0.0).square()


def losses_in_steps(logits: Tensor, targets: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """The plain reference: loss, logarithm of the sum of exponentials and gradient of each row, in fp32."""
    _, smoothing, cap, z_loss = terms
    z, here = logits.float(), targets != terms.ignore_index
    tanh = torch.tanh(z / cap) if cap else None
    z = z if tanh is None else cap * tanh
    lses = torch.logsumexp(z, -1)
    grads = torch.exp(z - lses[:, None]) * (1 + 2 * z_loss * lses[:, None]) - smoothing / z.shape[1]
    grads.scatter_add_(1, torch.where(here, targets, 0)[:, None], torch.full_like(lses, smoothing - 1)[:, None])
    grads = grads if tanh is None else grads * (1 - tanh * tanh)
    return torch_row_losses(logits, targets, terms), lses, torch.where(here[:, None], grads, 0.0)


def round_stochastically(grads: Tensor, logits: Tensor, targets: Tensor, kept: int) -> Tensor:
    """Rounds gradients to the bits of mantissa that are `kept`; without any, to the nearest in the logits' dtype.

    Stochastically: a number that lies a quarter of the way up goes up in one case of four, so that it is right on
    average. What the columns of a row draw are multiples of the golden ratio, and begin where its target and two
    of its logits put them: the same row has the same gradient, wherever it stands.
    """
    width = logits.shape[1]
    if not kept:
        return grads.to(logits.dtype).float()

    def bits_of(column: Tensor) -> Tensor:
        there = (column >= 0) & (column < width)
        picked = logits.gather(1, torch.where(there, column, 0)[:, None])[:, 0].float()
        return torch.where(there, picked, 0.0).view(torch.int32).long() & _WORD

    h = (bits_of(targets) ^ (bits_of(targets ^ 1) >> 16)) + targets.long() * GOLDEN & _WORD
    h = (h ^ (h >> 16)) * MIXERS[0] & _WORD
    h = (h ^ (h >> 15)) * MIXERS[1] & _WORD
    column = torch.arange(width, device=logits.device)
    words = _WORD - ((h ^ (h >> 16))[:, None] + column * GOLDEN & _WORD)
    return quantize(grads, Format(8, kept), overflow="inf", rounding="stochastic", bits=words)


def _store(out: Tensor, grads: Tensor, width: int) -> None:
    out[:, :width] = grads
    out[:, width:] = 0


def _empty_rows(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def has_kernel(logits: Tensor) -> bool:
    """Whether the kernel runs on the device of a tensor."""
    return logits.is_cuda and has_triton()


@cache
def kernels() -> Any:
    """Returns the module of the kernel."""
    from halfstep.torch.kernels import cross_entropy  # needs Triton

    return cross_entropy


# --- with gradients


class RowCrossEntropy(torch.autograd.Function):
    """The loss of each row of the caller's logits, in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, terms: Terms, kept: int) -> Tensor:
        losses, lses = row_losses(logits, targets, logits.shape[1], *terms)
        ctx.save_for_backward(logits, targets, lses)
        ctx.terms = (*terms, kept)
        return losses

    @staticmethod
    @first_derivative_only(*ONCE)
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lses = ctx.saved_tensors
        given = (logits, targets, lses, g.contiguous(), logits.shape[1], *ctx.terms)
        return row_gradients(*given), None, None, None


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of x W^T + b, in fp32; operands as in matmul.Linear. `needs`: which have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        owner: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: Terms,
        chunks: int,
        needs: tuple[bool, bool, bool],
        size: int,
        width: int,
        casts: Casts,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum, and a part of the logits' gradient of `size` elements."""
        rows, w, b = operands(x, values, bias, casts)
        ctx.shape, ctx.rows, ctx.casts, ctx.needs, ctx.chunks = x.shape, values.shape[0], casts, needs, chunks
        scale = SCALES.get(w.dtype, 1.0)
        if chunks > 1:
            given = (chunks, list(needs), width, *terms, scale, size)
            total, *kept, sample = linear_gradients(rows, w, b, targets, *given)
        else:
            kept = [rows, w, logits := _logits(rows, w, b)]
            total = row_losses_(logits, targets, width, *terms, scale).sum()
            sample = sample_gradient(logits[:, :width], size, scale)
        ctx.mark_non_differentiable(sample)
        ctx.save_for_backward(*kept)
        return total, sample

    @staticmethod
    @first_derivative_only(*ONCE)
    def backward(ctx: Any, g: Tensor, _: Any = None) -> tuple[Tensor | None, ...]:
        casts, needs = ctx.casts, ctx.needs
        factor = g / SCALES.get(casts.compute, 1.0)
        if ctx.chunks > 1:
            grads = ctx.saved_tensors
        else:
            rows, w, g = ctx.saved_tensors
            grads = (
                matmul(g, w, torch.float32) if needs[0] else None,
                matmul(g.t(), rows, torch.float32) if needs[1] else None,
                g.sum(0, dtype=torch.float32) if needs[2] else None,
            )
        dx, dw, db = scale_gradients(grads, needs, factor, casts)
        dx = None if dx is None else dx.view(ctx.shape)
        dw, db = (None if grad is None else grad[: ctx.rows] for grad in (dw, db))
        return dx, None, dw, db, *[None] * 7


def scale_gradients(grads: Sequence[Any], needs: Sequence[bool], factor: Tensor, casts: Casts) -> list[Any]:
    """Returns those of an input, a weight and a bias that are needed, times what came in, each in its format."""
    dtypes = (casts.grad, casts.grad_weight, casts.grad_weight)
    rows = zip(grads, needs, dtypes, strict=False)
    return [(grad * factor).to(dtype) if needed else None for grad, needed, dtype in rows]


def operands(x: Tensor, values: Tensor, bias: Tensor | None, casts: Casts) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the rows of x, and W and b in compute, with as many columns as tensor cores want (matmul.Linear)."""
    compute = casts.compute
    w, b = values.to(compute), None if bias is None else bias.to(compute)
    lacking = tensor_core_padding(w.shape[0], x)
    if lacking:
        w, b = F.pad(w, (0, 0, 0, lacking)), b if b is None else F.pad(b, (0, lacking))
    return rows_of(x), w, b


def _logits(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    # As matmul.Linear: an NVIDIA GPU adds the bias to the fp32 sum.
    return F.linear(rows, w, b) if b is None or rows.is_cuda else F.linear(rows, w) + b


def chunks_for(tokens: int, columns: int, asked: int) -> int:
    """Returns in how many chunks 16-bit logits are made."""
    return max(asked, min(tokens // TOKENS_OF_CHUNK, 2 * tokens * columns // LARGE_CHUNK))


def split_chunks(rows: Tensor, chunks: int, multiple: int = 1) -> Sequence[Tensor]:
    """Returns the chunks of tokens, of one size, a multiple of what matmuls sum over; the last may be smaller."""
    return rows.split(max(1, -(-rows.shape[0] // (chunks * multiple))) * multiple)


# --- entry points


def why_no_kernel(beside: Tensor, dtype: torch.dtype, casts: Casts | None = None) -> str:
    """Returns why the kernel is not for logits in this dtype, on the device of a tensor; empty if it is."""
    if casts is not None and (casts.emulate or casts.loss is not torch.float32):
        return "the loss is emulated or not in fp32"
    if dtype not in NARROW:
        return "logits are neither bf16 nor fp16"
    if not has_kernel(beside):
        return "it needs an NVIDIA GPU and Triton"
    return "torch.func transforms it" if transforming() else ""


def check_targets(targets: Tensor, rows: torch.Size) -> None:
    """Refuses targets that are not one class for each row."""
    if targets.shape != rows or targets.is_floating_point():
        given = f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"
        raise LossError(
            f"targets are {given}, and the rows have shape {tuple(rows)}",
            hint="give the index of a class for each row",
        )


def row_cross_entropy(logits: Tensor, targets: Tensor, terms: Terms, kept: int = 0) -> Tensor:
    """Returns the loss of each row of logits, in fp32; `kept` are the bits of mantissa of its gradient, if few."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return RowCrossEntropy.apply(logits, targets, terms, kept)  # type: ignore[no-any-return]
    return row_losses(logits, targets, logits.shape[1], *terms)[0]


def torch_loss(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, *, kept: int = 0,
) -> Tensor | None:  # fmt: skip
    """Returns what `F.cross_entropy` of these arguments is, by the kernel; None if it is not for them.

    `kept` are the bits of mantissa that the layer which made the logits keeps of their gradient, if it is narrow.
    """
    others = weight is not None or size_average is not None or reduce is not None
    if (
        others
        or input.dim() != 2
        or target.dim() != 1
        or target.is_floating_point()
        or input.shape[0] != target.shape[0]  # which torch refuses
        or reduction not in REDUCTIONS
        or why_no_kernel(input, input.dtype)
    ):
        return None
    terms = Terms(ignore_index, label_smoothing)
    if reduction == "none":
        return row_cross_entropy(input, target, terms, kept)
    total = row_cross_entropy(input, target, terms, kept).sum()
    return total if reduction == "sum" else mean_loss(total, target, ignore_index)


def linear_losses(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, targets: Tensor, casts: Casts, terms: Terms,
    chunks: int = 1, size: int = 0, width: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the sum of the losses of x W^T + b, of an x in compute; `targets` are of one dimension.

    With a `width`, of the first columns alone: the others pad a vocabulary. Beside it, `size` elements of the
    logits' gradient for a loss whose own is 1, in fp32; None without gradients.
    """
    needs = (x.requires_grad, owner.requires_grad, bias is not None and bias.requires_grad)
    chunks = chunks_for(targets.shape[0], values.shape[0], chunks)
    if torch.is_grad_enabled() and any(needs):
        settings = (terms, chunks, needs, size, width or values.shape[0], casts)
        return LinearCrossEntropy.apply(x, values, owner, bias, targets, *settings)  # type: ignore[no-any-return]
    rows, w, b = operands(x, values, bias, casts)
    pairs = zip(split_chunks(rows, chunks), split_chunks(targets, chunks), strict=True)
    width = width or values.shape[0]
    sums = [row_losses(_logits(some, w, b), wanted, width, *terms)[0].sum() for some, wanted in pairs]
    return torch.stack(sums).sum(), None


def mean_loss(total: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Returns the mean over targets of a sum of losses; of none it is NaN with a gradient of zero, as torch's."""
    count = (targets != ignored).sum()
    return total / count.clamp(min=1) + torch.where(count > 0, 0.0, torch.nan)
