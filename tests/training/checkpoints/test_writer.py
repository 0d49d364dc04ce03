"""Checkpoints written while training continues, without a wait, and which of them are kept."""

import errno
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import CheckpointWriteError
from halfstep.training.checkpoints.writer import (
    Candidate,
    Retention,
    Saver,
    best_step,
    due_step,
    good_step,
    prune,
    steps_to_keep,
    survey,
)
from halfstep.training.run import checkpointing
from halfstep.training.run.checkpointing import Checkpointer
from halfstep.training.run.health import Health
from halfstep.training.run.signals import StopRequest
from halfstep.training.session import open_session
from halfstep.training.telemetry.events import Events, read_events
from tests.training.runs import raising


def taken(step):
    return lambda: lambda: {"w": ("U8", (3,), memoryview(bytes([step] * 3)))}


@pytest.fixture
def slow(monkeypatch):
    gate, real = threading.Event(), checkpoint.write

    def save(*args):
        assert gate.wait(10)
        return real(*args)

    monkeypatch.setattr(checkpoint, "write", save)
    return gate


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")


def test_a_save_returns_at_once_and_is_reported_when_complete(tmp_path, slow):
    saver = Saver(tmp_path, Retention())
    waited = saver.save(1, taken(1), {})
    assert saver.is_busy  # the disk was not let go yet
    assert saver.poll() == []
    assert not saver.wait(0.01)
    assert saver.saved_step is None
    slow.set()
    assert saver.wait(10)
    (saved,) = saver.poll()
    assert (saved.step, saved.bytes, saved.trouble, saved.waited) == (1, 3, None, waited)
    assert saved.seconds >= waited
    assert saver.saved_step == 1
    assert bytes(checkpoint.load(saved.path)[0]["w"].data) == bytes([1] * 3)


def test_the_next_one_waits_for_the_one_before_and_the_time_is_counted(tmp_path, slow):
    saver = Saver(tmp_path, Retention())
    saver.save(1, taken(1), {})
    threading.Timer(0.2, slow.set).start()

    def take():
        assert (tmp_path / "step-000001").is_dir()  # its buffers are free now
        return taken(2)()

    assert saver.save(2, take, {}) > 0.1
    assert saver.wait(10)
    assert [(saved.step, saved.waited > 0.1) for saved in saver.poll()] == [(1, False), (2, True)]


def test_a_full_disk_is_reported_and_what_was_saved_before_stays(tmp_path, monkeypatch):
    saver = Saver(tmp_path, Retention(1))
    saver.save(1, taken(1), {})
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver.save(2, taken(2), {})
        saver.wait()
    first, second = saver.poll()
    assert first.path.name == "step-000001"
    assert second.path is None
    assert "No space left" in second.trouble.message
    assert saver.saved_step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    saver.save(3, taken(3), {})
    saver.wait()
    assert saver.poll()[0].path.name == "step-000003"


def test_a_prune_that_fails_is_reported_and_the_save_counts(tmp_path, monkeypatch):
    saver = Saver(tmp_path, Retention(1))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", full)
    for step in (1, 2):
        saver.save(step, taken(step), {})
    saver.wait()
    last = saver.poll()[-1]
    assert last.path.name == "step-000002"
    assert "cannot be removed" in last.trouble.message
    assert saver.saved_step == 2


def test_a_defect_of_ours_is_raised_and_not_taken_for_a_full_disk(tmp_path):
    saver = Saver(tmp_path, Retention())
    saver.save(1, lambda: lambda: 1 / 0, {})
    saver.wait()
    with pytest.raises(ZeroDivisionError):
        saver.poll()


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize(
    ("backend", "policy"),
    [("torch", "bf16-mixed,emulate=true"), pytest.param("jax", "fp32", marks=pytest.mark.prove), ("mlx", "fp32")],
)
def test_a_snapshot_is_of_its_own_moment_whatever_steps_follow(backend, policy, ema):
    pytest.importorskip("mlx.core" if backend == "mlx" else backend)
    small = ["context=16", "layers=1", "width=16", "heads=2"]
    settings = [f"backend={backend}", *(f"model.{one}" for one in small), "training.batch=2"]
    settings.append(f"training.ema={ema}")
    session = open_session(load("tiny", settings), Policy.parse(policy), "cpu")
    tokens = np.random.default_rng(0).integers(0, 256, (1, 2, 17)).astype(np.int32)
    for _ in range(2):  # the second time the memory is used again
        session.step(tokens)
        before, snapshot = session.state(), session.snapshot()
        session.read(session.step(tokens))
        assert {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in snapshot().items()} == before
        assert session.state() != before


