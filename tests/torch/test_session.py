"""The session: steps, state, evaluation and sampling of the reference decoder on torch."""

import numpy as np
import pytest
import torch

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch.session import Session
from halfstep.torch.state import restored, stored

SMALL = [
    "model.context=16",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "training.batch=2",
    "training.micro_batches=2",
    "training.compile=false",
    "optimizer.name=adamw",
]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


def batch(step, session):
    model, training = session.config.model, session.config.training
    rng = np.random.default_rng(step)
    shape = (training.micro_batches, training.batch, model.context + 1)
    return rng.integers(0, 64, shape).astype(np.int32)


def weights(session):
    return {name: p.detach().clone() for name, p in session.model.named_parameters()}


POLICIES = [
    "fp32",
    "bf16-mixed",
    "bf16-true,param=bf16:stochastic",
    "fp16-mixed,emulate=true",
    "fp8-mixed,emulate=true",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_learns(policy):
    s = session(policy, "optimizer.rate=0.01")
    losses = [s.read(s.step(batch(0, s)))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_put_back_goes_on_bit_for_bit(policy, optimizer):
    one = session(policy, f"optimizer.name={optimizer}")
    for step in range(3):
        one.step(batch(step, one))
    saved = one.state()
    other = session(policy, f"optimizer.name={optimizer}")
    other.step(batch(9, other))  # elsewhere, so that anything left out of the state would show
    torch.manual_seed(99)
    other.load(saved)
    for step in range(3, 6):
        left, right = (s.read(s.step(batch(step, s))) for s in (one, other))
        assert left == right
    left, right = weights(one), weights(other)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert {k: v for k, v in one.state().items() if k != "rng.cpu"}.keys() == saved.keys() - {"rng.cpu"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("fp32", "model.width=32"), "of shape"),
        (("bf16-true",), "bfloat16 of shape"),
        (("fp32", "model.layers=2"), "names differ"),
        (("fp32", "optimizer.name=muon"), "names differ"),
        (("fp32,moments=bf16",), "bfloat16 of shape"),
    ],
)
def test_a_state_of_another_shape_or_precision_is_refused_whole(other, said):
    given = session("fp32").state()
    target = session(*other)
    before = weights(target)
    with pytest.raises(HalfstepError, match=said):
        target.load(given)
    after = weights(target)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_stored_tensors_come_back_with_their_bits(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = restored(stored(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_evaluation_changes_nothing_and_is_in_the_eval_format():
    s = session("fp8-mixed,emulate=true")
    batches = [batch(1, s)[0]]
    before = s.state()
    total, count = s.evaluate(batches)
    assert count == 2 * 16
    # fp8-mixed evaluates in bf16: the same as bf16-mixed does
    reference = session("bf16-mixed,emulate=true")
    assert total == reference.evaluate(batches)[0]
    assert s.state() == before
    assert str(s.model.blocks[0].mlp.up.precision.operand.format) == "e4m3"


def test_the_schedule_sees_skipped_steps():
    s = session()
    rates = []
    for step in range(4):
        tokens = batch(step, s)
        if step == 1:
            s.model.embed.weight.data[0, 0] = float("nan")
            tokens[...] = 0
        s.read(s.step(tokens))
        rates.append(float(s.run.optimizers[0].param_groups[0]["rate"]) / 3e-3)
        if step == 1:
            s.model.embed.weight.data[0, 0] = 0.0
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])


def test_sampling_is_a_function_of_the_seed_and_greedy_at_zero():
    s = session()
    first = list(s.generate([1, 2], 20, 1.0, 0, seed=3))
    assert first == list(s.generate([1, 2], 20, 1.0, 0, seed=3))
    assert first != list(s.generate([1, 2], 20, 1.0, 0, seed=4))
    greedy = list(s.generate([1, 2], 5, 0.0, 0, seed=0))
    assert greedy == list(s.generate([1, 2], 5, 1.0, 1, seed=9))  # the top one of one
    assert all(0 <= token < 256 for token in first)


def test_matrices_decay_and_the_rest_does_not():
    s = session("fp32", "model.norm_gain=true")
    groups = s.run.optimizers[0].param_groups
    for group in groups:
        for p in group["params"]:
            assert (group["weight_decay"] > 0) == (p.ndim >= 2)


def test_fp32_is_fp32():
    session()
    assert torch.get_float32_matmul_precision() == "highest"
