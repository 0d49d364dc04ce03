"""`halfstep train` in several processes: the same run as in one, whose ranks decide and save together."""

import errno
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.cli.main import run
from halfstep.training.checkpoints import checkpoint, tensors
from halfstep.training.data.types import DataError
from halfstep.training.job import UNHEARD, Job, RankError, Row, describe
from tests.training.parallel.ranks import log_of, numbers, train, train_to_end, words
from tests.training.runs import at_step, events_of, final_state, stop

TOKENS = 4 * 16  # of an update


def assert_same_numbers(one, two):
    """What differs is the order of fp32 sums: at most as many units in the last place as there are terms."""
    assert [row[0] for row in one] == [row[0] for row in two]
    left, right = (np.array([row[1:] for row in rows]) for rows in (one, two))
    np.testing.assert_allclose(right, left, rtol=TOKENS * 2.0**-23)


def on_rank(rank, act):
    return act if int(os.environ["RANK"]) == rank else lambda *_: None


def stop_rank_1_at_3(loop):
    at_step(loop, 3, on_rank(1, stop))


def test_two_ranks_train_as_one_and_a_signal_to_one_stops_both(text, tmp_path):
    one, two, halved = (tmp_path / name for name in ("one", "two", "halved"))
    assert run(words(text, one)) == 0
    (code, said, own), (other_code, other_said, others) = train(words(text, two))
    assert (code, other_code) == (0, 0), said
    assert "2 processes, each with the whole state (DDP)" in said
    assert not re.search("error|step|run folder", other_said), other_said
    assert own == others
    assert_same_numbers(numbers(one), numbers(two))
    assert_same_numbers(*(numbers(out, "validation", ("step", "loss", "bits_per_byte")) for out in (one, two)))
    assert events_of(two, "start")[0]["ranks"] == 2
    (alone,), (added,) = events_of(one, "layers"), events_of(two, "layers")
    assert alone["activation"]["count"] == added["activation"]["count"]
    assert min(alone["activation"]["count"]) == 6 * 4 * 16 * 16  # steps, sequences, tokens, features
    assert [event["why"] for event in events_of(two, "sample")] == ["schedule"]

    train_to_end(words(text, halved), stop_rank_1_at_3)
    (event,) = events_of(halved, "stop")
    assert (event["reason"], event["step"], event["saved"]) == ("SIGTERM", 4, 4)
    resumed = train_to_end(words(text, halved, resume=True))
    assert final_state(halved)[0] == final_state(two)[0]
    assert [digest for *_, digest in resumed] == [own, own]


