"""A run's state in one file: back bit for bit, whole or absent, and refused if it is another run's or damaged."""

import copy

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.integrations import state
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from tests.refusals import refuses
from tests.torch.test_state import Net, train

MAKE = {
    "ours": lambda m: AdamW(m.parameters(), lr=0.01),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "two": lambda m: [torch.optim.SGD(m.embed.parameters(), lr=0.01, momentum=0.9), AdamW([m.head.weight])],
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
}


def prepared(policy="bf16-mixed", name="ours", **options):
    model = Net()
    return prepare(model, MAKE[name](model), policy, **options)


def half_frozen(policy, base=3):
    """A run with a large frozen weight, which the framework brings back: here the model's own seed."""
    model = Net()
    model.base = nn.Linear(400, 400)
    with torch.no_grad():
        model.base.weight.fill_(base)
    model.base.requires_grad_(False)
    return prepare(model, AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), policy)


@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "fp16-mixed"])
def test_frozen_weights_are_not_written_and_must_be_the_same(policy, tmp_path):
    run, path = half_frozen(policy), tmp_path / state.NAME
    train(run, [1, 2])
    state.save(run, path)
    assert path.stat().st_size < 30_000 < run.model.base.weight.nbytes
    losses = train(run, [3, 4])
    again = half_frozen(policy)
    state.load(again, path)
    assert train(again, [3, 4]) == losses
    assert same(again.state_dict(), run.state_dict())
    other = half_frozen(policy, base=4)
    kept = copy.deepcopy(other.state_dict())
    with refuses(HalfstepError, "frozen weight `base.weight`", "load the weights that the run began with"):
        state.load(other, path)
    assert same(other.state_dict(), kept)


def same(a, b):
    bits = all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])
    return bits and a["tensors"].keys() == b["tensors"].keys() and repr(a["groups"]) == repr(b["groups"])


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split,moments=bf16", "fp16-mixed", "fp32"])
def test_a_run_continues_from_its_file_as_if_it_had_never_stopped(policy, name, tmp_path):
    first = prepared(policy, name, ema=0.9)
    train(first, [1, 2])
    state.save(first, tmp_path / state.NAME)
    kept = copy.deepcopy(first.state_dict())
    losses = train(first, [3, 4])
    second = prepared(policy, name, ema=0.9)
    state.load(second, tmp_path / state.NAME)
    assert same(kept, second.state_dict())
    assert train(second, [3, 4]) == losses
    assert same(first.state_dict(), second.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == [state.NAME]


def test_another_policy_is_refused_by_name_and_changes_nothing(tmp_path):
    first, second = prepared("bf16-mixed"), prepared("fp16-mixed")
    train(first, [1])
    state.save(first, tmp_path / state.NAME)
    before = copy.deepcopy(second.state_dict())
    with refuses(HalfstepError, "the policy `.*`, and this run has"):
        state.load(second, tmp_path / state.NAME)
    assert same(before, second.state_dict())


def test_another_model_and_other_groups_are_refused(tmp_path):
    state.save(prepared(), tmp_path / state.NAME)
    wide = Net(width=8)
    with refuses(HalfstepError, "shape"):
        state.load(prepare(wide, MAKE["ours"](wide), "bf16-mixed"), tmp_path / state.NAME)
    with refuses(HalfstepError, "AdamW"):
        state.load(prepared(name="two"), tmp_path / state.NAME)


def test_a_file_that_is_missing_foreign_or_damaged_is_refused(tmp_path):
    from safetensors.torch import save_file

    run, path = prepared(), tmp_path / state.NAME
    with refuses(state.StateError, "there is no", "without a policy"):
        state.load(run, path)
    save_file({"weight": torch.ones(3)}, path)
    with refuses(state.StateError, "not a state of a run"):
        state.load(run, path)
    state.save(run, path)
    content = bytearray(path.read_bytes())
    for place in (len(content) - 1, len(content) // 2, 4):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with refuses(state.StateError, "is damaged"):
            state.load(run, path)
    path.write_bytes(content[:-7])
    with refuses(state.StateError, "is damaged"):
        state.load(run, path)
    path.write_bytes(content)
    state.load(run, path)


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    run, path = prepared(), tmp_path / state.NAME
    state.save(run, path)
    before = path.read_bytes()
    train(run, [1])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, "replace", full)
    with refuses(state.StateError, "No space left", "free space"):
        state.save(run, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [state.NAME]


def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path):
    run = prepared()
    run.optimizers[0].param_groups[0]["decide"] = lambda: 1
    with refuses(state.StateError, "function"):
        state.save(run, tmp_path / state.NAME)
    model = Net()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with refuses(state.StateError, r"`model.phase` is held in torch.complex64", "persistent=False"):
        state.save(prepare(model, MAKE["ours"](model), "bf16-mixed"), tmp_path / state.NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_state_in_a_form_of_its_own_is_refused_by_name(tmp_path):
    class Packed(torch.Tensor):  # as the 8-bit moments of torchao
        def __tensor_flatten__(self):
            return [], None

    run = prepared(name="NAdam")
    train(run, [1])
    moments = run.optimizers[0].state[run.model.embed.weight]
    moments["exp_avg"] = moments["exp_avg"].as_subclass(Packed)
    with refuses(state.StateError, "`optimizer.0.embed.weight.exp_avg` is of the class Packed", "moments=bf16"):
        state.save(run, tmp_path / state.NAME)
    assert not list(tmp_path.iterdir())


def test_the_state_of_an_optimizer_has_the_same_order_after_every_load(tmp_path):
    """Ranks gather it key by key; the library that reads the file gives its tensors in another order each time."""
    run, path = prepared(name="NAdam"), tmp_path / state.NAME
    train(run, [1])
    state.save(run, path)
    orders = set()
    for _ in range(8):
        again = prepared(name="NAdam")
        state.load(again, path)
        orders.add(str([[*held] for held in again.optimizers[0].state.values()]))
    assert len(orders) == 1
