"""Loggers get what events hold, fail without stopping a run, and resume with it.

The real packages write, and what they wrote is read back; tests of packages that are not installed are skipped.
"""

import contextlib
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from halfstep.config.load import load
from halfstep.core.errors import ConfigError, LoggerError, SettingValueError
from halfstep.training.telemetry import loggers
from halfstep.training.telemetry.events import Events, read_events
from halfstep.training.telemetry.loggers import Board, curve_values, numeric_fields
from tests.training.runs import full, interrupt_at, starter

ROOT = Path(__file__).parents[3]
BASE = ["training.steps=6", "training.validate_every=3", "training.save_every=2"]


@pytest.fixture
def start(text, tmp_path):
    def started(*names, resume=False):
        return starter(*BASE)(text, tmp_path / "run", f"training.loggers={json.dumps(names)}", resume=resume)

    return started


@pytest.fixture
def events(tmp_path):
    return lambda: read_events(tmp_path / "run" / "events.jsonl")


class Recorder:
    """A logger that remembers; it breaks at the `broken` step, when it is closed, or when it starts."""

    def __init__(self, broken=None):
        self.broken, self.curves, self.calls = broken, [], []

    def start(self, event):
        self.calls.append(("start", event["resumed_from"], event["config"]["training"]["steps"]))
        self._break("start")

    def curve(self, step, time, values):
        self.curves.append((step, time, values))
        self._break(step)

    def roll_back(self, step):
        self.calls.append(("back", step))

    def close(self, totals, *, failed):
        self.calls.append(("close", failed, totals))
        self._break("close")

    def _break(self, at):
        if at == self.broken:
            raise OSError(28, "No space left on device")


@pytest.fixture
def planted(monkeypatch):
    opened = []

    def plant(*made):
        found = iter(made)

        def opens(name, where):
            opened.append(where)
            return next(found)

        monkeypatch.setattr(loggers, "_open", opens)
        monkeypatch.setattr(loggers, "check", lambda names: None)
        return opened

    return plant


def test_a_logger_gets_the_numbers_of_the_events(start, events, planted):
    recorder = Recorder()
    opened = planted(recorder)
    start("tensorboard").run()
    curves = [e for e in events() if e["event"] in ("step", "validation", "checkpoint")]
    assert recorder.curves == [(e["step"], e["time"], curve_values(e)) for e in curves]
    assert recorder.curves[0][2]["train/loss"] == curves[0]["loss"]
    assert {name for _, _, values in recorder.curves for name in values} > {
        "train/input_wait", "validation/bits_per_byte", "checkpoint/waited",
    }  # fmt: skip
    begun, ended = recorder.calls
    assert begun == ("start", None, 6)
    assert ended == ("close", False, numeric_fields(events()[-1]))
    assert (opened[0].resumed_from, len(opened[0].id)) == (None, 8)


def test_numbers_are_named_by_what_they_are_of():
    event = {"event": "step", "time": 5.0, "step": 3, "loss": math.nan, "mfu": None, "tokens": 7, "flag": True,
             "note": "x"}  # fmt: skip
    found = curve_values(event)
    assert list(found) == ["train/loss", "train/tokens"]
    assert math.isnan(found["train/loss"])
    assert curve_values({"event": "warning", "message": "no", "time": 1.0}) == {}
    assert numeric_fields({"event": "end", "spent": {"wall": 2, "input": 1.0}, "mfu": 0.5}) == {
        "spent_wall": 2.0, "spent_input": 1.0, "mfu": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("broken", ["start", 2, 6, "close"])
def test_a_logger_that_fails_is_dropped_with_one_warning(start, events, planted, broken, capsys):
    recorder, other = Recorder(broken), Recorder()
    planted(recorder, other)
    assert start("tensorboard", "wandb").run().finished
    warned = [e["message"] for e in events() if e["event"] == "warning"]
    assert len(warned) == 1
    assert "`tensorboard` failed and is dropped" in warned[0]
    assert "No space left" in warned[0]
    assert "warning: the logger `tensorboard`" in capsys.readouterr().err
    assert len([c for c in other.curves if "train/loss" in c[2]]) == 6  # the other one misses nothing
    if broken != "close":
        assert sum(1 for step, _, _ in recorder.curves if step == broken) <= 1  # it was not asked again


def test_a_resumed_run_is_the_same_run_to_its_loggers(start, planted):
    first, second = Recorder(), Recorder()
    opened = planted(first, second)
    interrupt_at(start("tensorboard"), 5)  # after the checkpoint of step 4
    assert first.calls[-1][:2] == ("close", True)
    start("tensorboard", resume=True).run()
    assert (opened[0].id, opened[1].resumed_from) == (opened[1].id, 4)
    assert second.calls[0] == ("start", 4, 6)
    assert [step for step, _, values in second.curves if "train/loss" in values] == [5, 6]


def test_loggers_learn_of_a_rollback(tmp_path):
    recorder = Recorder()
    board = Board((), tmp_path, None, warn=pytest.fail)
    board.loggers["one"] = recorder
    with Events(tmp_path / "events.jsonl") as events:
        events.listener = board.log_event
        events.write("rollback", step=9, to=4, skipped_data=5, message="back")
    assert recorder.calls == [("back", 4)]


@pytest.mark.parametrize("left", ["{}", "", "3", '{"id"'])
def test_a_damaged_identity_is_a_warning(tmp_path, planted, left):
    planted(Recorder())
    (tmp_path / "loggers.json").write_text(left)
    warned = []
    with Board(("wandb",), tmp_path, 4, warn=warned.append):
        pass
    assert "loggers.json` is damaged and holds no id" in warned[0]
    assert len(json.loads((tmp_path / "loggers.json").read_text())["id"]) == 8


def test_a_full_disk_that_refuses_the_identity_is_a_warning(tmp_path, planted, monkeypatch):
    monkeypatch.setattr("halfstep.training.telemetry.loggers.write_whole", full)
    planted(Recorder())
    warned = []
    with Board(("wandb",), tmp_path, 4, warn=warned.append) as board:
        assert board.loggers
    assert "cannot be written (No space left on device)" in warned[0]


def test_a_logger_that_cannot_start_leaves_the_others_alone(tmp_path, monkeypatch):
    there = Recorder()

    def opens(name, where):
        if name == "wandb":
            raise RuntimeError("no network")
        return there

    monkeypatch.setattr(loggers, "_open", opens)
    warned = []
    board = Board(("tensorboard", "wandb"), tmp_path, 4, warn=warned.append).__enter__()
    assert (list(board.loggers), there.calls, len(warned)) == (["tensorboard"], [], 1)
    board = Board(("tensorboard", "wandb"), tmp_path, None, warn=warned.append)
    with pytest.raises(LoggerError, match="`wandb` cannot start"):
        board.__enter__()  # a new run is refused, and closes what it opened
    assert there.calls == [("close", True, {})]


def test_without_loggers_nothing_is_written_or_imported(start, tmp_path):
    start().run()
    assert not (tmp_path / "run" / "loggers.json").exists()
    code = "import halfstep.training.loop, sys; assert not {'tensorboard', 'wandb', 'trackio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
@pytest.mark.parametrize("leftover", [False, True])
def test_a_missing_package_is_refused_before_the_run_begins(start, tmp_path, name, leftover, monkeypatch):
    (tmp_path / name).mkdir()  # as W&B leaves one behind, and Python takes it for a package
    empty = type("Spec", (), {"origin": None})()
    monkeypatch.setattr(loggers, "find_spec", lambda asked: empty if leftover else None)
    with pytest.raises(SettingValueError, match=f"the package `{name}` is not installed") as caught:
        start(name)
    assert f"run: pip install '.[{name}]', or" in caught.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [('"tensorboard"', "a list of any of"), ('["tensorbord"]', r"training.loggers\[0\]"), ("[3]", r"\[0\]")],
)
def test_other_names_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        load("tiny", [f"training.loggers={given}"])


