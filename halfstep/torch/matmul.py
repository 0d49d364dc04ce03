"""The matmuls of a casted layer, forward and backward: what autograd is told to do instead of its own rules.

Here operands are in 16 bits or more; those of narrower operands, which have scales of their own, are in linear.py.

Autograd keeps the gradient of an operand in the operand's dtype: a weight that is cast to bf16 for the matmul gets
a gradient that was rounded to bf16, and widened after. Here it is said where a gradient is rounded: that of an
activation to `grad`, that of a weight to `grad_weight`, fp32 as a rule, straight from the fp32 sum.

A weight comes in two: its `numbers`, which are multiplied, and its `owner`, the tensor that the gradient belongs
to. They differ where the numbers are the bf16 half of a split master (split.py).

None of this is differentiable twice: torch refuses the gradient of a gradient, and says that it is this.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep.core.formats import Format
from halfstep.torch.cast import carried

if TYPE_CHECKING:
    from halfstep.torch.layers import Casts


def multiply(x: Tensor, numbers: Tensor, owner: Tensor, bias: Tensor | None, casts: "Casts") -> Tensor:
    """x W^T + b of an x in the compute format."""
    return _Linear.apply(x, numbers, owner, bias, casts)  # type: ignore[no-any-return]


def look_up(
    index: Tensor, numbers: Tensor, owner: Tensor, padding: int, by_frequency: bool, casts: "Casts"
) -> Tensor:
    """Rows of a table, as it holds them; their gradient is summed in fp32."""
    return _Rows.apply(index, numbers, owner, padding, by_frequency, casts)  # type: ignore[no-any-return]


def scores(q: Tensor, k: Tensor, casts: "Casts") -> Tensor:
    """q k^T in fp32, of batches of matrices in the compute format."""
    return _Scores.apply(q, k, casts)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """The three matmuls of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, numbers: Tensor, owner: Tensor, bias: Tensor | None, casts: "Casts"
    ) -> Tensor:
        w = in_compute(numbers, casts)
        ctx.save_for_backward(x, w)
        ctx.casts = casts
        p, rows = casts.precision, rows_of(x)
        if casts.emulate:
            y = _emulated_matmul(rows, w.t(), p.operand.format, p.operand.format, p.compute)
        else:
            y, bias = _native(rows, w, bias, casts), None
        if bias is not None:
            y = carried(y + in_compute(bias, casts), p.compute)
        return y.view(*x.shape[:-1], numbers.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        casts, p = ctx.casts, ctx.casts.precision
        grad_input = grad_weight = grad_bias = None
        g = rows_of(g)
        if ctx.needs_input_grad[0]:
            grad_input = _grad_input(g, w, casts).view(x.shape)
        if ctx.needs_input_grad[2]:
            grad_weight = _grad_weight(g, rows_of(x), casts)
        if ctx.needs_input_grad[3]:
            wide = (carried(g, p.grad) if casts.emulate else g).sum(0, dtype=torch.float32)
            grad_bias = carried(wide, p.grad_weight) if casts.emulate else wide.to(casts.grad_weight)
        return grad_input, None, grad_weight, grad_bias, None


class _Rows(torch.autograd.Function):
    """Rows of a table; their gradient is summed in fp32 whatever the table is held in."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, numbers: Tensor, owner: Tensor, padding: int, by_frequency: bool, casts: "Casts"
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.arguments = (numbers.shape[0], padding, by_frequency)
        ctx.casts = casts
        return F.embedding(index, numbers)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(g.float(), index, *ctx.arguments)
        return None, None, carried(grad, ctx.casts.precision.grad_weight), None, None, None


class _Scores(torch.autograd.Function):
    """Scores of attention; their gradients are those of a matmul in compute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, casts: "Casts") -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.casts = casts
        return matmul(q, k.mT, torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        casts, fmt = ctx.casts, ctx.casts.precision.grad
        if casts.emulate:
            g = carried(g, fmt)
            return carried(g @ k, fmt), carried(g.mT @ q, fmt), None
        g = g.to(casts.grad)
        return g @ k, g.mT @ q, None


def rows_of(x: Tensor) -> Tensor:
    """An activation as a matrix, a row for each token."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def in_compute(parameter: Tensor, casts: "Casts") -> Tensor:
    """A parameter in the compute format."""
    p = parameter.to(casts.compute)
    return carried(p, casts.precision.compute) if casts.emulate else p


def _native(x: Tensor, w: Tensor, bias: Tensor | None, casts: "Casts") -> Tensor:
    """x W^T + b by the framework's matmul.

    On an NVIDIA GPU the bias is added to the fp32 sum, before it is rounded: a kernel less, and a rounding less
    than elsewhere, where sums are rounded before a bias is added.
    """
    x, w = x.to(casts.operand), w.t().to(casts.operand)
    if bias is None:
        return matmul(x, w, casts.compute)
    bias = in_compute(bias, casts)
    if x.is_cuda and x.dtype == w.dtype == bias.dtype == casts.compute:
        return torch.addmm(bias, x, w)
    return matmul(x, w, casts.compute) + bias


def _grad_input(g: Tensor, w: Tensor, casts: "Casts") -> Tensor:
    p = casts.precision
    if casts.emulate:
        return _emulated_matmul(carried(g, p.grad), w, p.grad_operand.format, p.operand.format, p.grad)
    return matmul(g.to(casts.grad_operand), w.to(casts.operand), casts.grad)


def _grad_weight(g: Tensor, x: Tensor, casts: "Casts") -> Tensor:
    p = casts.precision
    if casts.emulate:
        g = carried(g, p.grad).t()
        return _emulated_matmul(g, x, p.grad_operand.format, p.operand.format, p.grad_weight)
    return matmul(g.to(casts.grad_operand).t(), x.to(casts.operand), casts.grad_weight)


def matmul(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a b summed in fp32, its result in `out`."""
    if out == a.dtype == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype and out == torch.float32:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    # Widened operands make the same exact products and an fp32 sum; CPUs have no mixed-output matmul.
    return (a.float() @ b.float()).to(out)


def _emulated_matmul(a: Tensor, b: Tensor, a_format: Format, b_format: Format, out: Format) -> Tensor:
    """Exact products of numbers of the formats, summed in fp32, rounded to `out`."""
    return carried(carried(a, a_format) @ carried(b, b_format), out)
