"""The casted matmul and the islands: formats in and out, forward and backward. Promotion is strict throughout."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, FP16, FP32, TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.rounding import cast
from halfstep.jax import layers
from halfstep.jax.cast import quantize, quantize_scaled
from halfstep.jax.layers import (
    COMPILER_OPTIONS,
    CastedLinear,
    Norm,
    attention,
    cross_entropy,
    dot_general,
    enter,
    layer_norm,
    linear,
    owned,
    pointwise,
    rms_norm,
    rotate,
    softmax,
    spread,
)
from halfstep.jax.lowering import casts_for, casts_of

# As a step is compiled. Op by op, every operation of every shape is compiled on its own, which takes far longer.
quick = partial(jax.jit, compiler_options=COMPILER_OPTIONS)


of = casts_for


def narrow(policy):
    return casts_of(precisions(Policy.parse(policy), ["a"])["a"])


NATIVE = of("bf16-mixed")
FULL = casts_of(Precision())
EMULATED = of("bf16-mixed,emulate=true")
both = pytest.mark.parametrize("casts", [NATIVE, EMULATED], ids=["native", "emulated"])


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(x):
    return cast(np.asarray(x, np.float32), BF16, overflow="inf")


def wide(x):
    return np.asarray(x).astype(np.float32)


def assert_rounded_once(found, exact):
    """bf16 numbers, each within half an ulp of an fp32 result that another program computed."""
    found, exact = wide(found), np.asarray(exact)
    assert np.array_equal(found, bf16(found))
    assert (abs(found - exact) <= abs(exact) * (BF16.epsilon / 2) + 2.0**-20 * abs(exact).max()).all()


def with_grads(f, g, *inputs):
    """The result and the gradients of every input, for a gradient g of the result."""

    @quick
    def run(g, *inputs):
        y, pull = jax.vjp(f, *inputs)
        return y, pull(g.astype(y.dtype))

    return run(g, *inputs)


# --- matmuls ---------------------------------------------------------------------------------------------


def test_fp32_is_the_matmul_of_jax_in_full_precision():
    x, w, b = draw(5, 8), draw(6, 8, seed=1), draw(6, seed=2)
    found, expected = quick(
        lambda x, w, b: (linear(x, w, b, FULL), jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST) + b)
    )(x, w, b)
    assert np.array_equal(found, expected)


@both
def test_the_three_matmuls_have_exact_operands_and_fp32_sums(casts):
    x, w, g = draw(7, 8), draw(6, 8, seed=1), bf16(draw(7, 6, seed=2))
    y, (grad_input, grad_weight) = with_grads(lambda x, w: linear(x, w, None, casts), g, x, w)
    # Products of bf16 numbers are exact in fp32 and in fp64; only the order of the fp32 sum is open.
    xl, wl, gl = (t.astype(np.float64) for t in (bf16(x), bf16(w), g))
    assert y.dtype == casts.compute
    assert_rounded_sum(y, xl @ wl.T, abs(xl) @ abs(wl).T, terms=8)
    assert_rounded_sum(grad_input, gl @ wl, abs(gl) @ abs(wl), terms=6)
    # The weight gradient keeps fp32: only the summation error, no rounding to bf16.
    assert grad_weight.dtype == jnp.float32
    bound = 7 * 2.0**-24 * (abs(gl).T @ abs(xl))
    assert (abs(np.asarray(grad_weight, np.float64) - gl.T @ xl) <= bound).all()
    assert not np.array_equal(grad_weight, bf16(grad_weight))


def assert_rounded_sum(result, exact, magnitude, terms):
    """A sum of `terms` exact products in fp32, then rounded once to bf16."""
    summed = terms * 2.0**-24 * magnitude
    bound = summed + (abs(exact) + summed) * BF16.epsilon / 2
    assert (abs(wide(result).astype(np.float64) - exact) <= bound).all()
    assert np.array_equal(wide(result), bf16(wide(result)))


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_native_matmul_sums_in_fp32(policy):
    """In bf16 a sum of ones ends at 256, in fp16 at 2048."""
    x = np.ones((1, 4096), np.float32)
    assert float(linear(x, x, None, of(policy))[0, 0]) == 4096


CASES = {
    "x W": ((3, 4, 5), (5, 6), (((2,), (0,)), ((), ()))),
    "two contracted, in another order": ((2, 3, 4, 5), (5, 7, 4), (((3, 2), (0, 2)), ((), ()))),
    "batched, in another order": ((3, 2, 4, 6), (6, 2, 5, 3), (((3,), (0,)), ((1, 0), (1, 3)))),
    "nothing contracted": ((2, 3), (4, 5), (((), ()), ((), ()))),
}


@pytest.mark.parametrize(
    ("case", "weight_first"), [(c, bool(i % 2)) for i, c in enumerate([*CASES, *list(CASES)[2:]])]
)
def test_any_contraction_has_the_gradients_of_lax_dot_general(case, weight_first):
    x_shape, w_shape, ((cx, cw), (bx, bw)) = CASES[case]
    dims = ((cw, cx), (bw, bx)) if weight_first else ((cx, cw), (bx, bw))
    x, w = draw(*x_shape), draw(*w_shape, seed=1)
    casts = of("fp32,grad_weight=bf16,emulate=true")  # fp32 but for the weight gradient, so not plain

    def reference(x, w):
        return lax.dot_general(*((w, x) if weight_first else (x, w)), dims, precision=lax.Precision.HIGHEST)

    g = draw(*jax.eval_shape(reference, x, w).shape, seed=2)
    ours = with_grads(lambda x, w: dot_general(x, w, dims, casts, weight_first=weight_first), g, x, w)
    y, (grad_input, grad_weight) = with_grads(reference, g, x, w)
    assert np.array_equal(ours[0], y)
    np.testing.assert_allclose(ours[1][0], grad_input, rtol=2.0**-20, atol=2.0**-20)
    assert np.array_equal(ours[1][1], bf16(ours[1][1]))
    np.testing.assert_allclose(ours[1][1], grad_weight, rtol=BF16.epsilon / 2, atol=2.0**-20)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_format_is_the_layers_own_whatever_the_operands_are(x_dtype, w_dtype):
    x, w = jnp.asarray(draw(3, 8), x_dtype), jnp.asarray(draw(4, 8, seed=1), w_dtype)
    for casts, dtype in ((NATIVE, jnp.bfloat16), (FULL, jnp.float32), (EMULATED, jnp.float32)):

        def run(x, w, casts=casts):
            y, pull = jax.vjp(lambda x, w: linear(x, w, None, casts), x, w)
            return y, pull(y)

        y, grads = jax.eval_shape(run, x, w)
        assert y.dtype == dtype
        assert [g.dtype for g in grads] == [x_dtype, w_dtype]


def test_a_weight_gradient_in_bf16_is_rounded_whatever_the_compiler_is_told():
    casts = of("bf16-true")

    @jax.jit
    def grad_weight(x, w, g):
        return jax.vjp(lambda w: linear(x, w, None, casts), w)[1](g.astype(jnp.bfloat16))[0]

    grad = grad_weight(draw(5, 8), draw(4, 8, seed=1), draw(5, 4))
    assert grad.dtype == jnp.float32
    assert np.array_equal(grad, bf16(grad))


def test_the_bias_is_added_in_the_compute_format():
    x, w, b = draw(3, 8), draw(4, 8, seed=1), draw(4, seed=2)
    without, emulated, native = quick(
        lambda x, w, b: (linear(x, w, None, EMULATED), linear(x, w, b, EMULATED), linear(x, w, b, NATIVE))
    )(x, w, b)
    assert np.array_equal(emulated, bf16(without + bf16(b)))
    assert np.array_equal(wide(native), emulated)


@both
def test_the_gradient_of_a_bias_is_fp32_from_the_sum_on(casts):
    x, w, b, g = draw(2, 3, 8), draw(4, 8, seed=1), draw(4, seed=2), bf16(draw(2, 3, 4, seed=3))
    _, (_, _, grad) = with_grads(lambda x, w, b: linear(x, w, b, casts), g, x, w, b)
    np.testing.assert_allclose(grad, g.sum((0, 1)), rtol=0, atol=6 * 2.0**-24 * np.abs(g).sum((0, 1)).max())
    assert not np.array_equal(grad, bf16(grad))
    rounded_ = of("bf16-true,emulate=true" if casts.emulate else "bf16-true")
    _, (_, _, grad) = with_grads(lambda x, w, b: linear(x, w, b, rounded_), g, x, w, b)
    assert np.array_equal(grad, bf16(grad))


@pytest.mark.parametrize("shape", [(768,), (1, 768), ()])
def test_a_small_parameter_is_spread_and_its_gradient_summed_in_fp32(shape):
    """JAX's own sum over tokens would be in bf16 and end at 256."""
    p = draw(*shape)
    y, (grad,) = with_grads(lambda p: spread(p, (2, 600, 768), NATIVE), np.ones((2, 600, 768), np.float32), p)
    assert np.array_equal(wide(y), np.broadcast_to(bf16(p), (2, 600, 768)))
    assert grad.dtype == jnp.float32
    count = 2 * 600 * (768 if shape == () else 1)
    assert np.array_equal(grad, bf16(np.full(shape, count, np.float32)))