class Bar:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Session:
    snapshot = staticmethod(taken(7))

    def is_out_of_memory(self, error):
        return "allocate" in str(error)


@pytest.fixture
def checkpointer(tmp_path):
    (tmp_path / "run").mkdir()
    with Events(tmp_path / "run" / "events.jsonl") as events:
        saver = Saver(tmp_path / "run" / "checkpoints", Retention())
        describe = lambda step, held_out: {"held_out": held_out}  # noqa: E731
        yield Checkpointer(saver, Session(), Health(0.0), events, Bar(), describe, print, StopRequest())


def events_of(checkpointer):
    return read_events(checkpointer.events.path)


def ask(checkpointer, deadline=None, seconds_ago=0.0):
    checkpointer.stop.receive(15)
    checkpointer.stop.at = time.monotonic() - seconds_ago
    checkpointer.stop.deadline = math.inf if deadline is None else deadline
    return checkpointer


@pytest.mark.parametrize(("enough", "number"), [(0.0, 1), (60.0, 0)])
def test_saves_that_training_waits_for_are_one_warning(checkpointer, monkeypatch, enough, number):
    monkeypatch.setattr(checkpointing, "LONG", enough)
    turns, real, settle = threading.Semaphore(0), checkpoint.write, checkpointer.wait

    def save(*args):
        assert turns.acquire(timeout=60)
        return real(*args)

    def wait():  # a disk that is done with one only when the next one waits for it
        if checkpointer.saver.is_busy:
            turns.release()
        return settle()

    monkeypatch.setattr(checkpoint, "write", save)
    monkeypatch.setattr(checkpointer, "wait", wait)
    checkpointer.save(1)
    assert events_of(checkpointer) == []  # taking the snapshot is no waiting for a disk
    for step in 2, 3, 4:
        checkpointer.save(step)
    checkpointer.wait()
    warnings = [event["message"] for event in events_of(checkpointer) if event["event"] == "warning"]
    assert len(warnings) == number
    assert all("raise training.save_every" in message for message in warnings)
    assert [event["step"] for event in events_of(checkpointer) if event["event"] == "checkpoint"] == [1, 2, 3, 4]


def test_a_failed_save_is_reported_and_the_last_one_is_tried_again(checkpointer, monkeypatch):
    monkeypatch.setattr("halfstep.training.run.checkpointing.PAUSE", 0.05)
    real, tries = os.fsync, []

    def fsync(descriptor):
        tries.append(descriptor)
        if len(tries) < 3:
            full()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert checkpointer.save_last(4)
    assert [event["event"] for event in events_of(checkpointer)] == ["save_failed", "save_failed", "checkpoint"]
    assert "No space left" in events_of(checkpointer)[0]["message"]
    assert checkpointer.bar.notes[0].startswith("NOT SAVED: ")
    assert checkpointer.failed is None


def test_a_disk_that_stays_full_is_an_error_in_the_end(checkpointer, monkeypatch):
    monkeypatch.setattr("halfstep.training.run.checkpointing.PAUSE", 0.01)
    monkeypatch.setattr("halfstep.training.run.checkpointing.PATIENCE", 0.05)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError):
        checkpointer.save_last(4)
    assert not ask(checkpointer).save_last(4)  # a stopped run is warned, not failed


