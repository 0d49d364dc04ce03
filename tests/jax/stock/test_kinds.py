"""Every call that looks at a step, on stock models of many kinds: it answers, or refuses with what to do."""

import jax
import numpy as np
import optax
import pytest

from halfstep.core.errors import PolicyReachError
from halfstep.jax import Monitor, audit, check, init, make_step, summary
from halfstep.jax.layers import COMPILER_OPTIONS
from tests.jax.stock.kinds import KINDS

# These are refused under a policy, with what to write.
REFUSED = {
    "linen moe with fp32 shares": ("multiplies float32", "cast it"),
    "custom_vjp": ("enters `custom_vjp_call`", ".astype(jnp.float32)"),
    "custom_vjp with while": ("enters `custom_vjp_call`", ".astype(jnp.float32)"),
}
EVERY = [pytest.param(name, marks=pytest.mark.prove) for name in KINDS if name not in REFUSED]
OPTIMIZER = optax.adam(1e-3)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Steps that run once or twice: LLVM's optimizations would take longer than they save."""
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_backend_optimization_level", 0)
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_llvm_disable_expensive_passes", True)


def built(name):
    params, loss_fn, batch, draws = KINDS[name]()
    return params, loss_fn, batch, (jax.random.key(1),) if draws else ()


def assert_every_call_answers(name, policy):
    params, loss_fn, batch, rng = built(name)
    monitor, state = Monitor(), init(params, OPTIMIZER, policy)
    step = make_step(loss_fn, OPTIMIZER, monitor=monitor)
    assert str(state.policy) in summary(state)
    rows = step.coverage(state, batch, *rng).rows
    assert {"dot_general", "conv_general_dilated"} & {row.function for row in rows if row.how == "covered"}
    weights = monitor.weight_numbers()
    state, result = step(state, batch, *rng)
    check(result)
    assert np.isfinite(float(result.loss))
    layers = len(monitor.layers)
    assert layers
    assert np.isfinite(monitor.layer_numbers().read()).all()
    assert len(weights.read()) == layers
    sample = step.sample(state, batch, *rng, share=1 / 2)
    assert all({"activation", "gradient"} <= roles.keys() for roles in sample.values())
    assert len(sample) == layers


@pytest.mark.parametrize("name", ["equinox mlp", "nnx lora, einsum and cond"])
def test_every_call_answers_in_bf16(name):
    assert_every_call_answers(name, "bf16-mixed")


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "fp16-mixed", "fp8-mixed,emulate=true"])
@pytest.mark.parametrize("name", EVERY)
def test_every_call_answers_under_every_policy(name, policy):
    assert_every_call_answers(name, policy)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("policy", [None, "bf16-mixed"])
def test_an_audit_answers(name, policy):
    params, loss_fn, batch, rng = built(name)
    found = audit(loss_fn, params, batch, OPTIMIZER, rng=rng[0] if rng else None, policy=policy, steps=1)
    assert all(each.rule and str(each) for each in found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_policy_cannot_reach_is_refused_by_every_call(name):
    (params, loss_fn, batch, _), (said, remedy) = built(name), REFUSED[name]
    state, step = init(params, OPTIMIZER, "bf16-mixed"), make_step(loss_fn, OPTIMIZER, monitor=Monitor())
    assert summary(state)
    for call in (
        lambda: step.coverage(state, batch),
        lambda: step(state, batch),
        lambda: step.sample(state, batch),
        lambda: audit(loss_fn, params, batch, OPTIMIZER, policy="bf16-mixed", steps=1),
    ):
        with pytest.raises(PolicyReachError, match=said) as caught:
            call()
        assert remedy in caught.value.hint
        assert "kinds.py" in caught.value.message
