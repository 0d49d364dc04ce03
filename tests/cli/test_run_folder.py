"""Which folder a run gets, and which one `--resume` takes."""

import json
import os
import shlex
import time

import pytest

from halfstep.cli import train as command
from halfstep.cli.main import run
from halfstep.training import paths
from halfstep.training.run import folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def make(parent, name, last, *, torn=False):
    made = parent / name
    made.mkdir(parents=True)
    (made / paths.CONFIG).write_text("")
    lines = [json.dumps({"event": "step", "time": last - back, "step": 9 - back}) for back in (1, 0)]
    (made / paths.EVENTS).write_text("\n".join(lines) + "\n" + '{"event": "ste' * torn)
    return made


DAY = "20250102-030405"


def test_the_newest_run_is_the_one_that_was_trained_last(tmp_path):
    older = make(tmp_path, f"tiny-{DAY}", 1000.0)
    newer = make(tmp_path, f"gpt2-{DAY}", 2000.0, torn=True)
    os.utime(newer, (1, 1))
    (older / "model.int8z").write_bytes(b"")  # as `halfstep export` does: the folder's own time is now
    assert folder.newest(tmp_path) == newer
    assert folder.newest(tmp_path, "tiny") == older


def test_a_run_without_a_record_is_as_old_as_its_checkpoint(tmp_path):
    bare = make(tmp_path, f"tiny-{DAY}", time.time())
    (bare / paths.EVENTS).write_text("no JSON\n")
    saved = bare / paths.CHECKPOINTS / "step-000005"
    saved.mkdir(parents=True)
    os.utime(saved, (500, 500))
    assert make(tmp_path, "mine", 600.0) == folder.newest(tmp_path)
    os.utime(saved, (700, 700))
    assert folder.newest(tmp_path) == bare


@pytest.mark.parametrize("other", ["tiny-big-", "tinys-", "a-tiny-", "tiny-20250102-", "tiny", "TINY-"])
def test_a_recipe_resumes_only_its_own_runs(tmp_path, other):
    ours = make(tmp_path, f"tiny-{DAY}", 1000.0)
    make(tmp_path, f"{other}{DAY}", 2000.0)
    make(tmp_path, "tiny-notes", 3000.0)
    assert folder.newest(tmp_path, "tiny") == ours
    assert folder.newest(tmp_path, "t[i]ny") is None
    assert make(tmp_path, f"tiny-{DAY}-2", 4000.0) == folder.newest(tmp_path, "tiny")


def test_resume_takes_the_run_that_was_trained_last(quick, runs, capsys):
    first, second = runs / f"tiny-{DAY}", runs / "tiny-20250102-030406"
    for where in (first, second):
        assert run(["train", *quick, "--out", str(where)]) == 0
    assert run(["export", str(first), "--to", "artifact", "--device", "cpu"]) == 0
    make(runs, f"tiny-big-{DAY}", time.time() + 100)
    capsys.readouterr()
    assert run(["train", "tiny", "--resume", *quick]) == 0
    assert f"run folder {second}" in capsys.readouterr().err


def test_runs_that_start_in_the_same_second_get_separate_folders(quick, runs, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: DAY)
    for _ in range(3):
        assert run(["train", *quick]) == 0
    assert sorted(path.name for path in runs.iterdir()) == [f"tiny-{DAY}", f"tiny-{DAY}-2", f"tiny-{DAY}-3"]
    assert folder.newest(runs, "tiny") == runs / f"tiny-{DAY}-3"


def test_a_folder_is_created_before_the_run_starts(runs):
    """Two processes that both look first would both find it free."""
    with command._new_folder("tiny") as one, command._new_folder("tiny") as other:
        assert one != other
        assert one.is_dir()
        assert other.is_dir()


@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_does_not_start_leaves_no_folder(runs, there, capsys):
    if there:
        runs.mkdir()
    assert run(["train", "--policy", "fp32", "--device", "toaster"]) == 2
    assert runs.exists() == there
    assert not there or list(runs.iterdir()) == []


def test_a_place_where_no_folder_can_be_made_is_named(runs, refused):
    runs.write_text("a file")
    assert "cannot create" in refused("train", "--policy", "fp32")


EMPTY = [
    "train --policy fp32 --out ''",
    "train --policy fp32 --out=",
    "train ''",
    "artifact run --out ''",
    "data pack '' --out packed --tokenizer bytes",
    "data pack text.txt --out packed --tokenizer bytes --separator=",
    "sample run --validation ''",
    "data verify ''",
]


@pytest.mark.parametrize("command", EMPTY)
def test_an_empty_argument_is_refused(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("words and more words\n" * 200)
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(command)) == 2
    err = capsys.readouterr().err
    assert " is empty\n" in err
    assert "hint: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