def test_a_parameter_of_its_own_has_its_gradient_in_grad_weight():
    g = draw(8)
    assert np.array_equal(with_grads(lambda p: owned(p, of("bf16-true")), g, draw(8))[1][0], bf16(g))
    assert np.array_equal(with_grads(lambda p: owned(p, NATIVE), g, draw(8))[1][0], g)


@pytest.mark.parametrize("form", ["", ",emulate=true"])
def test_narrow_operands_are_scaled_and_the_result_is_in_compute(form):
    casts = narrow(f"fp8-mixed{form}")
    x, w, g = draw(5, 16) * np.float32(1e-4), draw(6, 16, seed=1), bf16(draw(5, 6, seed=2) * np.float32(1e-3))
    y, (grad_input, grad_weight) = with_grads(lambda x, w: linear(x, w, None, casts), g, x, w)
    p = casts.precision
    (xq, x_inv), (wq, w_inv), (gq, g_inv) = quick(
        lambda x, w, g: (*(quantize_scaled(t, p.operand) for t in (x, w)), quantize_scaled(g, p.grad_operand))
    )(bf16(x), bf16(w), g)
    # Sums of at most 16 products of e4m3 and e5m2 numbers are exact in fp32, so every bit is known.
    xq, wq, gq = np.asarray(xq), np.asarray(wq), np.asarray(gq)
    assert np.array_equal(wide(y), bf16(xq @ wq.T * x_inv * w_inv))
    assert np.array_equal(grad_input, bf16(gq @ wq * g_inv * w_inv))
    assert np.array_equal(grad_weight, gq.T @ xq * g_inv * x_inv)
    # Without a scale, 1e-4 is below the smallest e4m3 and the whole product would vanish.
    assert np.abs(quantize(x, p.operand.format, overflow="saturate")).max() == 0
    assert np.abs(wide(y)).max() > 0


