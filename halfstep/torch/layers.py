"""The casted matmul and the islands, as functions and as modules.

**A linear layer is three matmuls**, named by their results. With x of shape (tokens, in), W of (out, in) and the
incoming gradient g of (tokens, out):

    output      = x W^T      operands in `operand`,                    rounded to `compute`
    grad_input  = g W        operands in `grad_operand`, `operand`,    rounded to `grad`
    grad_weight = g^T x      operands in `grad_operand`, `operand`,    in `grad_weight`, fp32 as a rule

Each sums in fp32. Both operands are cast to the layer's own formats, whatever the weight or the input happens to
be. An fp32 weight gradient is fp32 from the sum on (matmul.py), also of a split master's bf16 half (split/), of
a bias and of an embedding's rows.

**An island** (norm, softmax, loss) is fp32 inside, backward too: it widens its input, and autograd narrows the
gradient only on the way out. Norms return the compute format, the loss returns fp32. Attention takes the softmax
of fp32 scores: in a fused kernel, or in steps if the caller wants the weights themselves.

**Emulated** matmuls of numbers of a format are exact products summed in fp32, in an order that may differ from the
hardware's. What a fused kernel keeps to itself, such as attention's probabilities, is not rounded.

Every function takes a `Casts` last (lowering.py) and is hidden from function modes (functions/mode.py).

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head.
"""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from halfstep.core.errors import FormatDtypeError, UnsupportedTransformError
from halfstep.core.formats import BF16, FP32, Format, parse
from halfstep.core.policy import Policy, as_policy
from halfstep.core.precision import Precision, base_precision
from halfstep.core.refusal import named_format
from halfstep.torch.fp8.delayed import History
from halfstep.torch.fp8.linear import CASTS_BY_NAME, amaxes_of, layer_grad_bits, narrow_in_graph, narrow_linear
from halfstep.torch.loss import plain as losses
from halfstep.torch.loss.coded import coded_in_graph
from halfstep.torch.loss.fp8 import loss_in_graph, narrow_losses
from halfstep.torch.numerics.attention import attention as attention
from halfstep.torch.numerics.attention import softmax as softmax
from halfstep.torch.numerics.compile_cache import allow_in_graph
from halfstep.torch.numerics.dtypes import FLOATS, dtype_of, format_of
from halfstep.torch.numerics.lowering import (
    Casts,
    autocast_error,
    bypass_mode,
    cached_cast,
    exit_island,
    island,
    island_parameter,
    round_to_compute,
    to_compute,
    with_weight_grad_format,
)
from halfstep.torch.numerics.matmul import (
    DIRECT,
    EmbeddingLookup,
    apply_linear,
    eager_linear,
    is_for_torch,
    linear_in_steps,
)
from halfstep.torch.numerics.norms import normalize
from halfstep.torch.numerics.provenance import transforming
from halfstep.torch.numerics.recompute import NODE, RecomputeInBackward, drop_recomputable, recompute_in_backward
from halfstep.torch.numerics.split.holder import Holder
from halfstep.torch.numerics.split.operand import is_split, operand_of, route_gradient


@cache
def casts_of(precision: Precision) -> Casts:
    """Returns what a precision means in torch. Emulated, every tensor is carried in fp32."""
    one_format = {precision.operand.format, precision.grad_operand.format, precision.grad} == {precision.compute}
    casts = Casts.lower(
        precision,
        dtype_of,
        whole=precision.compute != BF16,
        fp32_grads=precision.grad_weight == FP32,
        direct=one_format and precision.grad_weight == FP32 and not precision.emulate,
        fp32_norm=precision.norm == precision.grad_weight == FP32 and not precision.emulate,
        fast=precision.matmul.fast and not precision.emulate,
        delayed=precision.delayed,
        wide=casts_of(precision.widened()) if precision.narrow else None,
    )
    if casts.direct:
        DIRECT.setdefault(casts.compute, casts)
    if not precision.narrow:
        return casts
    allow_in_graph(narrow_in_graph, loss_in_graph, coded_in_graph)
    CASTS_BY_NAME[str(precision)] = casts = replace(casts, words=str(precision))
    return casts


def casts_for(policy: Policy | str) -> Casts:
    """Returns what a policy means where no rule applies."""
    return casts_of(base_precision(as_policy(policy)))


