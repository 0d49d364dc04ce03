"""Split masters: whole fp32 masters in two halves, to the bit, whatever the optimizer, the policy and the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.core import split as reference
from halfstep.jax import init, load_state_dict, make_step, muon, state_dict, summary
from tests.jax.draws import normal

LABELS = {"up": {"weight": "muon"}, "down": {"weight": "muon"}, "bias": "adamw"}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "muon": optax.multi_transform({"muon": muon(0.02), "adamw": optax.adamw(1e-2)}, LABELS),
}


def params():
    ups = {name: {"weight": jnp.asarray(normal(4, 4, seed=i))} for i, name in enumerate(("up", "down"))}
    return {**ups, "bias": jnp.zeros(4)}


def loss(p, x):
    return jnp.square(jnp.tanh(x @ p["up"]["weight"]) @ p["down"]["weight"] + p["bias"]).mean()


def trained(policy, optimizer, steps=3, **options):
    step = make_step(loss, optimizer, **options)
    state = init(params(), optimizer, policy, ema=0.5)
    for number in range(steps):
        batch = normal(2, 4, seed=9 + number)
        batch[0, 0] = np.inf if number == 1 else batch[0, 0]  # one that is skipped
        state, result = step(state, batch if "micro_batches" not in options else np.stack([batch, batch]))
        assert bool(result.skipped) == (number == 1)
    return state


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("rest", "name", "options"),
    [
        ("", "adamw", {}),
        pytest.param("; down: compute=fp32", "adamw", {"micro_batches": 2}, marks=pytest.mark.prove),
        pytest.param(",emulate=true", "muon", {"clip_norm": 0.1}, marks=pytest.mark.prove),
    ],
)
def test_it_is_training_with_whole_masters_bit_for_bit(rest, name, options):
    whole = trained(f"bf16-mixed{rest}", OPTIMIZERS[name], **options)
    halves = trained(f"bf16-mixed,param=fp32:split{rest}", OPTIMIZERS[name], **options)
    assert bits(halves.masters()) == bits(whole.params)
    assert bits((halves.opt_state, halves.ema)) == bits((whole.opt_state, whole.ema))
    assert halves.params["bias"].dtype == jnp.float32
    for layer in ("up", "down"):
        hi, lo = reference.split(np.asarray(whole.params[layer]["weight"]))
        half = halves.params[layer]["weight"]
        assert half.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(half).view(np.uint16), hi)
        assert np.array_equal(halves.remainders[f"{layer}.weight"], lo)


def test_a_matmul_reads_the_half_and_ties_show_it():
    """1 + 2^-8 lies between two bf16: nearest-even goes down to 1, the half up to 1 + 2^-7."""
    seen = {}
    optimizer = optax.sgd(0.0)
    for policy in ("bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-mixed,param=fp32:split; w: compute=fp32"):
        state = init({"w": jnp.full((1, 1), 1 + 2.0**-8)}, optimizer, policy)
        step = make_step(lambda p, x: (x @ p["w"]).astype(jnp.float32).sum(), optimizer)
        seen[policy.rpartition(",")[2]] = float(step(state, jnp.ones((1, 1)))[1].loss)
    assert seen == {
        "bf16-mixed": 1.0,
        "param=fp32:split": 1 + 2.0**-7,
        "param=fp32:split; w: compute=fp32": 1 + 2.0**-8,
    }


def test_its_state_has_the_names_of_torchs_and_its_summary_says_how_masters_are_held():
    state = trained("bf16-mixed,param=fp32:split", OPTIMIZERS["adamw"])
    names = {name: x.dtype.name for name, x in state_dict(state).items() if name.startswith(("model.", "remain"))}
    assert names == {
        "model.bias": "float32",
        **{f"model.{layer}.weight": "bfloat16" for layer in ("up", "down")},
        **{f"remainder.{layer}.weight": "int16" for layer in ("up", "down")},
    }
    fresh = init(params(), OPTIMIZERS["adamw"], "bf16-mixed,param=fp32:split", ema=0.5)
    assert bits(load_state_dict(fresh, state_dict(state))) == bits(state)
    assert "2 parameters, 32 numbers, in bf16 and a 16-bit remainder, together fp32" in summary(state)
