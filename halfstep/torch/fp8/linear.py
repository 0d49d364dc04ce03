"""The three matmuls of a linear layer with narrow operands (fp8), natively and emulated by the same recipe.

1. The matmuls. Each is a b^T of two row-major matrices whose last dimension is summed over, the one layout that
   fp8 tensor cores take. So each tensor takes part twice, once as it is and once transposed:

       output      = x W^T      x (tokens, in)       W (out, in)
       grad_input  = g W        g (tokens, out)      W^T (in, out)
       grad_weight = g^T x      g^T (out, tokens)    x^T (in, tokens)

2. An operand is (a) multiplied by a power of two that brings its amax into the top binade of the format, (b)
   clamped, (c) rounded to nearest even. The product is summed in fp32, multiplied by both inverse scales there,
   and rounded once. A tensor or row with an infinity or NaN gets the scale NaN: the step is skipped.

3. Granularity. With one scale per tensor the transposed operand has the same numbers, so x is kept for the
   backward pass as 8-bit codes. With one scale per row (`:row`), rows are those of the matmul at hand: x has other
   scales along tokens than along features, so x itself is kept and cast again. The weight always is.

4. Delayed operands (`:delayed`) are scaled by the largest amax of earlier updates (delayed.py), or by their own
   until there is one. A larger number saturates; an infinity does not, it becomes NaN.

5. Sizes. `in` and `out` must be multiples of 16, which is checked when a model is prepared (fp8_choice.py). Where
   tokens are summed over, rows of zeros pad them, which adds exact zeros to the sum.

6. Sums are fp32 when emulated and natively on a CPU. An NVIDIA tensor core aligns the products of an instruction
   to the largest and keeps some 14 bits; cuBLAS adds such partial sums in fp32, unless fast accumulation is asked
   for (`matmul=fp32:fast`), which only the forward matmul uses. benchmarks/prove/fp8_bits.py holds the bound.

7. A narrow operand that meets a wide one (`compute=e4m3` without `grad`): no hardware multiplies such a pair. Its
   numbers are exact in the wide format, which multiplies them; the scale is undone after the sum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import Format
from halfstep.core.refusal import NARROW_ONCE
from halfstep.core.roles import Operand, is_narrow
from halfstep.torch.cast import amax_of, carried, quantize_scaled
from halfstep.torch.dtypes import DTYPES, ROWS_INTO_FP32, dtype_of
from halfstep.torch.fp8.delayed import History
from halfstep.torch.lowering import Casts
from halfstep.torch.matmul import apply_linear, in_compute, matmul, once, refuse_transforms, rows_of
from halfstep.torch.tracing import compiling, traced

MULTIPLE = 16  # of elements: what the sizes of a native fp8 matmul must be


class Lowered(NamedTuple):
    """An operand as a matmul takes it: numbers of its format, (rows, summed over), and what undoes their scale."""

    values: Tensor
    inv_scale: Tensor | None = None  # a scalar, or (rows, 1); None if the operand is wide


# --- entry points


def narrow_linear(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, casts: Casts, history: History | None
) -> Tensor:
    """x W^T + b of an x in compute, some operands narrow; delayed ones follow their own amax without a history."""
    if x.numel() == 0:  # no kernel takes a batch without tokens, which an expert of a mixture may get
        added = None if bias is None else bias.detach()
        return apply_linear(x, values, owner, added, bias, casts.wide)
    refuse_transforms(*NARROW_ONCE)
    amaxes = probe = None
    if history is not None and casts.delayed:
        amaxes, probe = history.amaxes, history.probe
        if not (x.requires_grad or owner.requires_grad):
            probe = probe.detach()  # no backward pass will come through here
    assert casts.in_graph is not None
    return casts.in_graph(casts.words, x, values, owner, bias, amaxes, probe, compiling())


def in_graph(casts: Casts) -> Callable[..., Tensor]:
    """Returns the three matmuls as one function for dynamo's graph: to interpret it in every layer takes long."""

    def call(words: str, *given: Any) -> Tensor:
        return _Narrow.apply(*given, casts)  # type: ignore[no-any-return]

    return torch.compiler.allow_in_graph(call)


