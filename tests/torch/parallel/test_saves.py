"""Checkpoints of sharded runs: written by all ranks while they train, read back to the same bits on any number."""

import pickletools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Stored, widen
from halfstep.integrations import state as integrations_state
from halfstep.torch.state import (
    Copies,
    _live,
    load_state,
    load_weights,
    restored,
    rows_here,
    state_of,
    stored,
    written,
)
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.writer import Retention, Saver
from tests.torch.parallel import jobs

META = {"policy": "bf16-mixed"}


begin = partial(jobs.begin, ema=0.9)


def step(run, called, *numbers):
    for number in numbers:
        result = run.step(jobs.loss_of(called), jobs.batches(number, 1))
    return float(result.loss)


def whole_state(run):
    """The bytes of every tensor of the job's state, put together by torch."""
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in _live(run).items()}
    return {name: bytes(stored(t).data) for name, t in whole.items()}


def save(folder, *how):
    """Trains two steps, saves, and trains on while the checkpoint is written; returns the state of step 2."""
    run, called = begin(*how)
    step(run, called, 0, 1)
    state = whole_state(run)
    rank, ranks = jobs.rank_and_ranks()
    sharded = run.sharded is not None and ranks > 1
    saver = Saver(folder, Retention(), rank=rank, ranks=ranks if sharded else 1, token="job")
    if sharded or rank == 0:
        saver.save(2, lambda: Copies().take(*written(run)), META)
    step(run, called, 2, 3)
    assert saver.wait(60)
    assert [saved.trouble for saved in saver.poll()] == [None] * (sharded or rank == 0)
    return state, whole_state(run)


def resume(path, *how):
    """Reads this rank's rows into a new run; returns the job's state as it was loaded, and after two steps."""
    run, called = begin(*how)
    with torch.no_grad():
        called(jobs.batches(9, 1)[0])  # FSDP keeps some weights gathered after this
    arrays, _ = checkpoint.load(path, partial(rows_here, run))
    given = {name: restored(record) for name, record in arrays.items()}
    if run.sharded is not None:
        local = sum(record.data.nbytes for record in arrays.values())
        assert local < 0.75 * sum(entry["bytes"] for entry in checkpoint.read_manifest(path)["files"].values())
    load_state(run, given)
    state = whole_state(run)
    step(run, called, 2, 3)
    return state, whole_state(run)


def joined(state):
    """A state with its masters whole."""
    made = dict(state)
    for name in [name for name in state if name.startswith("remainder.")]:
        hi, lo = f"model.{name.removeprefix('remainder.')}", made.pop(name)
        count = len(lo) // 2
        made[hi] = widen(Stored("BF16", (count,), state[hi]), Stored("I16", (count,), lo)).tobytes()
    return made


def assert_no_pickles(path):
    """No file of a checkpoint is a pickle, nor holds one: after the header come the bytes of the tensors."""
    for file in path.iterdir():
        content = file.read_bytes()
        assert file.suffix in (".safetensors", ".json")
        assert b"\x80\x04\x95" not in content
        assert b"PK\x03\x04" not in content
        with pytest.raises((ValueError, IndexError)):
            list(pickletools.genops(content))


def test_two_ranks_save_while_they_train_and_any_number_reads_the_same_bits(ranks, tmp_path):
    results = ranks(save, 2, tmp_path, "bf16-mixed", "ours", ())
    (state, after), (other, _) = results
    assert state == other  # the parts of the job, not of a rank
    path = tmp_path / "step-000002"
    assert sorted(file.name for file in path.glob("state*")) == [
        "state-00001-of-00002.safetensors",
        "state-00002-of-00002.safetensors",
    ]
    assert_no_pickles(path)
    arrays, manifest = checkpoint.load(path)
    assert {name: bytes(record.data) for name, record in arrays.items()} == state
    assert manifest["tensors"]["optimizer.0.blocks.0.up.weight.exp_avg"]["shape"] == [33, 16]
    again = ranks(resume, 2, path, "bf16-mixed", "ours", ())
    assert again == [(state, after)] * 2  # the steps after it, too, are those of the job that was not stopped
    assert resume(path, "bf16-mixed")[0] == state


def test_what_one_process_saved_is_resumed_by_shards(ranks, tmp_path):
    state, _ = save(tmp_path, "bf16-mixed,param=fp32:split", "foreach")
    path = tmp_path / "step-000002"
    assert (path / "state.safetensors").exists()
    assert_no_pickles(path)
    sharded = ranks(resume, 2, path, "bf16-mixed,param=fp32:split", "foreach", ())
    assert [loaded for loaded, _ in sharded] == [joined(state)] * 2


