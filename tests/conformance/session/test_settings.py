"""Settings of training that a session carries out: recomputed blocks, averaged weights, Muon's momentum."""

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.core.policy import Policy
from halfstep.training.session import open_session
from tests.conformance.session.sessions import TRAINING

GIVEN = [*TRAINING, "training.steps=4", "model.vocabulary=32", "model.context=8", "model.layers=2"]
GIVEN += ["model.width=16", "model.heads=2", "model.kv_heads=1", "model.mlp_width=16"]
GIVEN += ["model.value_residual=true", "model.zero_init=false"]


def opened(name, policy, *extra):
    return open_session(load("golf", [*GIVEN, f"backend={name}", *extra]), Policy.parse(policy), "cpu")


def three_batches():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32, (2, 2, 9)).astype(np.int32) for _ in range(3)]


def floats(state, prefix):
    return {
        name.removeprefix(prefix): np.frombuffer(data, "<f4").reshape(shape)
        for name, (dtype, shape, data) in state.items()
        if name.startswith(prefix) and dtype == "F32"
    }


def assert_trained_alike(backend, sessions):
    """Bit for bit on torch; where a compiler or a graph orders sums anew, to their rounding."""
    for session in sessions:
        for tokens in three_batches():
            session.step(tokens)
    expected, found = (session.state() for session in sessions)
    if backend.name == "torch":
        assert all(found[name] == expected[name] for name in found)
    found, expected = floats(found, "model."), floats(expected, "model.")
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value), name


def test_recomputed_blocks_give_the_same_gradients(slow_backend):
    sessions = [
        opened(slow_backend.name, "fp32", f"training.recompute_blocks={again}") for again in ("false", "true")
    ]
    assert_trained_alike(slow_backend, sessions)


def test_blocks_are_recomputed(backend, monkeypatch):
    """Traced or called twice as often; on JAX the program says so."""
    block, entry, counts = backend.model.Block, "forward" if backend.name == "torch" else "__call__", {}
    original, tokens = getattr(block, entry), np.zeros((2, 9), np.int32)
    for again in ("false", "true"):
        calls = []
        monkeypatch.setattr(
            block, entry, lambda self, *given, calls=calls: calls.append(self) or original(self, *given)
        )
        session = opened(backend.name, "fp32", f"training.recompute_blocks={again}", "training.micro_batches=1")
        if backend.name == "jax":
            trace = backend.jax.make_jaxpr(lambda p, t, s=session: s._loss(p, t).total)
            jaxpr = str(trace(session.run.params, tokens))
            counts[again] = 2 * (1 + ("checkpoint" in jaxpr or "remat" in jaxpr))
        else:
            session.read(session.step(three_batches()[0][:1]))
            counts[again] = len(calls)
    assert counts == {"false": 2, "true": 4}


def kept_by_jax(session, jax):
    """Returns the bytes that the forward pass leaves for the backward pass, without the parameters."""
    tokens = np.zeros((2, 9), np.int32)
    _, back = jax.vjp(lambda p: session._loss(p, tokens).total, session.run.params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(back) if hasattr(leaf, "nbytes"))


def test_lean_memory_keeps_less_and_trains_alike(slow_backend):
    """What torch keeps: torch/test_recompute.py."""
    if slow_backend.name == "mlx":
        with pytest.raises(ConfigError, match=r"mx\.checkpoint runs all of a function again"):
            opened("mlx", "fp32", "training.memory=lean")
        return
    policy = "bf16-mixed,param=fp32" if slow_backend.name == "torch" else "fp32"
    sessions = [opened(slow_backend.name, policy, f"training.memory={memory}") for memory in ("fast", "lean")]
    if slow_backend.name == "jax":
        fast, lean = (kept_by_jax(session, slow_backend.jax) for session in sessions)
        assert lean < fast
    assert_trained_alike(slow_backend, sessions)


def test_averages_follow_the_weights_and_are_what_is_evaluated(slow_backend):
    session = opened(slow_backend.name, "fp32", "training.ema=0.75")
    expected = floats(session.state(), "model.")
    for tokens in three_batches():
        session.step(tokens)
        weights = floats(session.state(), "model.")
        expected = {n: a + np.float32(0.25) * (weights[n] - a) for n, a in expected.items()}
    state = session.state()
    averages = floats(state, "average.")
    assert averages.keys() == weights.keys()
    for name, value in expected.items():
        assert np.allclose(averages[name], value, rtol=1e-5, atol=1e-7), name
    evaluated = [three_batches()[0][0]]
    averaged, plain = session.evaluate(evaluated), session.evaluate(evaluated, averaged=False)
    assert averaged != plain
    assert session.state() == state  # evaluating changes nothing
    bare = opened(slow_backend.name, "fp32")
    bare.load_weights({f"model.{name}": ("F32", v.shape, v.tobytes()) for name, v in averages.items()})
    assert bare.evaluate(evaluated)[0] == pytest.approx(averaged[0], rel=1e-6)
    bare.load_weights({name: record for name, record in state.items() if name.startswith("model.")})
    assert bare.evaluate(evaluated)[0] == pytest.approx(plain[0], rel=1e-6)
    with pytest.raises(HalfstepError, match="average"):
        bare.load(state)


def test_a_skipped_step_moves_no_average(slow_backend):
    small = ["model.layers=1", "model.value_residual=false", "model.unet_skips=false"]
    session = opened(slow_backend.name, "fp16-mixed", "training.ema=0.75", *small)
    first, second, _ = three_batches()
    assert session.read(session.step(first))["skipped"] == 0  # so that averages and weights differ
    session.load(session.state() | {"scale.scale": ("F32", (), np.float32(2.0**40).tobytes())})
    before = session.state()
    assert session.read(session.step(second))["skipped"] == 1
    after = session.state()
    assert before["average.embed.weight"] != before["model.embed.weight"]
    assert all(before[name] == after[name] for name in before if name.startswith(("model.", "average.")))


def test_the_momentum_of_muon_warms_up(slow_backend):
    """Constant where both ends are the same; another course of the weights where they are not."""

    def after(*extra):
        one = ("model.layers=1", "model.value_residual=false", "optimizer.muon_momentum=0.5")
        session = opened(slow_backend.name, "fp32", *one, *extra)
        for tokens in three_batches():
            session.step(tokens)
        return floats(session.state(), "model.")["blocks.0.mlp.up.weight"]

    constant = after("optimizer.muon_momentum_warmup=0")
    level = after("optimizer.muon_momentum_start=0.5", "optimizer.muon_momentum_warmup=7")
    rising = after("optimizer.muon_momentum_start=0.0", "optimizer.muon_momentum_warmup=7")
    assert np.allclose(level, constant, rtol=1e-5, atol=1e-6)
    assert not np.allclose(rising, constant, rtol=1e-3, atol=1e-4)
