"""The casted matmul and the islands: formats in and out, forward and backward."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import Sequential

from halfstep.core.errors import FormatError, HalfstepError, PolicyError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.precision import base_precision as base
from halfstep.mlx import layers
from halfstep.mlx.convert.apply import apply
from halfstep.mlx.layers import (
    CastedLinear,
    Norm,
    Streams,
    attention,
    check_stream_dtype,
    embedding,
    linear,
    plus,
    times,
    with_weight_grad_format,
)
from halfstep.mlx.numerics.cast import quantize
from halfstep.mlx.numerics.lowering import casts_of


def of(policy):
    return casts_of(base(Policy.parse(policy)))


NATIVE, EMULATED = of("bf16-mixed"), of("bf16-mixed,emulate=true")
HALF, FULL = of("fp16-mixed"), casts_of(Precision())
FP8 = casts_of(precisions(Policy.parse("fp8-mixed,emulate=true"), ["a"])["a"])
BOTH = pytest.mark.parametrize("casts", [NATIVE, EMULATED], ids=["native", "emulated"])


def draw(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def bf16(x):
    return x.astype(mx.bfloat16).astype(mx.float32)


def as_fp64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def gradients(function, g, *arrays):
    """The result of a function, and the gradients of its arguments where the result's gradient is g."""
    (y,), found = mx.vjp(lambda *given: [function(*given)], list(arrays), [g.astype(function(*arrays).dtype)])
    return y, *found


def equal(one, other):
    return one.dtype == other.dtype and bool(mx.array_equal(one, other))


def test_fp32_is_mlxs_own_matmul_bit_for_bit():
    x, w, b = draw(2, 5, 8), draw(6, 8, seed=1), draw(6, seed=2)
    assert equal(linear(x, w, None, FULL), x @ w.T)
    assert equal(linear(x, w, b, FULL), x @ w.T + b)


