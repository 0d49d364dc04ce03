"""The casted matmul and the islands, as functions and as stateless modules.

An island (norm, softmax, loss) is fp32 inside, backward too: it widens its input and narrows the gradient only on
the way out. Norms and softmax return the compute format, the loss returns fp32. An island in a narrower format
computes in fp32 on numbers of that format, rounded where they enter and leave, as kernels do.

Natively, XLA may keep more precision than asked for between two operations that it fuses, never less, unless the
outermost jit is given `COMPILER_OPTIONS`. Modules hold no parameters: they are called with all parameters by name.

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from halfstep.core.arrays.cast import GOLDEN, MIXERS
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.precision import Precision
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.jaxpr import COMPILER_OPTIONS as COMPILER_OPTIONS
from halfstep.jax.numerics.cast import carried, quantize
from halfstep.jax.numerics.dtypes import default_device, describe, dtype_of
from halfstep.jax.numerics.lowering import Casts, casts_of
from halfstep.jax.numerics.matmul import (
    as_dimensions,
    casted_dot,
    differentiable_once,
    in_compute,
    plain_dot,
    product,
)

Params = Mapping[str, Array]
"""All parameters of a model, by their qualified names."""


def to_compute(x: Array, casts: Casts) -> Array:
    """Casts an activation to the compute format of the module it enters."""
    return round_result(x.astype(casts.compute), casts)


def batch_to_compute(x: Array, casts: Casts) -> Array:
    """Casts a leaf of a batch: a mask's finite numbers stay finite, or rows that are masked become NaN."""
    lowest = -casts.precision.compute.max
    return to_compute(jnp.where(x < lowest, jnp.where(jnp.isinf(x), x, lowest), x), casts)


def round_result(x: Array, casts: Casts) -> Array:
    """Returns the result of an operation in the compute format: unchanged natively, rounded where emulated."""
    if not casts.emulate or casts.plain:
        return x
    return _round(x, casts.precision.compute, casts.precision.grad)


def with_weight_grad_format(parameter: Array, casts: Casts) -> Array:
    """Returns a parameter that no matmul takes; its gradient is rounded to the format of weight gradients."""
    if casts.precision.grad_weight == FP32 or parameter.dtype != jnp.float32:
        return parameter  # a bf16 parameter has a bf16 gradient anyway
    return _round(parameter, FP32, casts.precision.grad_weight)


def broadcast(parameter: Array, shape: Sequence[int], casts: Casts) -> Array:
    """Broadcasts a small parameter to activations; JAX's own rule would sum its gradient in their dtype."""
    return cast_bias(to_compute(with_weight_grad_format(parameter, casts), casts), tuple(shape), None)


def linear(x: Array, weight: Array, bias: Array | None, casts: Casts, *, amaxes: Array | None = None) -> Array:
    """Returns x W^T + b with the operands, sums and results of `casts`; `amaxes` scale delayed operands."""
    rows = x.reshape(-1, x.shape[-1])
    y = dot_general(rows, weight, (((1,), (1,)), ((), ())), casts, amaxes=amaxes)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    if bias is None:
        return y
    return round_result(y + cast_bias(with_weight_grad_format(bias, casts), y.shape, casts), casts)


def dot_general(
    x: Array,
    weight: Array,
    dimension_numbers: Any,
    casts: Casts,
    *,
    weight_first: bool = False,
    amaxes: Array | None = None,
) -> Array:
    """Multiplies an activation and a weight as `lax.dot_general` does, the weight first if asked, into compute."""
    dims = as_dimensions(dimension_numbers)
    if casts.plain:
        return plain_dot(weight, x, dims) if weight_first else plain_dot(x, weight, dims)
    return casted_dot(to_compute(x, casts), weight, amaxes, dims, casts, weight_first)


def rms_norm(x: Array, gain: Array | None, casts: Casts, eps: float = 1e-6) -> Array:
    """Returns x / sqrt(mean(x^2) + eps) * gain: inside in the norm format, out in compute."""
    return _norm(x, gain, None, casts, False, eps)


def layer_norm(x: Array, gain: Array | None, bias: Array | None, casts: Casts, eps: float = 1e-5) -> Array:
    """Returns (x - mean) / sqrt(variance + eps) * gain + bias: inside in the norm format, out in compute."""
    return _norm(x, gain, bias, casts, True, eps)


