"""Resuming after the unplanned: no checkpoint yet, edited settings, data or folders that have disappeared."""

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfstep.config.run import RunConfig, TrainingConfig
from halfstep.config.schema import to_table
from halfstep.core.errors import ResumeError, RunFolderError
from halfstep.core.formats import FP32
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import DamagedCheckpointError
from halfstep.training.data.shards import header
from halfstep.training.data.types import DamagedDataError, DataError
from halfstep.training.files import write_whole
from halfstep.training.run.folder import Record, RunFacts
from halfstep.training.run.manifest import describe_other_bits
from halfstep.training.run.resume import decide
from halfstep.training.telemetry.events import EventsError
from halfstep.training.telemetry.meters import recorded_ceiling
from tests.training.runs import (
    at_step,
    events_of,
    final_state,
    full,
    give_up,
    interrupt_at,
    resume,
    roll_back_at,
    starter,
)

start = starter("training.steps=12", "training.save_every=4")


def test_a_run_that_died_before_its_first_checkpoint_starts_over(text, tmp_path):
    plain, out = tmp_path / "plain", tmp_path / "run"
    start(text, plain).run()
    interrupt_at(start(text, out), 3)
    loop = resume(out)
    assert loop.start == 0
    assert "has no checkpoint yet: the run starts over" in loop.warnings[0]
    assert loop.run().finished
    assert final_state(out)[0] == final_state(plain)[0]
    assert [event["resumed_from"] for event in events_of(out, "start")] == [None, None]


def test_a_run_with_given_weights_starts_over_with_them(text, tmp_path):
    first, plain, out = tmp_path / "first", tmp_path / "plain", tmp_path / "run"
    start(text, first, "seed=3").run()
    start(text, plain, f"init={first}").run()
    interrupt_at(start(text, out, f"init={first}"), 3)
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(plain)[0]
    assert final_state(out)[1]["init"] == final_state(plain)[1]["init"]


@pytest.mark.parametrize(
    ("was", "now", "key"),
    [
        ("batch = 2", "batch = 4", "training.batch"),
        ("seed = 0", "seed = 7", "seed"),
        ("width = 16", "width = 32", "model.width"),
        ("ema = 0.0", "ema = 0.5", "training.ema"),
    ],
)
def test_settings_that_were_edited_by_hand_are_refused(text, out, was, now, key):
    interrupt_at(start(text, out), 9)
    path = out / paths.CONFIG
    lines = path.read_text().splitlines()
    (place,) = [n for n, line in enumerate(lines) if line.startswith(was)]
    lines[place] = lines[place].replace(was, now, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(ResumeError, match=rf"step-000008` was saved with {key} = ") as caught:
        resume(out)
    assert f"set it back in `{out / 'run.toml'}`" in caught.value.hint


@pytest.fixture
def shards(tmp_path):
    draw, folder = np.random.default_rng(0).integers, tmp_path / "shards"
    folder.mkdir()
    for name, size in (("a", 4000), ("b_val", 400)):
        tokens = draw(0, 200, size).astype("<u2").tobytes()
        (folder / f"{name}.bin").write_bytes(header(size, np.dtype("<u2")) + tokens)
    return folder


@pytest.mark.parametrize("late", [False, True])
def test_data_that_cannot_be_read_costs_no_step_that_was_taken(shards, tmp_path, monkeypatch, late):
    plain, out = tmp_path / "plain", tmp_path / "run"
    start(shards, plain, "training.save_every=100").run()
    loop = start(shards, out, "training.save_every=100")
    monkeypatch.setattr(type(loop.session), "asynchronous", late)
    at = loop.batches.at

    def broken(step):
        if step == 7:
            raise DataError("a shard is damaged")
        return at(step)

    loop.batches.at = broken
    with pytest.raises(DataError):
        loop.run()
    assert checkpoint.latest(out / paths.CHECKPOINTS).name == "step-000007"
    (stop,) = events_of(out, "stop")
    assert (stop["step"], stop["saved"]) == (7, 7)
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(plain)[0]


def test_a_shard_that_is_cut_short_in_use_is_an_error_and_no_bus_error(shards, tmp_path):
    loop = start(shards, tmp_path / "run")
    at_step(loop, 4, lambda: os.truncate(shards / "a.bin", 2000))
    with pytest.raises(
        DamagedDataError, match=r"a\.bin` was truncated while it was in use: it has 2000 bytes and had"
    ):
        loop.run()
    assert events_of(tmp_path / "run", "stop")[0]["saved"] >= 4


def test_a_run_folder_that_is_moved_away_is_not_made_again(text, tmp_path, capsys):
    out, moved = tmp_path / "run", tmp_path / "moved"
    loop = start(text, out)
    at_step(loop, 6, lambda: (loop.saver.wait(), out.rename(moved)))
    at_step(loop, 10, lambda: (loop.saver.wait(), moved.rename(out)))
    assert loop.run().finished
    assert [(e["step"], "was moved or removed" in e["message"]) for e in events_of(out, "save_failed")] == [
        (8, True)
    ]
    assert "NOT SAVED" in capsys.readouterr().err
    assert checkpoint.latest(out / paths.CHECKPOINTS).name == "step-000012"


@pytest.mark.parametrize("deadline", [60.0, None])
def test_an_artifact_is_skipped_under_a_deadline(text, out, capsys, deadline):
    """A scheduler would kill the run in the middle of it; its last step is saved."""
    loop = start(text, out, "artifact.format=int8-zlib", deadline=deadline)
    save = loop.checkpointer.save_last

    def saved(step):
        signal.raise_signal(signal.SIGTERM)
        return save(step)

    loop.checkpointer.save_last = saved
    assert loop.run().finished
    assert len(events_of(out, "artifact")) == (deadline is None)
    assert (f"`halfstep artifact {out}` makes it" in capsys.readouterr().err) == (deadline is not None)


def test_links_in_a_run_folder_lead_nowhere(text, tmp_path):
    out, precious = tmp_path / "run", tmp_path / "precious"
    start(text, out).run()
    precious.write_text("mine")
    (out / "lock").unlink()
    (out / "lock").symlink_to(precious)
    with pytest.raises(RunFolderError):
        resume(out)
    assert precious.read_text() == "mine"
    (out / "run.toml.partial").symlink_to(precious)
    write_whole(out / "run.toml", b"new")
    assert (precious.read_text(), (out / "run.toml").read_bytes()) == ("mine", b"new")
    (out / "lock").unlink()
    (out / paths.EVENTS).unlink()
    (out / paths.EVENTS).symlink_to(precious)  # it has no newline at its end
    with pytest.raises(EventsError, match="cannot be written"):
        resume(out).run()
    assert precious.read_text() == "mine"


def test_events_that_a_disk_never_took_are_reported_lost(text, tmp_path, capsys):
    loop = start(text, tmp_path / "run")

    class Full:
        write = full

        def close(self):
            pass

    def fill():
        loop.events._file.close()
        loop.events._file = Full()

    assert at_step(loop, 11, fill).run().finished
    words = capsys.readouterr().err
    assert re.search(r"NOT WRITTEN: the last \d events are lost: .*No space left on device", words)


def test_a_checkpoint_that_is_pruned_while_it_is_read_gives_way_to_the_next(text, out, monkeypatch):
    start(text, out, "training.keep_last=2").run()
    here, real = out / paths.CHECKPOINTS, checkpoint.load
    expected = real(here / "step-000008")[1]

    def pruned(path):
        if path.name == "step-000012":
            checkpoint.discard(path)
        return real(path)

    monkeypatch.setattr(checkpoint, "load", pruned)
    found = checkpoint.load_newest(here)
    assert (found.path.name, found.manifest) == ("step-000008", expected)
    (found.path / checkpoint.STATE).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError):
        checkpoint.load_newest(here)
    checkpoint.discard(found.path)
    assert checkpoint.load_newest(here) is None


