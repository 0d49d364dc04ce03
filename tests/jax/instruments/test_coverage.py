"""What a policy reaches in a loss function, and what it does not; and the summary of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.core.audit.coverage import IN_COMPUTE
from halfstep.core.errors import RunStateError
from halfstep.jax import init, make_step, summary

OPTIMIZER = optax.sgd(0.1)


def params():
    shapes = {"embed": (8, 4), "up": (4, 16), "down": (16, 4)}
    drawn = np.random.default_rng(0)
    weights = {name: {"weight": jnp.asarray(drawn.standard_normal(s), jnp.float32)} for name, s in shapes.items()}
    return {**weights, "gain": jnp.ones(4)}


def loss(p, batch):
    x = p["embed"]["weight"][batch["tokens"]]
    scores = jax.nn.softmax(x @ x.mT)
    x = scores @ x
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["gain"]
    x = jax.lax.cond(
        batch["tokens"][0, 0] > 0,
        lambda x: jnp.tanh(x @ p["up"]["weight"]),
        lambda x: x[..., :1] + jnp.zeros(16, x.dtype),
        x,
    )
    y = x @ p["down"]["weight"]
    y = jnp.cumsum(y, 1)
    return -jax.nn.log_softmax(y).mean()


BATCH = {"tokens": jnp.zeros((2, 3), jnp.int32)}


@pytest.fixture
def step():
    return make_step(loss, OPTIMIZER)


def test_an_operation_without_inputs_is_no_obstacle():
    """Positions and causal masks are made of nothing."""

    def masked(p, batch):
        x = p["embed"]["weight"][batch["tokens"]] + jnp.arange(4.0)
        scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), x @ x.mT, -1e9)
        return (jax.nn.softmax(scores) @ x).mean()

    rows = make_step(masked, OPTIMIZER).coverage(init(params(), OPTIMIZER, "bf16-mixed"), BATCH).rows
    assert {"gather", "dot_general"} <= {row.function for row in rows}


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true"])
def test_products_islands_and_look_ups_are_listed_with_how_they_run(step, policy):
    coverage = step.coverage(init(params(), OPTIMIZER, policy), BATCH)
    rows = {(row.function, row.module): row for row in coverage.rows}
    for name in ("up", "down"):
        row = rows["dot_general", name]
        assert (row.how, row.why, row.calls) == ("covered", "multiplies in bf16, weight gradients in fp32", 1)
    assert rows["gather", "embed"].why == "looks up its master and casts to bf16, gradients in fp32"
    others = [row for row in coverage.rows if row.function == "dot_general" and row.module not in ("up", "down")]
    assert [(row.how, row.why) for row in others] == [("unchanged", IN_COMPUTE)] * 2
    islands = {(row.function, row.why) for row in coverage.rows if "island" in row.why}
    assert islands == {
        ("exp", "is an island of softmax: fp32 inside, bf16 out"),
        ("rsqrt", "is an island of norm: fp32 inside, bf16 out"),
        ("log", "is an island of loss: fp32 inside and out"),
    }
    # the mean of the norm is the island's; no role covers the sum over positions
    assert [(row.function, row.why) for row in coverage.uncovered] == [
        ("cumsum", "computed in bfloat16, no role reaches it")
    ]
    assert "2 dot_general (up, down): covered, multiplies in bf16" in str(coverage)


def test_rules_show_in_the_list_and_in_the_summary(step):
    state = init(params(), OPTIMIZER, "bf16-mixed,emulate=true; up: compute=e4m3:row; down: compute=fp32", ema=0.9)
    rows = {(row.function, row.module): row for row in step.coverage(state, BATCH).rows}
    assert rows["dot_general", "up"].why == "multiplies in e4m3:row, weight gradients in fp32"
    assert rows["dot_general", "down"].why == "multiplies in fp32, weight gradients in fp32"
    lines = summary(state).splitlines()
    assert lines[0] == str(state.policy)
    assert "  2 modules (embed, gain): computes in bf16, weight gradients in fp32" in lines
    assert any(line.startswith("  1 module (up): computes in bf16, multiplies in e4m3:row") for line in lines)
    assert "  1 module (down): computes in fp32, weight gradients in fp32" in lines
    assert "  masters: 4 parameters, 164 numbers, in fp32 (emulated), moments in fp32" in lines
    assert "  gradients: summed in fp32; loss scale: none; not finite: skipped" in lines


def test_a_list_takes_one_micro_batch_and_keeps_the_state():
    state = init(params(), OPTIMIZER, "bf16-mixed")
    step = make_step(loss, OPTIMIZER, micro_batches=2)
    found = step.coverage(state, {"tokens": jnp.zeros((2, 2, 3), jnp.int32)})
    assert found == make_step(loss, OPTIMIZER).coverage(state, BATCH)
    assert not state.num_applied.is_deleted()
    with pytest.raises(RunStateError, match="cast=False"):
        make_step(loss, OPTIMIZER, cast=False).coverage(state, BATCH)