@pytest.mark.prove
@pytest.mark.parametrize(
    ("optimizer", "shape"), [("ours", (4,)), ("ours", (2, 2)), ("foreach", (4,)), ("sgd", (2, 2)), ("muon", (4,))]
)
def test_four_ranks_then_two_then_one(ranks, tmp_path, optimizer, shape):
    policy = "fp16-mixed"
    (state, after), *_ = ranks(save, 4, tmp_path, policy, optimizer, shape)
    path = tmp_path / "step-000002"
    files = sorted(file.name for file in path.glob("state*"))
    assert files == [f"state-0000{rank}-of-00004.safetensors" for rank in range(1, 1 + shape[-1])]
    assert_no_pickles(path)
    assert ranks(resume, 4, path, policy, optimizer, shape) == [(state, after)] * 4
    assert [loaded for loaded, _ in ranks(resume, 2, path, policy, optimizer, ())] == [state] * 2
    assert [loaded for loaded, _ in ranks(resume, 2, path, policy, optimizer)] == [state] * 2
    assert resume(path, policy, optimizer)[0] == state


@pytest.mark.prove
def test_split_masters_go_from_ddp_to_shards_and_back(ranks, tmp_path):
    policy = "bf16-mixed,param=fp32:split"
    state, _ = ranks(save, 2, tmp_path / "ddp", policy)[0]
    sharded = ranks(resume, 2, tmp_path / "ddp" / "step-000002", policy, "ours", ())
    assert [loaded for loaded, _ in sharded] == [joined(state)] * 2
    state, _ = ranks(save, 2, tmp_path / "fsdp", policy, "ours", ())[0]
    again = ranks(resume, 2, tmp_path / "fsdp" / "step-000002", policy)
    assert [joined(loaded) for loaded, _ in again] == [state] * 2


def by_state_dict():
    run, called = begin(shape=())
    step(run, called, 0)
    saved = {**run.state_dict(), "tensors": {n: t.clone() for n, t in run.state_dict()["tensors"].items()}}
    assert {type(t) for t in saved["tensors"].values()} == {torch.Tensor}
    loss = step(run, called, 1)
    run.load_state_dict(saved)
    assert step(run, called, 1) == loss
    with pytest.raises(HalfstepError, match="is one file, and each rank has its own rows"):
        integrations_state.save(run, "anywhere")
    others = [None] * dist.get_world_size()
    dist.all_gather_object(others, saved["rows"])
    saved["rows"] = others[1 - dist.get_rank()]
    with pytest.raises(HalfstepError, match="other rows of the weights") as caught:
        run.load_state_dict(saved)
    return caught.value.hint


def whole_weights_into_shards():
    alone = jobs.net()
    with torch.no_grad():
        for p in alone.parameters():
            p.mul_(3.0)
    given = {f"model.{name}": p.detach() for name, p in alone.named_parameters()}
    run, called = begin(shape=())
    rows = jobs.batches(0, 1)[0]
    with torch.no_grad():
        before = called(rows)
        load_weights(run, given)
        assert not torch.equal(called(rows), before)
    assert all(type(t) is torch.Tensor for t in state_of(run).values())
    found = whole_state(run)
    return all(found[name] == bytes(stored(p).data) for name, p in given.items())


def test_own_loops_keep_the_rows_of_their_rank_and_take_whole_weights(ranks):
    assert all("the list of what every rank saved" in hint for hint in ranks(by_state_dict, 2))
    assert ranks(whole_weights_into_shards, 2) == [True, True]


def dictionaries(folder, optimizer):
    """Trains two steps, and saves what `state_dict` returns, as a loop of its own does."""
    run, called = begin("bf16-mixed", optimizer, ())
    step(run, called, 0, 1)
    torch.save(run.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    state = whole_state(run)
    return state, step(run, called, 2, 3), whole_state(run)


def from_dictionaries(folder, optimizer, count=2, shape=()):
    run, called = begin("bf16-mixed", optimizer, shape)
    step(run, called, 7)
    run.load_state_dict([torch.load(f"{folder}/rank{r}.pt", weights_only=True) for r in range(count)])
    state = whole_state(run)
    return state, step(run, called, 2, 3), whole_state(run)


def without_random(state):
    return {name: held for name, held in state.items() if not name.startswith("rng.")}


@pytest.mark.parametrize("optimizer", ["fused", pytest.param("muon", marks=pytest.mark.prove)])
def test_what_state_dict_returned_on_all_ranks_loads_on_any_number(ranks, optimizer, tmp_path):
    saved = ranks(dictionaries, 2, tmp_path, optimizer)
    assert ranks(from_dictionaries, 2, tmp_path, optimizer) == saved
    state, *_ = from_dictionaries(tmp_path, optimizer, 2, None)  # one process
    assert without_random(state) == without_random(saved[0][0])
    with pytest.raises(HalfstepError, match="has 50 rows, and the states that were given have 25"):
        from_dictionaries(tmp_path, optimizer, 1, None)


@pytest.mark.prove
def test_four_ranks_load_what_state_dict_returned_on_two(ranks, tmp_path):
    state, *_ = ranks(dictionaries, 2, tmp_path, "fused")[0]
    for found, *_ in ranks(from_dictionaries, 4, tmp_path, "fused"):
        assert without_random(found) == without_random(state)
