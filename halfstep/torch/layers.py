"""The casted matmul and the islands, as functions and as modules.

**A linear layer is three matmuls**, named by their results. With x of shape (tokens, in), W of (out, in) and the
incoming gradient g of (tokens, out):

    output      = x W^T      operands in `operand`,             rounded to `compute`
    grad_input  = g W        operands in `grad_operand`, `operand`,    rounded to `grad`
    grad_weight = g^T x      operands in `grad_operand`, `operand`,    in `grad_weight`, fp32 as a rule

Each sums in fp32. Both operands are cast to the layer's own formats; none is derived from what the weight or
the input happens to be. Plain autograd would round grad_weight to the operands' dtype before the cast to the
master widens it again; here an fp32 weight gradient is fp32 from the sum on (matmul.py), also where the weight is
the bf16 half of a split master (split.py). So are the gradients of a bias and of the rows of an embedding.

**An island** (norm, softmax, loss) is fp32 inside, backward too: it widens its input, and autograd narrows the
gradient only on the way out. Norms return the compute format, the loss returns fp32. Attention takes the softmax
of fp32 scores: in a fused kernel, or in steps where the weights themselves are wanted.

**Emulated**, a tensor is carried in fp32 and holds values of its format. Every tensor that hardware would store in
the format is rounded by the reference cast, gradients included; matmuls of such operands are exact products
summed in fp32, in an order that may differ from the hardware's. What a fused kernel keeps to itself is not
rounded: attention's probabilities stay fp32 here, where some kernels narrow them before they meet the values.

Every function takes a `Casts` last, what a precision means in torch; `casts_for("bf16-mixed")` makes one.

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP32, Format
from halfstep.core.policy import Policy, as_policy
from halfstep.core.precision import Precision, base_precision
from halfstep.torch.cast import carried
from halfstep.torch.dtypes import dtype_of
from halfstep.torch.fp8.delayed import Past
from halfstep.torch.fp8.linear import in_graph, narrow_linear
from halfstep.torch.matmul import look_up, multiply, scores
from halfstep.torch.split import Holder, is_half, used, widened


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
    whole: bool  # operands need more of a split master than its bf16 half
    fast: bool = False  # forward matmuls of narrow operands may sum in less than fp32
    wide: "Casts | None" = None  # of narrow operands: the same layer with operands in compute
    past: Past | None = None  # of one layer: what its delayed operands are scaled by
    in_graph: Callable[..., Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.wide is not None:
            object.__setattr__(self, "in_graph", in_graph(self))

    def __deepcopy__(self, memo: Any) -> "Casts":
        return self if self.past is None else copy.deepcopy(self.past, memo).hung_on(replace(self, past=None))


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
        whole=precision.compute != BF16,
        fast=precision.matmul.fast and not precision.emulate,
        wide=casts_of(precision.widened()) if precision.narrow else None,
    )


def casts_for(policy: Policy | str) -> Casts:
    """What a policy means where no rule applies."""
    return casts_of(base_precision(as_policy(policy)))


class Layer(Holder):
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
        casts, past = casts_of(precision), self.__dict__.get("halfstep_past")
        self.casts = past.hung_on(casts) if past is not None and precision.delayed else casts

    def whole_because(self, name: str) -> str:
        """Why a matrix of this name cannot be held as a half here; empty where it can."""
        return ""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def unreached(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of ours, which says itself what is cast: no function mode (mode.py) sees what it calls."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def check_autocast(*devices: str) -> None:
    """Refuses to run if torch would cast as well, on one of these kinds of device."""
    for device in devices:
        if torch.is_autocast_enabled(device):
            raise autocast_error()


def autocast_error() -> HalfstepError:
    """Returns the error for a module that is used under torch.autocast."""
    return HalfstepError(
        "a module with a policy is used under torch.autocast, which would cast inside its islands",
        hint="leave torch.autocast out: the modules cast by themselves",
    )


def enter(x: Tensor, casts: Casts) -> Tensor:
    """An activation in the compute format of the module it enters."""
    # Asked here without a Python call: it runs some forty times per micro-batch of a small model.
    if torch.is_autocast_enabled(x.device.type):
        raise autocast_error()
    return rounded(x.to(casts.compute), casts)


def rounded(x: Tensor, casts: Casts) -> Tensor:
    """The result of an operation in the compute format: as it is natively, rounded where it is emulated."""
    if not casts.emulate or casts.plain:
        return x
    return _Rounded.apply(x, casts.precision.compute, casts.precision.grad)  # type: ignore[no-any-return]


def owned(parameter: Tensor, casts: Casts) -> Tensor:
    """A parameter that is not a matmul's, its gradient rounded to the format of weight gradients."""
    if is_half(parameter):
        parameter = widened(parameter, casts.whole)
    if casts.precision.grad_weight == FP32 or parameter.dtype != torch.float32:
        return parameter  # a bf16 parameter has a bf16 gradient as it is
    return _Rounded.apply(parameter, FP32, casts.precision.grad_weight)  # type: ignore[no-any-return]


