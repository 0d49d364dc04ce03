"""The casted matmul and the islands: formats in and out, forward and backward."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from halfstep.config.model import ModelConfig
from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16, FP16, FP32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.precision import base_precision as base
from halfstep.mlx.cast import quantize, quantize_scaled
from halfstep.mlx.layers import (
    CastedLinear,
    Norm,
    attention,
    cross_entropy,
    embedding,
    enter,
    expect,
    layer_norm,
    linear,
    owned,
    plus,
    rms_norm,
    rotate,
    rounded,
    softmax,
    times,
)
from halfstep.mlx.lowering import casts_of


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


# --- the three matmuls -----------------------------------------------------------------------------------


def test_fp32_is_mlxs_own_matmul_bit_for_bit():
    x, w, b = draw(2, 5, 8), draw(6, 8, seed=1), draw(6, seed=2)
    assert equal(linear(x, w, None, FULL), x @ w.T)
    assert equal(linear(x, w, b, FULL), x @ w.T + b)


@pytest.mark.parametrize(
    ("casts", "fmt"),
    [(NATIVE, BF16), (EMULATED, BF16), (HALF, FP16), (of("fp16-mixed,emulate=true"), FP16)],
    ids=["bf16", "emulated bf16", "fp16", "emulated fp16"],
)
@pytest.mark.parametrize("terms", [7, 500])
def test_the_three_matmuls_have_exact_operands_and_fp32_sums(casts, fmt, terms):
    """Each result in turn is a sum of `terms` products: summed in the format, 500 would be off by percents."""

    def narrow(x):
        return quantize(x, fmt, overflow="inf")

    for tokens, inputs, outputs in ((3, terms, 5), (3, 5, terms), (terms, 5, 3)):
        x, w = draw(tokens, inputs), draw(outputs, inputs, seed=1)
        g = narrow(draw(tokens, outputs, seed=2))
        y, grad_x, grad_w = gradients(lambda x, w: linear(x, w, None, casts), g, x, w)
        xs, ws, gs = as_fp64(narrow(x)), as_fp64(narrow(w)), as_fp64(g)
        # Products of half numbers are exact in fp32 and in fp64; only the order of the fp32 sum is open.
        assert_sum(y, xs, ws.T, fmt)
        assert_sum(grad_x, gs, ws, fmt)
        assert_sum(grad_w, gs.T, xs, FP32)
        assert grad_w.dtype == mx.float32
        assert not equal(grad_w, narrow(grad_w))  # the weight gradient keeps fp32


def assert_sum(result, a, b, fmt):
    """a b, a sum of exact products in fp32, then rounded once to the format."""
    exact, summed = a @ b, a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))
    bound = summed + (np.abs(exact) + summed) * (fmt.epsilon / 2 if fmt != FP32 else 0)
    assert (np.abs(as_fp64(result) - exact) <= bound).all()
    assert equal(result.astype(mx.float32), quantize(result, fmt, overflow="inf"))


def test_an_incoming_gradient_is_first_an_activation():
    """Rounded to `grad`, and then to the operand's format: an e5m2 of a bf16 is not always that of the number."""
    x, w, g = draw(5, 8), draw(6, 8, seed=1), draw(5, 6, seed=2)
    g = mx.concatenate([g[:, :3], mx.full((5, 3), 1.125 + 2.0**-10)], axis=1)  # just above a tie of e5m2
    for casts in (EMULATED, NATIVE, FP8):
        wide, narrow = (gradients(lambda x, w, c=casts: linear(x, w, None, c), t, x, w) for t in (g, bf16(g)))
        assert all(equal(one, other) for one, other in zip(wide, narrow, strict=True))


def test_bf16_true_rounds_the_weight_gradient():
    casts = of("bf16-true")
    x, w, g = draw(5, 8, seed=1), draw(4, 8), draw(5, 4, seed=2)
    _, grad_w = gradients(lambda w: linear(x, w, None, casts), g, w)
    assert equal(grad_w, bf16(grad_w))
    _, held = gradients(lambda w: linear(x, w, None, casts), g, w.astype(mx.bfloat16))
    assert held.dtype == mx.bfloat16


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
        lambda p: enter(owned(p, casts), casts) * x.astype(casts.compute), bf16(draw(64, 8)), hi[:1]
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


