"""`halfstep runs`: every state that a run can be in, and folders that are none."""

import json
import math
import os
import time

import pytest

from halfstep.cli import train
from halfstep.cli.main import run
from halfstep.tools.runs import state_of
from halfstep.training.files import RunLock
from tests.report.page.made_up_runs import run as made_up
from tests.report.page.made_up_runs import start, step
from tests.report.test_watch import lines


def make(parent, name, events, *, age=60.0, torn=""):
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    now = time.time()
    late = max((event["time"] for event in events), default=0.0)
    moved = [event | {"time": now - age + event["time"] - late} for event in events]
    (folder / "events.jsonl").write_text(lines(moved) + torn)
    return folder


STOP = {"event": "stop", "time": 1_760_000_020.0, "step": 20, "reason": "SIGTERM", "saved": 20}


@pytest.fixture
def runs(tmp_path):
    parent = tmp_path / "runs"
    make(parent, "finished", made_up(40, "bf16-mixed"), age=30)
    make(parent, "stopped", [*made_up(20, finished=False), STOP], age=7200)
    make(parent, "crashed", made_up(30, "fp16-mixed", finished=False), age=300, torn='{"event": "end", "ti')
    (parent / "notes").mkdir()
    (parent / "a file").write_text("")
    return parent


def test_runs_are_listed_with_the_newest_first(runs, capsys):
    assert run(["runs", str(runs)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:] if "runs/" in line]
    assert [(row[0].rpartition("/")[2], row[1]) for row in rows] == [
        ("finished", "finished"),
        ("crashed", "crashed"),
        ("stopped", "stopped"),
    ]
    assert "bf16-mixed" in rows[0]
    assert rows[0][-3:] == ["30", "s", "ago"]


def test_the_same_as_data(runs, data_of):
    finished, crashed, stopped = data_of("runs", str(runs))
    assert finished["state"] == "finished"
    assert (finished["step"], finished["policy"]) == (40, "bf16-mixed")
    assert finished["validation_loss"] > 1
    assert finished["problem"] is None
    assert 29 < finished["age"] < 90
    assert crashed["step"] == 30
    assert (stopped["state"], stopped["step"]) == ("stopped", 20)
    assert [one["folder"] for one in data_of("runs", str(runs / "stopped"))] == [str(runs / "stopped")]


def test_a_run_whose_lock_is_held_is_running(runs):
    lock = RunLock(runs / "crashed")
    assert state_of(runs / "crashed").state == "running"
    lock.release()
    assert state_of(runs / "crashed").state == "crashed"
    lock = RunLock(runs / "finished")  # to be trained further: it has not said so yet
    assert state_of(runs / "finished").state == "finished"
    lock.release()


def test_a_resumed_run_is_as_its_last_session(runs):
    events = [*made_up(20, finished=False), STOP, start("bf16-mixed", time=1_760_000_100.0, resumed_from=20)]
    folder = make(runs, "resumed", events)
    assert (state_of(folder).state, state_of(folder).step) == ("crashed", 20)
    assert state_of(folder).policy == "bf16-mixed"
    folder = make(runs, "not a number", [start(), step(1, 1_760_000_000.25, loss="nan")])
    assert math.isnan(state_of(folder).loss)


def test_what_cannot_be_read_is_listed_and_does_not_stop_the_others(runs, capsys):
    broken = runs / "broken"
    broken.mkdir()
    os.mkfifo(broken / "events.jsonl")
    bare = runs / "bare"
    bare.mkdir()
    (bare / "run.toml").write_text("")
    make(runs, "damaged", [], torn="no JSON\n" * 3)
    assert run(["runs", str(runs), "--json"]) == 0
    out, err = capsys.readouterr()
    states = {os.path.basename(one["folder"]): one["state"] for one in json.loads(out)}
    assert states == {"finished": "finished", "stopped": "stopped", "crashed": "crashed", "bare": "crashed",
                      "broken": "unreadable", "damaged": "crashed"}  # fmt: skip
    assert "it is a pipe, not a file" in err


def test_folders_without_runs(tmp_path, monkeypatch, capsys, refused, data_of):
    assert run(["runs", str(tmp_path)]) == 0
    assert "holds no runs" in capsys.readouterr().err
    assert data_of("runs", str(tmp_path)) == []
    monkeypatch.setattr(train, "RUNS", tmp_path / "runs")
    assert "there is no folder" in refused("runs")
    assert run(["runs", str(tmp_path), "again"]) == 2