@pytest.mark.prove
def test_two_ranks_with_shards_train_as_one(text, tmp_path):
    """They stop, resume without shards, and what they leave is read by one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    adamw, full = "optimizer.name=adamw", "parallel.shard=full"
    assert run(words(text, one, adamw)) == 0
    ends = train_to_end(words(text, two, adamw, full), stop_rank_1_at_3)
    assert "2 processes, each with a share of the state (FSDP2)" in ends[0][1]
    assert "Warning" not in ends[0][1]
    assert ends[0][2] == ends[1][2]
    (event,) = events_of(two, "stop")
    assert (event["step"], event["saved"]) == (4, 4)
    assert len([*(two / "checkpoints" / "step-000004").glob("state-*.safetensors")]) == 2
    ends = train_to_end(words(text, two, adamw, resume=True))
    assert_same_numbers(numbers(one), numbers(two))
    assert_same_numbers(*(numbers(out, "validation", ("step", "loss", "bits_per_byte")) for out in (one, two)))


SHARED = {
    "hybrid": ["parallel.shard=hybrid"],
    "compiled": ["training.compile=true"],
    "compiled shards": ["training.compile=true", "parallel.shard=full"],
    "split": ["policy=fp32,param=fp32:split"],
    "mixed values": ["model.layers=2", "model.value_residual=true"],
}


@pytest.mark.prove
@pytest.mark.parametrize("case", SHARED)
def test_ranks_train_as_one_however_they_share_the_model(case, text, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    count = 4 if case == "hybrid" else 2
    policy = "fp32,param=fp32:split" if case == "split" else "fp32"
    settings = ["optimizer.name=adamw", "training.micro_batches=2"]
    settings += [each for each in SHARED[case] if not each.startswith("policy")]
    alone = [each for each in settings if not each.startswith(("parallel", "training.compile"))]
    assert run(words(text, one, *alone, policy=policy)) == 0
    ends = train_to_end(words(text, many, *settings, policy=policy), count=count, local=2)
    assert len({str(digest) for *_, digest in ends}) == 1
    assert_same_numbers(numbers(one), numbers(many))


def nan_on_rank_1(loop):
    real = loop.session._loss
    loop.session._loss = lambda x, y: real(x, y) * (math.nan if loop.tally.launched == 2 else 1.0)


def plant_nan(loop):
    on_rank(1, nan_on_rank_1)(loop)


@pytest.mark.prove
def test_a_nan_on_one_rank_skips_the_step_on_all_and_names_the_rank_and_its_data(text, out):
    ends = train_to_end(words(text, out), plant_nan)
    assert ends[0][2] == ends[1][2]
    (event,) = events_of(out, "skip")
    assert (event["step"], event["ranks"]) == (3, [1])
    assert sum(len(place["offsets"]) for place in event["where"]) == 2  # of 4 sequences
    assert "step 3 was not finite and was skipped on rank 1; its data begins in" in ends[0][1]


def unreadable_on_rank_1(loop):
    real = loop.batches.at

    def at(step, *rest):
        if step == 3:
            raise DataError("a shard is damaged", hint="mend it")
        return real(step, *rest)

    loop.batches.at = at


def plant_unreadable(loop):
    on_rank(1, unreadable_on_rank_1)(loop)


@pytest.mark.prove
def test_data_that_one_rank_cannot_read_stops_all_after_a_save(text, out):
    ends = train(words(text, out, "training.save_every=100"), plant_unreadable)
    assert [code for code, *_ in ends] == [2, 2], ends
    assert "error: rank 1: a shard is damaged" in ends[0][1]
    assert "error" not in ends[1][1]
    assert final_state(out)[1]["step"] == 3


REFUSED = {
    "settings": (
        [[], ["optimizer.rate=0.01"]],
        "rank 1 is not the same run as rank 0: optimizer.rate is 0.01 there",
    ),
    "batch": ([["training.batch=3"]] * 2, "3 sequences, in micro-batches of 3, cannot be divided among 2 ranks"),
    "few": ([["training.batch=1"]] * 2, "an update has 1 x 1 = 1 sequences, which is fewer than 2 ranks"),
    "hybrid": ([["parallel.shard=hybrid", "optimizer.name=adamw"]] * 2, "all processes are on one machine"),
    "backend": (
        [["backend=jax"]] * 2,
        "torchrun has started 2 processes, which share a run on backend torch, and this one is on jax",
    ),
}


@pytest.mark.parametrize("case", ["settings", *(pytest.param(c, marks=pytest.mark.prove) for c in [*REFUSED][1:])])
def test_ranks_are_refused_once_with_the_reason(case, text, out):
    settings, reason = REFUSED[case]
    ends = train([words(text, out, *each) for each in settings])
    assert [code for code, *_ in ends] == [2, 2], ends
    assert reason in ends[0][1]
    assert "hint:" in ends[0][1]
    assert "error" not in ends[1][1]


def hang(*_):
    time.sleep(600)


def hang_in_a_step(loop):
    at_step(loop, 3, on_rank(1, hang))


def hang_in_the_data(loop):
    real = loop.batches.at
    loop.batches.at = lambda step, *rest: (on_rank(1, hang)() if step == 3 else None) or real(step, *rest)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (hang_in_a_step, r"than `step 3` for 2 s: .*rank 1 \(process \d+ on .*\) is in hang \(test_job.py:\d+\)"),
        (hang_in_the_data, r"rank 1 .* is still at `reading its data for step \d`.*: rank 0 has waited for 2 s"),
    ],
)
def test_a_rank_that_hangs_ends_the_run_and_is_named(text, out, plant, expected):
    command = words(text, out, "parallel.timeout=2")
    with pytest.raises(BrokenProcessPool):
        train(command, plant)
    said = "".join(Path(log_of(command, rank)).read_text() for rank in (0, 1))
    assert re.search(expected, said), said
    assert said.count("error:") == 1


def test_gpus_need_gpus(text, out, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run([*words(text, out), "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert "error: --gpus 2, and this machine has no GPUs for torch" in said
    assert "`torchrun --nproc-per-node=2 -m halfstep train ... --device cpu` starts processes on the CPU" in said
    monkeypatch.setenv("RANK", "0")
    assert run([*words(text, out), "--gpus", "2"]) == 2
    assert "hint: omit --gpus" in capsys.readouterr().err
    assert run(words(text, out)) == 2
    assert "RANK is set, and WORLD_SIZE is not" in capsys.readouterr().err


@pytest.mark.prove
def test_torchrun_starts_it(text, out):
    """The command that users type. benchmarks/prove/job_kills.py kills workers of torchrun's engine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "halfstep",
    ]
    command += words(text, out, "training.steps=2", resume=True)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (start,) = events_of(out, "start")
    assert (start["ranks"], start["resumed_from"], final_state(out)[1]["step"]) == (2, None, 2)


def spike_once(loop):
    """The losses of steps 11 to 13 are high until the run rolls back."""
    real = loop.session._loss

    def loss(x, y):
        high = loop.tally.launched in (10, 11, 12) and not loop.health.shift
        return real(x, y) * (4.0 if high else 1.0)

    loop.session._loss = loss