@pytest.mark.parametrize("steps", [6, 12])
def test_checkpoints_alone_are_enough_to_resume(text, tmp_path, steps):
    """As where a run was moved without its record."""
    plain, out = tmp_path / "plain", tmp_path / "run"
    start(text, plain).run()
    interrupt_at(start(text, out), steps) if steps < 12 else start(text, out).run()
    (out / paths.EVENTS).unlink()
    assert recorded_ceiling(out / paths.EVENTS, "any", FP32) is None
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(plain)[0]
    assert events_of(out, "end")


def test_a_read_that_failed_once_is_forgotten_by_a_rollback(text, tmp_path, monkeypatch):
    loop = start(text, tmp_path / "run")
    monkeypatch.setattr(type(loop.session), "asynchronous", True)
    at, record, failed = loop.batches.at, loop._record, []

    def broken(step):
        if step == 7 and not failed:
            failed.append(step)
            raise DataError("a disk that came back")
        return at(step)

    def recorded_late(result):
        record(result)
        if loop.tally.step == 7 and len(failed) == 1:
            failed.append("rolled back")
            give_up(loop, good=4)

    loop.batches.at, loop._record = broken, recorded_late
    assert loop.run().finished
    assert len(failed) == 2


def test_steps_that_a_rollback_gave_up_count_for_the_speed(text, out):
    interrupt_at(start(text, out), 10)
    loop = resume(out)
    assert loop.start == 8
    roll_back_at(loop, 10, good=4)
    outcome = loop.run()
    later = outcome.seconds - outcome.totals["spent"]["first_step"]
    assert outcome.tokens_per_second * later == pytest.approx((2 + 8 - 1) * 2 * 16)


def test_the_rate_in_the_record_is_the_one_that_a_skipped_step_had(text, tmp_path):
    loop = start(text, tmp_path / "run", "training.warmup=0.5")
    real, taken = loop.session._loss, []

    def loss(x, y):
        taken.append(1)
        return real(x, y) * (math.nan if len(taken) in (1, 3) else 1.0)

    loop.session._loss = loss
    loop.run()
    rates = [event["learning_rate"] for event in events_of(tmp_path / "run", "step")][:5]
    unit = rates[0]
    assert unit > 0
    assert rates == pytest.approx([unit, unit, 2 * unit, 2 * unit, 3 * unit])