# --- an operand, and the product of two


def lower(x: Tensor, operand: Operand, casts: Casts, amax: Tensor | None = None) -> Lowered:
    """Casts a matrix to an operand; its scales follow its own amax unless one is given."""
    if not is_narrow(operand.format):
        return Lowered(carried(x, operand.format) if casts.emulate else x.to(dtype_of(operand.format)))
    if amax is None:
        amax = amax_of(x, operand)
    elif operand.amax == "delayed":
        x = x.masked_fill(x.isinf(), float("nan"))  # an amax of earlier updates does not show it
    # In eager mode torch's own conversion is many times faster than ours and makes the same numbers.
    native = not casts.emulate or (operand.format in DTYPES and not compiling())
    values, inv_scale = quantize_scaled(x, operand, amax=amax, native=native)
    return Lowered(values.float() if casts.emulate else values.contiguous(), inv_scale)


def product(
    a: Lowered,
    b: Lowered,
    out: Format,
    dtype: torch.dtype,
    casts: Casts,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Returns a b^T + bias, summed and unscaled in fp32, then rounded to `out`, which natively is `dtype`."""
    if not casts.emulate and a.inv_scale is not None and b.inv_scale is not None:
        return _scaled_product(a.values, b.values.t(), a.inv_scale, b.inv_scale, bias, dtype, fast)
    left, right = a.values, b.values
    if not casts.emulate:
        wide = left.dtype if a.inv_scale is None else right.dtype
        left, right = left.to(wide), right.to(wide)
    y = matmul(left, right.t(), torch.float32)
    if a.inv_scale is not None:
        y = y * a.inv_scale
    if b.inv_scale is not None:
        y = y * b.inv_scale.reshape(1, -1)
    y = carried(y, out) if casts.emulate else y.to(dtype)
    if bias is None:
        return y
    return carried(y + bias, out) if casts.emulate else y + bias


def _scaled_product(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """torch's own product of a row-major and a column-major 8-bit matrix, unscaled in its epilogue."""
    settings: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast}
    if a_inv.dim() == 0 and b_inv.dim() == 0:
        if a.is_cuda and bias is not None and bias.dtype == dtype:
            # An NVIDIA GPU adds the bias to the fp32 sum: one rounding fewer than elsewhere.
            return torch._scaled_mm(a, b, a_inv, b_inv, bias, **settings)
        y = torch._scaled_mm(a, b, a_inv, b_inv, **settings)
    else:
        # A kernel takes one scale per row of both operands, or one scale for each operand.
        a_inv = a_inv.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        b_inv = b_inv.reshape(1, -1).expand(1, b.shape[1]).contiguous()
        if dtype != torch.float32 or ROWS_INTO_FP32.get(a.device.type, False):
            y = torch._scaled_mm(a, b, a_inv, b_inv, **settings)
        else:
            # Powers of two commute with every rounding of the sum, so they may come after it.
            one = torch.ones((), device=a.device)
            y = torch._scaled_mm(a, b, one, one, **settings) * a_inv * b_inv
    return y if bias is None else y + bias


# --- the three matmuls, forward and backward


