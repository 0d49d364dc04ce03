"""Attention in a precision: fused, or in steps where its weights are needed; and the softmax as an island.

The softmax of fp32 scores is fp32 inside. A fused kernel keeps its probabilities to itself, so emulation does not
round them. Attention in steps computes fp32 scores from operands in compute (`Scores`).

Shapes: B batch, T tokens of a sequence, H heads, K features of a head.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from halfstep.torch.numerics.lowering import Casts, bypass_mode, exit_island, island, round_to_compute, to_compute
from halfstep.torch.numerics.matmul import differentiable_gradients, matmul, multiply_rounded, round_tensor
from halfstep.torch.numerics.provenance import recording, transforming

# How torch may compute attention. On these devices it has kernels that never store the scores, and may take none.
FUSED_ON = ("cuda",)
ATTENTION_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
}
UNFUSED = "without a fused kernel, storing every score"


@bypass_mode
def softmax(x: Tensor, casts: Casts, axis: int = -1) -> Tensor:
    """Returns exp(x) over its sum: inside in the softmax format, out in compute."""
    return exit_island(torch.softmax(island(x, "softmax", casts), axis), "softmax", casts)


def attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    casts: Casts,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention, causal unless there is a mask (as torch's: True where a query may attend, or numbers to add)."""
    if not casts.fused_softmax:
        return weighted_attention(q_BHTK, k_BHTK, v_BHTK, casts, causal=causal, mask=mask, dropout=dropout)[0]
    with torch._C.DisableTorchFunction():
        q, k, v, mask, causal, grouped = _fused_operands(q_BHTK, k_BHTK, v_BHTK, casts, causal, mask)
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)
        return round_to_compute(y, casts) if casts.emulate else y


def _fused_operands(
    q: Tensor, k: Tensor, v: Tensor, casts: Casts, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, bool]:
    """Returns what torch's fused attention is given: operands, mask, whether it is causal, and grouped."""
    q, k, v = to_compute(q, casts), to_compute(k, casts), to_compute(v, casts)
    if mask is not None:
        mask, causal = cast_mask(mask, q.dtype), False
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # fused kernels of torch take these in halves only
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        grouped = False
    return q, k, v, mask, causal, grouped


@bypass_mode
def attention_kernel(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, casts: Casts) -> str:
    """Returns how causal attention of such tensors is computed: by which of torch's kernels, or why by none."""
    if not casts.fused_softmax:
        return f"{UNFUSED}: softmax={casts.precision.softmax} has no fused kernel"
    q, k, v, mask, causal, grouped = _fused_operands(q_BHTK, k_BHTK, v_BHTK, casts, True, None)
    return kernel_of(q, k, v, mask, causal=causal, enable_gqa=grouped)


def kernel_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> str:  # fmt: skip
    """Returns by which kernel torch's fused attention computes; if it takes none of them, why it refuses each."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    chosen = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, **options)
    if chosen != SDPBackend.MATH.value:
        return f"by torch's {ATTENTION_KERNELS.get(chosen, chosen)} kernel"
    given = torch.backends.cuda.SDPAParams(q, k, v, mask, dropout, causal, enable_gqa)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        for kernel in ("flash", "efficient", "cudnn"):
            getattr(torch.backends.cuda, f"can_use_{kernel}_attention")(given, debug=True)
    reported = [str(each.message).partition(" (Triggered internally")[0].rstrip(".") for each in reasons]
    return f"{UNFUSED}: {'; '.join(dict.fromkeys(reported)) or 'torch gives no reason'}"


@bypass_mode
def weighted_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    casts: Casts,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in steps, and its weights, which no fused kernel returns. An fp32 softmax takes fp32 scores."""
    q, k, v = to_compute(q_BHTK, casts), to_compute(k_BHTK, casts), to_compute(v_BHTK, casts)
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if casts.fused_softmax:
        if transforming():
            s_BHTT = scores_in_steps(q, k)
        else:
            s_BHTT = Scores.apply(q.flatten(0, 1), k.flatten(0, 1), casts).unflatten(0, q.shape[:2])
    else:
        s_BHTT = (q @ k.mT).to(casts.softmax)
    s_BHTT = s_BHTT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and causal:
        mask = torch.ones(s_BHTT.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        s_BHTT = s_BHTT.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        s_BHTT = s_BHTT + cast_mask(mask, s_BHTT.dtype)
    weights = softmax(s_BHTT, casts)
    if dropout:
        weights = round_to_compute(F.dropout(weights, dropout), casts)
    return round_to_compute(weights @ v, casts), weights


def cast_mask(mask: Tensor | None, dtype: torch.dtype) -> Any:
    """Casts a mask of numbers to a narrower dtype; what is finite stays finite, or masked rows become NaN."""
    if mask is None or mask.dtype in (torch.bool, dtype):
        return mask
    limits = torch.finfo(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


class Scores(torch.autograd.Function):
    """Scores of attention: q k^T in fp32, of batches in compute, with the gradients of a matmul in compute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, casts: Casts) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.casts = casts
        return matmul(q, k.mT, torch.float32)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors
        if recording():
            return differentiable_gradients(scores_in_steps, {0: q, 1: k}, ctx, g)
        to_grad = (ctx.casts.precision.grad, ctx.casts.grad, ctx.casts)
        g = round_tensor(g, *to_grad)
        return multiply_rounded(g, k, *to_grad), multiply_rounded(g.mT, q, *to_grad), None


def scores_in_steps(q: Tensor, k: Tensor) -> Tensor:
    """`Scores`."""
    return q.float() @ k.float().mT