_LIKE = {dtype: casts_of(Precision.in_format(format_of(dtype))) for dtype in FLOATS}
_FROM_INPUT = cast(Casts, None)  # the casts of a layer that follows its input, until it is given others


def casts_like(x: Tensor) -> Casts:
    """Returns how a layer without a policy computes: in the format of its input, with fp32 weight gradients."""
    casts = _LIKE.get(x.dtype)
    if casts is None:
        raise FormatDtypeError(
            f"the input is {str(x.dtype).removeprefix('torch.')}, and a casted layer multiplies in float32, "
            "bfloat16 or float16",
            hint="cast the input, or name the format to cast it to: CastedLinear(..., compute='bf16')",
        )
    return casts


# --- functions

UNSAFE_VIEW: Any = torch.ops.aten._unsafe_view.default


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: Casts,
    *,
    transposed: bool = False,
    history: History | None = None,
    loss_casts: Casts | None = None,
    lean: bool = False,
) -> Tensor:
    """Returns x W^T + b, or x W + b if the matrix is held `transposed`; `history` scales delayed operands.

    Compiled code may compute it together with its loss (fusion/loss.py), which has casts of its own if there are
    `loss_casts`, and makes a part of the logits at a time if it is `lean`.
    """
    with torch._C.DisableTorchFunction():
        if torch._C._is_any_autocast_enabled():
            raise autocast_error()
        transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        if casts.direct and not transformed and not torch.compiler.is_compiling():
            compute = casts.compute
            x = x if x.dtype is compute else x.to(compute)
            recomputed = RecomputeInBackward.used and type(x.grad_fn) is NODE
            if casts.plain and not recomputed and is_for_torch(x, weight, bias, transposed):
                y = F.linear(x, weight.t() if transposed else weight, bias)  # no Python in either pass
                return UNSAFE_VIEW(y, y.shape) if y._is_view() else y  # to autograd no view, as of `Linear`
            if type(weight) is not Tensor and weight.dtype is torch.bfloat16:
                values, owner = operand_of(weight, casts.whole)
            else:
                values, owner = cached_cast(weight, compute), weight
            if transposed:
                values, owner = values.t(), owner.t()
            added = None if bias is None else cached_cast(bias, compute)
            if recomputed:
                with drop_recomputable(x):
                    return eager_linear(x, values, owner, added, bias, casts)  # type: ignore[no-any-return]
            return eager_linear(x, values, owner, added, bias, casts)  # type: ignore[no-any-return]
        if casts.plain:
            weight = with_weight_grad_format(weight, casts).float()
            weight, x = weight.t() if transposed else weight, x.float()
            with drop_recomputable(x):
                return F.linear(x, weight, None if bias is None else bias.float())
        values, owner = operand_of(weight, casts.whole)
        if transposed:
            values, owner = values.t(), owner.t()
        x = x if x.dtype is casts.compute else x.to(casts.compute)
        x = round_to_compute(x, casts) if casts.emulate else x
        if transformed and casts.wide is None:
            return linear_in_steps(x, values, check_transformed(owner, casts), bias, casts)
        chunks = losses.LEAN_CHUNKS if lean else 1
        with drop_recomputable(x):
            if casts.wide is not None:
                return narrow_linear(x, values, owner, bias, casts, history, chunks)
            past = (None, None) if loss_casts is None else amaxes_of(history, loss_casts, trained=True)
            of_loss = ("" if loss_casts is None else loss_casts.words, chunks, *past)
            added = None if bias is None else bias.detach()
            return apply_linear(x, values, owner, added, bias, casts, of_loss=of_loss)


def check_transformed(weight: Tensor, casts: Casts) -> Tensor:
    """Returns a weight that torch.func gave, or refuses half of a split master: its gradient would be bf16."""
    if casts.fp32_grads and weight.requires_grad and weight.dtype != torch.float32:
        raise UnsupportedTransformError(
            f"torch.func was given a {weight.dtype} weight whose gradient the policy wants in fp32",
            hint="give it the masters: torch.func.functional_call(model, model.state_dict(), ...), not "
            "model.named_parameters(), or prepare with `param=fp32`",
        )
    return weight