def softmax(x: Array, casts: Casts, axis: int = -1) -> Array:
    """Returns exp(x) / sum(exp(x)): inside in the softmax format, out in compute."""
    fmt = casts.precision.softmax
    return to_compute(_to_island_format(jax.nn.softmax(_to_island_format(x, fmt), axis=axis), fmt), casts)


def attention(
    q_BHTK: Array,
    k_BHTK: Array,
    v_BHTK: Array,
    casts: Casts,
    *,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Array:
    """Computes causal attention; its softmax is in the softmax format, its result in compute.

    cuDNN's kernel, which never stores the scores, runs on NVIDIA where it supports the shapes; both sum and
    exponentiate in fp32. `implementation` is for code that is traced for another device than JAX's default one.
    """
    q, k, v = to_compute(q_BHTK, casts), to_compute(k_BHTK, casts), to_compute(v_BHTK, casts)
    if implementation is None:
        implementation = "cudnn" if _has_cudnn_attention(q) else "xla"
    if implementation == "xla" or not casts.fused_softmax:
        return _attention(q, k, v, casts)
    q, k, v = (jnp.swapaxes(t, 1, 2) for t in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return jnp.swapaxes(y, 1, 2)


def cross_entropy(
    logits: Array, targets: Array, casts: Casts, softcap: float = 0.0, *, head: Casts | None = None
) -> Array:
    """Returns the sum of -log softmax(logits)[target] over all targets: inside and out in the loss format.

    `head` are the casts of the layer that made the logits. If they narrow its gradient, natively, it is rounded
    stochastically: to the nearest, every token would be off to the same side. Every target is a class; none is
    ignored.
    """
    fmt, targets = casts.precision.loss, targets.astype(jnp.int32)
    kept = 0 if head is None else head.precision.kept_bits
    if fmt == FP32:
        return _negative_log_likelihood(logits, targets, softcap, kept)
    total = _negative_log_likelihood(_to_island_format(logits, fmt), targets, softcap, kept)
    return _to_island_format(total, fmt).astype(casts.loss)


def rotate(x_BHTK: Array, cos_TK: Array, sin_TK: Array, casts: Casts) -> Array:
    """Applies rotary positions: halves of each head turn by the angle of their position; angles are fp32."""
    half = x_BHTK.shape[-1] // 2
    x = x_BHTK.astype(jnp.float32)
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return to_compute(x * cos_TK + turned * sin_TK, casts)


def pointwise(f: Callable[[Array], Array], x: Array, casts: Casts) -> Array:
    """Applies a nonlinearity: fp32 inside, compute out; only its input is kept for the backward pass."""
    return round_result(_pointwise(f, x), casts)


SCOPE = "layer:"
"""What begins the name scope of a layer, for what looks for layers in a jaxpr."""


class Layer:
    """A module with its own name and precision; what it computes is in a name scope of that name."""

    def __init_subclass__(cls) -> None:
        call: Callable[..., Any] = cls.__call__  # type: ignore[operator]

        @wraps(call)
        def scoped(self: Any, *args: Any) -> Any:
            with jax.named_scope(SCOPE + self.name) if self.name else nullcontext():
                return call(self, *args)

        cls.__call__ = scoped  # type: ignore[method-assign]

    def __init__(self, name: str, precision: Precision):
        self.name = name
        self.casts = casts_of(precision)

    @property
    def precision(self) -> Precision:
        """The formats the module runs in."""
        return self.casts.precision

    def parameter(self, params: Params, field: str) -> Array:
        """Returns a parameter of this module by its field, `weight` for example."""
        return params[f"{self.name}.{field}"]


class CastedLinear(Layer):
    """A linear layer that computes in its own precision, whatever its weight and input are held in.

    `weight` names the parameter of another module that it multiplies by, as a tied head does.
    """

    def __init__(self, name: str, precision: Precision, bias: bool = False, weight: str = ""):
        super().__init__(name, precision)
        self.has_bias, self.weight = bias, weight or f"{name}.weight"

    def __call__(self, params: Params, x: Array) -> Array:
        bias = self.parameter(params, "bias") if self.has_bias else None
        amaxes = params.get(f"{PREFIX}{self.name}")
        return linear(x, params[self.weight], bias, self.casts, amaxes=amaxes)


class Norm(Layer):
    """Root-mean-square or layer normalization, an island."""

    def __init__(self, name: str, precision: Precision, kind: str, gain: bool, bias: bool = False, *, eps: float):
        super().__init__(name, precision)
        self.kind, self.eps = kind, eps
        self.has_gain = gain
        self.has_bias = bias and gain and kind == "layer"

    def __call__(self, params: Params, x: Array) -> Array:
        gain = self.parameter(params, "weight") if self.has_gain else None
        bias = self.parameter(params, "bias") if self.has_bias else None
        return _norm(x, gain, bias, self.casts, self.kind == "layer", self.eps)


def _to_island_format(x: Array, fmt: Format) -> Array:
    """Returns an fp32 array that holds numbers of the format an island computes in; so does its gradient."""
    x = x.astype(jnp.float32)
    return x if fmt == FP32 else _round(x, fmt, fmt)


def _norm(x: Array, gain: Array | None, bias: Array | None, casts: Casts, centered: bool, eps: float) -> Array:
    fmt = casts.precision.norm
    rows = x.reshape(-1, x.shape[-1])
    if fmt != FP32:
        rows = _to_island_format(rows, fmt)
    given = [None if p is None else with_weight_grad_format(p, casts) for p in (gain, bias)]
    gain, bias = (None if p is None else _to_island_format(p, fmt) for p in given)
    y = _normalize(rows, gain, bias, centered, eps).reshape(x.shape)
    return to_compute(_to_island_format(y, fmt), casts)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalize(x: Array, gain: Array | None, bias: Array | None, centered: bool, eps: float) -> Array:
    """Normalizes rows of any dtype in fp32, and keeps the input unchanged for the backward pass."""
    return _normalize_forward(x, gain, bias, centered, eps)[0]


def _normalize_forward(
    x: Array, gain: Array | None, bias: Array | None, centered: bool, eps: float
) -> tuple[Array, Any]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centered else jnp.zeros((), jnp.float32)
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True) + eps)
    y = (wide - mean) * rstd
    if gain is not None:
        y = y * gain
    if bias is not None:
        y = y + bias
    return y, (x, gain, bias, mean, rstd)


