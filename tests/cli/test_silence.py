"""No command is silent for long: it says what it does, and after some seconds that it still works."""

import io
import math
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from halfstep.cli.main import run
from halfstep.cli.output import Pulse
from halfstep.training.telemetry.progress import SILENCE, StepProgress, drop_refusals
from tests.silence import silences

SLOW = {"torch": 9}  # seconds that its import takes longer
LONGEST = 6.0  # two thirds of it: a busy machine is late, but not by so much


def test_signs_of_life_come_often_for_two_minutes_and_then_ever_later():
    SILENCE[0], SILENCE[1] = 100.0, 0.0
    pulse = Pulse()
    times = [100 + tick / 4 for tick in range(4 * 180)]
    spoken = [(now - 100, words) for now in times if (words := pulse.words(now))]
    assert spoken[0] == (2.5, "still working after 2 s")
    at = [seconds for seconds, _ in spoken]
    assert at[:48] == [2.5 * number for number in range(1, 49)]
    assert at[48:52] == [122.5, 125.25, 128.0, 130.75]
    assert at[-1] - at[-2] > 3.5
    SILENCE[0] = 290.0  # something else was said
    assert not pulse.words(292.0)
    assert pulse.words(292.5)
    SILENCE[1] = math.inf
    assert not pulse.words(1e9)


def test_what_is_said_ends_a_silence_unless_nobody_gets_it():
    for stream, heard in ((io.StringIO(), True), (None, False)):
        SILENCE[0] = 100.0
        print("word", file=drop_refusals(stream))
        assert (SILENCE[0] > 100.0) is heard


def test_steps_that_take_long_are_no_silence_until_one_takes_twice_as_long():
    now = [100.0]
    with StepProgress(10, stream=io.StringIO(), clock=lambda: now[0]) as bar:
        pulse = Pulse()
        now[0] += 60.0
        bar.update(1)
        assert pulse.words(SILENCE[0] + 2.5), "the first step compiles; how long it takes says nothing of the next"
        now[0] += 30.0
        bar.update(2)
        begun = SILENCE[0]
        assert not pulse.words(begun + 59.0)
        assert pulse.words(begun + 61.0)
    assert pulse.words(SILENCE[0] + 120.0)


def test_signs_of_life_end_with_a_command_that_is_killed(tmp_path):
    ours, theirs = os.pipe()
    code = (
        "import os; from halfstep.cli.output import signs_of_life\nwith signs_of_life(): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=theirs).returncode == -signal.SIGKILL
    os.close(theirs)
    assert select.select([ours], [], [], 10)[0], "another process holds it"
    assert os.read(ours, 100) == b""
    os.close(ours)


@pytest.mark.prove
def test_what_is_imported_slowly_is_announced_and_broken_by_signs_of_life(arguments, out, tmp_path):
    assert run(arguments) == 0
    code, said, gaps = silences(["eval", str(out), "--device", "cpu"], tmp_path, SLOW)
    assert code == 0, said
    assert "bigram bits" in said.strip().splitlines()[-1], "libraries have nothing to say at the end"
    assert sum(seconds for seconds, _ in gaps) > SLOW["torch"]
    assert max(gaps)[0] < LONGEST, (max(gaps), said)
    assert re.search(r"loading `.*`\r?\nstill working after \d s\r?\nstill working after \d", said)


@pytest.mark.prove
def test_a_script_that_is_audited_speaks_for_itself_from_its_first_words_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(4); print('first words', flush=True); time.sleep(4)")
    _, said, _ = silences(["audit", "--", sys.executable, str(script)], tmp_path, {})
    before, after = said.split("first words")
    assert "still working after " in before
    assert "still working" not in after


COMMANDS = {
    "train": "train --out other",
    "resume": "train --resume --out RUN --set training.steps=4",
    "sample": "sample RUN --length 4",
    "export": "export RUN --to safetensors",
    "artifact": "export RUN --to artifact",
    "report": "report RUN",
    "runs": "runs .",
    "audit of a run": "audit RUN",
    "audit of a recipe": "audit tiny",
    "probe": "probe --backend torch --budget 0.2",
    "plan": "plan tiny --gpu h200",
    "compare": "compare fp32 bf16-mixed --steps 2 --seeds 2 --out compared",
    "tune": "tune tiny --base fp32 --steps 2 --seeds 2 --most-seeds 2 --policies 1 --out tuned",
}


@pytest.mark.prove
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_is_silent_for_long(name, terminal, arguments, small, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 0
    words = [str(out) if word == "RUN" else word for word in COMMANDS[name].split()]
    if name in ("train", "compare", "tune"):
        words += small
    code, said, gaps = silences(words, tmp_path, SLOW, terminal=terminal)
    assert code in (0, 1, 3), said
    assert max(gaps)[0] < LONGEST, (max(gaps), said)


def test_no_message_guesses_how_long_something_takes():
    """A guess is wrong on another machine; what is said is a bound, or what was measured."""
    guess = re.compile(r"(about|around|some|roughly) (\{[^}]*\}|[\d.]+) ?(s|seconds|minutes|min)\b")
    for path in Path(halfstep.__file__).parent.rglob("*.py"):
        found = guess.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found[0]}"