@pytest.mark.parametrize("form", ["", ",emulate=true"])
def test_row_wise_scales_belong_to_what_each_matmul_does_not_sum_over(form):
    casts = narrow(f"bf16-mixed,compute=e4m3:row,grad=e4m3:row{form}")
    p = casts.precision
    spreads = np.float32([1e-6, 1.0, 1e3, 1e6])
    x, w = (
        draw(4, 16) * spreads[:, None],
        draw(8, 16, seed=1) * np.geomspace(1e-4, 1e4, 8, dtype=np.float32)[:, None],
    )
    g = bf16(draw(4, 8, seed=2))
    y, (grad_input, grad_weight) = with_grads(lambda x, w: linear(x, w, None, casts), g, x, w)

    def product(a, b, a_operand, b_operand):
        """a b with a scale for each row of a and each column of b, as hardware has it."""
        (aq, a_inv), (bq, b_inv) = quick(
            lambda a, b: (quantize_scaled(a, a_operand), quantize_scaled(b, b_operand))
        )(a, b.T)
        return np.asarray(aq) @ np.asarray(bq).T * a_inv * np.asarray(b_inv).T

    xl, wl = bf16(x), bf16(w)
    assert np.array_equal(wide(y), bf16(product(xl, wl.T, p.operand, p.operand)))
    assert np.array_equal(grad_input, bf16(product(g, wl, p.grad_operand, p.operand)))
    assert np.array_equal(grad_weight, product(g.T, xl, p.grad_operand, p.operand))
    # Each operand is within 2^-4 of itself, relatively; random signs make the sum better, never worse.
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert (np.linalg.norm(wide(y) - exact, axis=1) < 2 * 2.0**-4 * np.linalg.norm(exact, axis=1)).all()


