"""Delayed scaling, natively where torch multiplies 8-bit floats on this CPU, and emulated everywhere."""

import copy

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import E4M3, E5M2
from halfstep.torch.fp8.delayed import HISTORY
from halfstep.torch.numerics.cast import scale_for
from halfstep.torch.numerics.dtypes import supported
from halfstep.torch.run import prepare
from halfstep.torch.state import load_state, restored, state_of, stored
from tests.refusals import refuses
from tests.torch.nets import same

DELAYED = "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed"
FORMS = [
    pytest.param("", marks=pytest.mark.skipif(not supported(E4M3, "cpu"), reason="no fp8 here"), id="native"),
    pytest.param(",emulate=true", id="emulated"),
]
X, W, G = range(3)


def prepared(policy, lr=0.0):
    """One layer whose input, output gradient and learning rate are chosen; its loss is sum(y * g)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    return prepare(model, torch.optim.SGD(model.parameters(), lr=lr, fused=True), policy), model


def step(run, *pairs):
    def loss(pair):
        x, g = (torch.full((16, 16), value / 2) for value in pair)
        x[0, 0], g[0, 0] = pair
        return (run.model(x) * g).sum()

    return run.step(loss, pairs)


def history(run):
    return run.amaxes.named()["0"]


@pytest.mark.parametrize("form", FORMS)
def test_the_amax_of_an_update_is_the_largest_of_its_micro_batches(form):
    run, model = prepared(DELAYED + form)
    assert torch.equal(history(run), torch.zeros(3, HISTORY))
    step(run, (1.0, 8.0), (4.0, 2.0))
    weight = model[0].weight.detach().bfloat16().abs().max().float()
    # The weights of both micro-batches are equal: each gradient counts as it is.
    assert history(run)[:, 0].tolist() == [4.0, float(weight), 8.0]
    assert not history(run)[:, 1:].any()
    step(run, (2.0, 16.0))
    assert history(run)[X, :3].tolist() == [2.0, 4.0, 0.0]
    assert history(run)[G, :3].tolist() == [16.0, 8.0, 0.0]


@pytest.mark.parametrize("form", FORMS)
def test_the_next_update_and_its_gradients_are_scaled_by_the_largest_amax_of_earlier_ones(form):
    """The first scale is the tensor's own; then a number that is 16 times the history saturates at 448 / scale."""
    run, model = prepared(DELAYED + form)
    model[0].weight.data.copy_(torch.eye(16))
    first = model(torch.full((16, 16), 64.0))
    assert torch.equal(first.float(), torch.full((16, 16), 64.0))  # no history yet: as current
    step(run, (1.0, 1.0))
    step(run, (0.25, 1.0))
    with torch.no_grad():
        y = model(torch.full((16, 16), 64.0))
    largest = E4M3.max / float(scale_for(torch.tensor(1.0), E4M3))
    assert torch.equal(y.float(), torch.full((16, 16), largest))
    assert largest < 64.0
    run, model = prepared(DELAYED + form)
    model[0].weight.data.copy_(torch.eye(16))
    step(run, (1.0, 1.0))
    x = torch.ones(16, 16, requires_grad=True)
    model(x).backward(torch.full((16, 16), 2.0**10, dtype=model(x).dtype))
    largest = E5M2.max / float(scale_for(torch.tensor(1.0), E5M2))
    assert torch.equal(x.grad, torch.full((16, 16), largest))
    run.forget()


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_update_and_a_dropped_one_leave_the_history_alone(form):
    run, model = prepared(DELAYED + form)
    step(run, (1.0, 1.0))
    before = history(run).clone()
    assert bool(step(run, (float("inf"), 1.0)).skipped)
    assert bool(step(run, (2.0, float("nan"))).skipped)
    assert torch.equal(history(run), before)
    with pytest.raises(ZeroDivisionError):  # in the second micro-batch, after the first was summed
        run.step(lambda number: model(torch.full((16, 16), 32.0)).sum() * (1 / number), [1.0, 0])
    with torch.no_grad():
        model(torch.full((16, 16), 1e6))
    step(run, (0.5, 0.5))
    assert history(run)[X, :2].tolist() == [0.5, 1.0]


def test_an_operand_that_is_not_delayed_ignores_its_history_and_a_frozen_layer_needs_no_gradient():
    run, model = prepared("bf16-mixed,compute=e4m3:delayed,grad=e5m2,emulate=true")
    model[0].weight.data.copy_(torch.eye(16))
    step(run, (1.0, 8.0))
    assert history(run)[X, 0] == 1.0
    # Its own amax is kept anyway, and not used.
    step(run, (1.0, 64.0))
    x = torch.ones(16, 16, requires_grad=True)
    model(x).backward(torch.full((16, 16), 2.0**30))
    assert torch.equal(x.grad, torch.full((16, 16), 2.0**30))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    run = prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1, fused=True), f"{DELAYED},emulate=true")
    assert not model[0](torch.ones(2, 16)).requires_grad
    assert "delayed: 2 matmuls are scaled by the largest amax of their last 16 updates" in run.summary()


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_equals_the_uninterrupted_one(form):
    pairs = [(2.0**i, 2.0**-i) for i in range(4)]
    whole, first, second, again = (prepared(DELAYED + form, lr=0.1)[0] for _ in range(4))
    for pair in pairs:
        step(whole, pair)
    for pair in pairs[:2]:
        step(first, pair)
    saved = {name: stored(t) for name, t in state_of(first).items()}
    load_state(second, {name: restored(record) for name, record in saved.items()})
    for pair in pairs[2:]:
        step(second, pair)
    assert same((history(whole), whole.model[0].weight), (history(second), second.model[0].weight))
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(history(again), history(first))


def test_a_history_is_of_its_model_alone_and_forgets_after_so_many_updates():
    run, model = prepared(f"{DELAYED},emulate=true")
    step(run, (1.0, 1.0))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.full((16, 16), 64.0)), model(torch.full((16, 16), 64.0)))
    twin(torch.full((16, 16), 64.0)).sum().backward()
    step(run, (2.0, 1.0))
    assert history(run)[X, 0] == 2.0
    run.unprepare()
    assert "halfstep" not in model[0].__dict__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    assert prepare(model, optimizer, "bf16-mixed,compute=e4m3,emulate=true").amaxes is None
    run, _ = prepared(f"{DELAYED},emulate=true")
    step(run, (1024.0, 1.0))
    for _ in range(HISTORY - 1):
        step(run, (1.0, 1.0))
    assert history(run)[X].max() == 1024.0
    step(run, (1.0, 1.0))
    assert history(run)[X].max() == 1.0
    run, model = prepared(f"{DELAYED},emulate=true")
    run.step(lambda x: (model(x) + model(2 * x)).sum(), [torch.ones(16, 16)])
    assert history(run)[X, 0] == 3.0


def test_what_cannot_be_delayed_and_a_state_without_the_history_are_refused_with_the_remedy():
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refuses(PolicyError, "a row of activations is a token", "`e4m3:row`"):
        prepare(model, optimizer, "bf16-mixed,compute=e4m3:row:delayed,emulate=true")
    attention = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(PolicyError, match="projects queries, keys and values"):
        prepare(attention, torch.optim.SGD(attention.parameters(), lr=0.1), f"{DELAYED},emulate=true")
    run, _ = prepared(f"{DELAYED},emulate=true")
    state = {name: t for name, t in state_of(run).items() if not name.startswith("amax.")}
    with refuses(HalfstepError, "no amax history of `0`", "omit `delayed`", "load_weights"):
        load_state(run, state)
