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

7. A gradient of many numbers, as of a vocabulary's logits, is cast in parts, which share its scale: some tokens at
   a time for grad_input, some outputs at a time for grad_weight. No sum is taken apart, so no number changes.

8. A narrow operand that meets a wide one (`compute=e4m3` without `grad`): no hardware multiplies such a pair. Its
   numbers are exact in the wide format, which multiplies them; the scale is undone after the sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import FP32, Format
from halfstep.core.refusal import NARROW_ONCE
from halfstep.core.roles import Operand, is_narrow
from halfstep.torch.fp8.delayed import History
from halfstep.torch.kernels import has_triton
from halfstep.torch.numerics.cast import amax_of, carried, quantize_scaled
from halfstep.torch.numerics.dtypes import DTYPES, ROWS_INTO_FP32, dtype_of
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.matmul import (
    apply_linear,
    cast_parameter,
    first_derivative_only,
    matmul,
    refuse_transforms,
    rows_of,
)
from halfstep.torch.numerics.provenance import compiling, traced

MULTIPLE = 16  # of elements: what the sizes of a native fp8 matmul must be
CODES = 2**28  # the most codes of a gradient that exist at a time, in each layout
SHARED = "halfstep_codes"  # an attribute of an activation
TILE = 128  # rows that a matmul's kernels take at a time, or a divisor of that


class Lowered(NamedTuple):
    """An operand as a matmul takes it: numbers of its format, (rows, summed over), and what undoes their scale."""

    values: Tensor
    inv_scale: Tensor | None = None  # a scalar, or (rows, 1); None if the operand is wide


# --- entry points


def narrow_linear(
    x: Tensor,
    values: Tensor,
    owner: Tensor,
    bias: Tensor | None,
    casts: Casts,
    history: History | None,
    chunks: int = 1,
) -> Tensor:
    """x W^T + b of an x in compute, some operands narrow; delayed ones follow their own amax without a history.

    `chunks` are those of its loss, if compiled code fuses them.
    """
    if x.numel() == 0:  # no kernel takes a batch without tokens, which an expert of a mixture may get
        added = None if bias is None else bias.detach()
        return apply_linear(x, values, owner, added, bias, casts.wide)
    refuse_transforms(*NARROW_ONCE)
    past = amaxes_of(history, casts, trained=x.requires_grad or owner.requires_grad)
    return narrow_in_graph(casts.words, chunks, x, values, owner, bias, *past, compiling())