def read_tensorboard(folder):
    """{tag: [(step, value)]} as TensorBoard itself reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def as_float32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_shows_each_step_once_as_it_was_taken_last(start, events, tmp_path):
    interrupt_at(start("tensorboard"), 5)
    start("tensorboard", resume=True).run()
    found = read_tensorboard(tmp_path / "run" / "tensorboard")
    last = {e["step"]: e["loss"] for e in events() if e["event"] == "step"}
    assert found["train/loss"] == [(step, as_float32(loss)) for step, loss in last.items()]
    assert [step for step, _ in found["validation/loss"]] == [3, 6]
    speeds = {e["step"]: e["tokens_per_second"] for e in events() if e["event"] == "step"}
    assert found["train/tokens_per_second"][4] == (5, as_float32(speeds[5]))  # the later of two fifth steps


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_forgets_a_session_that_died_before_its_first_checkpoint(start, tmp_path):
    interrupt_at(start("tensorboard"), 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    start("tensorboard", resume=True).run()
    found = read_tensorboard(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_a_disk_that_refuses_tensorboards_file_stops_no_run(start, events, monkeypatch):
    from tensorboard.summary.writer import record_writer

    loop, written = start("tensorboard"), []

    def refuses(self, data):
        written.append(data)
        if len(written) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_writer.RecordWriter, "write", refuses)
    assert loop.run().finished
    (warned,) = [e["message"] for e in events() if e["event"] == "warning"]
    assert "`tensorboard` failed" in warned


def read_wandb(path):
    """The records of a .wandb file: blocks of 32 KiB, after 7 bytes of header, hold pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, piece = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        piece += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(piece)
            piece = b""


def ended(path):
    """The records of a session that is over; W&B's own process may flush them a moment after `finish`."""
    for _ in range(500):
        found = list(read_wandb(path))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.01)
    raise AssertionError(f"{path} has no end")


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_works_offline_and_resumes_the_same_run(start, events, tmp_path, monkeypatch):
    for variable in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    interrupt_at(start("wandb"), 5)
    start("wandb", resume=True).run()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [ended(file) for file in files]
    runs = [record.run for session in records for record in session if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (json.loads((tmp_path / "run" / "loggers.json").read_text())["id"], "halfstep", "run")
    }
    found = []
    for session in records:
        for record in session:
            if record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                if "train/loss" in row:
                    found.append((row["step"], row["train/loss"]))
    assert found == [(e["step"], e["loss"]) for e in events() if e["event"] == "step"]
    exits = [r.exit.exit_code for session in records for r in session if r.WhichOneof("record_type") == "exit"]
    assert exits == [1, 0]


@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
def test_trackio_keeps_one_run_through_a_resume(text, tmp_path):
    # In its own process: trackio looks for its folder when it is imported.
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.training.runs import before_step, starter
for resume in (False, True):
    settings = [*{BASE!r}, 'training.loggers=["trackio"]']
    loop = starter(*settings)({str(text)!r}, Path({str(tmp_path / "run")!r}), resume=resume)
    def stop(loop=loop):
        if loop.tally.step == 3:
            loop.stop.requested = "SIGTERM"
    before_step(loop, stop).run()
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # what it prints are words
    (path,) = (tmp_path / "trackio").glob("halfstep*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    warned = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, metrics["train/loss"]) for step, metrics in warned if "train/loss" in metrics]
    written = read_events(tmp_path / "run" / "events.jsonl")
    assert losses == [(e["step"], e["loss"]) for e in written if e["event"] == "step"]
    assert len({name for name, _, _ in rows}) == 1
