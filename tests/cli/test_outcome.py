"""How a run ends, as people and schedulers see it: the summary, the page, and the exit code."""

import re
import signal

import pytest

from halfstep.cli import outcome
from halfstep.cli.main import run
from halfstep.training.loop import Loop


@pytest.fixture
def arguments(arguments):
    return [*arguments, "--set", "training.steps=20", "--set", "training.save_every=5"]


@pytest.fixture
def stopped_at(monkeypatch):
    """A function: a SIGTERM comes when that step is over."""

    def plan(step):
        record = Loop._record

        def recorded(loop, result):
            record(loop, result)
            if loop.tally.step == step:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(Loop, "_record", recorded)

    return plan


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_deadline_leaves_the_page_to_the_next_session(
    arguments, tmp_path, capsys, monkeypatch, stopped_at, data_of
):
    page = tmp_path / "run" / "report.html"
    stopped_at(7)
    assert run([*arguments, "--deadline", "30"]) == 0
    assert not page.exists()
    assert f"page {outcome.LATER}" in printed(capsys)
    stopped_at(9)
    monkeypatch.setenv("HALFSTEP_DEADLINE", "30")
    assert data_of(*arguments, "--resume")["report"] is None
    assert not page.exists()
    assert run([*arguments, "--resume"]) == 0
    assert str(page) in printed(capsys).replace(" ", "")
    assert page.exists()


def test_without_a_deadline_there_is_a_page_and_a_summary_of_this_session_and_in_total(
    arguments, out, capsys, stopped_at
):
    later = ["--resume", "--set", "training.validate_every=1000"]
    said = [r"trained 7 steps in .* tokens/s after the first step \(\d+\.\d s\)(?!; )", r"trained 13 steps in .*; 20 steps in total",
            "trained nothing: all 20 steps were already trained"]  # fmt: skip
    stopped_at(7)
    for more, words in zip(([], later, later), said, strict=True):
        assert run([*arguments, *more]) == 0
        shown = printed(capsys)
        assert re.search(words, shown)
        assert outcome.LATER not in shown
        assert (out / "report.html").exists()


def test_json_has_the_steps_of_the_session_and_of_the_run(arguments, stopped_at, data_of):
    def steps(*more):
        data = data_of(*arguments, *more)
        if data["seconds"]:
            tokens, later = (data["session_steps"] - 1) * 2 * 16, data["seconds"] - data["spent"]["first_step"]
            assert data["tokens_per_second"] == pytest.approx(tokens / later)
        return data["step"], data["resumed_from"], data["session_steps"]

    stopped_at(7)
    assert steps() == (7, None, 7)
    assert steps("--resume") == (20, 7, 13)
    assert steps("--resume") == (20, 20, 0)


def test_a_system_error_that_loses_steps_exits_with_1(arguments, tmp_path, capsys, monkeypatch):
    record = Loop._record

    def recorded(loop, result):
        record(loop, result)
        if loop.tally.step == 7:
            raise OSError(5, "Input/output error", "text.txt")

    monkeypatch.setattr(Loop, "_record", recorded)
    assert run(arguments) == 1
    assert "error: Input/output error: `text.txt`" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").exists()


def test_an_error_that_loses_steps_exits_with_1_and_leaves_a_page(arguments, tmp_path, capsys):
    """50 non-finite updates end a run; it had saved, but not the last steps."""
    hopeless = ["--set", "optimizer.rate=1e30", "--set", "training.steps=100"]
    assert run([*arguments, *hopeless]) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert "error: " in words
    assert "steps in a row were not finite" in words
    page = tmp_path / "run" / "report.html"
    assert f"page {page}" in words
    assert "update skipped" in page.read_text()
    assert run([*arguments, *hopeless]) == 2  # the folder holds a run: nothing was trained, and nothing lost
    assert "already holds a run" in capsys.readouterr().err
