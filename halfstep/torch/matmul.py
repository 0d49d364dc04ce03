"""The matmuls of a casted layer, forward and backward: what autograd runs instead of its own rules.

Operands here have 16 bits or more; narrower ones, which need scales, are in fp8/linear.py.

Autograd keeps the gradient of an operand in the operand's dtype: a weight that is cast to bf16 for the matmul gets
a gradient that was rounded to bf16 and then widened. Here each gradient is rounded explicitly: that of an
activation to `grad`, that of a weight to `grad_weight`, fp32 as a rule, straight from the fp32 sum.

A weight comes as two tensors, its `values`, which are multiplied, and its `owner`, which gets the gradient; they
differ for a split master (split.py). None of this is differentiable twice: torch refuses it by name.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep.core.formats import Format
from halfstep.torch.cast import carried
from halfstep.torch.lowering import Casts


class Linear(torch.autograd.Function):
    """x W^T + b of an x in the compute format: the three matmuls of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
        """Returns the result."""
        w = in_compute(values, casts) if casts.emulate else values.to(casts.compute)
        ctx.save_for_backward(x, w)
        ctx.casts = casts
        rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        if casts.emulate:
            p = casts.precision
            y = _emulated_matmul(rows, w.t(), p.operand.format, p.operand.format, p.compute)
            y = y if bias is None else carried(y + in_compute(bias, casts), p.compute)
        elif bias is None:
            y = matmul(rows.to(casts.operand), w.t().to(casts.operand), casts.compute)
        else:
            y = _biased_output(rows.to(casts.operand), w.t().to(casts.operand), bias, casts)
        return y.view(*x.shape[:-1], values.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each input."""
        casts, (needs_input, _, needs_weight, needs_bias, _) = ctx.casts, ctx.needs_input_grad
        if casts.emulate:
            return _emulated_gradients(ctx, g)
        x, w = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        g = g.flatten(0, -2) if g.dim() > 1 else g.unsqueeze(0)
        operand = g.to(casts.grad_operand)
        if needs_input:
            grad_input = matmul(operand, w.to(casts.operand), casts.grad).view(x.shape)
        if needs_weight:
            rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
            grad_weight = matmul(operand.t(), rows.to(casts.operand), casts.grad_weight)
        if needs_bias:
            grad_bias = g.sum(0, dtype=torch.float32).to(casts.grad_weight)
        return grad_input, None, grad_weight, grad_bias, None


def _biased_output(x: Tensor, w: Tensor, bias: Tensor, casts: Casts) -> Tensor:
    """x W + b. An NVIDIA GPU adds the bias to the fp32 sum: a kernel and a rounding fewer than elsewhere."""
    bias = bias.to(casts.compute)
    if x.is_cuda and x.dtype == w.dtype == bias.dtype == casts.compute:
        return torch.addmm(bias, x, w)
    return matmul(x, w, casts.compute) + bias


def _emulated_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    p, needs = ctx.casts.precision, ctx.needs_input_grad
    grad_input = grad_weight = grad_bias = None
    g = carried(rows_of(g), p.grad)
    if needs[0]:
        grad_input = _emulated_matmul(g, w, p.grad_operand.format, p.operand.format, p.grad).view(x.shape)
    if needs[2]:
        formats = (p.grad_operand.format, p.operand.format, p.grad_weight)
        grad_weight = _emulated_matmul(g.t(), rows_of(x), *formats)
    if needs[3]:
        grad_bias = carried(g.sum(0, dtype=torch.float32), p.grad_weight)
    return grad_input, None, grad_weight, grad_bias, None


class Rows(torch.autograd.Function):
    """Rows of a table, in the dtype it is held in; their gradient is summed in fp32 whatever that is."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, values: Tensor, owner: Tensor, padding: int, by_frequency: bool, casts: Casts
    ) -> Tensor:
        """Returns the result."""
        ctx.save_for_backward(index)
        ctx.arguments = (values.shape[0], padding, by_frequency)
        ctx.casts = casts
        return F.embedding(index, values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each input."""
        (index,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(g.float(), index, *ctx.arguments)
        return None, None, carried(grad, ctx.casts.precision.grad_weight), None, None, None


class Scores(torch.autograd.Function):
    """Scores of attention: q k^T in fp32, of batches in compute, with the gradients of a matmul in compute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, casts: Casts) -> Tensor:
        """Returns the result."""
        ctx.save_for_backward(q, k)
        ctx.casts = casts
        return matmul(q, k.mT, torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradient of each input."""
        q, k = ctx.saved_tensors
        casts, fmt = ctx.casts, ctx.casts.precision.grad
        if casts.emulate:
            g = carried(g, fmt)
            return carried(g @ k, fmt), carried(g.mT @ q, fmt), None
        g = g.to(casts.grad)
        return g @ k, g.mT @ q, None


def rows_of(x: Tensor) -> Tensor:
    """Returns an activation as a matrix, one row per token."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def in_compute(parameter: Tensor, casts: Casts) -> Tensor:
    """Casts a parameter to the compute format."""
    p = parameter.to(casts.compute)
    return carried(p, casts.precision.compute) if casts.emulate else p


def matmul(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """Returns a b in `out`, summed in fp32."""
    if out == a.dtype == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype and out == torch.float32:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    # CPUs have no matmul with a wider result. Widened operands make the same exact products and an fp32 sum.
    return (a.float() @ b.float()).to(out)


def _emulated_matmul(a: Tensor, b: Tensor, a_format: Format, b_format: Format, out: Format) -> Tensor:
    return carried(carried(a, a_format) @ carried(b, b_format), out)