def amaxes_of(history: History | None, casts: Casts, *, trained: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns the amaxes of earlier updates and the probe, if operands are delayed."""
    if history is None or not casts.delayed:
        return None, None
    return history.amaxes, history.probe if trained else history.probe.detach()  # no backward pass will come


CASTS_BY_NAME: dict[str, Casts] = {}
"""By the precision in words, which is all that graphs and custom operations know of it (`layers.casts_of`)."""


def narrow_in_graph(words: str, chunks: int, *given: Any) -> Tensor:
    """The three matmuls as one function for dynamo's graph: to interpret it in every layer takes long."""
    return Narrow.apply(*given, CASTS_BY_NAME[words])  # type: ignore[no-any-return]


_MOVES = "View ReshapeAlias UnsafeView Alias Slice Select Index Squeeze Unsqueeze Transpose Permute Clone"
_VIEWS = {f"{name}Backward{overload}" for name in _MOVES.split() for overload in (0, 1)}


def layer_grad_bits(logits: Tensor) -> int:
    """Returns how many bits of mantissa the layer that made logits keeps of their gradient; 0 for all.

    In eager mode: compiled code sees it in the graph (fusion/loss.py).
    """
    node: Any = logits.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return int(node.casts.precision.kept_bits) if isinstance(node, Narrow._backward_cls) else 0  # type: ignore[attr-defined]


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


class Narrow(torch.autograd.Function):
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
            rows = rows_of(x)
            known = shared_codes(x, casts)
            y, kept = output(pad_rows(rows, casts), values, bias, history, casts, rows.shape[0], known=known)
            ctx.save_for_backward(*kept)
        return y.view(*x.shape[:-1], values.shape[0]).detach()  # no view to autograd, as in matmul.py

    @staticmethod
    @first_derivative_only(*NARROW_ONCE)
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        casts, needs = ctx.casts, ctx.needs_input_grad
        with traced(ctx.compiled):
            rows = rows_of(carried(g, casts.precision.grad) if casts.emulate else g)
            given = (pad_rows(rows, casts), rows.shape[0], (needs[0], needs[2], needs[3]))
            dx, dw, db, amaxes = gradients(ctx.saved_tensors, *given, casts, ctx.delayed)
        return dx if dx is None else dx.view(*g.shape[:-1], -1), None, dw, db, None, amaxes, None, None


def output(
    rows: Tensor,
    values: Tensor,
    bias: Tensor | None,
    history: Tensor | None,
    casts: Casts,
    tokens: int,
    known: Lowered | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Returns x W^T + b of the first `tokens` of x, whose rows are padded, and what `gradients` needs of it.

    `known` is the cast of x, if it was made: by another layer, or as a part of a tensor that has one scale.
    """
    p = casts.precision
    # 1. Operands in compute, and the amax that scales each, from earlier updates if they are delayed.
    w, past = cast_parameter(values, casts), None if history is None else history.amax(dim=1)
    x_amax, x_now = (None, None) if known else _amax(rows, p.operand, past, 0)
    w_amax, w_now = _amax(w, p.operand, past, 1)
    # 2. The casts, and the product.
    a, b = known or lower(rows, p.operand, casts, x_amax), lower(w, p.operand, casts, w_amax)
    added = None if bias is None else cast_parameter(bias, casts)
    y = product(_first_rows(a, tokens), b, p.compute, casts.compute, casts, bias=added, fast=casts.fast)
    # 3. For the backward pass: x as codes, or as it came if it is cast again; scales and amaxes.
    again = _casts_again(values, casts)
    scales = [x_amax if again else a.inv_scale, w_amax] if has_one_scale(p.operand) else []
    amaxes = [] if past is None else [past, torch.stack([cast(Tensor, x_now), w_now])]
    kept = [rows if again or _has_row_scales(p.operand) else a.values, values, *scales, *amaxes]
    return y, kept  # type: ignore[return-value]


def shared_codes(x: Tensor, casts: Casts) -> Lowered | None:
    """Returns the cast of an activation that several layers have as input, such as queries, keys and values.

    It is kept with the activation, for as long as that exists. Compiled code shares casts by itself.
    """
    operand = casts.precision.operand
    shares = has_one_scale(operand) and not casts.delayed and not casts.emulate
    if compiling() or not shares or x.grad_fn is None:
        return None
    found = x.__dict__.get(SHARED)
    if found is None or found[0] != (operand.format, x._version):
        found = (operand.format, x._version), lower(pad_rows(rows_of(x), casts), operand, casts)
        setattr(x, SHARED, found)
    return found[1]  # type: ignore[no-any-return]


def gradients(
    saved: Sequence[Tensor],
    g: Tensor,
    tokens: int,
    needs: tuple[bool, bool, bool],
    casts: Casts,
    delayed: bool,
    factor: Tensor | None = None,
    *,
    wide: bool = False,
) -> tuple[Tensor | None, ...]:
    """Returns grad_input, grad_weight and grad_bias, as far as each `needs` to be, and the amaxes of operands.

    The rows of g are padded. What comes in is `factor` times g: each sum is multiplied by it before it is rounded.
    All are fp32 if they are asked for `wide`.
    """
    p, operand = casts.precision, casts.precision.grad_operand
    narrow = is_narrow(operand.format)
    formats = (FP32, FP32) if wide else (p.grad, p.grad_weight)
    dtypes = (torch.float32, torch.float32) if wide else (casts.grad, casts.grad_weight)
    kept, values, *rest = saved
    x_scale, w_amax = rest[:2] if has_one_scale(p.operand) else (None, None)
    past, now = rest[-2:] if delayed else (None, None)
    grad_input = grad_weight = grad_bias = amaxes = None
    # 1. grad_bias, from the gradient before its cast.
    if needs[2]:
        grad_bias = _multiply(g.sum(0, dtype=torch.float32), factor)
        grad_bias = carried(grad_bias, formats[1]) if casts.emulate else grad_bias.to(dtypes[1])
    # 2. The scale of the gradient as an operand; the history is of what came in, with its factor.
    if past is not None and factor is not None:
        past = torch.nan_to_num(past / factor.abs())  # of no gradient, a factor of 0, too
    g_amax, g_now = _amax(g, operand, past, 2)
    if now is not None:
        amaxes = torch.cat([now, _multiply(g_now, None if factor is None else factor.abs()).reshape(1)])

    def cast_part(part: Tensor) -> Lowered:
        if not narrow:
            return lower(part, operand, casts)
        amax = amax_of(part, operand) if g_amax is None else g_amax
        if factor is not None:
            # Changes no result. A scale that depends on what comes in is not known in the forward pass, where a
            # compiler would make all of these codes to keep them instead of g: both layouts are as large as g.
            amax = torch.where(factor.isnan(), factor, amax)
        a = lower(part, operand, casts, amax)
        return a._replace(inv_scale=_multiply(a.inv_scale, factor))

    # 3. Its codes: of all of it, or of a part at a time if they are many. A factor is undone with a scale.
    parts, others = (-(-g.numel() // CODES), None) if narrow else (1, factor)
    whole = cast_part(g) if parts == 1 else None

    def cast_again(x: Tensor, amax: Tensor | None) -> Lowered:
        if amax is not None and compiling():  # as above: a compiler would keep the codes of the forward pass
            late = g[0, 0] if g_amax is None else g_amax
            amax = torch.where(late.isnan(), late, amax)
        return lower(x, p.operand, casts, amax)

    def multiply(made: Lowered | None, rows: Tensor, b: Lowered, out: Format, dtype: torch.dtype) -> Tensor:
        """Multiplies g, or g^T, by another operand: all rows, whose codes were made, or some at a time."""
        b = b._replace(inv_scale=_multiply(b.inv_scale, others))
        if made is not None:
            return product(made, b, out, dtype, casts)
        split = rows.split(-(-rows.shape[0] // (parts * TILE)) * TILE)
        return torch.cat([product(cast_part(part), b, out, dtype, casts) for part in split])

    # 4. grad_input = g W, some tokens at a time.
    if needs[0]:
        w = cast_parameter(values, casts)
        b = _transpose_operand(cast_again(w, w_amax), w, p.operand, casts)
        grad_input = multiply(whole and _first_rows(whole, tokens), g[:tokens], b, formats[0], dtypes[0])
    # 5. grad_weight = g^T x, both transposed, some outputs at a time.
    if needs[1]:
        again = _casts_again(values, casts)
        x = cast_again(kept, x_scale) if again else Lowered(kept, x_scale)
        x_t = _transpose_operand(x, kept, p.operand, casts, shared=not again)
        g_t = whole and _transpose_operand(whole, g, operand, casts, factor)
        grad_weight = multiply(g_t, g.t(), x_t, formats[1], dtypes[1])
    return grad_input, grad_weight, grad_bias, amaxes


def _multiply(x: Any, factor: Tensor | None) -> Any:
    return x if x is None or factor is None else x * factor


def _amax(x: Tensor, operand: Operand, past: Tensor | None, index: int) -> tuple[Tensor | None, Tensor]:
    """Returns the amax that scales a whole tensor, if one does, and the tensor's own, for the history."""
    if not has_one_scale(operand):
        return None, torch.zeros((), device=x.device)
    now = amax_of(x, operand)
    if past is None or operand.amax == "current":
        return now, now
    return torch.where(past[index] > 0, past[index], now), now


def _casts_again(w: Tensor, casts: Casts) -> bool:
    """Whether x is kept as it came, and cast again in the backward pass: in compiled code, if it is wider than y.

    Its codes are then written once, and transposed. Of others inductor writes transposed codes at once: it may be
    the input of several layers, such as queries, keys and values, which have one cast in common.
    """
    return compiling() and not casts.emulate and has_one_scale(casts.precision.operand) and w.shape[1] > w.shape[0]


def _transpose_operand(
    a: Lowered, wide: Tensor, operand: Operand, casts: Casts, factor: Tensor | None = None, *, shared: bool = False
) -> Lowered:
    """Transposes an operand: the same numbers, or a new cast if each row has a scale, times the same factor."""
    if _has_row_scales(operand):
        again = lower(wide.t(), operand, casts)
        return again._replace(inv_scale=_multiply(again.inv_scale, factor))
    if casts.emulate or a.inv_scale is None:
        return Lowered(a.values.t(), a.inv_scale)
    by_compiler = shared and compiling()
    return Lowered(a.values.t().contiguous() if by_compiler else transpose_codes(a.values), a.inv_scale)


@torch.library.custom_op("halfstep::transpose_codes", mutates_args=())
def transpose_codes(codes: Tensor) -> Tensor:
    """Returns codes with the other dimension last.

    Opaque to compilers: inductor writes them byte by byte where it makes the codes, which is slower than writing
    them once and transposing them.
    """
    return write_transpose(codes)


@transpose_codes.register_fake
def _(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


def write_transpose(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Writes the transpose of codes to `out`, or to memory of its own."""
    out = codes.new_empty(codes.shape[1], codes.shape[0]) if out is None else out
    if codes.is_cuda and has_triton():
        from halfstep.torch.kernels.transpose import transpose  # needs Triton

        transpose(codes, out)
    else:
        out.view(torch.uint8).copy_(codes.view(torch.uint8).t())
    return out


def _first_rows(a: Lowered, rows: int) -> Lowered:
    inv_scale = a.inv_scale
    if inv_scale is not None and inv_scale.dim() > 0:
        inv_scale = inv_scale[:rows]
    return Lowered(a.values[:rows], inv_scale)


def pad_rows(rows: Tensor, casts: Casts) -> Tensor:
    """Adds rows of zeros up to the multiple that a native matmul needs to sum over them."""
    missing = -rows.shape[0] % MULTIPLE
    return rows if casts.emulate or not missing else F.pad(rows, (0, 0, 0, missing))


def has_one_scale(operand: Operand) -> bool:
    """Whether a tensor is scaled as a whole."""
    return is_narrow(operand.format) and operand.granularity == "tensor"


def _has_row_scales(operand: Operand) -> bool:
    return is_narrow(operand.format) and operand.granularity == "row"