def test_after_a_signal_nothing_is_started_that_would_not_end_in_time(checkpointer, slow):
    checkpointer.saver.longest = 5.0
    assert not ask(checkpointer, 10.0, seconds_ago=6.0).save_last(4)
    assert not checkpointer.saver.is_busy
    checkpointer.saver.longest = 0.1
    started = time.monotonic()
    assert not ask(checkpointer, 10.0, seconds_ago=9.7).save_last(4)  # started, and the disk is slow
    assert 0.2 < time.monotonic() - started < 1.5
    assert checkpointer.saver.is_busy
    slow.set()
    assert ask(checkpointer, 10.0).save_last(4)
    assert checkpointer.saver.saved_step == 4


@pytest.mark.parametrize(
    "act", [lambda checkpointer: checkpointer.save_last(5), lambda checkpointer: checkpointer.save(5)]
)
def test_a_signal_that_comes_while_a_save_is_waited_for_has_its_deadline_too(checkpointer, slow, act):
    checkpointer.save(4)
    threading.Timer(0.1, ask, (checkpointer, 0.2)).start()
    started = time.monotonic()
    assert not act(checkpointer)
    assert time.monotonic() - started < 2
    assert checkpointer.saver.is_busy
    slow.set()
    checkpointer.saver.wait()
    assert [path.name for path in checkpointer.saver.folder.iterdir()] == ["step-000004"]