def test_a_batch_of_row_wise_scales():
    """A scale for each index of batch and row: each of the slices is the plain matmul."""
    casts = narrow("bf16-mixed,compute=e4m3:row,grad=e4m3:row,emulate=true")
    x, w = draw(3, 2, 4, 16), draw(2, 16, 5, seed=1)
    y, *slices = quick(
        lambda x, w: [
            dot_general(x, w, (((3,), (1,)), ((1,), (0,))), casts),
            *(linear(x[:, index], w[index].T, None, casts) for index in range(2)),
        ]
    )(x, w)
    assert np.array_equal(y, np.stack(slices))


def test_one_narrow_operand_meets_a_wide_one():
    """`compute=e4m3` alone leaves the gradient in bf16."""
    native, emulated = (narrow(f"bf16-mixed,compute=e4m3{form}") for form in ("", ",emulate=true"))
    x, w, g = draw(5, 16), draw(6, 16, seed=1), bf16(draw(5, 6, seed=2))
    found = with_grads(lambda x, w: linear(x, w, None, native), g, x, w)
    expected = with_grads(lambda x, w: linear(x, w, None, emulated), g, x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(wide(one), other, rtol=BF16.epsilon, atol=0)


def test_a_delayed_scale_is_refused_not_made_of_this_step():
    casts = narrow("bf16-mixed,compute=e4m3:delayed,emulate=true")
    with pytest.raises(RoundingError, match="earlier steps"):
        jax.eval_shape(lambda x, w: linear(x, w, None, casts), draw(5, 16), draw(6, 16))


def test_no_rows_are_no_error():
    for casts in (FULL, NATIVE, EMULATED):
        shapes = jax.eval_shape(lambda x, w, b, c=casts: linear(x, w, b, c), draw(2, 0, 8), draw(6, 8), draw(6))
        assert shapes.shape == (2, 0, 6)


# --- what is asked of XLA --------------------------------------------------------------------------------


def dots(casts, platform="cpu"):
    """The lines of the three matmuls in what is handed to XLA."""

    def grads(x, w):
        return jax.value_and_grad(lambda x, w: linear(x, w, None, casts).astype(jnp.float32).sum(), (0, 1))(x, w)

    with jax.default_matmul_precision("bfloat16"):  # what a user may have set
        lowered = jax.jit(grads).trace(draw(4, 8), draw(6, 8)).lower(lowering_platforms=(platform,))
    found = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(found) == 3
    return found


def test_fp32_matmuls_are_pinned_to_fp32():
    for casts in (FULL, EMULATED, of("fp32,grad_weight=bf16")):
        for line in dots(casts):
            assert "[HIGHEST, HIGHEST]" in line
            assert "bf16" not in line  # a weight gradient in bf16 is rounded after an fp32 matmul


def test_bf16_matmuls_write_bf16_once_and_weight_gradients_fp32():
    results = [line.rpartition("->")[2] for line in dots(NATIVE)]
    assert sorted("bf16" if "bf16" in result else "f32" for result in results) == ["bf16", "bf16", "f32"]
    assert all("bf16>, tensor<" in line for line in dots(NATIVE))


def test_tf32_is_asked_for_by_name():
    for line in dots(of("compute=tf32"), "cuda"):
        assert "lhs_precision_type = tf32, rhs_precision_type = tf32, accumulation_type = f32" in line


def test_emulated_tf32_rounds_its_operands_and_multiplies_in_fp32():
    casts = of("compute=tf32,emulate=true")
    x, w = draw(5, 8), draw(6, 8, seed=1)
    xl, wl = (cast(t, TF32, overflow="inf").astype(np.float64) for t in (x, w))
    y = quick(lambda x, w: linear(x, w, None, casts))(x, w)
    bound = 8 * 2.0**-24 * (abs(xl) @ abs(wl).T) + abs(xl @ wl.T) * TF32.epsilon / 2
    assert (abs(np.asarray(y, np.float64) - xl @ wl.T) <= bound).all()
    assert np.array_equal(y, cast(np.asarray(y), TF32, overflow="inf"))
    assert all("[HIGHEST, HIGHEST]" in line and "algorithm" not in line for line in dots(casts))


def test_fp8_matmuls_get_fp8_operands_and_sum_in_fp32():
    for line in dots(narrow("fp8-mixed"), "cuda"):
        assert "f8E4M3FN" in line
        assert line.endswith("xf32>")
        assert "[HIGHEST, HIGHEST]" in line  # XLA's word for no fast accumulation
    assert sum("f8E5M2" in line for line in dots(narrow("fp8-mixed"), "cuda")) == 2


# --- islands ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_is_fp32_inside_and_compute_out_forward_and_backward(casts, kind):
    x, gain, bias, g = (
        bf16(draw(3, 4, 64) * 100),
        draw(64, seed=1) + 1,
        draw(64, seed=3),
        bf16(draw(3, 4, 64, seed=2)),
    )

    def run(casts, dtype):
        def norm(x, gain, bias):
            x = x.astype(dtype)
            return rms_norm(x, gain, casts) if kind == "rms" else layer_norm(x, gain, bias, casts)

        return with_grads(norm, g, x, gain, bias)

    exact, (exact_x, exact_gain, exact_bias) = run(FULL, jnp.float32)
    y, (x_grad, gain_grad, bias_grad) = run(casts, casts.compute)
    assert y.dtype == casts.compute
    assert_rounded_once(y, exact)  # at the end
    for found, exact in ((gain_grad, exact_gain), (bias_grad, exact_bias)):  # nothing inside was rounded
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, rtol=0, atol=2.0**-20 * np.abs(exact).max())
    if not casts.emulate:
        assert_rounded_once(x_grad, exact_x)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_gradient_of_a_norm_is_that_of_its_formula(kind):
    x, gain, bias, g = draw(5, 64) + 0.5, draw(64, seed=1), draw(64, seed=2), draw(5, 64, seed=3)

    def formula(x, gain, bias):
        if kind == "rms":
            return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        return centered / jnp.sqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + 1e-5) * gain + bias

    def norm(x, gain, bias):
        return rms_norm(x, gain, FULL) if kind == "rms" else layer_norm(x, gain, bias, FULL)

    found, expected = (jax.tree.leaves(with_grads(f, g, x, gain, bias)) for f in (norm, formula))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=64 * 2.0**-24 * np.abs(other).max())
    without = with_grads(lambda x: norm(x, None, None), g, x)[0]
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    np.testing.assert_allclose(without, quick(formula)(x, ones, zeros), rtol=0, atol=2.0**-20)