@unreached
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts, *, transposed: bool = False) -> Tensor:
    """x W^T + b with the operands, sums and results of `casts`; x W + b of a matrix that is held transposed."""
    if casts.plain:
        check_autocast(x.device.type)
        weight = owned(weight, casts).float()
        return F.linear(x.float(), weight.t() if transposed else weight, None if bias is None else bias.float())
    numbers, owner = used(weight, casts.whole)
    if transposed:
        numbers, owner = numbers.t(), owner.t()
    product = multiply if casts.wide is None else narrow_linear
    return product(enter(x, casts), numbers, owner, bias, casts)


@unreached
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
    """Rows of the master, cast to compute; their gradient is summed in fp32. The rest is as torch has it."""
    if is_half(weight) and not casts.whole:
        numbers, owner = used(weight, casts.whole)
        padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
        return enter(look_up(index, numbers, owner, padding, scale_grad_by_freq, casts), casts)
    table = owned(weight, casts)
    return enter(F.embedding(index, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse), casts)


@unreached
def rms_norm(x: Tensor, gain: Tensor | None, casts: Casts, eps: float | None = 1e-6, *, dims: int = 1) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dims: inside in the norm format, out in compute."""
    x, gain = island(x, "norm", casts), own(gain, "norm", casts)
    return leave(F.rms_norm(x, x.shape[-dims:], gain, eps), "norm", casts)


@unreached
def layer_norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, casts: Casts, eps: float = 1e-5, *, dims: int = 1
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias over the last dims: norm format inside, compute out."""
    x, gain, bias = island(x, "norm", casts), own(gain, "norm", casts), own(bias, "norm", casts)
    return leave(F.layer_norm(x, x.shape[-dims:], gain, bias, eps), "norm", casts)


@unreached
def softmax(x: Tensor, casts: Casts, axis: int = -1) -> Tensor:
    """exp(x) over its sum: inside in the softmax format, out in compute."""
    return leave(torch.softmax(island(x, "softmax", casts), axis), "softmax", casts)


@unreached
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
    """Attention, causal unless a mask says otherwise; its softmax is in the softmax format, its result in compute.

    A mask is as torch's attention has it: True where a query may attend, or numbers that are added to the scores.
    """
    if not casts.fused_softmax:
        return weighted_attention(q_BHTK, k_BHTK, v_BHTK, casts, causal=causal, mask=mask, dropout=dropout)[0]
    q, k, v = enter(q_BHTK, casts), enter(k_BHTK, casts), enter(v_BHTK, casts)
    grouped = q.shape[1] != k.shape[1]
    mask, causal = additive(mask, q.dtype), causal and mask is None
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)
    return rounded(y, casts)


