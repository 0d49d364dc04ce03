"""`halfstep report` and `halfstep watch`: what they write, serve and refuse."""

import os
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import pytest

from halfstep.cli.main import run
from tests.report.page.made_up_runs import run as made_up
from tests.report.page.made_up_runs import watched_run
from tests.report.test_watch import lines


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a-run"
    made.mkdir()
    (made / "events.jsonl").write_text(lines(watched_run(20, 8)))
    return made


def test_report_writes_the_page_again_and_prints_where(folder, tmp_path, capsys):
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    first = (folder / "report.html").read_text()
    assert "<title>a-run: halfstep report</title>" in first
    assert run(["report", str(folder), "--out", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").read_text() == first


def test_an_unfinished_record_with_a_torn_last_line_is_enough(folder, capsys):
    (folder / "events.jsonl").write_text(lines(made_up(7, finished=False)) + '{"event": "step", "ti')
    assert run(["report", str(folder)]) == 0
    assert "This run is unfinished" in (folder / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "watch"])
def test_what_is_no_run_is_refused(command, folder, tmp_path, refused):
    newer = [dict(event) for event in made_up(3)]
    newer[0]["halfstep"] = "99.0"
    wrong = {
        "there": (None, "holds no run that has started"),
        "newer": (lines(newer), "halfstep 99.0 wrote this run"),
        "damaged": ("{}\n", "events.jsonl:1: this line is not an object"),
        "empty": ("", "there is no `start` among the events"),
    }
    for name, (record, message) in wrong.items():
        made = tmp_path / name
        made.mkdir()
        if record is not None:
            (made / "events.jsonl").write_text(record)
        assert message in refused(command, str(made))
        assert not (made / "report.html").exists()
    assert run([command, str(tmp_path / "nowhere")]) == 2
    os.mkfifo(tmp_path / "there" / "events.jsonl")
    assert "it is a pipe, not a file" in refused(command, str(tmp_path / "there"))
    assert "needs RUN" in refused(command)


def test_wrong_options_are_refused(folder, tmp_path, refused):
    assert "is a folder" in refused("report", str(folder), "--out", str(tmp_path))
    for port in ("-1", "70000"):
        assert "a port is between 1 and 65535" in refused("watch", str(folder), "--port", port)


@pytest.mark.prove
def test_watch_serves_until_ctrl_c_and_ends_quietly(folder):
    command = [sys.executable, "-m", "halfstep", "watch", str(folder)]
    # What a shell starts in the background ignores Ctrl-C, and its children do.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, preexec_fn=heeding)
    try:
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"halfstep report: a-run" in answer.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert err == f"watching `{folder}`; Ctrl-C ends it\n"
