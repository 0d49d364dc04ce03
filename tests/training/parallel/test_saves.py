"""Checkpoints of `halfstep train` on ranks that share the state: faults of one rank, and what reads them."""

import errno
import json
import os

import pytest

from halfstep.cli.main import run
from halfstep.training.checkpoints import checkpoint, tensors
from tests.training.parallel.ranks import train, words
from tests.training.runs import events_of

SHARDED = ("optimizer.name=adamw", "parallel.shard=full", "training.keep_last=9")


def full_disk(loop):
    """The disk of rank 1 is full when it saves step 2."""
    real = tensors.flush

    def flush(path):
        if path.name.startswith("state-00002") and path.parent.name.startswith("step-000002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    tensors.flush = flush


def no_memory(loop):
    """Rank 1 has no memory for a copy of step 4, nor for the next try, if there is one."""
    real = loop.session.snapshot

    def snapshot():
        if os.environ["RANK"] == "1" and loop.tally.step in (3, 4):
            raise MemoryError
        return real()

    loop.session.snapshot = snapshot


@pytest.mark.prove
@pytest.mark.parametrize(("plant", "step"), [(full_disk, 2), (no_memory, 4)])
def test_a_rank_that_cannot_save_fails_the_save_for_all_and_training_continues(text, out, plant, step):
    ends = train(words(text, out, *SHARDED), plant)
    assert [code for code, *_ in ends] == [0, 0], ends
    (event,) = events_of(out, "save_failed")
    assert event["step"] == step
    assert "rank 1 failed: " in event["message"]
    steps = [path.name for path in checkpoint.step_folders(out / "checkpoints")]
    assert steps == [f"step-00000{each}" for each in (2, 4, 6) if each != step]
    assert [event["step"] for event in events_of(out, "checkpoint")] == [
        each for each in (2, 4, 6) if each != step
    ]


@pytest.mark.prove
def test_one_process_reads_what_ranks_saved(text, out, capsys):
    ends = train(words(text, out, *SHARDED))
    assert [code for code, *_ in ends] == [0, 0], ends
    capsys.readouterr()
    losses = []
    for backend in ("torch", "jax", "mlx"):
        assert run(["eval", str(out), "--backend", backend, "--device", "cpu", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert run(["artifact", str(out), "--device", "cpu"]) == 0
    assert run(["export", str(out), "--to", "safetensors", "--out", str(out / "exported"), "--device", "cpu"]) == 0