def _normalize_backward(centered: bool, eps: float, kept: Any, g: Array) -> tuple[Any, Any, Any]:
    """Returns dx = rstd * (h - mean(h) - y * mean(h y)) with y the normalized row and h = g * gain."""
    x, gain, bias, mean, rstd = kept
    x = lax.optimization_barrier(x)  # as in _pointwise_backward
    y = (x.astype(jnp.float32) - mean) * rstd
    h = g if gain is None else g * gain
    grad = h - y * jnp.mean(h * y, axis=-1, keepdims=True)
    if centered:
        grad = grad - jnp.mean(h, axis=-1, keepdims=True)
    of_gain = None if gain is None else jnp.sum(g * y, axis=0)
    of_bias = None if bias is None else jnp.sum(g, axis=0)
    return (grad * rstd).astype(x.dtype), of_gain, of_bias


_normalize.defvjp(_normalize_forward, _normalize_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _round(x: Array, value: Format, grad: Format) -> Array:
    """Rounds the value forward and the gradient backward, as storing both in narrow arrays would."""
    return carried(x, value)


_round.defvjp(lambda x, value, grad: (carried(x, value), None), lambda _, grad, __, g: (carried(g, grad),))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pointwise(f: Callable[[Array], Array], x: Array) -> Array:
    return f(x.astype(jnp.float32)).astype(x.dtype)


def _pointwise_backward(f: Callable[[Array], Array], x: Array, g: Array) -> tuple[Array]:
    # Without the barrier XLA notices that it computed this before, and keeps fp32 copies from then on.
    x = lax.optimization_barrier(x)
    return (jax.vjp(f, x.astype(jnp.float32))[1](g.astype(jnp.float32))[0].astype(x.dtype),)


_pointwise.defvjp(lambda f, x: (_pointwise(f, x), x), _pointwise_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def cast_bias(parameter: Array, shape: tuple[int, ...], casts: Casts | None) -> Array:
    """Broadcasts a bias in compute, or unchanged without casts; its gradient is a sum in fp32, like a weight's."""
    return jnp.broadcast_to(parameter if casts is None else in_compute(parameter, casts), shape)


def _bias_backward(shape: tuple[int, ...], casts: Casts | None, x: Array, g: Array) -> tuple[Array]:
    # The leading dimensions as one: a sum over rows, which XLA computes without a transpose.
    ones = next((axis for axis, size in enumerate(x.shape) if size > 1), x.ndim)
    own, last = x.shape[ones:], shape[len(shape) - x.ndim + ones :]
    rows = jnp.sum(g.astype(jnp.float32).reshape(-1, *last), axis=0)
    summed = tuple(axis for axis, (one, all_) in enumerate(zip(own, last, strict=True)) if one != all_)
    return (jnp.sum(rows, axis=summed, keepdims=True).reshape(x.shape).astype(x.dtype),)


cast_bias.defvjp(lambda parameter, shape, casts: (cast_bias(parameter, shape, casts), parameter), _bias_backward)


def _has_cudnn_attention(q: Array) -> bool:
    """Returns whether cuDNN takes such queries on JAX's default device: half precision, heads of 8 to 128."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    if not fits or q.dtype not in (dtype_of(BF16), dtype_of(FP16)):
        return False
    device = default_device()
    return device.platform == "gpu" and describe(device).kind == "nvidia"


def _attention(q: Array, k: Array, v: Array, casts: Casts) -> Array:
    """Writes attention out, its softmax in any format. Heads H are G groups for each of the heads N of keys."""
    batch, heads, tokens, features = q.shape
    q = q.reshape(batch, k.shape[1], -1, tokens, features)
    scores_BNGTS = product(q, k, (((4,), (3,)), ((0, 1), (0, 1))), FP32, casts) * features**-0.5
    past_TS = jnp.tril(jnp.ones((tokens, tokens), bool))
    scores_BNGTS = jnp.where(past_TS, scores_BNGTS, -jnp.inf)
    if casts.fused_softmax:
        weights = jax.nn.softmax(scores_BNGTS, axis=-1).astype(casts.compute)
    else:
        weights = softmax(scores_BNGTS, casts)
    y = product(weights, v, (((4,), (2,)), ((0, 1), (0, 1))), casts.precision.compute, casts)
    return round_result(y.reshape(batch, heads, tokens, features), casts)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _negative_log_likelihood(logits: Array, targets: Array, softcap: float, bits: int) -> Array:
    """Sums over all targets in fp32, for logits in any dtype, without an fp32 copy of them.

    The gradient is rounded stochastically to `bits` bits of mantissa, unless that is 0.
    """
    return _likelihood_forward(logits, targets, softcap, bits)[0]


def _likelihood_forward(
    logits: Array, targets: Array, softcap: float, bits: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    log_sum = jax.nn.logsumexp(cap_logits(logits, softcap), axis=-1)
    picked = cap_logits(jnp.take_along_axis(logits, targets[..., None], axis=-1), softcap)[..., 0]
    return jnp.sum(log_sum - picked), (logits, targets, log_sum)


def _likelihood_backward(
    softcap: float, bits: int, kept: tuple[Array, Array, Array], g: Array
) -> tuple[Array, None]:
    logits, targets, log_sum = kept
    capped = cap_logits(logits, softcap)
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    grad = (jnp.exp(capped - log_sum[..., None]) - hit.astype(jnp.float32)) * g
    if softcap:
        grad = grad * (1.0 - jnp.square(capped / softcap))
    if bits:
        given: dict[str, Any] = {"rounding": "stochastic", "bits": _draw_words(logits, targets)}
        grad = quantize(differentiable_once(grad), Format(8, bits), overflow="inf", **given)
    return grad.astype(logits.dtype), None


_negative_log_likelihood.defvjp(_likelihood_forward, _likelihood_backward)


def _draw_words(logits: Array, targets: Array) -> Array:
    """Returns a word for each number: the same as torch.losses.round_stochastically draws."""
    width, wide = logits.shape[-1], logits.astype(jnp.float32)
    golden, first, second = (jnp.uint32(number) for number in (GOLDEN, *MIXERS))

    def bits_of(column: Array) -> Array:
        picked = jnp.take_along_axis(wide, jnp.minimum(column, width - 1)[..., None], axis=-1)[..., 0]
        return lax.bitcast_convert_type(jnp.where(column < width, picked, 0.0), jnp.uint32)

    h = (bits_of(targets) ^ (bits_of(targets ^ 1) >> 16)) + targets.astype(jnp.uint32) * golden
    h = (h ^ (h >> 16)) * first
    h = (h ^ (h >> 15)) * second
    column = lax.broadcasted_iota(jnp.uint32, logits.shape, logits.ndim - 1)
    return ~((h ^ (h >> 16))[..., None] + column * golden)


def cap_logits(logits: Array, softcap: float) -> Array:
    """Returns logits in fp32, after the softcap if there is one."""
    logits = logits.astype(jnp.float32)
    return softcap * jnp.tanh(logits / softcap) if softcap else logits