def test_an_island_asked_for_in_bf16_is_another_number_and_the_same_native_and_emulated():
    x, gain, g = bf16(draw(4, 64) * 100), draw(64, seed=1), bf16(draw(4, 64, seed=2))
    native, emulated = (of(f"bf16-mixed,norm=bf16,softmax=bf16,loss=bf16{e}") for e in ("", ",emulate=true"))

    def islands(casts):
        def run(x, gain):
            x = x.astype(casts.compute)
            loss = cross_entropy(x, np.arange(4), casts).astype(jnp.float32)
            return (
                layer_norm(x, gain, None, casts).astype(jnp.float32),
                softmax(x, casts).astype(jnp.float32),
                loss,
            )

        y, pull = jax.vjp(run, x, gain)
        return [*y, *pull((g, g, jnp.float32(1.0)))]

    (*ours, grad_x, grad_gain), (*theirs, _, their_gain), other = quick(
        lambda: (islands(native), islands(emulated), layer_norm(x, gain, None, NATIVE))
    )()
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one, bf16(one))
    assert np.array_equal(grad_gain, their_gain)
    assert np.array_equal(grad_gain, bf16(grad_gain))
    assert np.array_equal(grad_x, bf16(grad_x))
    assert not np.array_equal(ours[0], wide(other))
    assert jax.eval_shape(lambda: cross_entropy(x, np.arange(4), native)).dtype == jnp.bfloat16


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_loss_is_fp32_whatever_the_logits_are(softcap):
    logits = jnp.asarray(draw(2, 3, 32) * 10, jnp.float16)
    targets = np.random.default_rng(0).integers(0, 32, (2, 3))

    def formula(logits):
        logits = logits.astype(jnp.float32)
        capped = softcap * jnp.tanh(logits / softcap) if softcap else logits
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(capped), targets[..., None], axis=-1))

    def loss(logits):
        return cross_entropy(logits, targets, of("fp16-mixed"), softcap)

    found, expected = quick(
        lambda logits: (jax.value_and_grad(loss)(logits), jax.value_and_grad(formula)(logits.astype(jnp.float32)))
    )(logits)
    assert found[0].dtype == jnp.float32
    np.testing.assert_allclose(found[0], expected[0], rtol=6 * 2.0**-22)
    assert np.isfinite(found[0] * 65536)  # in fp16 this is inf
    assert found[1].dtype == jnp.float16  # narrowed on the way out, after fp32 inside
    np.testing.assert_allclose(wide(found[1]), expected[1], rtol=FP16.epsilon, atol=FP16.smallest_subnormal)


