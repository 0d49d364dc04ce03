"""The casted matmul and the islands, as functions and as modules.

**A linear layer is three matmuls**, named by their results. With x of shape (tokens, in), W of (out, in) and the
incoming gradient g of (tokens, out):

    output      = x W^T      operands in `operand`,             rounded to `compute`
    grad_input  = g W        operands in `grad_operand`, `operand`,    rounded to `grad`
    grad_weight = g^T x      operands in `grad_operand`, `operand`,    in `grad_weight`, fp32 as a rule

Each sums in fp32. Both operands are cast to the layer's own formats; none is derived from what the weight or
the input happens to be. Plain autograd would round grad_weight to the operands' dtype before the cast to the
master widens it again; here an fp32 weight gradient is fp32 from the sum on.

**An island** (norm, softmax, loss) is fp32 inside, backward too: it widens its input, and autograd narrows the
gradient only on the way out. Norms return the compute format, the loss returns fp32.

**Emulated**, a tensor is carried in fp32 and holds values of its format. Every tensor that hardware would store in
the format is rounded by the reference cast, gradients included; matmuls of such operands are exact products
summed in fp32, in an order that may differ from the hardware's. What a fused kernel keeps to itself is not
rounded: attention's probabilities stay fp32 here, where some kernels narrow them before they meet the values.

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.core.formats import FP32, Format
from halfstep.core.precision import Precision
from halfstep.core.roles import Operand, is_narrow
from halfstep.torch.cast import carried, quantize_scaled
from halfstep.torch.dtypes import DTYPES, dtype_of


@dataclass(frozen=True)
class Casts:
    """A precision in torch's terms. Compiled code reads dtypes from it and never hashes a format."""

    precision: Precision
    emulate: bool
    plain: bool  # fp32 throughout: torch's own linear will do
    compute: torch.dtype
    operand: torch.dtype
    grad: torch.dtype
    grad_operand: torch.dtype
    grad_weight: torch.dtype
    norm: torch.dtype
    softmax: torch.dtype
    loss: torch.dtype
    fused_softmax: bool  # fused attention keeps scores and softmax in fp32 whatever its inputs are


@cache
def casts_of(precision: Precision) -> Casts:
    """What a precision means here. Emulated, every tensor is carried in fp32."""

    def carrier(fmt: Format) -> torch.dtype:
        return torch.float32 if precision.emulate else dtype_of(fmt)

    return Casts(
        precision=precision,
        emulate=precision.emulate,
        plain=precision.formats == (FP32,) and precision.grad_weight == FP32,
        compute=carrier(precision.compute),
        operand=carrier(precision.operand.format),
        grad=carrier(precision.grad),
        grad_operand=carrier(precision.grad_operand.format),
        grad_weight=carrier(precision.grad_weight),
        norm=carrier(precision.norm),
        softmax=carrier(precision.softmax),
        loss=carrier(precision.loss),
        fused_softmax=precision.softmax == FP32,
    )


class Layer(nn.Module):
    """A module with a precision of its own; fp32 until a policy is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = Precision()

    @property
    def precision(self) -> Precision:
        """What the module runs in."""
        return self.casts.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.casts = casts_of(precision)


def enter(x: Tensor, casts: Casts) -> Tensor:
    """An activation in the compute format of the module it enters."""
    return rounded(x.to(casts.compute), casts)


def rounded(x: Tensor, casts: Casts) -> Tensor:
    """The result of an operation in the compute format: as it is natively, rounded where it is emulated."""
    if not casts.emulate or casts.plain:
        return x
    return _Rounded.apply(x, casts.precision.compute, casts.precision.grad)  # type: ignore[no-any-return]


def owned(parameter: Tensor, casts: Casts) -> Tensor:
    """A parameter that is not a matmul's, its gradient rounded to the format of weight gradients."""
    if casts.precision.grad_weight == FP32 or parameter.dtype != torch.float32:
        return parameter  # a bf16 parameter has a bf16 gradient as it is
    return _Rounded.apply(parameter, FP32, casts.precision.grad_weight)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
    """x W^T + b with the operands, sums and results of `casts`."""
    if casts.plain:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    y: Tensor = _Linear.apply(enter(x, casts), weight, casts)
    return y if bias is None else rounded(y + enter(owned(bias, casts), casts), casts)


def rms_norm(x: Tensor, gain: Tensor | None, casts: Casts, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain: inside in the norm format, out in compute."""
    fmt = casts.precision.norm
    gain = None if gain is None else owned(gain, casts)
    x, gain = _inside(x, casts.norm, fmt, casts), _inside(gain, casts.norm, fmt, casts)
    return enter(_inside(F.rms_norm(x, x.shape[-1:], gain, eps), casts.norm, fmt, casts), casts)


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, casts: Casts, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias: inside in the norm format, out in compute."""
    fmt = casts.precision.norm
    gain, bias = (None if p is None else owned(p, casts) for p in (gain, bias))
    x, gain, bias = (_inside(t, casts.norm, fmt, casts) for t in (x, gain, bias))
    return enter(_inside(F.layer_norm(x, x.shape[-1:], gain, bias, eps), casts.norm, fmt, casts), casts)


def softmax(x: Tensor, casts: Casts, axis: int = -1) -> Tensor:
    """exp(x) over its sum: inside in the softmax format, out in compute."""
    fmt = casts.precision.softmax
    inside = torch.softmax(_inside(x, casts.softmax, fmt, casts), axis)
    return enter(_inside(inside, casts.softmax, fmt, casts), casts)


def attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, casts: Casts) -> Tensor:
    """Causal attention; its softmax is in the softmax format, its result in compute."""
    q, k, v = enter(q_BHTK, casts), enter(k_BHTK, casts), enter(v_BHTK, casts)
    grouped = q.shape[1] != k.shape[1]
    if casts.fused_softmax:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return rounded(y, casts)
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return _narrow_attention(q, k, v, casts)


