"""The casted matmul, three matmuls (core.precision), and the lookup of rows, with their gradients stated.

Each sums in fp32, as MLX's bf16 and fp16 matmuls do. A matmul of MLX has one dtype, so an fp32 result of half
operands comes from widened operands: the same exact products. A weight gradient in fp32 is fp32 from the sum on,
even where the weight is held in bf16 (the upper half of a split master): MLX lets a gradient be wider.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from halfstep.core.formats import FP32, Format
from halfstep.core.precision import Precision
from halfstep.core.refusal import twice_error
from halfstep.core.roles import Operand, is_narrow
from halfstep.mlx.numerics.cast import carried, quantize_scaled
from halfstep.mlx.numerics.dtypes import dtype_of
from halfstep.mlx.numerics.lowering import Casts, casts_of

product = mx.matmul  # MLX's own, before functions/ wraps it for the code of models


def multiply(x: mx.array, weight: mx.array, casts: Casts) -> mx.array:
    """Returns x W^T in compute, where x comes in compute."""
    return _three_matmuls(casts.precision)(x, weight)


def look_up(weight: mx.array, index: mx.array, casts: Casts) -> mx.array:
    """Returns rows of a table in fp32. MLX would sum their gradients in the dtype of the table."""
    return _rows(casts.precision.grad_weight)(weight, index)


@cache
def _three_matmuls(p: Precision) -> Any:
    casts = casts_of(p)

    def forward(x: mx.array, weight: mx.array) -> mx.array:
        w = cast_to_format(weight, casts.compute, p.compute, casts)
        if casts.emulate:
            return _emulated_matmul(x, w.T, p.operand, p.operand, p.compute)
        return _matmul(x.astype(casts.operand), w.T.astype(casts.operand), casts.compute)

    def backward(primals: tuple[mx.array, mx.array], g: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        (x, weight), w = primals, cast_to_format(primals[1], casts.compute, p.compute, casts)
        rows, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if casts.emulate:
            g = carried(g, p.grad)
            grad_input = _emulated_matmul(g, w, p.grad_operand, p.operand, p.grad)
            grad_weight = _emulated_matmul(g.T, rows, p.grad_operand, p.operand, p.grad_weight)
        else:
            g = g.astype(casts.grad_operand)
            grad_input = _matmul(g, w.astype(casts.operand), casts.grad)
            grad_weight = _matmul(g.T, rows.astype(casts.operand), casts.grad_weight)
        return grad_input.reshape(x.shape), cast_weight_grad(grad_weight, weight, p.grad_weight)

    return with_gradient(forward, backward)


def _matmul(a: mx.array, b: mx.array, out: mx.Dtype) -> mx.array:
    if out == a.dtype == b.dtype:
        return product(a, b)
    return product(a.astype(mx.float32), b.astype(mx.float32)).astype(out)


def _emulated_matmul(a: mx.array, b: mx.array, a_operand: Operand, b_operand: Operand, out: Format) -> mx.array:
    a, a_inv = _lower(a, a_operand)
    b, b_inv = _lower(b.T, b_operand)
    y = a @ b.T
    if a_inv is not None:
        y = y * a_inv
    if b_inv is not None:
        y = y * b_inv.reshape(-1)
    return carried(y, out)


def _lower(x: mx.array, operand: Operand) -> tuple[mx.array, mx.array | None]:
    """Returns an operand in its format, emulated, and what undoes its scale (a column for rows)."""
    if is_narrow(operand.format):
        return _narrowing(operand)(x)  # type: ignore[no-any-return]
    return carried(x, operand.format), None


@cache
def _narrowing(operand: Operand) -> Any:
    """Makes a narrow operand: `_three_matmuls` has its gradient, and that has none."""

    def refuse(*_: Any) -> Any:
        raise twice_error()

    stated = mx.custom_function(lambda x: quantize_scaled(x, operand))
    stated.vjp(refuse)
    stated.jvp(refuse)
    return stated


@cache
def _rows(fmt: Format) -> Any:

    def backward(primals: tuple[mx.array, mx.array], g: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        weight, index = primals
        total = mx.zeros(weight.shape).at[index.reshape(-1)].add(g.reshape(-1, weight.shape[-1]))
        return cast_weight_grad(carried(total, fmt), weight, fmt), mx.zeros_like(index)

    return with_gradient(lambda weight, index: weight[index].astype(mx.float32), backward)


def cast_weight_grad(g: mx.array, parameter: mx.array, fmt: Format) -> mx.array:
    """Returns a weight gradient in fp32 if the parameter is fp32, else in the dtype of its format."""
    return g.astype(mx.float32 if parameter.dtype == mx.float32 else dtype_of(fmt))


def cast_to_format(x: mx.array, dtype: mx.Dtype, fmt: Format, casts: Casts) -> mx.array:
    """Casts an array to a format, in the dtype that carries it."""
    x = x.astype(dtype)
    return rounding(fmt, fmt)(x) if casts.emulate and fmt != FP32 else x


@cache
def rounding(value: Format, grad: Format) -> Any:
    """Returns a function that rounds the value forward and the gradient backward, as narrow storage would."""
    return with_gradient(lambda x: carried(x, value), lambda _, g, __: carried(g, grad))


def with_gradient(function: Callable[..., mx.array], backward: Callable[..., Any]) -> Any:
    """Returns the function with a stated gradient: (arguments, gradient of the result, result) -> theirs."""
    stated = mx.custom_function(function)
    stated.vjp(backward)
    return stated