@pytest.mark.parametrize("x_dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("w_dtype", [mx.float32, mx.bfloat16])
def test_the_format_is_the_layers_own_whatever_the_operands_are(x_dtype, w_dtype):
    x, w = draw(3, 8).astype(x_dtype), draw(4, 8, seed=1).astype(w_dtype)
    assert linear(x, w, None, NATIVE).dtype == mx.bfloat16
    assert linear(x, w, None, FULL).dtype == mx.float32


def test_the_bias_is_added_in_the_compute_format():
    x, w, b = draw(3, 8), draw(4, 8, seed=1), draw(4, seed=2)
    without = linear(x, w, None, EMULATED)
    assert equal(linear(x, w, b, EMULATED), bf16(without + bf16(b)))


def test_native_and_emulated_are_the_same_numbers_where_sums_are_exact():
    """Small integers: every sum is exact in fp32, whatever the order, so that all that is left is the rounding."""
    rng = np.random.default_rng(0)
    x, w, g = (mx.array(rng.integers(-40, 40, shape).astype(np.float32)) for shape in ((9, 33), (7, 33), (9, 7)))
    for narrow, wide in ((NATIVE, EMULATED), (HALF, of("fp16-mixed,emulate=true"))):
        one = gradients(lambda x, w, c=narrow: linear(x, w, None, c), g, x, w)
        other = gradients(lambda x, w, c=wide: linear(x, w, None, c), g, x, w)
        assert one[0].dtype != other[0].dtype
        for a, b in zip(one, other, strict=True):
            assert equal(a.astype(mx.float32), b)


def test_narrow_operands_are_scaled_and_the_result_is_in_compute():
    casts = FP8
    x, w = draw(5, 16) * 1e-4, draw(6, 16, seed=1)
    g = bf16(draw(5, 6, seed=2) * 1e-3)
    y, grad_x, grad_w = gradients(lambda x, w: linear(x, w, None, casts), g, x, w)
    (xq, x_inv), (wq, w_inv) = (quantize_scaled(bf16(t), casts.precision.operand) for t in (x, w))
    gq, g_inv = quantize_scaled(g, casts.precision.grad_operand)
    assert equal(y, bf16(xq @ wq.T * x_inv * w_inv))
    assert equal(grad_x, bf16(gq @ wq * g_inv * w_inv))
    assert equal(grad_w, gq.T @ xq * g_inv * x_inv)
    # Without a scale, 1e-4 is below the smallest e4m3 and the whole product would vanish.
    assert mx.abs(quantize(x, casts.precision.operand.format, overflow="saturate")).max() == 0
    assert mx.abs(y).max() > 0


def test_row_wise_scales_give_each_row_its_own_range():
    policy = Policy.parse("bf16-mixed,compute=e4m3:row,grad=e4m3:row,emulate=true")
    casts = casts_of(precisions(policy, ["a"])["a"])
    x = draw(2, 2, 16) * mx.array([[1e-6, 1.0], [1e3, 1e6]])[:, :, None]
    w = draw(8, 16, seed=1)
    exact = x @ w.T
    y = linear(x, w, None, casts)
    relative = mx.linalg.norm(y - exact, axis=-1) / mx.linalg.norm(exact, axis=-1)
    # Each operand is within 2^-4 of itself, relatively; random signs make the sum better, never worse.
    assert (relative < 2 * 2.0**-4).all()


# --- islands ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_is_fp32_inside_and_compute_out_forward_and_backward(casts, kind):
    x, gain, g = bf16(draw(4, 64) * 100), draw(64, seed=1) + 1, bf16(draw(4, 64, seed=2))

    def run(casts, dtype):
        norm = rms_norm if kind == "rms" else lambda x, gain, casts: layer_norm(x, gain, None, casts)
        return gradients(lambda x, gain: norm(x, gain, casts), g, x.astype(dtype), gain)

    wide = run(FULL, mx.float32)
    y, grad_x, grad_gain = run(casts, mx.float32 if casts.emulate else mx.bfloat16)
    assert y.dtype == grad_x.dtype == (mx.float32 if casts.emulate else mx.bfloat16)
    assert equal(y.astype(mx.float32), bf16(wide[0]))  # one rounding, at the end
    assert equal(grad_gain, wide[2])  # nothing inside was rounded
    if not casts.emulate:
        assert equal(grad_x.astype(mx.float32), bf16(wide[1]))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_is_the_formula(kind):
    x, gain, bias = draw(3, 16) * 5 + 2, draw(16, seed=1), draw(16, seed=2)
    wide = as_fp64(x)
    if kind == "rms":
        found = rms_norm(x, gain, FULL)
        exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * as_fp64(gain)
        assert equal(rms_norm(x, None, FULL), rms_norm(x, mx.ones(16), FULL))
    else:
        found = layer_norm(x, gain, bias, FULL)
        centered = wide - wide.mean(-1, keepdims=True)
        exact = centered / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * as_fp64(gain) + as_fp64(bias)
    # A sum of 16 squares and a handful of operations: far fewer than 64 roundings.
    assert (np.abs(as_fp64(found) - exact) <= 64 * 2.0**-24 * (np.abs(exact) + 1)).all()


def test_an_island_asked_for_in_bf16_is_another_number_native_and_emulated_alike():
    x, gain = bf16(draw(4, 64) * 100), draw(64, seed=1)
    asked = "bf16-mixed,norm=bf16,softmax=bf16,loss=bf16"
    native, emulated = of(asked), of(asked + ",emulate=true")
    for norm in (rms_norm, lambda x, gain, casts: layer_norm(x, gain, None, casts)):
        assert equal(norm(x, gain, native).astype(mx.float32), norm(x, gain, emulated))
        assert not equal(norm(x, gain, native), norm(x, gain, NATIVE))
    assert equal(softmax(x, native).astype(mx.float32), softmax(x, emulated))
    targets = mx.array([0, 1, 2, 3])
    one, other = (cross_entropy(x, targets, casts) for casts in (native, emulated))
    assert one.dtype == mx.bfloat16
    assert equal(one.astype(mx.float32), other)


@BOTH
def test_softmax_is_fp32_inside(casts):
    x = bf16(draw(3, 40) * 4)
    found = softmax(x.astype(casts.compute), casts)
    assert found.dtype == casts.compute
    assert equal(found.astype(mx.float32), bf16(mx.softmax(x, axis=-1)))
    # Along another axis MLX sums 40 terms in another order.
    difference = softmax(x.T, FULL, axis=0).T / mx.softmax(x, axis=-1) - 1
    assert mx.abs(difference).max() <= 2 * 40 * 2.0**-24


def test_the_loss_is_fp32_whatever_the_logits_are():
    logits, targets = (draw(2, 2, 32) * 100).astype(mx.float16), mx.array([[0, 1], [2, 3]])
    loss, grad = gradients(lambda logits: cross_entropy(logits, targets, HALF), mx.array(1.0), logits)
    assert loss.dtype == mx.float32
    assert grad.dtype == mx.float16
    wide = logits.astype(mx.float32)
    assert equal(loss, nn.losses.cross_entropy(wide, targets, reduction="sum"))
    assert mx.isfinite(loss * 65536)  # in fp16 this is inf
    probabilities = mx.softmax(wide, axis=-1) - (mx.arange(32) == targets[..., None])
    assert mx.abs(grad.astype(mx.float32) - probabilities).max() <= FP16.epsilon


def test_softcap_bounds_the_logits():
    logits, targets = mx.array([[1e4, 0.0]]), mx.array([1])
    assert cross_entropy(logits, targets, FULL, softcap=30.0).item() == pytest.approx(30.0, rel=1e-6)


# --- attention -------------------------------------------------------------------------------------------


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


@BOTH
def test_attention_sees_no_future_and_its_gradients_are_in_compute(casts):
    q, k, v = (draw(1, 2, 6, 8, seed=s).astype(casts.compute) for s in range(3))
    y, *grads = gradients(lambda *qkv: attention(*qkv, casts), draw(1, 2, 6, 8, seed=3), q, k, v)
    assert {t.dtype for t in (y, *grads)} == {casts.compute}
    changed = mx.concatenate([v[:, :, :-1], v[:, :, -1:] + 100], axis=2)
    assert equal(attention(q, k, changed, casts)[:, :, :-1], y[:, :, :-1])


def test_grouped_heads_share_keys_and_values():
    q, k, v = draw(1, 4, 5, 8), draw(1, 2, 5, 8, seed=1), draw(1, 2, 5, 8, seed=2)
    narrow = of("bf16-mixed,softmax=bf16,emulate=true")
    for casts in (FULL, narrow):
        wide = attention(q, mx.repeat(k, 2, 1), mx.repeat(v, 2, 1), casts)
        assert mx.abs(attention(q, k, v, casts) - wide).max() <= 8 * 2.0**-24 * mx.abs(v).max()


@pytest.mark.parametrize("policy", ["bf16-mixed,softmax=bf16", "bf16-mixed,softmax=bf16,emulate=true"])
def test_softmax_in_bf16_is_what_was_asked_for(policy):
    casts = of(policy)
    q, k, v = (bf16(draw(1, 2, 6, 8, seed=s)) for s in range(3))
    y, wide = attention(q, k, v, casts), attention(q, k, v, EMULATED)
    assert y.dtype == casts.compute
    assert not mx.array_equal(y.astype(mx.float32), wide)
    # scores, weights and result are each within half an ulp; the sum of weights is one
    assert mx.abs(y.astype(mx.float32) - wide).max() <= 8 * BF16.epsilon * mx.abs(v).max()


def test_rotation_keeps_the_norm_and_turns_by_relative_position():
    from halfstep.mlx.model import rope_tables

    cos, sin = rope_tables(ModelConfig(width=16, heads=1, context=64))
    x = mx.broadcast_to(draw(1, 1, 1, 16), (1, 1, 64, 16))
    turned = as_fp64(rotate(x, cos, sin, FULL))[0, 0]
    length = (as_fp64(x)[0, 0] ** 2).sum(-1)
    assert (np.abs((turned**2).sum(-1) - length) <= 2.0**-19 * length).all()
    dots = (turned[:-3] * turned[3:]).sum(-1)
    assert (np.abs(dots - dots[0]) <= 2.0**-18 * length[0]).all()
    assert rotate(x, cos, sin, NATIVE).dtype == mx.bfloat16


# --- rounding points -------------------------------------------------------------------------------------


def test_rounding_reaches_gradients_too():
    x, g = draw(64), draw(64, seed=1)
    y, grad = gradients(lambda x: enter(x, EMULATED), g, x)
    assert equal(y, bf16(x))
    assert equal(grad, bf16(g))


def test_native_and_plain_are_rounded_by_their_dtype_alone():
    x = draw(64)
    assert rounded(x, FULL) is x
    assert rounded(x, NATIVE) is x
    assert rounded(x, casts_of(Precision(emulate=True))) is x


def test_a_parameters_gradient_is_rounded_to_the_format_of_weight_gradients():
    casts, g, p = of("bf16-mixed,grad_weight=bf16"), draw(64, seed=1), draw(64)
    y, grad = gradients(lambda p: owned(p, casts), g, p)
    assert equal(y, p)
    assert equal(grad, bf16(g))
    assert owned(p, NATIVE) is p


def test_fp16_emulation_overflows_to_infinity_as_hardware_does():
    casts = of("fp16-mixed,emulate=true")
    assert enter(mx.array([7e4, -7e4]), casts).tolist() == [float("inf"), -float("inf")]


# --- modules ---------------------------------------------------------------------------------------------


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
    layer.precision, layer.streams = NATIVE.precision, frozenset({mx.bfloat16})
    made = copy.deepcopy([layer])[0]
    assert made.precision == NATIVE.precision
    assert made.streams == layer.streams
    assert equal(made.weight, layer.weight)
    made.weight = mx.zeros((4, 8))
    assert mx.abs(layer.weight).max() > 0


def test_printing_tells_the_truth():
    layer = CastedLinear(8, 4)
    layer.precision = NATIVE.precision
    assert "8 -> 4, bf16 operands" in repr(layer)
    layer.precision = EMULATED.precision
    assert "bf16 operands emulated" in repr(layer)
    assert "fp32 inside" in repr(Norm(8))


# --- promotion -------------------------------------------------------------------------------------------

PROMOTED = (
    "`blocks.0.attn.q` got a float32 activation where the stream is bfloat16: "
    "an fp32 array met it upstream and promoted it"
)


def test_an_fp32_array_that_promotes_the_stream_is_an_error():
    layer = CastedLinear(8, 4)
    layer.precision = NATIVE.precision
    x = draw(3, 8).astype(mx.bfloat16)
    assert layer(x * mx.array(0.5)).dtype == mx.bfloat16  # told nothing, it casts what comes
    layer.name, layer.streams = "blocks.0.attn.q", frozenset({mx.bfloat16})
    assert layer(x * 0.5).dtype == mx.bfloat16
    with pytest.raises(PolicyError) as caught:
        layer(x * mx.array(0.5))
    assert caught.value.message == PROMOTED
    assert "Python number" in caught.value.hint
    assert ".astype(mx.bfloat16)" in caught.value.hint


def test_norms_expect_the_stream_too():
    norm = Norm(8)
    norm.precision, norm.streams = NATIVE.precision, frozenset({mx.bfloat16})
    with pytest.raises(PolicyError, match="`Norm` got a float32 activation"):
        norm(draw(3, 8))


def test_what_the_model_has_elsewhere_is_let_through():
    """A head in fp32 under bf16: its stream is fp32, and both are the model's."""
    expect(draw(3), NATIVE, "a", frozenset({mx.bfloat16, mx.float32}))
    expect(mx.array([1, 2]), NATIVE, "a")  # integers are no activations
    expect(draw(3).astype(mx.bfloat16), NATIVE, "a")
    expect(draw(3), EMULATED, "a")  # emulated, everything is carried in fp32
    with pytest.raises(
        PolicyError, match="`a` got a bfloat16 activation where the stream is float32: it was cast"
    ):
        expect(draw(3).astype(mx.bfloat16), FULL, "a")