@pytest.mark.parametrize(("name", "rate"), [("muon", 0.04), ("adamw", 0.003)])
def test_the_rate_in_the_record_is_that_of_the_matrices(text, tmp_path, name, rate):
    own = f"optimizer.{'muon_rate' if name == 'muon' else 'rate'}={rate}"
    rates = (own, "optimizer.embedding_rate=0.5")
    start(text, tmp_path / "run", f"optimizer.name={name}", "training.warmup=0.0", *rates).run()
    assert events_of(tmp_path / "run", "step")[0]["learning_rate"] == pytest.approx(rate)


def test_what_changes_bits_is_a_warning(text, out, monkeypatch):
    import torch

    interrupt_at(start(text, out), 6)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    loop = start(text, out, "training.recompute_blocks=true", resume=True)
    (warning,) = loop.warnings
    assert f"threads was {threads} and is {threads + 1}" in warning
    assert "training.recompute_blocks was False and is True" in warning
    loop.lock.release()


@pytest.mark.parametrize(("batch", "pieces", "refused"), [(1, 2, False), (2, 2, True), (1, 1, True)])
def test_an_update_may_be_taken_in_other_pieces_of_the_same_sequences(text, tmp_path, batch, pieces, refused):
    plain, out = tmp_path / "plain", tmp_path / "run"
    start(text, plain).run()
    interrupt_at(start(text, out), 6)
    settings = [f"training.batch={batch}", f"training.micro_batches={pieces}"]
    if refused:
        with pytest.raises(ResumeError, match=r"training\.(batch|micro_batches) was"):
            start(text, out, *settings, resume=True)
        return
    assert start(text, out, *settings, resume=True).run().finished
    # From the weights of step 4, the loss of step 5 is of the same 32 tokens, added up in another order, as may be
    # the sums inside: some 20 in a series, of 256 at most, as in the conformance suite.
    found, expected = (
        next(e["loss"] for e in reversed(events_of(run, "step")) if e["step"] == 5) for run in (out, plain)
    )
    assert abs(found - expected) <= (32 + math.sqrt(20 * 256)) * 2**-24 * expected


FACTS = RunFacts(
    Path("run"), RunConfig(), None, None, Record(has_ended=False, last_saved=None), None, is_writable=True
)


COMPILED = RunConfig(training=TrainingConfig(compile=True))


def manifest_of(config, **fields):
    """Returns what a manifest holds of a run before its first step, for a decision."""
    guard = {"good": 0, "in_a_row": 0, "shift": 0, "went_back": [], "spikes": {"recent": [], "streak": 0}}
    data = {"digest": "", "description": "", "position": {}}
    known = {"policy": "fp32", "choice": None, "guard": guard, "data": data, "config": to_table(config), "step": 0}
    return json.loads(json.dumps(known | fields))


def test_a_run_of_an_older_version_stays_one_compiled_graph():
    facts = replace(FACTS, written=COMPILED, checkpoint=Path("saved"), manifest=manifest_of(COMPILED))
    assert decide(facts, None, []).config.training.compile == "whole"
    assert decide(facts, None, ["training.compile=block"]).config.training.compile == "block"
    here = {"compiled": {"how": "whole", "why": "training.compile says so"}, "config": to_table(RunConfig())}
    assert describe_other_bits(manifest_of(COMPILED), here) == []
    here["compiled"]["how"] = "block"
    (warning,) = describe_other_bits(manifest_of(COMPILED), here)
    assert "training.compile was whole and is block" in warning


def test_a_run_that_chose_how_to_compile_chooses_again():
    manifest = manifest_of(COMPILED, compiled={"how": "block", "why": "its 12 blocks are alike"})
    facts = replace(FACTS, written=COMPILED, checkpoint=Path("saved"), manifest=manifest)
    assert decide(facts, None, []).config == COMPILED


def test_how_a_run_resumes_is_decided_without_a_disk():
    decision = decide(FACTS, None, ["training.steps=2000"])
    assert (decision.config.training.steps, decision.written) == (2000, RunConfig())
    assert len(decision.warnings) == 1  # it starts over
    assert decide(replace(FACTS, record=Record(False, 8)), None, [], allow_older=True).config == RunConfig()


@pytest.mark.parametrize(
    ("facts", "overrides", "error", "named"),
    [
        ({}, ["model.width=64"], ResumeError, "model.width"),
        ({"written": None}, [], RunFolderError, "run.toml"),
        ({"is_writable": False}, [], RunFolderError, "run"),
        ({"dangling": "/disk"}, [], RunFolderError, "/disk"),
        ({"record": Record(False, 8)}, [], RunFolderError, "step 8"),
    ],
)
def test_what_may_not_resume_is_refused_by_its_facts(facts, overrides, error, named):
    with pytest.raises(error, match=named):
        decide(replace(FACTS, **facts), None, overrides)
