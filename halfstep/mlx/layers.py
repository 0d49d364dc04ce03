"""The casted matmul and the islands, as functions and as modules.

An island (norm, softmax, loss) is fp32 inside, backward too: it widens its input and narrows the gradient only on
the way out. Norms return the compute format, the loss returns fp32. What MLX's own functions would do:

    attention    without a fused kernel (on a CPU, and on a GPU while gradients are taken) the softmax is fp32, of
                 scores rounded to the dtype of q and k. So q and k are widened first: scores are fp32.
    norms        they round to the weight's dtype before they multiply by it. So they always get fp32; an island in
                 bf16 has bf16 numbers going in and coming out.
    factors      the gradient of a factor or a bias that is broadcast to bf16 activations is a sum of products
                 rounded one by one, itself in bf16 on Metal and on CPUs with an older MLX. So `times` and `plus`
                 compute in fp32 and round the result.

In MLX a bf16 array times an fp32 array, even of one element, is fp32, and so is all that follows. The code of a
prepared model is kept from it (convert/promotion.py); a layer that knows the dtypes of the model's stream
(`Layer.streams`) refuses any other (`check_stream_dtype`).
"""

from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from halfstep.core.errors import PolicyReachError
from halfstep.core.formats import FP32, Format, parse
from halfstep.core.precision import Precision
from halfstep.core.refusal import named_format
from halfstep.mlx.numerics.cast import carried
from halfstep.mlx.numerics.dtypes import DTYPES, format_of, is_floating
from halfstep.mlx.numerics.lowering import Casts, casts_of
from halfstep.mlx.numerics.matmul import (
    cast_to_format,
    cast_weight_grad,
    look_up,
    multiply,
    product,
    rounding,
    with_gradient,
)

# MLX's own, before functions.py wraps them for the code of models.
_softmax, _logsumexp = mx.softmax, mx.logsumexp
_rms_norm, _layer_norm, _attention = mx.fast.rms_norm, mx.fast.layer_norm, mx.fast.scaled_dot_product_attention

_FROM_INPUT = cast(Casts, None)  # the casts of a layer that follows its input, until it is given others


def casts_like(x: mx.array) -> Casts:
    """Returns how a layer without a policy computes: in the format of its input, with fp32 weight gradients."""
    return casts_of(Precision.in_format(format_of(x.dtype)))


class Held(Module):
    """A module whose parameters may be halves of split masters: it shows, saves and loads the masters."""

    halfstep_masters: Any = None  # of the whole model, while there is a run: optim.masters.Masters

    def parameters(self) -> Any:
        """Returns the parameters, those that are split as whole fp32 masters, whose gradients are fp32 too."""
        return self._join_halves(super().parameters())

    def trainable_parameters(self) -> Any:
        """Returns the parameters that are not frozen, those that are split as whole fp32 masters."""
        return self._join_halves(super().trainable_parameters())

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Any:
        """Loads weights of any floating dtype, and holds each as its master is held."""
        masters = self.halfstep_masters
        before = {} if masters is None else {name: place.array for name, place in masters.places.items()}
        super().load_weights(file_or_weights, strict)
        new = {n: masters.places[n].array for n, array in before.items() if masters.places[n].array is not array}
        if new:
            masters.set({name: array.astype(mx.float32) for name, array in new.items()})
        return self

    def _join_halves(self, tree: Any) -> Any:
        return tree if self.halfstep_masters is None else self.halfstep_masters.join_halves(tree)


class Streams(frozenset[mx.Dtype]):
    """The dtypes that activations may arrive in."""

    def __deepcopy__(self, _: dict[int, Any]) -> "Streams":
        return self  # MLX's dtypes cannot be copied


