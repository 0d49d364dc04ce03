"""The session: steps, state, evaluation and sampling of the reference decoder on torch."""

import numpy as np
import pytest
import torch

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch.session import Session
from halfstep.torch.state import restored, stored
from halfstep.training.sampling import generate

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
    "bf16-mixed,param=fp32:split",
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
    left, right = one.state(), other.state()
    assert {k: v for k, v in left.items() if k != "rng.cpu"} == {k: v for k, v in right.items() if k != "rng.cpu"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_split_masters_train_as_fp32_ones_bit_for_bit_where_compute_is_fp32(optimizer):
    whole, split = (session(policy, f"optimizer.name={optimizer}") for policy in ("fp32", "param=fp32:split"))
    for step in range(5):
        left, right = (s.read(s.step(batch(step, s))) for s in (whole, split))
        assert left == right
    state = split.state()
    assert state["model.blocks.0.mlp.up.weight"][0] == "BF16"
    assert state["remainder.blocks.0.mlp.up.weight"][0] == "I16"
    masters = split.run.weights()
    assert all(torch.equal(masters[name], p) for name, p in whole.model.named_parameters())


@pytest.mark.parametrize("source", ["fp32", "param=fp32:split", "bf16-true"])
@pytest.mark.parametrize("target", ["fp32", "bf16-mixed,param=fp32:split", "bf16-true"])
def test_weights_are_taken_from_a_state_however_they_are_held(source, target):
    trained, fresh = session(source), session(target, "seed=5")
    trained.step(batch(0, trained))
    fresh.load_weights(trained.state())
    expected = trained.run.weights()
    for name, found in fresh.run.weights().items():
        narrow = "bf16-true" in target
        assert torch.equal(found, expected[name].bfloat16().float() if narrow else expected[name]), name


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
        rates.append(float(s.run.optimizers[0].rate_of(s.run.optimizers[0].param_groups[0])) / 3e-3)
        if step == 1:
            s.model.embed.weight.data[0, 0] = 0.0
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])


def test_sampling_is_a_function_of_the_seed_and_greedy_at_zero():
    s = session()
    first = list(generate(s, [1, 2], 20, 1.0, 0, seed=3, alphabet=256))
    assert first == list(generate(s, [1, 2], 20, 1.0, 0, seed=3, alphabet=256))
    assert first != list(generate(s, [1, 2], 20, 1.0, 0, seed=4, alphabet=256))
    greedy = list(generate(s, [1, 2], 5, 0.0, 0, seed=0, alphabet=256))
    assert greedy == list(generate(s, [1, 2], 5, 1.0, 1, seed=9, alphabet=256))  # the top one of one
    assert all(0 <= token < 256 for token in first)


def test_matrices_decay_and_the_rest_does_not():
    s = session(
        "fp32", "model.layers=2", "model.unet_skips=true", "model.embedding_shortcut=channel", "model.bias=true"
    )
    optimizer = s.run.optimizers[0]
    for group in optimizer.param_groups:
        for p in group["params"]:
            matrix = p.ndim == 2 and optimizer.names[p].endswith(".weight")
            assert (group["weight_decay"] > 0) == matrix, optimizer.names[p]


def test_fp32_is_fp32():
    session()
    assert torch.get_float32_matmul_precision() == "highest"


def trained_state(policy):
    s = session(policy, "model.layers=2")
    for step in range(2):
        s.step(batch(step, s))
    return {name: value for name, value in s.state().items() if name != "rng.cpu"}


HONORED = [
    ("bf16-mixed", "bf16-mixed,param=bf16,grad_weight=bf16"),
    ("bf16-true", "bf16-true,param=bf16:stochastic"),
    ("bf16-mixed", "bf16-mixed,param=fp32:split"),
    ("fp32", "bf16-mixed"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=tf32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e6m9ieee,scale=dynamic"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,grad=fp32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true; blocks.0.mlp.up: grad=e5m2"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e4m3"),
    ("bf16-mixed,emulate=true; **: compute=e4m3", "bf16-mixed,emulate=true; **: compute=e4m3:row"),
    ("bf16-mixed", "bf16-mixed,grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; blocks.1.mlp.up: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed,accumulate=bf16"),
    ("bf16-mixed", "bf16-mixed,moments=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: moments=bf16"),
    ("bf16-mixed", "bf16-mixed,norm=bf16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,norm=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: norm=bf16"),
    ("bf16-mixed", "bf16-mixed,softmax=bf16"),
    ("bf16-mixed", "bf16-mixed,loss=bf16"),
    ("bf16-mixed", "bf16-mixed; lm_head: compute=fp32"),
    ("bf16-mixed", "bf16-mixed; embed: param=bf16,grad_weight=bf16"),
    ("fp16-mixed,emulate=true", "fp16-mixed,emulate=true,scale=static:value=2"),
]


@pytest.mark.parametrize(("base", "policy"), HONORED)
def test_every_value_that_is_accepted_changes_what_is_computed(base, policy):
    assert trained_state(policy) != trained_state(base)


REFUSED = [
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
    ("bf16-mixed,router=bf16", "router=bf16"),
    ("bf16-mixed,reduce=bf16", "reduce=bf16"),
    ("bf16-mixed,matmul=fp32:fast", "fast"),
    ("bf16-mixed,emulate=true,compute=e4m3:row:delayed", "delayed"),
    ("bf16-true,grad_weight=fp32", "torch keeps its gradient in that too"),
    ("bf16-mixed; blocks.0.mlp.up: grad=fp32; lm_head: compute=fp32", "activation's own format"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; **.attn: compute=e4m3", "names no matmul"),
    ("bf16-mixed; lm_head: param=bf16", "no parameter is held"),
    ("bf16-mixed; lm_head: moments=bf16", "no parameter is held"),
    ("compute=tf32", "tf32 cannot run"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_would_change_nothing_is_refused(policy, said):
    with pytest.raises(HalfstepError, match=said):
        session(policy)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("policy", ["compute=tf32,emulate=true", "compute=e6m9ieee,scale=dynamic,emulate=true"])
def test_any_format_runs_emulated_under_every_optimizer(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    assert np.isfinite(s.read(s.step(batch(0, s)))["loss"])


def test_emulated_bf16_true_rounds_the_gradients_that_native_bf16_true_has():
    found = {}
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        s = session(
            policy, "model.tied=false"
        )  # the two gradients of a tied weight are summed, in fp32 if emulated
        tokens = torch.from_numpy(batch(0, s)[0]).long()
        s.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        found[policy] = [p.grad.float() for p in s.model.parameters()]
    for native, emulated in zip(*found.values(), strict=True):
        assert torch.equal(native, native.bfloat16().float())
        assert torch.equal(emulated, emulated.bfloat16().float())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "policy", ["bf16-true", "bf16-true,emulate=true", "bf16-true,param=bf16:stochastic,emulate=true"]
)
def test_masters_stay_in_their_format_after_every_update(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    for step in range(2):
        before = weights(s)
        s.step(batch(step, s))
        after = weights(s)
        assert any(not torch.equal(before[name], after[name]) for name in after)
        assert all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in after.values())
