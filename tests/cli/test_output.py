"""Messages may be lost on a full disk or in a pipe without a reader; the run and its exit code are not."""

import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from halfstep.cli.main import run
from halfstep.cli.output import print_json
from halfstep.training.telemetry.events import read_events
from tests.training.runs import raising


def is_finished(tmp_path):
    return read_events(tmp_path / "run" / "events.jsonl")[-1]["event"] == "end"


class Refusing(io.StringIO):
    """A stream that takes some lines, and then raises."""

    def __init__(self, error, lines=0):
        super().__init__()
        self.error, self.lines = error, lines

    def write(self, text):
        self.lines -= text.count("\n")
        if self.lines < 0:
            raise self.error
        return super().write(text)

    def flush(self):
        if self.lines < 0:
            raise self.error


class Terminal(Refusing):
    def isatty(self):
        return True


STREAMS = {
    "full disk": lambda: Refusing(OSError(errno.ENOSPC, "No space left on device")),
    "reader left": lambda: Refusing(BrokenPipeError(errno.EPIPE, "Broken pipe"), 5),
    "lost terminal": lambda: Terminal(OSError(errno.EIO, "Input/output error"), 1),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("names", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
def test_a_run_continues_without_its_messages(arguments, tmp_path, monkeypatch, names, stream):
    monkeypatch.setenv("TERM", "xterm")
    for name in names:
        monkeypatch.setattr(sys, name, stream())
    given = getattr(sys, names[0])
    assert run(arguments) == 0
    assert getattr(sys, names[0]) is given
    assert is_finished(tmp_path)


def test_a_pipe_that_breaks_inside_a_run_is_an_error(arguments, refused, monkeypatch):
    """Not a reader that left."""
    monkeypatch.setattr("halfstep.training.loop.Loop.run", raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert "error: Broken pipe" in refused(*arguments)


def test_other_commands_report_lost_data(monkeypatch):
    monkeypatch.setattr(sys, "stdout", STREAMS["full disk"]())
    assert run(["formats", "--json"]) == 2


LINES = [
    pytest.param('(("$@"; echo $? >&3) 2>&1 | head -3 >/dev/null) 3>&1', id="a reader that leaves"),
    pytest.param('"$@" >/dev/full 2>/dev/full; echo $?', id="full disks"),
]


@pytest.mark.prove
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
@pytest.mark.parametrize("line", LINES)
def test_the_exit_code_is_that_of_the_run(arguments, tmp_path, line):
    """In a process of its own: Python flushes what is left when it exits, and makes an error of it."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "halfstep", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=buffered)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert is_finished(tmp_path)


@pytest.mark.prove
def test_a_run_that_ignores_the_signal_survives_its_terminal(arguments, tmp_path):
    """As under nohup; a thread draws the bar and fails first."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep", *arguments, "--set", "training.steps=200"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(theirs)
    shown = b""
    while b"run folder" not in shown:
        shown += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(120) == 0
    assert is_finished(tmp_path)


def test_json_has_null_for_nan_and_infinity(capsys):
    print_json({"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.0]}
