"""The page of symptoms on continuing a run in another precision: its commands, on a run that fails in its own."""

import shlex
import shutil

import pytest

from halfstep.cli.main import run as run_command
from tests.docs.test_taught import DOCS, FENCE
from tests.training.runs import events_of, final_state, interrupt_at, starter

SECTION = (DOCS / "solve.md").read_text(encoding="utf-8").partition("## Continue in another precision\n")[2]
SECTION = SECTION.partition("\n## ")[0]
COPY, *TRAIN = [
    shlex.split(line, comments=True)
    for match in FENCE.finditer(SECTION)
    if match[2] == "sh"
    for line in match[3].splitlines()
]
BF16, HERE = "bf16-mixed,emulate=true", {"fp8-mixed": "fp8-mixed,emulate=true"}  # no CPU has fp8
start = starter("training.steps=10", "training.save_every=4")


@pytest.fixture
def failed(text, tmp_path, monkeypatch):
    """A run in bf16 that broke off at its ninth step, and the copy of it that the page makes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    interrupt_at(start(text, tmp_path / "runs" / "mine", policy=BF16), 9)
    assert COPY[:2] == ["cp", "-r"]
    shutil.copytree(*COPY[2:])
    return tmp_path


@pytest.mark.parametrize("words", TRAIN, ids=lambda words: words[-1])
def test_a_command_of_the_page_continues_the_run(failed, words):
    out, policy = failed / words[words.index("--out") + 1], HERE.get(words[-1], words[-1])
    assert run_command([*words[1:-1], policy]) == 0
    first, second = events_of(out, "start")
    assert (first["policy"], second["policy"]) == (BF16, policy)
    assert events_of(out, "end")
    assert final_state(out)[1]["changes"] == [{"step": 8, "settings": {"policy": [BF16, policy]}}]


def test_the_copy_leaves_the_run_alone_and_the_checkpoint_before_is_taken_if_one_is_moved_away(failed):
    before = final_state(failed / "runs/mine")
    shutil.move(failed / "runs/in_fp32/checkpoints/step-000008", failed)
    assert run_command(TRAIN[0][1:]) == 0
    assert [change["step"] for change in events_of(failed / "runs/in_fp32", "start")[-1]["changes"]] == [4]
    assert final_state(failed / "runs/mine") == before