@bypass_mode
def embedding(
    index: Tensor,
    weight: Tensor,
    casts: Casts,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Looks up rows of the master and casts them to compute; their gradient is summed in fp32."""
    if is_split(weight) and not casts.whole:
        values, owner = operand_of(weight, casts.whole)
        if transforming():
            rows = route_gradient(values.float(), owner, casts.precision.grad_weight)
            return to_compute(F.embedding(index, rows, padding_idx, scale_grad_by_freq=scale_grad_by_freq), casts)
        padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
        return to_compute(EmbeddingLookup.apply(index, values, owner, padding, scale_grad_by_freq, casts), casts)
    table = with_weight_grad_format(check_transformed(weight, casts) if transforming() else weight, casts)
    return to_compute(
        F.embedding(index, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse), casts
    )


def rms_norm(x: Tensor, gain: Tensor | None, casts: Casts, eps: float | None = 1e-6, *, dims: int = 1) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * gain over the last dims: inside in the norm format, out in compute."""
    return _norm(x, gain, None, casts, eps, dims, centered=False)


def layer_norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, casts: Casts, eps: float = 1e-5, *, dims: int = 1
) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) * gain + bias over the last dims, in the formats of `rms_norm`."""
    return _norm(x, gain, bias, casts, eps, dims, centered=True)


def _norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, casts: Casts, eps: Any, dims: int, *, centered: bool
) -> Tensor:
    with torch._C.DisableTorchFunction():
        known = x.dtype is casts.compute or x.dtype is torch.float32
        known = known and casts.fp32_norm and (gain is None or gain.dtype is torch.float32)
        if known and not torch._C._is_any_autocast_enabled():  # as in most layers
            return normalize(x, gain, bias, eps, dims, casts.compute, centered)
        x = island(x, "norm", casts)
        gain, bias = (island_parameter(parameter, "norm", casts) for parameter in (gain, bias))
        shape = x.shape[-dims:]
        y = torch.layer_norm(x, shape, gain, bias, eps) if centered else torch.rms_norm(x, shape, gain, eps)
        return exit_island(y, "norm", casts)


def cross_entropy(logits: Tensor, targets: Tensor, casts: Casts, softcap: float = 0.0) -> Tensor:
    """Returns the sum of -log softmax(logits)[target] over all targets: inside and out in the loss format."""
    losses.check_targets(targets, logits.shape[:-1])
    with torch._C.DisableTorchFunction():
        traced = torch.compiler.is_compiling()  # whose loss is fused in its graph
        if not traced and not losses.why_no_kernel(logits, logits.dtype, casts):
            rows, terms = (logits.flatten(0, -2), targets.flatten()), losses.Terms(softcap=softcap)
            return losses.row_cross_entropy(*rows, terms, layer_grad_bits(logits)).sum()
        inside = island(logits, "loss", casts).flatten(0, -2)
        if softcap:
            inside = softcap * torch.tanh(inside / softcap)
        return island(F.cross_entropy(inside, targets.flatten(), reduction="sum"), "loss", casts)  # type: ignore[no-any-return]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    casts: Casts,
    terms: losses.Terms = losses.PLAIN,
    chunks: int = 1,
    size: int = 0,
    history: History | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of the losses of `linear(x, weight, bias, casts)`, whose logits are not kept.

    For casts that are `direct` or narrow, with an fp32 loss. Beside it, `size` elements of the logits' gradient.
    """
    losses.check_targets(targets, x.shape[:-1])
    with torch._C.DisableTorchFunction():
        if torch._C._is_any_autocast_enabled():
            raise autocast_error()
        x, targets = x if x.dtype is casts.compute else x.to(casts.compute), targets.flatten()
        if transforming() and casts.wide is None:
            values, owner = operand_of(weight, casts.whole)
            logits = linear_in_steps(x, values, check_transformed(owner, casts), bias, casts)
            return losses.torch_row_losses(logits.flatten(0, -2), targets, terms).sum(), None
        if torch.compiler.is_compiling() or is_split(weight) or casts.wide is not None:
            values, owner = operand_of(weight, casts.whole)
        else:
            values, owner = cached_cast(weight, casts.compute), weight
        given = (x, values, owner, bias, targets, casts)
        if casts.wide is not None:
            return narrow_losses(*given, history, terms, chunks, size)
        return losses.linear_losses(*given, terms, chunks, size)


def parameter_to_compute(parameter: Tensor, casts: Casts) -> Tensor:
    """Returns a parameter of no matmul in compute, with its gradient in the format of weight gradients."""
    return to_compute(with_weight_grad_format(parameter, casts), casts)


def times(x: Tensor, factor: Tensor, casts: Casts) -> Tensor:
    """Multiplies an activation by a parameter in compute."""
    return round_to_compute(factor * x, casts)