def cross_entropy(logits: Tensor, targets: Tensor, casts: Casts, softcap: float = 0.0) -> Tensor:
    """The sum of -log softmax(logits)[target] over all targets: inside and out in the loss format."""
    fmt = casts.precision.loss
    inside = _inside(logits, casts.loss, fmt, casts).flatten(0, -2)
    if softcap:
        inside = softcap * torch.tanh(inside / softcap)
    return _inside(F.cross_entropy(inside, targets.flatten(), reduction="sum"), casts.loss, fmt, casts)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor, casts: Casts) -> Tensor:
    """Rotary positions: halves of each head turn by the angle of their position; angles are fp32."""
    half = x_BHTK.shape[-1] // 2
    x = x_BHTK.float()
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return enter(x * cos_TK + turned * sin_TK, casts)


def _inside(x: Any, dtype: torch.dtype, fmt: Format, casts: Casts) -> Any:
    """A tensor (or None) in the format that an island computes in."""
    if x is None:
        return None
    if casts.emulate and fmt != FP32:
        return _Rounded.apply(x.to(dtype), fmt, fmt)
    return x.to(dtype)


class Matmul(Layer):
    """A module that multiplies activations by a matrix: what narrow operands are for."""


class CastedLinear(Matmul):
    """A linear layer that computes in its own precision, whatever its weight and input are held in."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return linear(x, self.weight, self.bias, self.casts)

    def extra_repr(self) -> str:
        """What the layer computes in, so that printing the model tells the truth."""
        outputs, inputs = self.weight.shape
        form = " emulated" if self.precision.emulate else ""
        return f"{inputs} -> {outputs}, {self.precision.operand.format} operands{form}"


class Norm(Layer):
    """Root-mean-square or layer normalization, an island."""

    def __init__(self, width: int, kind: str = "rms", gain: bool = True, bias: bool = False):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(width)) if gain else None
        self.bias = nn.Parameter(torch.empty(width)) if bias and gain and kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input."""
        if self.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.casts)
        return rms_norm(x, self.weight, self.casts)

    def extra_repr(self) -> str:
        """What the island computes in."""
        return f"{self.kind}, {self.precision.norm} inside, {self.precision.compute} out"


class _Rounded(torch.autograd.Function):
    """Rounds the value forward and the gradient backward, as storing both in narrow tensors would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Format, grad: Format) -> Tensor:
        ctx.grad = grad
        return carried(x, value)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return carried(g, ctx.grad), None, None


class _Linear(torch.autograd.Function):
    """The three matmuls of a linear layer without bias; x comes in the compute format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, casts: Casts) -> Tensor:
        p = casts.precision
        w = weight.to(casts.compute)
        if casts.emulate:
            w = carried(w, p.compute)
        ctx.save_for_backward(x, w)
        ctx.casts, ctx.weight_dtype = casts, weight.dtype
        rows = x.flatten(0, -2)
        if casts.emulate:
            y = _emulated_matmul(rows, w.t(), p.operand, p.operand, p.compute)
        else:
            y = _matmul(rows.to(casts.operand), w.t().to(casts.operand), casts.compute)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        grad_input = grad_weight = None
        g = g.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_input = _grad_input(g, w, ctx.casts).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(g, x.flatten(0, -2), ctx.casts).to(ctx.weight_dtype)
        return grad_input, grad_weight, None


def _grad_input(g: Tensor, w: Tensor, casts: Casts) -> Tensor:
    p = casts.precision
    if casts.emulate:
        return _emulated_matmul(carried(g, p.grad), w, p.grad_operand, p.operand, p.grad)
    return _matmul(g.to(casts.grad_operand), w.to(casts.operand), casts.grad)


def _grad_weight(g: Tensor, x: Tensor, casts: Casts) -> Tensor:
    p = casts.precision
    if casts.emulate:
        return _emulated_matmul(carried(g, p.grad).t(), x, p.grad_operand, p.operand, p.grad_weight)
    return _matmul(g.to(casts.grad_operand).t(), x.to(casts.operand), casts.grad_weight)


def _matmul(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a b summed in fp32, its result in `out`."""
    if out == a.dtype == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype and out == torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    # Widened operands make the same exact products and an fp32 sum; CPUs have no mixed-output matmul.
    return (a.float() @ b.float()).to(out)


def _emulated_matmul(a: Tensor, b: Tensor, a_operand: Operand, b_operand: Operand, out: Format) -> Tensor:
    a, a_inv = _lower(a, a_operand)
    b, b_inv = _lower(b.t(), b_operand)
    y = a @ b.t()
    if a_inv is not None:
        y = y * a_inv
    if b_inv is not None:
        y = y * b_inv.t()
    return carried(y, out)


def _lower(x: Tensor, operand: Operand) -> tuple[Tensor, Tensor | None]:
    """An operand's values in its format, and what undoes their scale (a column for rows), emulated."""
    if is_narrow(operand.format):
        native = operand.format in DTYPES and not torch.compiler.is_compiling()
        values, inv_scale = quantize_scaled(x, operand, native=native)
        return values.float(), inv_scale.reshape(-1, 1)
    return carried(x, operand.format), None


def _narrow_attention(q: Tensor, k: Tensor, v: Tensor, casts: Casts) -> Tensor:
    """Attention with its softmax in a narrower format than fp32, which no fused kernel offers."""
    scores = (q @ k.transpose(-2, -1)).to(casts.softmax) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    return rounded(softmax(scores, casts) @ v, casts)