class Layer(Held):
    """A module with its own precision; fp32 until a policy is applied."""

    _repr_template = ""  # what printing the module says of it (m) and of its precision (p)
    casts: Casts = casts_of(Precision())
    named: Format | None = None  # the format that it was built with, if one was named
    name: str = ""  # the qualified name, for messages, once the module is in a prepared model
    streams: Streams | None = None  # the dtypes activations may arrive in; None allows any

    @property
    def precision(self) -> Precision:
        """The formats the module runs in; None if it follows its input."""
        return getattr(self.casts, "precision", None)  # type: ignore[return-value]

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.casts = casts_of(precision)

    def _extra_repr(self) -> str:
        emulated = " emulated" if self.precision.emulate else ""
        shown = self._repr_template.format(m=self, p=self.precision, emulated=emulated)
        return ", ".join(filter(None, [super()._extra_repr(), shown]))

    def check_activation_dtype(self, x: mx.array) -> mx.array:
        """Returns the activation, or refuses a dtype that the model's stream does not have."""
        if self.streams is not None:
            check_stream_dtype(x, self.casts, self.name or type(self).__name__, self.streams)
        return x


def check_stream_dtype(x: mx.array, casts: Casts, name: str, streams: Streams) -> None:
    """Refuses an activation in a float dtype that is not in `streams`."""
    if x.dtype in streams or not is_floating(x):
        return
    stream = casts.compute if casts.compute in streams else next(iter(streams))
    promoted = x.dtype.size > stream.size
    why = "a cast or an fp32 array widened it upstream" if promoted else "it was cast upstream"
    raise PolicyReachError(
        f"`{name}` got a {_word(x.dtype)} activation where the stream is {_word(stream)}: {why}",
        hint="in MLX an fp32 array of any size widens what it meets: use a Python number in its place, or "
        f".astype(mx.{_word(stream)})",
    )


def to_compute(x: mx.array, casts: Casts) -> mx.array:
    """Casts an activation to the compute format of the module it enters."""
    return round_to_compute(x.astype(casts.compute), casts)


def cast_input(x: mx.array, casts: Casts) -> mx.array:
    """Casts an input of a model: a mask's finite numbers stay finite, or rows that are masked become NaN."""
    lowest = -casts.precision.compute.max
    if x.dtype != casts.compute or casts.emulate:
        x = mx.where(x < lowest, mx.where(mx.isinf(x), x, lowest), x)
    return to_compute(x, casts)


def round_to_compute(x: mx.array, casts: Casts) -> mx.array:
    """Returns the result of an operation in the compute format: unchanged natively, rounded where emulated."""
    if not casts.emulate or casts.plain:
        return x
    return rounding(casts.precision.compute, casts.precision.grad)(x)


def with_weight_grad_format(parameter: mx.array, casts: Casts) -> mx.array:
    """Returns a parameter of no matmul, with its gradient in `grad_weight` whatever the parameter is held in."""
    if parameter.dtype == mx.float32 and casts.precision.grad_weight == FP32:
        return parameter
    return _owning(casts.precision.grad_weight)(parameter)


def parameter_to_compute(parameter: mx.array, casts: Casts) -> mx.array:
    """Returns a parameter of no matmul in the compute format, with its gradient in `grad_weight`."""
    return to_compute(with_weight_grad_format(parameter, casts), casts)


def times(x: mx.array, factor: mx.array, casts: Casts) -> mx.array:
    """Multiplies an activation by a parameter broadcast to it. Half numbers have exact products in fp32."""
    return to_compute(x.astype(mx.float32) * factor.astype(mx.float32), casts)


def plus(x: mx.array, addend: mx.array, casts: Casts) -> mx.array:
    """Adds a parameter broadcast to an activation; its gradient is summed in fp32 too."""
    return to_compute(x.astype(mx.float32) + addend.astype(mx.float32), casts)


def empty_parameter(*shape: int) -> mx.array:
    """Returns a parameter that has no values yet."""
    return mx.zeros(shape)


def embedding(weight: mx.array, index: mx.array, casts: Casts) -> mx.array:
    """Returns rows of a table in compute; their gradients are summed in fp32, whatever the table is held in."""
    return to_compute(look_up(weight, index, casts), casts)


