"""What a run shows while it trains, in a log and on a terminal."""

import io
import os
import pty
import re

import pytest

from halfstep.core.host import format_bytes
from halfstep.training.telemetry.progress import BytesProgress, StepProgress, wrap_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(total, seconds_a_step, start=0, **numbers):
    stream, now = io.StringIO(), [100.0]
    with StepProgress(total, start=start, stream=stream, clock=lambda: now[0]) as bar:
        for step in range(start + 1, total + 1):
            now[0] += seconds_a_step
            bar.update(step, **numbers)
    return stream.getvalue().splitlines()


def steps(shown):
    return [int(re.match(r"step (\d+)/", line)[1]) for line in shown]


def test_a_line_is_shown_each_tenth_or_every_few_seconds_from_where_a_run_is():
    assert steps(lines(1000, 0.001)) == [1, *range(100, 1001, 100)]
    assert steps(lines(3, 0.001)) == [1, 2, 3]
    assert steps(lines(1000, 0.5))[:6] == [1, 6, 11, 16, 21, 26]
    assert steps(lines(1000, 7.0)) == list(range(1, 1001))
    assert steps(lines(1000, 0.001, start=555)) == [556, 600, 700, 800, 900, 1000]


def test_a_line_in_full_without_news_and_without_an_end():
    shown = lines(200, 2.0, loss=3.21449, tokens_per_second=45120.4, memory=1.25 * 2**30, scale=65536.0, skipped=2)
    assert shown[0] == "step 1/200  loss 3.214  2 skipped  scale 65536  45,120 tokens/s  1.2 GiB"
    assert shown[1] == "step 3/200  loss 3.214  2 skipped  scale 65536  0:06:34 left  45,120 tokens/s  1.2 GiB"
    assert shown[-1] == "step 200/200  loss 3.214  2 skipped  scale 65536  45,120 tokens/s  1.2 GiB"
    (only,) = lines(1, 1.0, loss=float("nan"), scale=1.0, skipped=0)
    assert only == "step 1/1  loss nan"
    assert lines(1, 1.0) == ["step 1/1"]
    assert "left" not in lines(3, 1.0, start=1)[-1]
    stream, now = io.StringIO(), [100.0]
    with StepProgress(2**63 - 1, stream=stream, clock=lambda: now[0]) as bar:
        for step in range(1, 30):
            now[0] += 1.0
            bar.update(step)
    assert "left" not in stream.getvalue()


def test_notes_are_lines_on_stderr_and_stdout_stays_clean(capsys):
    stream = io.StringIO()
    with StepProgress(10, stream=stream) as bar:
        bar.note("a [bracketed] note")
    assert stream.getvalue() == "a [bracketed] note\n"
    with StepProgress(1) as bar:
        bar.update(1, loss=2.0)
        bar.note("done")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 1/1  loss 2\ndone\n")


def test_the_stream_decides_the_kind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert StepProgress(1, stream=Terminal()).is_live
    assert not StepProgress(1, stream=io.StringIO()).is_live
    monkeypatch.setenv("TERM", "dumb")
    assert not StepProgress(1, stream=Terminal()).is_live


def test_a_terminal_shows_bars_and_notes_above_them(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with StepProgress(50, start=10, stream=stream) as bar:
        bar.update(20, loss=3.25, tokens_per_second=1000.0, scale=1.0, memory=2**20)
        bar.note("saved [step 20]")
        print("data")
        bar.update(50, loss=1.5, skipped=3)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "step 10/50" in shown
    assert "saved [step 20]\n" in shown
    last = shown.rstrip().splitlines()[-1]
    assert "step 50/50" in last
    assert "loss 1.5  3 skipped" in last
    assert "scale" not in last
    assert capsys.readouterr().out == "data\n"  # stdout is not redirected
    stream = Terminal()
    with BytesProgress("packing", stream) as show:
        show(4000, 4000, 1100)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).rstrip().splitlines()[-1]
    assert "packing  3.9 KiB of 3.9 KiB" in last
    assert "100.0%  1,100 tokens" in last


def test_bars_and_notes_fit_80_columns(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream, path = Terminal(), "/a/very/long/path/" + "x" * 80
    with StepProgress(100_000, stream=stream) as bar:
        bar.update(1, loss=3.25)
        bar.update(12_345, loss=3.2519, tokens_per_second=1_045_120.0, scale=65536.0, skipped=2, memory=2**40)
        bar.note("precision fp32: bf16 training steps of a block are at least 3.8x slower than fp32 (366 ms)")
        bar.note(f"saved {path}")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert max(len(line) for line in shown if path not in line) <= 80
    assert path in shown  # whole, to be copied
    assert "precision fp32: bf16 training steps of a block are at least 3.8x slower than" in shown
    assert "step 12345/100000" in shown[-1]
    assert "loss 3.252  2 skipped  scale 65536" in shown[-1]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2.0**63, "8192.0 PiB")],
)
def test_bytes_in_words(number, text):
    assert format_bytes(number) == text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_log_on_a_full_disk_does_not_stop_the_run():
    with open("/dev/full", "w") as stream:
        shown = StepProgress(10, stream=stream)
        with shown:
            shown.note("said")
            shown.update(10, loss=1.0)
        with pytest.raises(OSError, match="No space left"):
            print("", file=stream, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that closing can flush


class Gone(Terminal):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("kind", [Terminal, Gone, io.StringIO])
def test_a_stream_that_went_away_or_was_never_there_ends_no_run(monkeypatch, kind):
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    if kind is io.StringIO:
        stream.close()
    with StepProgress(3, stream=stream) as bar:
        bar.update(1, loss=1.0)
        if kind is Terminal:
            stream.__class__ = Gone
        bar.note("saved")
        bar.update(3, loss=1.0)


def test_without_a_stream_there_are_no_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    with StepProgress(3) as bar:
        bar.update(3, loss=1.0)
        bar.note("saved")
    assert capsys.readouterr().out == ""


def test_bytes_are_timed_from_the_first_update(capsys):
    now = [0.0]
    with BytesProgress("packing", clock=lambda: now[0]) as show:
        for now[0], *seen in [(0.0, 1000, 4000, 500), (10.0, 2000, 4000, 700), (12.0, 3000, 4000, 900),
                              (20.0, 4000, 4000, 1100)]:  # fmt: skip
            show(*seen)
    assert capsys.readouterr().err.splitlines() == [
        "packing  1000 bytes of 3.9 KiB  25.0%  500 tokens",
        "packing  2.0 KiB of 3.9 KiB  50.0%  700 tokens  20 tokens/s  0:00:20 left",
        "packing  3.9 KiB of 3.9 KiB  100.0%  1,100 tokens  30 tokens/s",
    ]


def test_a_terminal_without_a_size_has_80_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    try:
        with open(theirs, "w") as stream:
            assert wrap_line("word " * 16 + "more", stream) == " ".join(["word"] * 16) + "\nmore"
    finally:
        os.close(ours)