@pytest.mark.prove
def test_shards_roll_back_and_start_from_the_weights_of_another_run(text, tmp_path):
    first, one, two = (tmp_path / name for name in ("first", "one", "two"))
    assert run(words(text, first, "optimizer.name=adamw")) == 0
    settings = ["optimizer.name=adamw", "training.rollback=4", "training.steps=16", "parallel.shard=full"]
    start = ["--init", str(first)]
    (alone,) = train([*words(text, one, *settings[:-1]), *start], spike_once, count=1)
    ends = train([*words(text, two, *settings), *start], spike_once)
    assert [code for code, *_ in (alone, *ends)] == [0] * 3, ends
    for out in (one, two):
        (event,) = events_of(out, "rollback")
        assert (event["step"], event["to"]) == (13, 8)
    assert_same_numbers(numbers(one), numbers(two))
    assert numbers(one)[0][1] < numbers(first)[0][1]
    assert ends[0][2] == ends[1][2]


FP8, BF16 = "fp8-mixed,emulate=true", "bf16-mixed,param=fp32:split,emulate=true"


def stop_rank_1_at_2(loop):
    at_step(loop, 2, stop if os.environ["RANK"] == "1" else lambda: None)


@pytest.mark.prove
@pytest.mark.parametrize("shard", ["none", "full"])
def test_ranks_change_it_together_and_resume_at_the_change(text, tmp_path, shard):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (f"parallel.shard={shard}", "optimizer.name=adamw", f'schedule=[{{from=3,policy="{BF16}"}}]')
    ends = train_to_end(words(text, whole, *settings, policy=FP8))
    assert ends[0][2] == ends[1][2]
    stopped = train(words(text, cut, *settings, policy=FP8), stop_rank_1_at_2)
    assert [event["step"] for event in events_of(cut, "stop")] == [3], stopped
    train_to_end(words(text, cut, *settings, policy=FP8, resume=True))
    assert [(event["step"], event["policy"]) for event in events_of(cut, "policy")] == [(3, BF16)]
    assert final_state(cut)[0] == final_state(whole)[0]


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
    train_to_end(words(text, out, *SHARDED), plant)
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
    train_to_end(words(text, out, *SHARDED))
    capsys.readouterr()
    losses = []
    for backend in ("torch", "jax", "mlx"):
        assert run(["eval", str(out), "--backend", backend, "--device", "cpu", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert run(["artifact", str(out), "--device", "cpu"]) == 0
    assert run(["export", str(out), "--to", "safetensors", "--out", str(out / "exported"), "--device", "cpu"]) == 0


def row(beats, number, what="step 3", line="all_reduce (distributed_c10d.py:1)"):
    return Row(beats, number, what, line, "process 7 on node")


def test_a_report_names_the_rank_that_is_silent_behind_or_elsewhere():
    before = [row(4, 9), row(4, 9)]
    frozen = describe(0, before, [row(7, 9), row(4, 9)], 2.0)
    assert frozen.startswith("rank 1 (process 7 on node) does not answer; the last it did was `step 3`")
    late = describe(0, before, [row(7, 9), row(7, 8, "reading its data for step 3", "read (disk.py:1)")], 2.0)
    assert late.startswith(
        "rank 1 (process 7 on node) is still at `reading its data for step 3`, in read (disk.py:1)"
    )
    assert late.endswith("rank 0 has waited for 2 s at `step 3`")
    hung = describe(0, [*before, row(4, 9)], [row(7, 9), row(7, 9, line="loop (mine.py:2)"), row(7, 9)], 2.0)
    assert "rank 1 (process 7 on node) is in loop (mine.py:2); ranks 0, 2 are in all_reduce" in hung
    assert "rank 1 (no process yet)" in describe(0, [row(4, 9), UNHEARD], [row(7, 9), UNHEARD], 2.0)


class Other:
    """A host whose other rank answers what it is given."""

    backend, launcher, has_notes, rank, ranks = "torch", "torchrun", True, 0, 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def broadcast(self, text):
        return text

    def note(self, key, text):
        pass

    def gather(self, text):
        return [text, json.dumps(self.answers.pop(0))]


def test_a_rank_with_other_data_is_refused():
    with pytest.raises(RankError, match="rank 1 is not the same run as rank 0: data is 'b' there, and 'a'"):
        Job(Other({"data": "b"})).check_same({"data": "a"}, "give it the same")


def test_a_rank_that_does_not_see_the_folder_is_refused(out):
    out.mkdir()
    with pytest.raises(RankError, match="rank 1 does not see the run folder"):
        Job(Other(None, False)).check_folder(out)
    assert not [*out.iterdir()]
    Job(Other(None, True)).check_folder(out)