def linear(x: mx.array, weight: mx.array, bias: mx.array | None, casts: Casts) -> mx.array:
    """Returns x W^T + b with the operands, sums and results of `casts`."""
    if casts.plain and weight.dtype == mx.float32:
        y = product(x.astype(mx.float32), weight.T)
    else:
        y = multiply(to_compute(x, casts), weight, casts)
    return (
        y if bias is None else plus(y, _biasing(casts.precision.compute, casts.precision.grad_weight)(bias), casts)
    )


def rms_norm(x: mx.array, gain: mx.array | None, casts: Casts, eps: float = 1e-6) -> mx.array:
    """Returns x / sqrt(mean(x^2) + eps) * gain: inside in the norm format, out in compute."""
    fmt = casts.precision.norm
    gain = None if gain is None else with_weight_grad_format(gain, casts)
    x, gain = to_island(x, casts.norm, fmt, casts), to_island(gain, casts.norm, fmt, casts)
    return exit_island(_rms_norm(x, gain, eps), casts.norm, fmt, casts)


def layer_norm(
    x: mx.array, gain: mx.array | None, bias: mx.array | None, casts: Casts, eps: float = 1e-5
) -> mx.array:
    """Returns (x - mean) / sqrt(variance + eps) * gain + bias: inside in the norm format, out in compute."""
    fmt = casts.precision.norm
    gain, bias = (None if p is None else with_weight_grad_format(p, casts) for p in (gain, bias))
    x, gain, bias = (to_island(t, casts.norm, fmt, casts) for t in (x, gain, bias))
    return exit_island(_layer_norm(x, gain, bias, eps), casts.norm, fmt, casts)


def softmax(x: mx.array, casts: Casts, axis: int = -1) -> mx.array:
    """Returns exp(x) / sum(exp(x)): inside in the softmax format, out in compute."""
    fmt = casts.precision.softmax
    return exit_island(_softmax(to_island(x, casts.softmax, fmt, casts), axis=axis), casts.softmax, fmt, casts)


