"""What only a GPU can show; docs/measurements/ keeps what it showed."""

import numpy as np
import pytest
import torch

from halfstep.config.load import load
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.session import Session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = ["model.layers=2", "training.batch=4", "training.micro_batches=2"]


def session(policy, *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cuda", lambda applied, xp: 1.0 / (1.0 + applied))


def batch(s, step=0):
    shape = (2, 4, s.config.model.context + 1)
    return np.random.default_rng(step).integers(0, 256, shape).astype(np.int32)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-true,param=bf16:stochastic", "fp16-mixed"])
def test_a_step_waits_for_nothing(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    for step in range(3):
        s.step(batch(s, step))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [s.step(batch(s, step)) for step in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(np.isfinite(s.read(result)["loss"]) for result in results)


def test_the_native_step_agrees_with_the_emulated_one():
    """Loss and gradients differ by the order of fp32 sums, and by roundings to bf16 that tip either way."""
    native, emulated = (
        session("bf16-mixed", "optimizer.name=adamw"),
        session("bf16-mixed,emulate=true", "optimizer.name=adamw"),
    )
    left, right = (s.read(s.step(batch(s))) for s in (native, emulated))
    assert left["loss"] == pytest.approx(right["loss"], rel=BF16.epsilon)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=4 * BF16.epsilon)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed,emulate=true"])
def test_it_learns(policy):
    s = session(policy, "optimizer.rate=0.01")
    losses = [s.read(s.step(batch(s)))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5


def test_compiled_it_is_the_same_loss():
    eager, compiled = session("bf16-mixed"), session("bf16-mixed", "training.compile=true")
    left, right = (s.read(s.step(batch(s)))["loss"] for s in (eager, compiled))
    assert left == pytest.approx(right, rel=BF16.epsilon)


def test_weight_gradients_are_fp32_from_the_sum_on():
    from halfstep.torch.layers import casts_of, linear

    casts = casts_of(session("bf16-mixed").model.blocks[0].mlp.up.precision)
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(48, 32, device="cuda", requires_grad=True)
    g = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    linear(x, w, None, casts).backward(g)
    exact = g.double().t() @ x.double()
    magnitude = g.abs().double().t() @ x.abs().double()
    assert w.grad.dtype == torch.float32
    # 64 exact products summed in fp32; tensor cores align them to the largest, hence a factor of two
    assert ((w.grad.double() - exact).abs() <= 2 * 64 * 2.0**-23 * magnitude).all()
    assert not torch.equal(w.grad, w.grad.bfloat16().float())
