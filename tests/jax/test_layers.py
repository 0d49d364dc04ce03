"""The casted matmul and the islands: formats in and out, forward and backward. Promotion is strict throughout."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from halfstep.core.errors import MissingAmaxError, UnsupportedTransformError
from halfstep.core.formats import BF16, TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.rounding import cast
from halfstep.jax import layers
from halfstep.jax.layers import COMPILER_OPTIONS, attention, linear
from halfstep.jax.numerics.lowering import casts_for as of
from halfstep.jax.numerics.lowering import casts_of
from tests.jax.draws import normal as draw

# As a step is compiled. Op by op, every operation of every shape is compiled on its own, which takes far longer.
quick = partial(jax.jit, compiler_options=COMPILER_OPTIONS)


def narrow(policy):
    return casts_of(precisions(Policy.parse(policy), ["a"])["a"])


NATIVE = of("bf16-mixed")
FULL = casts_of(Precision())
EMULATED = of("bf16-mixed,emulate=true")


pytestmark = pytest.mark.usefixtures("strict")


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
    ours = with_grads(lambda x, w: layers.dot_general(x, w, dims, casts, weight_first=weight_first), g, x, w)
    y, (grad_input, grad_weight) = with_grads(reference, g, x, w)
    assert np.array_equal(ours[0], y)
    np.testing.assert_allclose(ours[1][0], grad_input, rtol=2.0**-20, atol=2.0**-20)
    assert np.array_equal(ours[1][1], bf16(ours[1][1]))
    np.testing.assert_allclose(ours[1][1], grad_weight, rtol=BF16.epsilon / 2, atol=2.0**-20)


def test_a_weight_gradient_in_bf16_is_rounded_whatever_the_compiler_options():
    casts = of("bf16-true")

    @jax.jit
    def grad_weight(x, w, g):
        return jax.vjp(lambda w: linear(x, w, None, casts), w)[1](g.astype(jnp.bfloat16))[0]

    grad = grad_weight(draw(5, 8), draw(4, 8, seed=1), draw(5, 4))
    assert grad.dtype == jnp.float32
    assert np.array_equal(grad, bf16(grad))


@pytest.mark.parametrize("shape", [(768,), (1, 768), ()])
def test_a_small_parameter_is_spread_and_its_gradient_summed_in_fp32(shape):
    """JAX's own sum over tokens would be in bf16 and end at 256."""
    p = draw(*shape)
    y, (grad,) = with_grads(
        lambda p: layers.broadcast(p, (2, 600, 768), NATIVE), np.ones((2, 600, 768), np.float32), p
    )
    assert np.array_equal(wide(y), np.broadcast_to(bf16(p), (2, 600, 768)))
    assert grad.dtype == jnp.float32
    count = 2 * 600 * (768 if shape == () else 1)
    assert np.array_equal(grad, bf16(np.full(shape, count, np.float32)))


def test_a_batch_of_row_wise_scales():
    """A scale for each index of batch and row: each of the slices is the plain matmul."""
    casts = narrow("bf16-mixed,compute=e4m3:row,grad=e4m3:row,emulate=true")
    x, w = draw(3, 2, 4, 16), draw(2, 16, 5, seed=1)
    y, *slices = quick(
        lambda x, w: [
            layers.dot_general(x, w, (((3,), (1,)), ((1,), (0,))), casts),
            *(linear(x[:, index], w[index].T, None, casts) for index in range(2)),
        ]
    )(x, w)
    assert np.array_equal(y, np.stack(slices))


