"""The session on torch. What every backend's session does is in tests/conformance."""

import pytest
import torch

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch.session import Session
from halfstep.torch.state import restored, stored
from tests.token_batches import batch
from tests.torch.nets import same

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "optimizer.name=adamw"]
SMALL += ["training.batch=2", "training.micro_batches=2", "training.compile=false"]
POLICIES = ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic"]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


@pytest.mark.parametrize("policy", [*POLICIES, "fp16-mixed,emulate=true", "fp8-mixed,emulate=true"])
def test_it_learns(policy):
    s = session(policy, "optimizer.rate=0.01")
    losses = [s.read(s.step(batch(0, s)))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1


def test_compile_compiles_the_loss(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    session()
    assert compiled == []
    s = session("fp32", "training.compile=true")
    assert compiled == [s.model.loss]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_stored_tensors_come_back_with_their_bits(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = restored(stored(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_the_schedule_sees_skipped_steps():
    s = session()
    rates = []
    for step in range(4):
        tokens = batch(step, s)
        if step == 1:
            s.model.embed.weight.data[0, 0] = float("nan")
            tokens[...] = 0
        s.read(s.step(tokens))
        rates.append(float(s.run.optimizers[0].rate_of(s.run.optimizers[0].param_groups[0])) / 3e-3)
        if step == 1:
            s.model.embed.weight.data[0, 0] = 0.0
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])


def test_fp32_is_fp32():
    session()
    assert torch.get_float32_matmul_precision() == "highest"


def test_emulated_bf16_true_rounds_the_gradients_that_native_bf16_true_has():
    found = {}
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        # The two gradients of a tied weight are summed, in fp32 if emulated.
        s = session(policy, "model.tied=false")
        tokens = torch.from_numpy(batch(0, s)[0]).long()
        s.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        found[policy] = [p.grad.float() for p in s.model.parameters()]
    for native, emulated in zip(*found.values(), strict=True):
        assert same((native, emulated), (native.bfloat16().float(), emulated.bfloat16().float()))
