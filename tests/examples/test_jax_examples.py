"""The JAX examples run and learn, and the step written by hand computes what it should."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(rows=16, width=3, seed=0):
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return x, x.sum(-1)


def half(x):
    return np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)


def by_hand(kernel, bias, x, y, lr):
    """Returns the loss before and after the step in numpy, with each operation rounded to bf16."""

    def loss(kernel, bias):
        error = half(half(half(half(x) @ half(kernel)) + half(bias)).reshape(-1) - half(y))
        return error, half(half(error * error).mean())

    error, before = loss(kernel, bias)
    slope = half(half(2 * error) * half(1 / len(x)))
    kernel = kernel - lr * half(half(x).T @ slope.reshape(-1, 1))
    bias = bias - lr * half(slope.sum(keepdims=True))
    return float(before), float(loss(kernel, bias)[1])


@pytest.mark.prove
def test_the_step_by_hand_equals_the_step_in_numpy():
    import flax.linen as nn
    import jax

    step = example("jax_step").step
    x, y = data()
    lr = 0.1
    loss = step(3.0, x, y, lr, 128.0)
    assert loss.shape == (1,)
    assert loss.dtype == jnp.float32
    params = nn.Dense(1).init(jax.random.PRNGKey(3), x)["params"]
    before, after = by_hand(np.asarray(params["kernel"]), np.asarray(params["bias"]), x, y, lr)
    # the loss is a bf16 number; a mean of 16 in another order may round to a neighbor
    assert float(loss[0]) == float(half(loss)[0])
    assert float(loss[0]) == pytest.approx(after, rel=4 * 2.0**-8)
    assert float(loss[0]) < before
    # a power of two changes exponents only; any other scale rounds the gradients once more, by 2^-8 at most
    assert float(step(3.0, x, y, lr, 65536.0)[0]) == float(loss[0])
    for scale in (1.0, 3.0, 1000.0):
        scaled = step(3.0, jnp.asarray(x), jnp.asarray(y), lr, scale)
        assert float(scaled[0]) == pytest.approx(after, rel=4 * 2.0**-8)
    assert float(example("jax_step").step_by_halfstep(3.0, x, y, lr)[0]) == pytest.approx(after, rel=4 * 2.0**-8)


@pytest.mark.prove
def test_the_step_prints_a_table(capsys):
    example("jax_step").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss", "scale", "loss", "after", "one", "step"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "64", "256", "65536", "1000", "halfstep"]


def is_short(name):
    return len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "policy", "below"),
    [
        ("jax_plain", "fp16-mixed", 0.02),
        ("flax_linen", "bf16-mixed", 0.5),
        ("equinox_model", "bf16-mixed; layers.2: compute=fp32", 0.01),
    ],
)
def test_an_example_is_short_and_learns(name, policy, below, capsys):
    assert is_short(name)
    assert example(name).train(policy) < below
    printed = capsys.readouterr().out
    assert policy in printed
    assert "loss" in printed


@pytest.mark.prove
def test_the_classifier_is_short_and_learns_the_rings(capsys):
    assert is_short("flax_nnx")
    assert example("flax_nnx").train("bf16-mixed") > 0.9
    assert "right" in capsys.readouterr().out
