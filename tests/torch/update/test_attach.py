"""prepare in two stages: a model gets its policy first, and its run gets optimizers when they exist."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.policy import Policy
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from halfstep.torch.update.parts import check_move
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.update.test_prepare import ALL, Net, batch, loss_of, trained

POLICIES = [
    *("bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic", "fp16-mixed"),
    "bf16-mixed,moments=bf16",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["AdamW", "Muon", "fused", "foreach"])
def test_two_stages_are_one_call_bit_for_bit(policy, name):
    once, losses = trained(policy, ALL[name], 3, clip_norm=0.5, ema=0.9, seed=3)
    model = Net()
    run = prepare(model, policy, clip_norm=0.5, ema=0.9, seed=3)
    assert run.attach(ALL[name](model)) is run  # made from parameters that are held as the policy says
    results = [run.step(loss_of(model), [batch(2 * s + m) for m in range(2)]) for s in range(3)]
    assert [float(r.loss) for r in results] == losses
    assert same_by_name(run.weights(), once.weights())
    assert same_by_name(run.ema, once.ema)
    left, right = run.state_dict(), once.state_dict()
    assert same_by_name(left.pop("tensors"), right.pop("tensors"))
    assert left == right
    assert run.summary() == once.summary()


@pytest.mark.parametrize("policy", [Policy.parse("bf16-mixed,eval=fp32"), "bf16-mixed,param=fp32:split,eval=fp32"])
def test_without_optimizers_a_model_evaluates_and_gives_its_weights(policy):
    plain, model = Net(), Net()
    run = prepare(model, policy=policy)
    with torch.no_grad():
        narrow = model(batch()[0])
        with run.evaluation():
            assert torch.equal(model(batch()[0]), plain(batch()[0]))
        assert not torch.equal(narrow, plain(batch()[0]))
    assert same_by_name(run.weights(), dict(plain.named_parameters()))
    assert "no optimizers" in run.summary()
    assert "run.attach" in run.summary()
    assert "not trained" not in run.summary()
    with run.edit(), torch.no_grad():
        model.up.weight.mul_(0.3)
        plain.up.weight.mul_(0.3)
    model.load_state_dict(model.state_dict())
    assert same_by_name(run.weights(), dict(plain.named_parameters()))
    assert run.coverage(loss_of(model), batch()) is run.last_coverage
    assert same_by_name(dict(run.unprepare().named_parameters()), dict(plain.named_parameters()))


TRAINING = {
    "step": lambda run: run.step(loss_of(run.model), [batch()]),
    "backward": lambda run: run.backward(loss_of(run.model)(batch())),
    "update": lambda run: run.update(),
    "unscale": lambda run: run.unscale(),
    "state_dict": lambda run: run.state_dict(),
    "load_state_dict": lambda run: run.load_state_dict({}),
    "load_torch_amp": lambda run: run.load_torch_amp({}),
    "averaged": lambda run: run.averaged().__enter__(),
    "ema": lambda run: run.ema,
}


@pytest.mark.parametrize("verb", TRAINING)
def test_without_optimizers_nothing_is_trained(verb):
    run = prepare(Net(), "bf16-mixed", ema=0.9)
    with refuses(HalfstepError, "no optimizers", "run.attach"):
        TRAINING[verb](run)


def test_gradients_and_buffers_from_before_are_no_part_of_the_first_update():
    def moved(before):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        run = prepare(model, "bf16-mixed")
        if before:
            (model(torch.ones(2, 4)).sum() * 100).backward()
            model[0].reset_running_stats()
        run.attach(torch.optim.SGD(model.parameters(), lr=1.0))
        assert all(p.grad is None for p in model.parameters())
        run.backward(model(torch.full((2, 4), float("nan"))).sum())
        assert bool(run.update().skipped)
        assert torch.equal(model[0].running_var, torch.ones(4))
        run.step(lambda x: model(x).sum(), [torch.randn(2, 4, generator=torch.Generator().manual_seed(1))])
        return run.weights()

    assert same_by_name(moved(False), moved(True))


def replaced(model):
    model.up = nn.Linear(8, 16)


def cast(model):
    model.half()


def resized(model):
    model.norm.bias.data = torch.zeros(9)


def written(model):
    with torch.no_grad():
        model.up.weight.mul_(2)


CHANGED = {
    "added or replaced since": replaced,
    "the model was cast": cast,
    "had the shape": resized,
    "outside of run.edit": written,
}


@pytest.mark.parametrize("said", CHANGED)
def test_a_model_that_changed_in_between_is_refused_and_nothing_is_attached(said):
    model = Net()
    run = prepare(model, "bf16-mixed,param=fp32:split", ema=0.9)
    CHANGED[said](model)
    with refuses(HalfstepError, said):
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with refuses(HalfstepError, "no optimizers", "run.attach"):
        run.step(loss_of(model), [batch()])


def test_what_prepare_refuses_attach_refuses_and_both_once():
    model = Net()
    run = prepare(model, "bf16-mixed")
    for given, kind, said in (
        (AdamW(copy.deepcopy(model).parameters()), HalfstepError, "that the model does not"),
        (torch.optim.LBFGS(model.parameters()), HalfstepError, "closure"),
        (AdamW(model.parameters(), moments="bf16"), PolicyError, "moments=bf16"),
        ([], HalfstepError, "no optimizer was given"),
        (None, HalfstepError, "not a torch.optim.Optimizer"),
    ):
        with refuses(kind, said):
            run.attach(given)
    run.attach(ALL["fused"](model))
    with refuses(HalfstepError, "optimizers already", "unprepare"):
        run.attach(ALL["fused"](model))
    assert not bool(run.step(loss_of(model), [batch()]).skipped)
    for given in ((), (ALL["fused"](Net()),)):
        with refuses(HalfstepError, "no policy was given", "prepare(model,"):
            prepare(Net(), *given)


def test_a_move_in_between_is_refused_where_the_policy_depends_on_the_device():
    """What follows a model to a GPU is in tests/torch/test_gpu.py."""
    model, other = Net(), torch.device("cpu", 1)

    def move(policy, choice, conversion):
        parts = {"choice": choice, "conversion": conversion, "device": torch.device("cpu")}
        check_move(SimpleNamespace(model=model, policy=Policy.parse(policy), **parts), other)

    unmeasured, measured = (SimpleNamespace(narrow=narrow) for narrow in ({}, {"up": True}))
    plain = SimpleNamespace(measured=unmeasured, amaxes=None)
    for text, choice, conversion, said in (
        ("bf16-mixed", object(), plain, "measured there"),
        ("bf16-mixed", None, SimpleNamespace(measured=measured, amaxes=None), "measured there"),
        ("fp8-mixed,emulate=true", None, SimpleNamespace(measured=unmeasured, amaxes=object()), "amaxes"),
    ):
        with refuses(PolicyError, said, "before prepare()"):
            move(text, choice, conversion)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a CPU without native bf16
        move("bf16-mixed", None, plain)