# `compute=e4m3` alone leaves the gradient in bf16. tests/conformance has the emulated numbers.
@pytest.mark.parametrize(
    "operands", ["compute=e4m3", pytest.param("compute=e4m3:row,grad=e4m3:row", marks=pytest.mark.prove)]
)
def test_narrow_operands_are_the_same_natively_and_emulated(operands):
    native, emulated = (narrow(f"bf16-mixed,{operands}{form}") for form in ("", ",emulate=true"))
    x, w, g = draw(5, 16), draw(6, 16, seed=1), bf16(draw(5, 6, seed=2))
    found = with_grads(lambda x, w: linear(x, w, None, native), g, x, w)
    expected = with_grads(lambda x, w: linear(x, w, None, emulated), g, x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(wide(one), other, rtol=BF16.epsilon, atol=0)


def test_a_delayed_scale_is_refused_not_made_of_this_step():
    casts = narrow("bf16-mixed,compute=e4m3:delayed,emulate=true")
    with pytest.raises(MissingAmaxError):
        jax.eval_shape(lambda x, w: linear(x, w, None, casts), draw(5, 16), draw(6, 16))


def test_an_empty_batch_is_not_an_error():
    for casts in (FULL, NATIVE, EMULATED):
        shapes = jax.eval_shape(lambda x, w, b, c=casts: linear(x, w, b, c), draw(2, 0, 8), draw(6, 8), draw(6))
        assert shapes.shape == (2, 0, 6)


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


def test_targets_may_be_bytes_and_logits_more_than_bytes():
    logits, targets = draw(4, 300), np.array([0, 1, 44, 255], np.uint8)
    grad = quick(jax.grad(lambda z, t: layers.cross_entropy(z, t, FULL)))
    assert np.array_equal(grad(logits, targets), grad(logits, targets.astype(int)))


def test_the_gradient_of_a_narrow_heads_logits_is_rounded_stochastically_as_on_torch():
    torch = pytest.importorskip("torch")
    from halfstep.torch.loss import plain as losses

    logits, targets = (4 * draw(64, 301)).astype(jnp.bfloat16), np.arange(64) * 5 % 301
    targets[0] = 300  # the last, which has no logit beside it
    of_loss = jax.grad(lambda z, t, head: layers.cross_entropy(z, t, NATIVE, head=head))
    grad, fp8 = quick(of_loss, static_argnames="head"), "bf16-mixed,compute=e4m3,grad=e5m2"
    plain, found = (grad(logits, targets, head=head) for head in (None, narrow(fp8)))
    for head in (NATIVE, narrow(f"{fp8},emulate=true")):
        assert np.array_equal(grad(logits, targets, head=head), plain)
    given = torch.from_numpy(np.asarray(logits, np.float32)).bfloat16(), torch.from_numpy(targets)
    wide = losses.losses_in_steps(*given, losses.PLAIN)[2]
    expected, found = losses.round_stochastically(wide, *given, 2).numpy(), np.asarray(found, np.float32)
    # Of numbers that differ by 2^-18 of themselves, and units of at least 2^-3, one in 2^15 goes the other way: of
    # these 19,264 more than eight once in a hundred million.
    assert (found != expected).sum() <= 8
    assert (np.abs(found - expected) <= 2.0**-2 * np.abs(expected)).all()
    with pytest.raises(UnsupportedTransformError):
        jax.grad(lambda z: of_loss(z, targets, narrow(fp8)).astype(jnp.float32).sum())(logits)


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
    # No fused kernel has a softmax in bf16; a caller who names an implementation gets that one.
    jax.eval_shape(lambda q: attention(q, q, q, of("bf16-mixed,softmax=bf16")), q)
    jax.eval_shape(lambda q: attention(q, q, q, NATIVE, implementation="xla"), q)
    assert len(asked) == 1
    with jax.default_device(cpu[0]):
        assert not layers._has_cudnn_attention(q)


def test_a_nonlinearity_is_fp32_inside():
    x, g = bf16(draw(256) * 4), bf16(draw(256, seed=1))
    exact, (exact_grad,) = with_grads(jax.nn.gelu, g, x)
    for casts in (NATIVE, EMULATED):
        y, (grad,) = with_grads(lambda x, c=casts: layers.pointwise(jax.nn.gelu, layers.to_compute(x, c), c), g, x)
        assert_rounded_once(y, exact)
        assert_rounded_once(grad, exact_grad)


def test_gradients_can_be_differentiated_again_emulated_too_and_narrow_ones_say_that_they_cannot():
    x, w = draw(3, 16), draw(16, 16, seed=1)

    def twice(casts):
        def slope(x, w):
            return jax.grad(lambda x: jnp.tanh(linear(x, w, None, casts).astype(jnp.float32)).sum())(x)

        return quick(jax.grad(lambda w, x: jnp.square(slope(x, w)).sum()))(w, x)

    expected = twice(FULL)
    for casts in (NATIVE, EMULATED):
        assert np.linalg.norm(twice(casts) - expected) <= 8 * BF16.epsilon * np.linalg.norm(expected)
    with pytest.raises(UnsupportedTransformError):
        twice(narrow("fp8-mixed,emulate=true"))
