"""Layer and root-mean-square normalization in fp32, with fp32 gains, of inputs that may be narrow.

On an NVIDIA GPU and in eager mode each pass over a large input is one kernel of ours (kernels/normalize.py);
elsewhere torch's own function between two casts. Compiled code fuses the three by itself.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.torch.kernels import has_triton
from halfstep.torch.numerics.matmul import differentiable_gradients
from halfstep.torch.numerics.provenance import recording, transforming

WIDEST = 8192  # numbers in a row that the registers of a program can hold
LARGE = 2**22  # numbers from which on device time counts; below, a call from Python costs more than torch's own


def normalize(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: Any, dims: int, out: torch.dtype, centered: bool
) -> Tensor:
    """Returns x in `out`, over its last dims with a root mean square of 1, and if `centered` a mean of 0."""
    shape = x.shape[-dims:]
    if x.is_cuda and x.numel() >= LARGE and _is_for_kernel(x, gain, bias, shape, out):
        return apply_rows(x, gain, bias, eps, shape, out, centered)  # type: ignore[no-any-return]
    return normalize_in_steps(x, gain, bias, eps, shape, out, centered)


def _is_for_kernel(x: Tensor, gain: Any, bias: Any, shape: torch.Size, out: torch.dtype) -> bool:
    if torch.compiler.is_compiling() or transforming() or not has_triton() or shape.numel() > WIDEST:
        return False
    narrow = x.dtype is not torch.float32 or out is not torch.float32
    if gain is None and bias is not None:  # which has no gradient there
        return False
    return narrow and (gain is None or (gain.is_contiguous() and (bias is None or bias.is_contiguous())))


def normalize_in_steps(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: Any, shape: Any, out: torch.dtype, centered: bool
) -> Tensor:
    """The same in torch's own functions."""
    wide = x if x.dtype is torch.float32 else x.float()
    y = torch.layer_norm(wide, shape, gain, bias, eps) if centered else torch.rms_norm(wide, shape, gain, eps)
    if out is torch.bfloat16:
        return y.bfloat16()  # the same as below, in half of the host's time
    return y if out is torch.float32 else y.to(out)


class NormFunction(torch.autograd.Function):
    """The kernels, which take contiguous rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
        shape: torch.Size,
        out: torch.dtype,
        centered: bool,
    ) -> Tensor:
        ctx.settings = (eps, shape, out, centered)
        eps = torch.finfo(torch.float32).eps if eps is None else eps  # as torch's of an fp32 input
        y, stats = _kernels().normalize(x.contiguous(), gain, bias, shape.numel(), eps, out, centered)
        ctx.save_for_backward(x, gain, bias, stats)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias, stats = ctx.saved_tensors
        if recording():
            inputs = {0: x, 1: gain, 2: bias}
            return differentiable_gradients(
                lambda *given: normalize_in_steps(*given, *ctx.settings), inputs, ctx, g
            )
        grads = _kernels().gradients(g.contiguous(), x.contiguous(), gain, stats, ctx.settings[1].numel())
        return (*(grads if bias is not None else (*grads[:2], None)), None, None, None, None)


@cache
def _kernels() -> Any:
    from halfstep.torch.kernels import normalize  # needs Triton

    return normalize


# As matmul.eager_linear.
apply_rows = super(torch.autograd.Function, NormFunction).apply