def test_an_incoming_gradient_is_first_an_activation():
    """Rounded to `grad`, and then to the operand's format: an e5m2 of a bf16 is not always that of the number."""
    x, w, g = draw(5, 8), draw(6, 8, seed=1), draw(5, 6, seed=2)
    g = mx.concatenate([g[:, :3], mx.full((5, 3), 1.125 + 2.0**-10)], axis=1)  # just above a tie of e5m2
    for casts in (EMULATED, NATIVE, FP8):
        wide, narrow = (gradients(lambda x, w, c=casts: linear(x, w, None, c), t, x, w) for t in (g, bf16(g)))
        assert all(equal(one, other) for one, other in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("casts", [NATIVE, FULL], ids=["bf16", "fp32"])
def test_a_weight_held_in_bf16_has_an_fp32_gradient_if_the_policy_says_so(casts):
    """The upper half of a split master: MLX's own gradient of a conversion would be bf16."""
    x, g = bf16(draw(64, 8, seed=1)), bf16(draw(64, 4, seed=2))
    hi = draw(4, 8).astype(mx.bfloat16)
    _, held = gradients(lambda w: linear(x, w, None, casts), g, hi)
    _, wide = gradients(lambda w: linear(x, w, None, casts), g, hi.astype(mx.float32))
    assert equal(held, wide)
    assert not equal(held, bf16(held))
    _, gain = gradients(
        lambda p: layers.parameter_to_compute(p, casts) * x.astype(casts.compute),
        bf16(draw(64, 8)),
        hi[:1],
    )
    assert gain.dtype == mx.float32


@pytest.mark.parametrize("operation", [times, plus])
def test_factors_and_biases_have_gradients_summed_in_fp32(operation):
    """Products of both signs that almost cancel: rounded one by one, their sum is off by more than its size."""
    x, g = bf16(1 + draw(512, 4) / 8), bf16(1 + draw(512, 4, seed=1) / 8) * mx.array([1, -1] * 256)[:, None]
    p = bf16(draw(4, seed=2))
    xs, gs, ps = as_fp64(x), as_fp64(g), as_fp64(p)
    y, grad_x, grad_p = gradients(
        lambda x, p: operation(x, p, NATIVE), g, x.astype(mx.bfloat16), p.astype(mx.bfloat16)
    )
    exact, terms = (xs * ps, gs * xs) if operation is times else (xs + ps, gs)
    assert equal(y, mx.array(exact.astype(np.float32)).astype(mx.bfloat16))
    assert equal(grad_x, (g * p if operation is times else g).astype(mx.bfloat16))
    bound = 512 * 2.0**-24 * np.abs(terms).sum(0) + BF16.epsilon / 2 * np.abs(terms.sum(0))
    assert (np.abs(as_fp64(grad_p) - terms.sum(0)) <= bound).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_of_a_table_have_gradients_summed_in_fp32(dtype):
    """A thousand gradients of one row: in bf16 the sum would stop growing at 256."""
    table, index = draw(4, 8).astype(dtype), mx.array([[2] * 500, [2] * 499 + [0]])
    y, grad = gradients(lambda table: embedding(table, index, NATIVE), mx.ones((2, 500, 8)), table)
    assert equal(y, table.astype(mx.bfloat16)[index])
    expected = mx.broadcast_to(mx.array([1.0, 0.0, 999.0, 0.0])[:, None], (4, 8))
    assert equal(grad, expected)
    _, grad = gradients(lambda table: embedding(table, index, of("bf16-true")), mx.ones((2, 500, 8)), table)
    assert equal(grad, expected.astype(mx.bfloat16).astype(dtype))


def attended(q, k, v):
    """Causal attention in fp64, and the weights."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, scores


@pytest.mark.parametrize("casts", [NATIVE, EMULATED, HALF], ids=["native", "emulated", "fp16"])
def test_attention_takes_scores_and_softmax_in_fp32(casts):
    """MLX's attention of bf16 arrays rounds the scores: at a score of 60, that changes a weight by 12 %."""
    fmt = casts.precision.compute
    q, k, v = (quantize(draw(1, 2, 6, 8, seed=s), fmt, overflow="inf") for s in range(3))
    q = quantize(q * 30, fmt, overflow="inf")
    y = attention(q.astype(casts.compute), k.astype(casts.compute), v.astype(casts.compute), casts)
    assert y.dtype == casts.compute
    exact, scores = attended(*(as_fp64(t) for t in (q, k, v)))
    largest = np.abs(scores[np.isfinite(scores)]).max()
    # An fp32 score is off by eight roundings of at most its size; so is, relatively, each weight.
    bound = 16 * 2.0**-24 * (8 * largest + 8) * np.abs(as_fp64(v)).max() + fmt.epsilon / 2 * np.abs(exact)
    assert (np.abs(as_fp64(y) - exact) <= bound).all()
    assert largest > 60


def test_native_and_plain_are_rounded_by_their_dtype_alone():
    x = draw(64)
    assert layers.round_to_compute(x, FULL) is x
    assert layers.round_to_compute(x, NATIVE) is x
    assert layers.round_to_compute(x, casts_of(Precision(emulate=True))) is x
    assert with_weight_grad_format(x, NATIVE) is x


@BOTH
def test_a_layer_compiles_to_the_same_bits(casts):
    x, w, g = draw(4, 8), draw(6, 8, seed=1), draw(4, 6, seed=2)

    def function(x, w):
        return gradients(lambda x, w: linear(x, w, None, casts), g, x, w)

    for one, other in zip(function(x, w), mx.compile(function)(x, w), strict=True):
        assert equal(one, other)


def test_parameters_are_what_the_layer_has():
    assert set(CastedLinear(8, 4).parameters()) == {"weight"}
    assert set(CastedLinear(8, 4, bias=True).parameters()) == {"weight", "bias"}
    assert set(Norm(8, "layer", bias=True).parameters()) == {"weight", "bias"}
    assert set(Norm(8, gain=False).parameters()) == set()
    assert set(Norm(8, "rms", bias=True).parameters()) == {"weight"}


def test_a_layer_is_copied_with_its_precision():
    layer = CastedLinear(8, 4)
    layer.precision, layer.streams = NATIVE.precision, Streams({mx.bfloat16})
    made = copy.deepcopy([layer])[0]
    assert made.precision == NATIVE.precision
    assert made.streams == layer.streams
    assert equal(made.weight, layer.weight)
    made.weight = mx.zeros((4, 8))
    assert mx.abs(layer.weight).max() > 0


def test_printing_shows_the_formats():
    layer = CastedLinear(8, 4)
    layer.precision = NATIVE.precision
    assert "8 -> 4, bf16 operands" in repr(layer)
    layer.precision = EMULATED.precision
    assert "bf16 operands emulated" in repr(layer)
    assert "fp32 inside" in repr(Norm(8))


def test_an_fp32_array_that_promotes_the_stream_is_an_error_of_layers_and_norms():
    layer = CastedLinear(8, 4)
    layer.precision = NATIVE.precision
    x = draw(3, 8).astype(mx.bfloat16)
    assert layer(x * mx.array(0.5)).dtype == mx.bfloat16  # without streams it casts any input
    layer.name, layer.streams = "blocks.0.attn.q", Streams({mx.bfloat16})
    assert layer(x * 0.5).dtype == mx.bfloat16
    with pytest.raises(PolicyError) as caught:
        layer(x * mx.array(0.5))
    assert caught.value.message == (
        "`blocks.0.attn.q` got a float32 activation where the stream is bfloat16: "
        "a cast or an fp32 array widened it upstream"
    )
    assert "Python number" in caught.value.hint
    assert ".astype(mx.bfloat16)" in caught.value.hint
    norm = Norm(8)
    norm.precision, norm.streams = NATIVE.precision, Streams({mx.bfloat16})
    with pytest.raises(PolicyError, match="`Norm` got a float32 activation"):
        norm(draw(3, 8))


def test_what_the_model_has_elsewhere_is_let_through():
    """A head in fp32 under bf16: its stream is fp32, and both are the model's."""
    narrow, wide = Streams({mx.bfloat16}), Streams({mx.float32})
    check_stream_dtype(draw(3), NATIVE, "a", narrow | wide)
    check_stream_dtype(mx.array([1, 2]), NATIVE, "a", narrow)  # integers are not activations
    check_stream_dtype(draw(3).astype(mx.bfloat16), NATIVE, "a", narrow)
    with pytest.raises(
        PolicyError, match="`a` got a bfloat16 activation where the stream is float32: it was cast"
    ):
        check_stream_dtype(draw(3).astype(mx.bfloat16), FULL, "a", wide)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_casted_layer_without_a_policy_follows_its_input(dtype):
    layer, norm, x = CastedLinear(8, 4, bias=True), Norm(8), draw(3, 8).astype(dtype)

    def loss(parameters, x):
        layer.update(parameters)
        return layer(norm(x)).astype(mx.float32).sum()

    assert layer(norm(x)).dtype == norm(x).dtype == dtype
    inside = norm(x).astype(mx.float32)
    wide = (inside @ layer.weight.astype(dtype).astype(mx.float32).T).astype(dtype)
    assert equal(layer(norm(x)), wide + layer.bias.astype(dtype))
    grads = mx.grad(loss)(layer.parameters(), x)
    assert {g.dtype for g in grads.values()} == {mx.float32}
    assert equal(grads["weight"], mx.ones((4, 3)) @ inside)


def test_a_casted_layer_may_name_its_format_and_a_policy_does_not_replace_it():
    assert CastedLinear(8, 4, compute="bf16")(draw(2, 8)).dtype == mx.bfloat16
    layer = CastedLinear(8, 4, compute=mx.float16)
    assert layer(draw(2, 8)).dtype == mx.float16
    assert "in the format of its input" in repr(CastedLinear(8, 4))
    with pytest.raises(FormatError, match="compute=e4m3"):
        CastedLinear(8, 4, compute="e4m3")
    with pytest.raises(PolicyError, match=r"`layers.0` was built with compute=fp16"):
        apply(Sequential(layer, CastedLinear(4, 4)), Policy.parse("bf16-mixed"))


def test_gradients_can_be_differentiated_again_emulated_too_and_narrow_ones_say_that_they_cannot():
    x, w = draw(3, 8), draw(4, 8, seed=1)

    def penalty(casts):
        def slope(x, w):
            return mx.grad(lambda x: mx.tanh(linear(x, w, None, casts).astype(mx.float32)).sum())(x)

        return lambda x, w: mx.square(slope(x, w).astype(mx.float32)).sum()

    expected = mx.grad(penalty(FULL), argnums=1)(x, w)
    tangent = mx.jvp(lambda x: linear(x, w, None, FULL), [x], [x])[1][0]
    for casts in (NATIVE, EMULATED):
        found = mx.grad(penalty(casts), argnums=1)(x, w)
        assert mx.linalg.norm(found - expected) <= 8 * BF16.epsilon * mx.linalg.norm(expected)
        moved = mx.jvp(lambda x, casts=casts: linear(x, w, None, casts), [x], [x])[1][0].astype(mx.float32)
        assert mx.linalg.norm(moved - tangent) <= 4 * BF16.epsilon * mx.linalg.norm(tangent)
    for derive in (
        lambda: mx.grad(penalty(FP8), argnums=1)(x, w),
        lambda: mx.jvp(lambda x: linear(x, w, None, FP8), [x], [x]),
    ):
        with pytest.raises(HalfstepError, match="narrow operands cannot be differentiated twice"):
            derive()