@unreached
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
    """The same in steps, and the weights, which no fused kernel gives away. Fp32 softmax takes fp32 scores."""
    q, k, v = enter(q_BHTK, casts), enter(k_BHTK, casts), enter(v_BHTK, casts)
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if casts.fused_softmax:
        s_BHTT = scores(q.flatten(0, 1), k.flatten(0, 1), casts).unflatten(0, q.shape[:2])
    else:
        s_BHTT = (q @ k.mT).to(casts.softmax)
    s_BHTT = s_BHTT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and causal:
        mask = torch.ones(s_BHTT.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        s_BHTT = s_BHTT.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        s_BHTT = s_BHTT + additive(mask, s_BHTT.dtype)
    weights = softmax(s_BHTT, casts)
    if dropout:
        weights = rounded(F.dropout(weights, dropout), casts)
    return rounded(weights @ v, casts), weights


def additive(mask: Tensor | None, dtype: torch.dtype) -> Any:
    """A mask of numbers in a narrower dtype: what is finite stays finite, lest a masked row become NaN."""
    if mask is None or mask.dtype in (torch.bool, dtype):
        return mask
    limits = torch.finfo(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


@unreached
def cross_entropy(logits: Tensor, targets: Tensor, casts: Casts, softcap: float = 0.0) -> Tensor:
    """The sum of -log softmax(logits)[target] over all targets: inside and out in the loss format."""
    inside = island(logits, "loss", casts).flatten(0, -2)
    if softcap:
        inside = softcap * torch.tanh(inside / softcap)
    return island(F.cross_entropy(inside, targets.flatten(), reduction="sum"), "loss", casts)  # type: ignore[no-any-return]


@unreached
def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor, casts: Casts) -> Tensor:
    """Rotary positions: halves of each head turn by the angle of their position; angles are fp32."""
    half = x_BHTK.shape[-1] // 2
    x = x_BHTK.float()
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return enter(x * cos_TK + turned * sin_TK, casts)


def island(x: Any, role: str, casts: Casts) -> Any:
    """A tensor (or None) in the format that an island of the role (`norm`, `softmax`, `loss`) computes in."""
    if x is None:
        return None
    fmt: Format = getattr(casts.precision, role)
    x = x.to(getattr(casts, role))
    return _Rounded.apply(x, fmt, fmt) if casts.emulate and fmt != FP32 else x


def own(parameter: Tensor | None, role: str, casts: Casts) -> Any:
    """A parameter of an island, or None, in the format that it computes in."""
    return None if parameter is None else island(owned(parameter, casts), role, casts)


def leave(x: Tensor, role: str, casts: Casts) -> Tensor:
    """What an island made, in its own format first and then in compute."""
    return enter(island(x, role, casts), casts)


class Matmul(Layer):
    """A module that multiplies activations by a matrix: what narrow operands are for."""

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix."""
        return [(p.shape[1], p.shape[0]) for p in self._parameters.values() if p is not None and p.dim() == 2]


class CastedLinear(Matmul, nn.Linear):
    """A linear layer that computes in its own precision, whatever its weight and input are held in."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **factory: Any):
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        self.precision = Precision()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return linear(x, self.weight, self.bias, self.casts)

    def whole_because(self, name: str) -> str:
        """The weight is multiplied as it is; what else a subclass holds is not known."""
        return "" if name == "weight" else "it is not the weight of the layer"

    def extra_repr(self) -> str:
        """What the layer computes in, so that printing the model tells the truth."""
        form = " emulated" if self.precision.emulate else ""
        return f"{super().extra_repr()}, {self.precision.operand.format} operands{form}"


class Norm(Layer):
    """Root-mean-square or layer normalization, an island."""

    def __init__(
        self, width: int, kind: str = "rms", gain: bool = True, bias: bool = False, eps: float | None = None
    ):
        super().__init__()
        self.kind = kind
        self.eps = eps or (1e-5 if kind == "layer" else 1e-6)
        self.weight = nn.Parameter(torch.ones(width)) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias and gain and kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input."""
        if self.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.casts, self.eps)
        return rms_norm(x, self.weight, self.casts, self.eps)

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