def plus(x: Tensor, addend: Tensor, casts: Casts) -> Tensor:
    """Adds a parameter in compute to an activation."""
    return round_to_compute(x + addend, casts)


def empty_parameter(*shape: int) -> nn.Parameter:
    """Returns a parameter that has no values yet."""
    return nn.Parameter(torch.empty(shape))


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor, casts: Casts) -> Tensor:
    """Rotary positions: the two halves of each head turn by the angle of their position; angles are fp32."""
    with torch._C.DisableTorchFunction():
        half = x_BHTK.shape[-1] // 2
        x = x_BHTK.float()
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return to_compute(x * cos_TK + turned * sin_TK, casts)


# --- modules


class Layer(Holder):
    """A module with a precision of its own; fp32 until a policy is applied."""

    casts: Casts = casts_of(Precision())
    named: Format | None = None  # the format that it was built with, if one was named

    @property
    def precision(self) -> Precision:
        """What the module runs in; None if it follows its input."""
        return getattr(self.casts, "precision", None)  # type: ignore[return-value]

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.casts = casts_of(precision)

    shown: ClassVar = ""  # what printing the model adds about the precision `p` of the module `m`
    split_name: ClassVar = ""  # the one parameter that may be a split master; empty: any matrix may
    whole_reason: ClassVar = ""  # why no parameter may

    @classmethod
    def whole_because(cls, module: nn.Module, name: str) -> str:
        """Returns why a matrix of this name cannot be held split in such a module; empty if it can."""
        other = cls.split_name not in ("", name)
        return cls.whole_reason or (f"it is not the `{cls.split_name}` of the layer" if other else "")

    def extra_repr(self) -> str:
        """Adds what the module computes in."""
        if self.casts is None:
            return ", ".join(filter(None, [super().extra_repr(), "in the format of its input"]))
        emulated = " emulated" if self.precision.emulate else ""
        text = self.shown.format(p=self.precision, m=self, emulated=emulated)
        return ", ".join(filter(None, [super().extra_repr(), text]))


class Matmul(Layer):
    """A module that multiplies activations by a matrix, so that it may have narrow operands."""

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """Returns (inputs, outputs) of each matrix."""
        return [(p.shape[1], p.shape[0]) for p in self._parameters.values() if p is not None and p.dim() == 2]


class CastedLinear(Matmul, nn.Linear):
    """A linear layer that computes in its own format, whatever its weight is held in; weight gradients are fp32.

    The format is that of the policy, once there is one. By itself the layer multiplies in `compute` ("bf16",
    torch.float16, ...), or without it in the format of its input: fp32 weights and bf16 inputs make a bf16 matmul.
    """

    casts = _FROM_INPUT
    shown = "{p.operand.format} operands{emulated}"
    split_name = "weight"  # what a subclass does with other matrices is unknown

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        compute: str | torch.dtype | None = None,
        **factory: Any,
    ):
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        if compute is not None:
            fmt = parse(compute) if isinstance(compute, str) else format_of(compute)
            self.named = named_format(fmt, map(format_of, FLOATS))
            self.precision = Precision.in_format(fmt)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        casts = self.casts or casts_like(x)
        of_loss, lean = self.halfstep.loss_casts, self.halfstep.recomputed
        history = self.halfstep.history
        return linear(x, self.weight, self.bias, casts, history=history, loss_casts=of_loss, lean=lean)


class Norm(Layer):
    """Root-mean-square or layer normalization, an island; without a policy its result has its input's format."""

    casts = _FROM_INPUT
    shown = "{m.kind}, {p.norm} inside, {p.compute} out"

    def __init__(
        self, width: int, kind: str = "rms", gain: bool = True, bias: bool = False, eps: float | None = None
    ):
        super().__init__()
        self.kind = kind
        self.eps = eps or (1e-5 if kind == "layer" else 1e-6)
        self.weight = nn.Parameter(torch.ones(width)) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias and gain and kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        casts, eps = self.casts or casts_like(x), self.eps
        norm: Any = layer_norm if self.kind == "layer" else rms_norm
        held = (self.weight, self.bias) if self.kind == "layer" else (self.weight,)
        if self.halfstep.recomputed:
            return recompute_in_backward(lambda x, *held: norm(x, *held, casts, eps), x, *held)
        return norm(x, *held, casts, eps)  # type: ignore[no-any-return]
