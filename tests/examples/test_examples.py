"""Examples that are one script each run, are as short as they say, and learn."""

import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from halfstep.torch import CastedLinear

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name, *, lines=60):
    """The names of an example, which has at most so many lines."""
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= lines
    return runpy.run_path(str(path))


def test_a_plain_loop_learns_and_resumes_exactly(capsys):
    plain = example("torch_plain", lines=80)
    resumed = plain["main"]("fp16-mixed", steps=20)
    printed = capsys.readouterr().out
    assert "5 Linear" in printed
    before, after = (float(line.split()[3].strip(",")) for line in printed.splitlines() if "  step " in line)
    assert after < before - 0.1
    assert plain["train"](plain["build"]("fp16-mixed"), 0, 20) == resumed


def test_casted_layers_multiply_in_bf16_and_learn_in_fp32():
    """Without autocast or a policy."""
    by_layers = example("casted_linear", lines=120)
    model, outputs, gradients = by_layers["build"](), set(), {}
    casted = {name: m for name, m in model.named_modules() if isinstance(m, CastedLinear)}
    for name, layer in casted.items():
        layer.register_forward_hook(lambda _, args, y: outputs.add((args[0].dtype, y.dtype)))
        layer.weight.register_hook(lambda g, name=name: gradients.update({name: g.clone()}))
    losses = by_layers["train"](model, 12, micro_batches=1)
    assert losses[-1] < losses[0] - 0.3
    assert outputs == {(torch.bfloat16, torch.bfloat16)}
    assert {layer.weight.dtype for layer in casted.values()} == {torch.float32}
    # fp32 from the sum on, not rounded to bf16 and widened
    assert len(gradients) == 9
    assert all((g != g.bfloat16().float()).any() for g in gradients.values())


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_any_model_and_optimizer_of_mlx_learn(policy, capsys):
    pytest.importorskip("mlx.core")
    train = example("mlx_prepare")["train"]
    first, last = train(policy, 1), train(policy, 25)
    assert last < first - 0.3
    printed = capsys.readouterr().out
    assert "12 Linear" in printed
    assert "after 25 steps" in printed


@pytest.mark.prove
def test_the_table_has_every_backend_and_they_agree(capsys):
    example("three_backends", lines=140)["main"](["bf16-mixed", "--width", "16", "--layers", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(name, policy) for name, policy, *_ in rows] == [
        (name, policy) for policy in ("fp32", "bf16-mixed") for name in ("torch", "jax", "mlx")
    ]
    for _, policy, _, off, gradients, _ in rows:
        # some twenty operations in sequence, each rounding once: in fp32 after a sum of 64 terms
        bound = 20 * 64**0.5 * 2.0**-24 if policy == "fp32" else 2 * 2.0**-8 * 20**0.5
        assert abs(float(off)) <= bound
        assert float(gradients) <= bound


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

    names = example("jax_step", lines=70)
    step = names["step"]
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
    assert float(names["step_by_halfstep"](3.0, x, y, lr)[0]) == pytest.approx(after, rel=4 * 2.0**-8)


@pytest.mark.prove
def test_the_step_prints_a_table(capsys):
    example("jax_step", lines=70)["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss", "scale", "loss", "after", "one", "step"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "64", "256", "65536", "1000", "halfstep"]


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
    assert example(name)["train"](policy) < below
    printed = capsys.readouterr().out
    assert policy in printed
    assert "loss" in printed


@pytest.mark.prove
def test_the_classifier_is_short_and_learns_the_rings(capsys):
    assert example("flax_nnx")["train"]("bf16-mixed") > 0.9
    assert "right" in capsys.readouterr().out