def test_an_earlier_failure_does_not_delay_the_last_save(checkpointer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        checkpointer.save(3)
        assert checkpointer.wait()
    started = time.monotonic()
    assert ask(checkpointer, 3.0).save_last(4)
    assert time.monotonic() - started < 2


def test_a_disk_that_stays_full_is_not_waited_for_past_the_deadline(checkpointer, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    started = time.monotonic()
    assert not ask(checkpointer, 0.4).save_last(4)
    assert time.monotonic() - started < 2


def test_no_memory_for_a_save_is_a_save_that_failed(checkpointer):
    checkpointer.session.snapshot = lambda: raising(MemoryError)
    checkpointer.save(4)
    checkpointer.wait()
    (event,) = events_of(checkpointer)
    assert event["event"] == "save_failed"
    assert "no memory" in event["message"]


@pytest.mark.parametrize("words", ["can't allocate memory", "a defect"])
def test_a_copy_that_the_host_has_no_memory_for_is_a_save_that_failed(checkpointer, words):
    checkpointer.session.snapshot = raising(RuntimeError(words))
    if words == "a defect":
        with pytest.raises(RuntimeError, match=words):
            checkpointer.save(3)
        return
    checkpointer.save(3)
    checkpointer.wait()
    del checkpointer.session.snapshot
    (event,) = events_of(checkpointer)
    assert (event["event"], event["step"]) == ("save_failed", 3)
    assert "the host has no memory left for a copy" in event["message"]
    assert checkpointer.save_last(4)
    assert checkpointer.saver.saved_step == 4


def test_a_checkpoint_is_an_event_with_what_it_cost_and_nothing_is_saved_before_a_step(checkpointer):
    assert checkpointer.save_last(0)
    assert events_of(checkpointer) == []
    checkpointer.save(5, 2.5)
    checkpointer.wait()
    (event,) = events_of(checkpointer)
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 5, "checkpoints/step-000005")
    assert (event["bytes"], event["held_out"]) == (3, 2.5)
    assert 0 <= event["waited"] <= event["seconds"]
    assert checkpoint.load(checkpointer.saver.folder / "step-000005")[1]["held_out"] == 2.5


def make(folder, **losses):
    for name, loss in losses.items():
        step = int(name.removeprefix("s"))
        checkpoint.save(folder, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": loss})


def names(folder):
    return sorted(int(entry.name.removeprefix("step-")) for entry in folder.iterdir())


def test_the_last_ones_and_every_so_many_stay(tmp_path):
    make(tmp_path, **{f"s{step}": None for step in range(1, 9)})
    removed = prune(tmp_path, Retention(last=2, every=3))
    assert names(tmp_path) == [3, 6, 7, 8]
    assert [int(path.name[-1]) for path in removed] == [1, 2, 4, 5]
    assert prune(tmp_path, Retention(last=2, every=3)) == []


def test_the_best_stays_and_is_found_again(tmp_path):
    make(tmp_path, s1=2.0, s2=1.5, s3=None, s4=1.5, s5=3.0)
    assert best_step(survey(tmp_path)) == 2  # the earlier of two equal ones
    prune(tmp_path, Retention(last=1, best=True))
    assert names(tmp_path) == [2, 5]
    make(tmp_path, s6=1.0)
    prune(tmp_path, Retention(last=1, best=True))
    assert names(tmp_path) == [6]
    assert best_step(survey(tmp_path)) == 6
    prune(tmp_path, Retention(last=1))
    assert best_step(survey(tmp_path / "nowhere")) is None


def test_one_that_was_due_is_kept_before_one_that_a_stop_left(tmp_path):
    def made(*steps):
        for step in steps:
            config = {"training": {"save_every": 10}}
            checkpoint.save(
                tmp_path, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": None, "config": config}
            )

    made(10, 20, 21, 30)
    prune(tmp_path, Retention(last=1), good=29)
    assert names(tmp_path) == [20, 30]
    made(33, 34)
    prune(tmp_path, Retention(last=1), good=29)
    assert names(tmp_path) == [20, 30, 34]  # the newest, and one that was due
    found = survey(tmp_path)
    assert [step for step, seen in found.items() if seen.due] == [20, 30]
    assert (due_step(found, 40), good_step(found, 40)) == (30, 30)
    assert (due_step(found, 29), due_step(found, 19), good_step(found, 19)) == (20, None, None)
    stopped = {34: found[34]}
    assert (due_step(stopped, 34), good_step(stopped, 34)) == (None, 34)  # for pruning better that than none


def test_the_last_step_is_due_whatever_the_schedule(tmp_path):
    config = {"training": {"save_every": 10, "steps": 25}}
    for step in (20, 25):
        checkpoint.save(
            tmp_path, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": None, "config": config}
        )
    prune(tmp_path, Retention(last=1), good=25)
    assert names(tmp_path) == [25]


def test_what_is_not_whole_is_left_and_does_not_count(tmp_path):
    make(tmp_path, s1=None, s2=None, s3=None, s4=None)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    (tmp_path / "step-000001" / "state.safetensors").write_bytes(b"")
    assert [path.name for path in prune(tmp_path, Retention(1))] == ["step-000002"]
    assert names(tmp_path) == [1, 3, 4]
    assert prune(tmp_path, Retention(5)) == []


def test_what_is_refused_on_load_stops_no_prune(tmp_path):
    make(tmp_path, s1=1.0, s2=2.0, s3=3.0, s4=4.0)
    (tmp_path / "step-000001" / "weights.pt").write_bytes(b"exported by hand")
    manifest = tmp_path / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    assert [path.name for path in prune(tmp_path, Retention(1))] == ["step-000003"]
    assert names(tmp_path) == [1, 2, 4]
    assert best_step(survey(tmp_path)) == 4


@given(
    st.dictionaries(st.integers(0, 60), st.booleans(), min_size=1),
    st.integers(1, 4),
    st.integers(0, 7),
    st.booleans(),
    st.none() | st.integers(0, 60),
)
def test_the_newest_always_stays_and_each_that_stays_has_a_reason(steps, last, every, by_best, good):
    seen = {step: Candidate(Path(), due, float(step)) for step, due in steps.items()}
    stay = steps_to_keep(seen, Retention(last, every, by_best), good)
    assert max(steps) in stay
    due = sorted(step for step in steps if steps[step])
    before = [step for step in sorted(steps) if good is not None and step <= good]
    protected = [step for step in before if steps[step]][-1:] or before[-1:]
    for step in steps:
        reasons = (step == max(steps), step in due[-last:], every > 0 and step % every == 0,
                   by_best and step == min(steps), step in protected)  # fmt: skip
        assert (step in stay) == any(reasons)