def attention(q_BHTK: mx.array, k_BHTK: mx.array, v_BHTK: mx.array, casts: Casts) -> mx.array:
    """Computes causal attention; its softmax is in the softmax format, its result in compute."""
    q, k, v = (to_compute(t, casts) for t in (q_BHTK, k_BHTK, v_BHTK))
    if casts.fused_softmax:
        q, k, v = (t.astype(mx.float32) for t in (q, k, v))
        y = _attention(q, k, v, scale=q.shape[-1] ** -0.5, mask="causal")
        return to_compute(y, casts)
    if q.shape[1] != k.shape[1]:
        k, v = (mx.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
    return _narrow_attention(q, k, v, casts)


def cross_entropy(logits: mx.array, targets: mx.array, casts: Casts, softcap: float = 0.0) -> mx.array:
    """Returns the sum of -log softmax(logits)[target] over all targets: inside and out in the loss format."""
    fmt = casts.precision.loss
    wide = to_island(logits, casts.loss, fmt, casts)
    if softcap:
        wide = softcap * mx.tanh(wide / softcap)
    chosen = mx.take_along_axis(wide, targets[..., None], axis=-1).squeeze(-1)
    total = (_logsumexp(wide, axis=-1) - chosen).sum()
    return cast_to_format(total, casts.loss, fmt, casts)


def rotate(x_BHTK: mx.array, cos_TK: mx.array, sin_TK: mx.array, casts: Casts) -> mx.array:
    """Applies rotary positions: halves of each head turn by the angle of their position; angles are fp32."""
    half = x_BHTK.shape[-1] // 2
    x = x_BHTK.astype(mx.float32)
    turned = mx.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return to_compute(x * cos_TK + turned * sin_TK, casts)


class Matmul(Layer):
    """A module that multiplies activations by a matrix, so that narrow operands apply to it."""


class CastedLinear(Matmul):
    """A linear layer that computes in its own format, whatever its weight is held in; weight gradients are fp32.

    The format is that of the policy, once there is one. By itself the layer multiplies in `compute` ("bf16",
    mx.float16, ...), or without it in the format of its input: fp32 weights and a bf16 input make a bf16 matmul.
    """

    casts = _FROM_INPUT
    _repr_template = "{p.operand.format} operands{emulated}"

    def __init__(self, inputs: int, outputs: int, bias: bool = False, compute: str | mx.Dtype | None = None):
        super().__init__()
        if compute is not None:
            fmt = parse(compute) if isinstance(compute, str) else format_of(compute)
            self.named = named_format(fmt, DTYPES)
            self.precision = Precision.in_format(fmt)
        bound = inputs**-0.5  # as nn.Linear initializes
        self.weight = mx.random.uniform(-bound, bound, (outputs, inputs))
        self.bias = mx.zeros((outputs,)) if bias else None

    def __call__(self, x: mx.array) -> mx.array:
        return linear(self.check_activation_dtype(x), self.weight, self.bias, self.casts or casts_like(x))

    def _extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        if self.casts is None:
            return f"{inputs} -> {outputs}, in the format of its input"
        return f"{inputs} -> {outputs}, {super()._extra_repr()}"


class Norm(Layer):
    """Root-mean-square or layer normalization, an island; without a policy its result has its input's format."""

    casts = _FROM_INPUT
    _repr_template = "{m.kind}, {p.norm} inside, {p.compute} out"

    def __init__(
        self, width: int, kind: str = "rms", gain: bool = True, bias: bool = False, eps: float | None = None
    ):
        super().__init__()
        self.kind = kind
        self.eps = eps or (1e-5 if kind == "layer" else 1e-6)
        self.weight = mx.ones((width,)) if gain else None
        self.bias = mx.zeros((width,)) if bias and gain and kind == "layer" else None

    def __call__(self, x: mx.array) -> mx.array:
        x, casts = self.check_activation_dtype(x), self.casts or casts_like(x)
        if self.kind == "layer":
            return layer_norm(x, self.weight, self.bias, casts, self.eps)
        return rms_norm(x, self.weight, casts, self.eps)

    def _extra_repr(self) -> str:
        if self.casts is None:
            return f"{self.kind}, {FP32} inside, out in the format of its input"
        return super()._extra_repr()


def to_island(x: Any, dtype: mx.Dtype, fmt: Format, casts: Casts) -> Any:
    """Returns an array (or None) with numbers of the format that an island computes in, in fp32."""
    return None if x is None else cast_to_format(x, dtype, fmt, casts).astype(mx.float32)


def exit_island(x: mx.array, dtype: mx.Dtype, fmt: Format, casts: Casts) -> mx.array:
    """Rounds the result of an island to its format, then to compute."""
    return to_compute(cast_to_format(x, dtype, fmt, casts), casts)


@cache
def _owning(fmt: Format) -> Any:
    """Widens a parameter to fp32, with its gradient in the format of weight gradients."""
    return with_gradient(lambda p: p.astype(mx.float32), lambda p, g, _: cast_weight_grad(carried(g, fmt), p, fmt))


@cache
def _biasing(compute: Format, fmt: Format) -> Any:
    """Rounds a bias to compute, in fp32: a cast to bf16 would round the sum of its gradients once more."""
    return with_gradient(
        lambda p: carried(p.astype(mx.float32), compute), lambda p, g, _: cast_weight_grad(carried(g, fmt), p, fmt)
    )


def _narrow_attention(q: mx.array, k: mx.array, v: mx.array, casts: Casts) -> mx.array:
    scores = (q @ k.swapaxes(-2, -1)).astype(casts.softmax) * q.shape[-1] ** -0.5
    positions = mx.arange(q.shape[-2])
    future = positions[:, None] < positions[None, :]
    scores = mx.where(future, -mx.inf, scores)
    return round_to_compute(softmax(scores, casts) @ v, casts)


def _word(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
