"""The three matmuls of a linear layer with narrow operands (fp8), natively and emulated by one recipe.

**Operands.** Each matmul is a b^T of two matrices whose last dimension is summed over, row-major both, the one
layout that fp8 tensor cores take:

    output      = x W^T      x (tokens, in)       W (out, in)
    grad_input  = g W        g (tokens, out)      W^T (in, out)
    grad_weight = g^T x      g^T (out, tokens)    x^T (in, tokens)

so each tensor takes part twice, once as it is and once transposed. An operand is multiplied by a power of two that
brings its amax into the top binade of the format, clamped, rounded to nearest even, and the sum is multiplied by
both inverse scales, in fp32, before its one rounding. Clamped first, because native casts disagree beyond the
largest number (torch 2.11 makes NaN of it, 2.13 the largest). What is infinite or NaN gives its tensor, or its
row, the scale NaN: loss and gradients come out NaN and the step is skipped. A tensor of zeros has the scale 1.

**One scale a tensor** gives the transposed operand the same numbers, so x is kept for the backward pass as 8-bit
codes, half of bf16. **One a row** (`:row`) is a scale for each row of the product at hand, as the hardware applies
it: x has other ones along tokens than along features, so it is cast anew, from what came in. The weight is always
cast anew: it is there anyway.

**Delayed** (`:delayed`) operands are scaled by the largest amax of earlier updates (delayed.py), or by their own
as long as there is none. A number beyond saturates; an infinity does not, it becomes NaN.

**Sizes.** `in` and `out` must be multiples of 16, which is checked when a model is prepared (fp8_choice.py).
Tokens need not be: where they are summed over, rows of zeros fill them up, which adds exact zeros to the sum.

**Sums** are fp32 emulated and natively on a CPU. An NVIDIA tensor core aligns the products of an instruction to
the largest and keeps some 14 bits; cuBLAS adds such partial sums in fp32, unless fast accumulation is asked for
(`matmul=fp32:fast`), which is for the forward matmul alone. benchmarks/prove/fp8_bits.py holds them to a bound.

**An operand that meets a wide one** (`compute=e4m3` without `grad`): no hardware multiplies such a pair. Its
numbers are exact in the wide format, which multiplies them; the scale is undone after the sum.

Amax and cast are plain operations, and compilers fuse them with what precedes. A fused cast sees the number before
it was rounded to bf16, as everything fused does. Emulated, operands are numbers of the format in fp32.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep.core.formats import Format
from halfstep.core.roles import Operand, is_narrow
from halfstep.torch.cast import amax_of, carried, quantize_scaled
from halfstep.torch.dtypes import DTYPES, ROWS_INTO_FP32, dtype_of
from halfstep.torch.matmul import in_compute, matmul, multiply, rows_of
from halfstep.torch.tracing import compiling, traced

if TYPE_CHECKING:
    from halfstep.torch.layers import Casts

MULTIPLE = 16
"""What the sizes of a native fp8 matmul must be multiples of, in elements."""


class Lowered(NamedTuple):
    """An operand as a matmul takes it: numbers of its format, (rows, summed over), and what undoes their scale."""

    values: Tensor
    inv_scale: Tensor | None = None  # a scalar, or (rows, 1); None of a wide one


def narrow_linear(x: Tensor, numbers: Tensor, owner: Tensor, bias: Tensor | None, casts: "Casts") -> Tensor:
    """x W^T + b of an x in the compute format: `matmul.multiply` with operands of which some are narrow."""
    if x.numel() == 0:  # no kernel takes a batch without tokens, as an expert of a mixture may have
        assert casts.wide is not None
        return multiply(x, numbers, owner, bias, casts.wide)
    past = casts.past
    history, probe = (None, None) if past is None else (past.history, past.probe)
    if probe is not None and not (x.requires_grad or owner.requires_grad):
        probe = probe.detach()  # nothing here is trained, and nothing behind it
    assert casts.in_graph is not None
    return casts.in_graph(x, numbers, owner, bias, history, probe, compiling())


def in_graph(casts: "Casts") -> Callable[..., Tensor]:
    """The three matmuls with these casts, for dynamo to put into its graph as they are.

    What is in there is traced all the same, by autograd as it runs. That dynamo would interpret every line of it,
    for every layer, made most of the time that an fp8 model took to compile.
    """

    def call(*given: Any) -> Tensor:
        return _Narrow.apply(*given, casts)  # type: ignore[no-any-return]

    return torch.compiler.allow_in_graph(call)


def lower(x: Tensor, operand: Operand, casts: "Casts", amax: Tensor | None = None) -> Lowered:
    """A matrix as an operand; its scales follow its own amax unless one is given."""
    if not is_narrow(operand.format):
        return Lowered(carried(x, operand.format) if casts.emulate else x.to(dtype_of(operand.format)))
    if amax is None:
        amax = amax_of(x, operand)
    elif operand.amax == "delayed":
        x = x.masked_fill(x.isinf(), float("nan"))  # an amax of earlier updates knows nothing of it
    # Eager, torch's own conversion is many times faster than ours, and makes the same numbers.
    native = not casts.emulate or (operand.format in DTYPES and not compiling())
    values, inv_scale = quantize_scaled(x, operand, amax=amax, native=native)
    return Lowered(values.float() if casts.emulate else values.contiguous(), inv_scale)


def product(
    a: Lowered,
    b: Lowered,
    out: Format,
    dtype: torch.dtype,
    casts: "Casts",
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """a b^T, summed in fp32 and unscaled there, then rounded to `out`, which natively is `dtype`; and a bias."""
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
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """torch's own product of a row-major and a column-major matrix of 8-bit numbers, unscaled in its epilogue.

    There an NVIDIA GPU adds the bias as well, to the fp32 sum: a rounding less than elsewhere.
    """
    if a_inv.dim() == 0 and b_inv.dim() == 0 and a.is_cuda and bias is not None and bias.dtype == dtype:
        return torch._scaled_mm(a, b, a_inv, b_inv, bias, out_dtype=dtype, use_fast_accum=fast)
    y = _unbiased_product(a, b, a_inv, b_inv, dtype, fast)
    return y if bias is None else y + bias


def _unbiased_product(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    if a_inv.dim() == 0 and b_inv.dim() == 0:
        return torch._scaled_mm(a, b, a_inv, b_inv, out_dtype=dtype, use_fast_accum=fast)
    # A kernel takes a scale for each row of both, or one of both.
    a_inv = a_inv.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
    b_inv = b_inv.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    if dtype != torch.float32 or ROWS_INTO_FP32.get(a.device.type, False):
        return torch._scaled_mm(a, b, a_inv, b_inv, out_dtype=dtype, use_fast_accum=fast)
    # Powers of two commute with every rounding of the sum, so they may as well come after it.
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, one, one, out_dtype=dtype, use_fast_accum=fast) * a_inv * b_inv


class _Narrow(torch.autograd.Function):
    """The three matmuls. Where there is a `probe`, the amax of each operand leaves as its gradient: delayed.py."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        numbers: Tensor,
        owner: Tensor,
        bias: Tensor | None,
        history: Tensor | None,
        probe: Tensor | None,
        compiled: bool,
        casts: "Casts",
    ) -> Tensor:
        ctx.casts, ctx.compiled = casts, compiled
        with traced(compiled):
            p, tokens = casts.precision, rows_of(x).shape[0]
            rows, w = _filled(rows_of(x), casts), in_compute(numbers, casts)
            past = None if history is None else history.amax(dim=1)
            x_amax, x_now = _amax(rows, p.operand, past, 0)
            w_amax, w_now = _amax(w, p.operand, past, 1)
            a, b = lower(rows, p.operand, casts, x_amax), lower(w, p.operand, casts, w_amax)
            added = None if bias is None else in_compute(bias, casts)
            y = product(_first(a, tokens), b, p.compute, casts.compute, casts, bias=added, fast=casts.fast)
            scales = [a.inv_scale, w_amax] if _has_one_scale(p.operand) else []
            amaxes = [] if past is None else [past, torch.stack([x_now, w_now])]
            ctx.save_for_backward(rows if _has_row_scales(p.operand) else a.values, numbers, *scales, *amaxes)
        return y.view(*x.shape[:-1], numbers.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with traced(ctx.compiled):
            casts, p = ctx.casts, ctx.casts.precision
            kept, numbers, *rest = ctx.saved_tensors
            x_inv, w_amax = rest[:2] if _has_one_scale(p.operand) else (None, None)
            past, now = rest[-2:] if casts.past is not None else (None, None)
            shape, tokens = (*g.shape[:-1], numbers.shape[1]), rows_of(g).shape[0]
            g = rows_of(carried(g, p.grad) if casts.emulate else g)
            grad_input = grad_weight = grad_bias = grad_probe = None
            if ctx.needs_input_grad[3]:
                wide = g.sum(0, dtype=torch.float32)
                grad_bias = carried(wide, p.grad_weight) if casts.emulate else wide.to(casts.grad_weight)
            g = _filled(g, casts)
            g_amax, g_now = _amax(g, p.grad_operand, past, 2)
            a = lower(g, p.grad_operand, casts, g_amax)
            if ctx.needs_input_grad[0]:
                b = lower(in_compute(numbers, casts).t(), p.operand, casts, w_amax)
                grad_input = product(_first(a, tokens), b, p.grad, casts.grad, casts).view(shape)
            if ctx.needs_input_grad[2]:
                turned = (
                    _turned(a, g, p.grad_operand, casts),
                    _turned(Lowered(kept, x_inv), kept, p.operand, casts),
                )
                grad_weight = product(*turned, p.grad_weight, casts.grad_weight, casts)
            if now is not None:
                grad_probe = torch.cat([now, g_now.reshape(1)])
        return grad_input, None, grad_weight, grad_bias, None, grad_probe, None, None


def _amax(x: Tensor, operand: Operand, past: Tensor | None, index: int) -> tuple[Tensor | None, Tensor]:
    """The amax that scales a tensor as a whole, if one does, and the tensor's own, for the history."""
    if not _has_one_scale(operand):
        return None, torch.zeros((), device=x.device)
    now = amax_of(x, operand)
    if past is None or operand.amax == "current":
        return now, now
    return torch.where(past[index] > 0, past[index], now), now


def _turned(a: Lowered, wide: Tensor, operand: Operand, casts: "Casts") -> Lowered:
    """The transposed operand: the same numbers, but where each row has a scale, those of its own rows."""
    if _has_row_scales(operand):
        return lower(wide.t(), operand, casts)
    values = a.values.t()
    return Lowered(values if casts.emulate or a.inv_scale is None else values.contiguous(), a.inv_scale)


def _first(a: Lowered, rows: int) -> Lowered:
    """The operand without the rows that fill it up."""
    inv_scale = a.inv_scale
    if inv_scale is not None and inv_scale.dim() > 0:
        inv_scale = inv_scale[:rows]
    return Lowered(a.values[:rows], inv_scale)


def _filled(rows: Tensor, casts: "Casts") -> Tensor:
    """As many rows as a native matmul sums over, the last ones zero."""
    missing = -rows.shape[0] % MULTIPLE
    return rows if casts.emulate or not missing else F.pad(rows, (0, 0, 0, missing))


def _has_one_scale(operand: Operand) -> bool:
    return is_narrow(operand.format) and operand.granularity == "tensor"


def _has_row_scales(operand: Operand) -> bool:
    return is_narrow(operand.format) and operand.granularity == "row"