class _Narrow(torch.autograd.Function):
    """The three matmuls. Where there is a `probe`, its gradient is the amax of each operand (delayed.py)."""

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
        casts: Casts,
    ) -> Tensor:
        ctx.casts, ctx.compiled, ctx.delayed = casts, compiled, history is not None
        with traced(compiled):
            p, tokens = casts.precision, rows_of(x).shape[0]
            # 1. Operands in compute; tokens padded, since the backward pass sums over them.
            rows, w = _padded(rows_of(x), casts), in_compute(values, casts)
            # 2. The amax that scales each, from earlier updates if they are delayed.
            past = None if history is None else history.amax(dim=1)
            x_amax, x_now = _amax(rows, p.operand, past, 0)
            w_amax, w_now = _amax(w, p.operand, past, 1)
            # 3. The casts, and output = x W^T + b.
            a, b = lower(rows, p.operand, casts, x_amax), lower(w, p.operand, casts, w_amax)
            added = None if bias is None else in_compute(bias, casts)
            y = product(_first(a, tokens), b, p.compute, casts.compute, casts, bias=added, fast=casts.fast)
            # 4. For the backward pass: x as codes, or as it came if each row has a scale; scales and amaxes.
            scales = [a.inv_scale, w_amax] if _has_one_scale(p.operand) else []
            amaxes = [] if past is None else [past, torch.stack([x_now, w_now])]
            ctx.save_for_backward(rows if _has_row_scales(p.operand) else a.values, values, *scales, *amaxes)
        return y.view(*x.shape[:-1], values.shape[0]).detach()  # no view to autograd, as in matmul.py

    @staticmethod
    @once(*NARROW_ONCE)
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with traced(ctx.compiled):
            casts, p = ctx.casts, ctx.casts.precision
            kept, values, *rest = ctx.saved_tensors
            x_inv, w_amax = rest[:2] if _has_one_scale(p.operand) else (None, None)
            past, now = rest[-2:] if ctx.delayed else (None, None)
            shape, tokens = (*g.shape[:-1], values.shape[1]), rows_of(g).shape[0]
            g = rows_of(carried(g, p.grad) if casts.emulate else g)
            grad_input = grad_weight = grad_bias = grad_probe = None
            # 1. grad_bias, from the gradient before its cast.
            if ctx.needs_input_grad[3]:
                wide = g.sum(0, dtype=torch.float32)
                grad_bias = carried(wide, p.grad_weight) if casts.emulate else wide.to(casts.grad_weight)
            # 2. The incoming gradient as an operand.
            g = _padded(g, casts)
            g_amax, g_now = _amax(g, p.grad_operand, past, 2)
            a = lower(g, p.grad_operand, casts, g_amax)
            # 3. grad_input = g W.
            if ctx.needs_input_grad[0]:
                b = lower(in_compute(values, casts).t(), p.operand, casts, w_amax)
                grad_input = product(_first(a, tokens), b, p.grad, casts.grad, casts).view(shape)
            # 4. grad_weight = g^T x, both transposed.
            if ctx.needs_input_grad[2]:
                g_t = _transposed(a, g, p.grad_operand, casts)
                x_t = _transposed(Lowered(kept, x_inv), kept, p.operand, casts)
                grad_weight = product(g_t, x_t, p.grad_weight, casts.grad_weight, casts)
            # 5. The amaxes leave as the gradient of the probe.
            if now is not None:
                grad_probe = torch.cat([now, g_now.reshape(1)])
        return grad_input, None, grad_weight, grad_bias, None, grad_probe, None, None


def _amax(x: Tensor, operand: Operand, past: Tensor | None, index: int) -> tuple[Tensor | None, Tensor]:
    """Returns the amax that scales a whole tensor, if one does, and the tensor's own, for the history."""
    if not _has_one_scale(operand):
        return None, torch.zeros((), device=x.device)
    now = amax_of(x, operand)
    if past is None or operand.amax == "current":
        return now, now
    return torch.where(past[index] > 0, past[index], now), now


def _transposed(a: Lowered, wide: Tensor, operand: Operand, casts: Casts) -> Lowered:
    """Transposes an operand: the same numbers, or a new cast if each row has a scale."""
    if _has_row_scales(operand):
        return lower(wide.t(), operand, casts)
    values = a.values.t()
    return Lowered(values if casts.emulate or a.inv_scale is None else values.contiguous(), a.inv_scale)


def _first(a: Lowered, rows: int) -> Lowered:
    inv_scale = a.inv_scale
    if inv_scale is not None and inv_scale.dim() > 0:
        inv_scale = inv_scale[:rows]
    return Lowered(a.values[:rows], inv_scale)


def _padded(rows: Tensor, casts: Casts) -> Tensor:
    """Adds rows of zeros up to the multiple that a native matmul needs to sum over them."""
    missing = -rows.shape[0] % MULTIPLE
    return rows if casts.emulate or not missing else F.pad(rows, (0, 0, 0, missing))


def _has_one_scale(operand: Operand) -> bool:
    return is_narrow(operand.format) and operand.granularity == "tensor"


def _has_row_scales(operand: Operand) -> bool:
    return is_narrow(operand.format) and operand.granularity == "row"
