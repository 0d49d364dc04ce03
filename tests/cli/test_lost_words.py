"""What a run says may be lost, on a full disk or in a pipe that nobody reads; the run and its exit code are not."""

import errno
import io
import os
import pty
import signal
import subprocess
import sys

import pytest

from halfstep.cli.main import run
from halfstep.training.telemetry.events import read_events

SMALL = [
    "model.context=16",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "training.batch=2",
    "training.steps=3",
    "training.validation_tokens=64",
    "training.measure_ceiling=false",
]


@pytest.fixture
def arguments(text, tmp_path):
    """Of a run that takes a moment, on the CPU."""
    chosen = [f"data.source={text}", *SMALL]
    settings = [word for setting in chosen for word in ("--set", setting)]
    return ["train", "--policy", "fp32", "--device", "cpu", "--out", str(tmp_path / "run"), *settings]


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


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "full disk": lambda: Refusing(OSError(errno.ENOSPC, "No space left on device")),
    "left after a line": lambda: Refusing(BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),
    "left after five": lambda: Refusing(BrokenPipeError(errno.EPIPE, "Broken pipe"), 5),
    "lost terminal": lambda: Terminal(OSError(errno.EIO, "Input/output error"), 1),
    "closed": closed,
    "none": lambda: None,
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("names", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
def test_a_run_goes_on_without_its_words(arguments, tmp_path, monkeypatch, names, stream):
    monkeypatch.setenv("TERM", "xterm")
    for name in names:
        monkeypatch.setattr(sys, name, stream())
    given = getattr(sys, names[0])
    assert run(arguments) == 0
    assert getattr(sys, names[0]) is given
    assert is_finished(tmp_path)


def test_words_do_not_move_to_stdout_where_there_is_no_stderr(capsys, monkeypatch):
    """`print` takes None for stdout."""
    monkeypatch.setattr(sys, "stderr", None)
    assert run(["policy", "fp32", "--json"]) == 0
    assert run(["formats", "--no-such"]) == 2
    assert capsys.readouterr().out.endswith("}\n")


def test_a_mistake_is_one_though_nobody_hears_of_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert run(["train", "tinny"]) == 2


def test_a_pipe_that_breaks_inside_a_run_is_no_reader_that_left(arguments, capsys, monkeypatch):
    def broken(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("halfstep.training.loop.Loop.run", broken)
    assert run(arguments) == 2
    assert "error: Broken pipe" in capsys.readouterr().err


def test_data_of_other_commands_is_not_lost_in_silence(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Refusing(OSError(errno.ENOSPC, "No space left on device")))
    assert run(["formats", "--json"]) == 2


def shell(line, *command):
    """A shell's line in which `"$@"` is the command."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    told = ["bash", "-c", line, "bash", sys.executable, *command]
    return subprocess.run(told, capture_output=True, text=True, check=False, env=buffered)


LINES = {
    "a reader that leaves": '(("$@"; echo $? >&3) 2>&1 | head -3 >/dev/null) 3>&1',
    "full disks": '"$@" >/dev/full 2>/dev/full; echo $?',
    "no streams": '(exec >&- 2>&- <&-; "$@"; echo $? >&3) 3>&1',
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=name, marks=pytest.mark.prove if name == "full disks" else ())
        for name, line in LINES.items()
    ],
)
def test_the_exit_code_is_that_of_the_run(arguments, tmp_path, line):
    """In a process of its own: Python flushes what is left when it exits, and makes an error of it."""
    done = shell(line, "-m", "halfstep", *arguments)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert is_finished(tmp_path)


def test_no_file_gets_the_number_of_a_stream_that_is_closed():
    """What a library writes to that number would go into it."""
    code = (
        "import os\nfrom halfstep.cli import main\n"
        "main.run = lambda _: 7 if os.open(os.devnull, os.O_RDONLY) > 2 and os.write(2, b'nowhere') else 1\n"
        "main.main([])\n"
    )
    assert shell('"$@" <&- >&- 2>&-', "-c", code).returncode == 7


@pytest.mark.prove
def test_a_terminal_that_goes_away_ends_no_run_that_ignores_the_signal(arguments, tmp_path):
    """As under nohup; the bar is drawn by a thread, which fails first."""
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
