"""Functions that keep their input alone: the numbers of one rounding, and what a backward pass holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from halfstep.jax.convert.patterns import find_recomputed
from halfstep.jax.jaxpr import EXACT
from tests.jax.interpreted import interpreted

pytestmark = pytest.mark.prove  # each compiles several programs

PARAMS = {"w": jnp.eye(64)}
X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32) * 3
TABLE = np.zeros((32, 64), np.float32)  # promotes a stream to fp32 without changing it
ROUNDOFF = 2.0**-8  # of bf16: half the distance to the next number


def inside(fn, policy="bf16-mixed"):
    """A function of x in compute, under a policy: fn(x @ identity) @ identity, if it has as many columns."""

    def between(p, x):
        y = fn(x @ p["w"])
        return y @ p["w"] if y.shape == X.shape else y

    return lambda x: interpreted(between, PARAMS, x, policy)


def rounded(x):
    return np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)


def lowered(run, x):
    """The program of a gradient, without what nothing uses."""
    return jax.jit(jax.value_and_grad(lambda x: run(x).astype(jnp.float32).sum())).lower(x).as_text()


def barriers(program):
    return [line.split(":")[-1].strip() for line in program.splitlines() if "optimization_barrier" in line]


ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "capped": lambda x: 30.0 * jnp.tanh(x / 30.0),
}


# In a function that is traced in bf16, the numbers of gelu itself are rounded.
CASES = [(name, True) for name in ACTIVATIONS] + [("silu", False), ("capped", False)]


@pytest.mark.parametrize(("name", "promoted"), CASES)
def test_an_activation_is_rounded_once_and_keeps_its_input_alone(name, promoted):
    function = ACTIVATIONS[name]
    run = inside(lambda x: function(x + TABLE if promoted else x))
    x = rounded(X)
    y, pull = jax.vjp(run, jnp.asarray(x))
    with jax.default_matmul_precision("highest"):
        exact, wide_pull = jax.vjp(function, jnp.asarray(x))
    assert np.array_equal(np.asarray(y, np.float32), rounded(exact))
    g = rounded(np.random.default_rng(1).standard_normal(X.shape))
    assert np.array_equal(pull(jnp.asarray(g, y.dtype))[0], rounded(wide_pull(jnp.asarray(g))[0]))
    program = lowered(run, jnp.asarray(x))
    assert barriers(program) == ["tensor<32x64xbf16>"]  # what is kept; each curve is computed before and after
    curves = [line for line in program.splitlines() if " stablehlo.tanh" in line or " stablehlo.logistic" in line]
    assert all("32x64xf32" in line for line in curves)


def test_emulated_activations_have_the_same_bits():
    x = jnp.asarray(X)
    native, emulated = (inside(jax.nn.gelu, p) for p in ("bf16-mixed", "bf16-mixed,emulate=true"))
    assert np.array_equal(np.asarray(native(x), np.float32), np.asarray(emulated(x), np.float32))


def test_only_functions_of_one_array_are_taken():
    def several(x, y):
        gated = jax.nn.silu(x) * y  # the curve is one function, the product another
        both = jnp.tanh(y) + y  # its parts are used twice
        return gated, both, jnp.tanh(both), 2.0 * both

    jaxpr = jax.make_jaxpr(several)(jnp.ones((2, 3)), jnp.ones((2, 3))).jaxpr
    assert [len(function.eqns) for function in find_recomputed(jaxpr).values()] == []
    lone = jax.make_jaxpr(jnp.tanh)(jnp.ones((2, 3))).jaxpr
    assert not find_recomputed(lone)
    assert not find_recomputed(jax.make_jaxpr(lambda x: x * 2 + 1)(jnp.ones((2, 3))).jaxpr)


@pytest.mark.parametrize("promoted", [False, True], ids=["as it is", "promoted"])
def test_a_softmax_keeps_its_input_alone_and_is_fp32_inside(promoted):
    run = inside(lambda x: jax.nn.softmax(x + TABLE if promoted else x))
    x = rounded(X)
    y, pull = jax.vjp(run, jnp.asarray(x))
    wide = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    wide /= wide.sum(-1, keepdims=True)
    assert np.abs(np.asarray(y, np.float64) / wide - 1).max() <= ROUNDOFF + 1e-5
    g = rounded(np.random.default_rng(1).standard_normal(X.shape)).astype(np.float64)
    exact = wide * (g - (g * wide).sum(-1, keepdims=True))
    found = np.asarray(pull(jnp.asarray(g, y.dtype))[0], np.float64)
    # One rounding to bf16, and fp32 sums of 64 products of at most max|g|.
    bound = ROUNDOFF * np.abs(exact) + 128 * 2.0**-24 * np.abs(g).max() * wide
    assert (np.abs(found - exact) <= bound + 1e-30).all()
    program = lowered(run, jnp.asarray(x))
    assert barriers(program) == ["tensor<32x64xbf16>"]
    assert program.count("stablehlo.exponential") == 2


@pytest.mark.parametrize("promoted", [False, True], ids=["as it is", "promoted"])
def test_the_gradient_of_a_label_is_summed_in_fp32_and_is_no_scatter(promoted):
    """Of a token that is nearly certain, p - 1 is far below what bf16 holds beside 1."""
    labels = np.arange(32)
    logits = rounded(X)
    logits[np.arange(32), labels] = 24.0  # p is 1 - 1e-8 or so

    def loss(p, x):
        x = (x + TABLE if promoted else x) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).sum()

    def run(x):
        return interpreted(loss, PARAMS, x)

    found = np.asarray(jax.grad(run)(jnp.asarray(logits)), np.float64)
    wide = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    wide /= wide.sum(-1, keepdims=True)
    exact = wide - np.eye(64)[labels]
    others = np.eye(64)[labels] == 0
    assert (np.abs(found - exact)[others] <= (ROUNDOFF + 1e-5) * np.abs(exact[others])).all()
    # At the label what fp32 leaves of p - 1, not what bf16 does.
    assert np.abs(found - exact)[~others].max() <= 128 * 2.0**-24
    assert not re.search(r"\[32,64\] = scatter", str(jax.make_jaxpr(jax.grad(run))(jnp.asarray(logits))))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", sorted(EXACT - {"select_n"}))
def test_exact_arithmetic_gives_the_same_in_the_format_as_in_fp32_and_rounded(name, dtype):
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 20000), np.uint16)
    numbers = bits.view(dtype)
    with np.errstate(invalid="ignore"):
        tiny = np.abs(numbers.astype(np.float32)) < 1e-30  # where products leave fp32, and devices flush
    numbers = np.where(tiny, np.asarray(1, dtype), numbers)
    operands = [jnp.asarray(x) for x in numbers][: 1 if name in ("neg", "abs") else 2]
    run = getattr(lax, name)
    with np.errstate(invalid="ignore"):
        narrow = np.asarray(run(*operands)).astype(np.float32)
        wide = np.asarray(run(*(x.astype(jnp.float32) for x in operands)).astype(dtype)).astype(np.float32)
    assert np.array_equal(narrow, wide, equal_nan=True)


def test_a_bias_is_cast_before_it_is_broadcast_and_has_an_fp32_gradient():
    params = {"w": jnp.eye(8), "b": jnp.asarray(np.linspace(0.1, 0.8, 8, dtype=np.float32))}
    x = np.random.default_rng(0).standard_normal((512, 8)).astype(np.float32)

    def loss(params, promote):
        def fn(p, x):
            y = x @ p["w"]
            y = (y + TABLE[:1, :8] if promote else y) + p["b"]
            return (y @ p["w"]).astype(jnp.float32).sum()

        return interpreted(fn, params, x)

    for promote in (False, True):
        grads = jax.grad(loss)(params, promote)
        assert np.asarray(grads["b"]).tolist() == [512.0] * 8  # bf16 stops counting at 256
        program = jax.jit(lambda p, promote=promote: loss(p, promote)).lower(params).as_text()
        assert re.search(r"\(tensor<(1x)?8xbf16>\) -> tensor<512x8xbf16>", program)