def test_softcap_bounds_the_logits():
    logits, targets = jnp.array([[1e4, 0.0]]), np.array([1])
    loss = quick(lambda logits: cross_entropy(logits, targets, FULL, softcap=30.0))(logits)
    assert float(loss) == pytest.approx(30.0, rel=1e-6)


def test_targets_may_be_bytes_and_logits_more_than_bytes():
    logits, targets = draw(4, 300), np.array([0, 1, 44, 255], np.uint8)
    grads = [
        quick(jax.grad(lambda z, t=t: cross_entropy(z, t, FULL)))(logits) for t in (targets, targets.astype(int))
    ]
    assert np.array_equal(*grads)


def test_softmax_returns_compute_and_sums_in_fp32():
    x = draw(3, 300)
    exact = np.exp(x - x.max(1, keepdims=True), dtype=np.float64)
    exact /= exact.sum(1, keepdims=True)
    found, columns = quick(lambda x: (softmax(x, NATIVE), softmax(x, FULL, axis=0).sum(0)))(x)
    assert found.dtype == jnp.bfloat16
    assert (abs(wide(found) - exact) <= exact * (BF16.epsilon / 2 + 2.0**-20)).all()
    np.testing.assert_allclose(columns, 1.0, rtol=2.0**-22)


def heads(casts, **sizes):
    shape = {"q": 2, "k": 2, "v": 2, **sizes}
    return [jnp.asarray(draw(1, count, 6, 8, seed=s), casts.compute) for s, count in enumerate(shape.values())]


