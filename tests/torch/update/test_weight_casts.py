"""Weights are cast once per update where layers run eagerly, and nothing stale is ever used."""

import copy

import pytest
import torch
from torch import nn

from halfstep.torch import AdamW, prepare
from halfstep.torch.numerics.lowering import CAST
from halfstep.torch.numerics.matmul import Linear
from halfstep.torch.update import parts
from tests.torch.nets import draw

X = draw(6, 16)


def prepared(policy="bf16-mixed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
    return model, prepare(model, AdamW(model.parameters(), lr=0.1), policy, clip_norm=1.0)


def casts_of(model):
    marks = [vars(p).get(CAST) for p in model.parameters()]
    return [mark.cast for mark in marks if mark is not None and mark.cast is not None]


def loss_of(model):
    return lambda x: model(x).square().mean().float()


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
@pytest.mark.parametrize("given", [list, iter], ids=["list", "iterator"])
def test_steps_have_the_bits_of_layers_that_cast_by_themselves(monkeypatch, policy, given):
    (one, with_casts), (two, without) = prepared(policy), prepared(policy)
    made = []
    make = parts.WeightCasts.make
    for _ in range(3):
        monkeypatch.setattr(parts.WeightCasts, "make", lambda self: (make(self), made.append(self._casted)))
        first = with_casts.step(loss_of(one), given([X, 2 * X]))
        monkeypatch.setattr(parts.WeightCasts, "make", lambda self: None)
        second = without.step(loss_of(two), given([X, 2 * X]))
        assert torch.equal(first.loss, second.loss)
    assert all(
        torch.equal(a, b) for a, b in zip(with_casts.weights().values(), without.weights().values(), strict=True)
    )
    # Biases are whole with both policies, matrices only with the first.
    assert [len(parameters) for parameters in made] == [0, *[2 if "split" in policy else 4] * 2]


def test_a_cast_is_used_by_every_micro_batch_of_its_update_and_by_nothing_after(monkeypatch):
    model, run = prepared()
    run.step(loss_of(model), [X])
    used = []
    forward = Linear.forward
    monkeypatch.setattr(
        Linear, "forward", lambda ctx, x, values, *rest: (used.append(values), forward(ctx, x, values, *rest))[1]
    )
    run.step(loss_of(model), [X, X])
    first, second = used[:2], used[2:]
    assert all(values.dtype == torch.bfloat16 for values in used)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert not casts_of(model)
    # After the step, writes by others reach the next forward pass, those that torch does not count too.
    model[0].weight.data.zero_()
    model(X)
    assert not used[-2].any()
    # An error on the way leaves nothing behind.
    with pytest.raises(ZeroDivisionError):
        run.step(lambda x: 1 / 0, [X])
    assert not casts_of(model)
    run.unprepare()
    assert not any(vars(p) for p in model.parameters())


def test_a_parameter_that_is_written_to_inside_a_step_is_cast_again():
    """A clamp in the loss function, and a teacher: averages that the model computes with for a while."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    run = prepare(model, AdamW(model.parameters(), lr=0.1), "bf16-mixed", ema=0.5)
    for _ in range(3):
        run.step(lambda x: model(x).square().mean().float(), [X])
    seen = []

    def loss(x):
        student = model(x)
        with torch.no_grad():
            model.weight.mul_(0.0)
            seen.append(model(x) - model.bias.bfloat16())
        return student.square().mean().float()

    before = model.weight.detach().clone()
    run.step(loss, [X])
    assert not seen[0].any()
    with torch.no_grad():
        model.weight.copy_(before)

    def distilled(x):
        with torch.no_grad(), run.averaged():
            target = model(x)
        out = model(x)
        seen.append((out - target).detach())
        return (out - target).square().mean().float()

    run.step(distilled, [X])
    assert seen[-1].any()


def test_running_out_of_memory_leaves_no_cast_and_layers_that_are_compiled_later_lose_their_mark(monkeypatch):
    model, run = prepared()
    run.step(loss_of(model), [X])
    empty, calls = torch.empty_like, []

    def second_fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return empty(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", second_fails)
        with pytest.raises(torch.OutOfMemoryError):
            run.step(loss_of(model), [X])
    assert not casts_of(model)
    # As if the model was compiled after an eager pass: nobody takes the casts, so that they are made once.
    run.step(lambda x: sum(p.square().sum() for p in model.parameters()), [X])
    run.weight_casts.make()
    assert not run.weight_casts._casted


def test_a_parameter_is_saved_without_what_an_update_marks(tmp_path):
    """torch.load, as it is by default, knows no class of ours; and a copy casts anew."""
    model, run = prepared()
    run.step(loss_of(model), [X])
    torch.save(dict(model.named_parameters()), tmp_path / "parameters.pt")
    found = torch.load(tmp_path / "parameters.pt")
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    assert torch.equal(copy.deepcopy(model)(X), model(X))


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
def test_marks_are_looked_for_where_there_may_be_new_ones_alone(monkeypatch, policy):
    """In the first update, in the one after layers left marks, and in a copy of the run."""
    model, run = prepared(policy)
    found = []
    find = parts.WeightCasts._find
    monkeypatch.setattr(parts.WeightCasts, "_find", lambda self: (find(self), found.append(self)))
    for _ in range(4):
        run.step(loss_of(model), [X])
    assert found == [run.weight_casts] * 2
    twin = copy.deepcopy(run)
    for _ in range(3):
        first, second = run.step(loss_of(model), [X]), twin.step(loss_of(twin.model), [X])
        assert torch.equal(first.loss, second.loss)
    assert all(map(torch.equal, run.weights().values(), twin.weights().values()))
