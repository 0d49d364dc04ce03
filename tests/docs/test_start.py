"""The first pages whose output has numbers of the machine in it: it is as shown, but for its numbers."""

import re
import shlex
import subprocess
import sys

import pytest

from halfstep.cli.main import run
from tests.accelerate_state import fresh_accelerate  # noqa: F401
from tests.docs.test_taught import DOCS, PAGES, read_blocks, run_blocks


def masked(text):
    """Returns the lines of a text with every number the same."""
    return [re.sub(r"\d[\d.,:]*", "#", line.rstrip()) for line in text.strip().splitlines()]


def test_every_page_has_a_test():
    here = {DOCS / "start" / "frameworks.md"}
    assert set(DOCS.glob("start/*.md")) == here | {page for page in PAGES if page.parent.name == "start"}


@pytest.mark.prove
def test_the_frameworks_train_under_the_policy_that_the_page_gives_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "start" / "frameworks.md"
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    outputs = [*run_blocks(page, blocks, lambda: capsys.readouterr().out)]
    assert len(outputs) == 3
    for line, printed, shown in outputs:
        assert masked(printed) == masked(shown), f"line {line}"


@pytest.mark.prove
def test_a_first_run_prints_what_the_page_shows_and_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8").partition("## A first run")[2]
    first, *more = re.findall(r"^```sh\n(.*?)^```", page, flags=re.S | re.M)
    shown = re.search(r"^```log\n(.*?)^```", page, flags=re.S | re.M)[1]
    # In fp32, which is fast everywhere, for four steps of a smaller model.
    small = " --policy fp32 --set model.width=32 --set model.heads=2 --set training.batch=4"
    commands = [
        f"{first.strip()}{small} --set training.validation_tokens=512".replace("=40", "=4"),
        *"".join(more).replace("=60", "=6").splitlines(),
    ]
    printed = []
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "halfstep"
        assert run(arguments) == 0
        printed.append(masked(re.sub(r"^precision .*$", "precision", capsys.readouterr().err, flags=re.M)))
    expected = masked(re.sub(r"^precision .*$", "precision", shown, flags=re.M))
    for line in (line.removesuffix("...").rstrip() for line in expected):
        assert any(known.startswith(line) for known in printed[0]), line
    assert any(line.startswith("step #/#") for line in printed[-1])


@pytest.mark.prove
def test_the_first_page_shows_what_the_audit_says_of_its_script_before_and_after(tmp_path):
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```([a-z].*)\n((?s:.*?))^```", page, flags=re.M))  # one of each kind
    script, shown, (imported, call) = (
        blocks['python title="train.py"'],
        blocks["text"],
        blocks["python"].split("\n\n"),
    )

    def audit(text):
        (tmp_path / "train.py").write_text(text)
        command = [
            sys.executable,
            "-m",
            "halfstep",
            "audit",
            "--select",
            "HS101",
            "--",
            sys.executable,
            "train.py",
        ]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert masked(audit(script).stdout) == masked(shown)
    script = f"{imported}\n{script.replace('model.bfloat16()', '')}".replace("for step in", f"{call}for step in")
    assert "nothing is wrong" in audit(script).stderr