def exact_attention(q, k, v):
    q, k, v = (np.asarray(t).astype(np.float64) for t in (q, k, v))
    k, v = (np.repeat(t, q.shape[1] // t.shape[1], axis=1) for t in (k, v))
    scores = np.where(np.tril(np.ones((6, 6), bool)), q @ k.swapaxes(2, 3) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("casts", [FULL, NATIVE, EMULATED], ids=["fp32", "native", "emulated"])
@pytest.mark.parametrize("shared", [2, 1])
def test_attention_returns_compute_sees_no_future_and_shares_keys(casts, shared):
    q, k, v = heads(casts, k=shared, v=shared)
    y, later = quick(lambda q, k, v: (attention(q, k, v, casts), attention(q, k, v.at[:, :, -1].add(100), casts)))(
        q, k, v
    )
    assert y.dtype == casts.compute
    assert np.array_equal(later[:, :, :-1], y[:, :, :-1])
    exact = exact_attention(*((bf16(t) for t in (wide(q), wide(k), wide(v))) if casts.emulate else (q, k, v)))
    # The weights are narrowed natively, and the result; each is within half an ulp, and weights sum to one.
    bound = 2.0**-20 if casts is FULL else (2 - casts.emulate) * BF16.epsilon / 2 + 2.0**-20
    assert (abs(wide(y) - exact) <= bound * np.abs(wide(v)).max()).all()


@both
def test_the_gradients_of_attention_are_those_of_fp32_within_its_formats(casts):
    q, k, v = (bf16(draw(1, count, 6, 8, seed=s)) for s, count in enumerate((4, 2, 2)))
    g = bf16(draw(1, 4, 6, 8, seed=9))
    found, exact = (with_grads(lambda *a, c=c: attention(*a, c), g, q, k, v)[1] for c in (casts, FULL))
    for one, other in zip(found, exact, strict=True):
        # Weights, their gradient and the result are each rounded once natively; norms of 1e-2 would be a fault.
        assert np.linalg.norm(one - other) <= 2 * BF16.epsilon * np.linalg.norm(other)
        assert not casts.emulate or np.array_equal(one, bf16(one))


def test_softmax_in_bf16_is_what_was_asked_for():
    native, emulated = (of(f"bf16-mixed,softmax=bf16{e}") for e in ("", ",emulate=true"))
    q, k, v = heads(EMULATED)
    found = quick(lambda q, k, v: [attention(q, k, v, c) for c in (emulated, native, EMULATED)])(q, k, v)
    y, same, wider = map(wide, found)
    assert np.array_equal(y, same)
    assert not np.array_equal(y, wider)
    # scores, weights and result are each within half an ulp; the sum of weights is one
    assert np.abs(y - wider).max() <= 8 * BF16.epsilon * np.abs(v).max()


def test_cudnn_attends_where_it_can(monkeypatch):
    q = jax.ShapeDtypeStruct((1, 2, 8, 64), jnp.bfloat16)
    assert not layers._has_cudnn_attention(q)
    gpu = SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability="9.0")
    cpu = jax.local_devices(backend="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: cpu if backend else [gpu])
    assert layers._has_cudnn_attention(q)
    assert layers._has_cudnn_attention(q.update(dtype=jnp.float16))
    assert not layers._has_cudnn_attention(q.update(dtype=jnp.float32))
    assert not layers._has_cudnn_attention(q.update(shape=(1, 2, 8, 4)))
    asked = []

    def attend(q, k, v, **options):
        asked.append((q.shape, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    assert jax.eval_shape(lambda q: attention(q, q, q, NATIVE), q).shape == q.shape
    assert asked == [((1, 8, 2, 64), {"is_causal": True, "implementation": "cudnn"})]
    # No fused kernel has a softmax in bf16, and nobody else decides for a caller who says which.
    jax.eval_shape(lambda q: attention(q, q, q, of("bf16-mixed,softmax=bf16")), q)
    jax.eval_shape(lambda q: attention(q, q, q, NATIVE, implementation="xla"), q)
    assert len(asked) == 1
    with jax.default_device(cpu[0]):
        assert not layers._has_cudnn_attention(q)


def test_rotation_keeps_the_norm_and_turns_by_relative_position():
    from halfstep.config.model import ModelConfig
    from halfstep.jax.model import rope_tables

    cos, sin = rope_tables(ModelConfig(width=16, heads=1, context=64))
    x = np.broadcast_to(draw(1, 1, 1, 16), (1, 1, 64, 16))
    turned, narrow = quick(
        lambda x: (rotate(x, cos, sin, FULL)[0, 0], rotate(x.astype(jnp.bfloat16), cos, sin, NATIVE))
    )(x)
    turned = np.asarray(turned)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x[0, 0], axis=-1), rtol=2.0**-20)
    dots = (turned[:-3] * turned[3:]).sum(-1)
    np.testing.assert_allclose(dots, dots[0], rtol=0, atol=2.0**-18 * np.square(x[0, 0, 0]).sum())
    assert narrow.dtype == jnp.bfloat16


# --- the rest --------------------------------------------------------------------------------------------


def test_a_nonlinearity_is_fp32_inside():
    x, g = bf16(draw(256) * 4), bf16(draw(256, seed=1))
    exact, (exact_grad,) = with_grads(jax.nn.gelu, g, x)
    for casts in (NATIVE, EMULATED):
        y, (grad,) = with_grads(lambda x, c=casts: pointwise(jax.nn.gelu, enter(x, c), c), g, x)
        assert_rounded_once(y, exact)
        assert_rounded_once(grad, exact_grad)


def test_rounding_reaches_gradients_too():
    g = draw(64, seed=1)
    y, (grad,) = with_grads(lambda x: enter(x, EMULATED), g, draw(64))
    assert np.array_equal(y, bf16(draw(64)))
    assert np.array_equal(grad, bf16(g))


def test_fp16_emulation_overflows_to_infinity_as_hardware_does():
    casts = of("fp16-mixed,emulate=true")
    assert enter(jnp.array([7e4, -7e4, 65504.0]), casts).tolist() == [float("inf"), -float("inf"), 65504.0]


def test_printing_tells_the_truth():
    assert "bf16 operands)" in repr(CastedLinear("up", NATIVE.precision))
    assert "bf16 operands emulated" in repr(CastedLinear("up", EMULATED.precision))
    assert "fp32 inside, bf16 out" in repr(Norm("norm", NATIVE.precision))
    assert FP32.name in repr(Norm("norm", Precision()))
