"""First pages, lessons, guides and the page of symptoms: every block runs, and prints what is shown beneath it.

The blocks of a page share their names, from top to bottom. After a block of Python or a command (`console`) that
prints, a block of text has all that it prints. `<!-- slow -->` before a block leaves it to `make prove`.
"""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cyclopts import CycloptsError

from halfstep.cli.app import app
from halfstep.cli.main import run as run_command

DOCS = Path(__file__).parents[2] / "docs"
START = [
    DOCS / "start" / f"{name}.md" for name in ("install", "your_loop", "jax", "mlx")
]  # the others: test_start.py
PAGES = [*START, *sorted(DOCS.glob("learn/*.md")), *sorted(DOCS.glob("guides/*.md"))]
PAGES += [DOCS / f"{name}.md" for name in ("fp8", "many_gpus", "solve")]
FENCE = re.compile(r"(<!-- slow -->\n)?^```(\w*)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.S | re.M)
# What is shown and not run: settings; commands that need a GPU, a cluster or minutes, and say so; what they print.
SHOWN = {"toml", "sh", "log"}


class Block(NamedTuple):
    line: int
    kind: str
    text: str
    shown: str
    slow: bool


def read_blocks(text):
    return [
        Block(text.count("\n", 0, match.start(3)), match[2], match[3], match[4] or "", bool(match[1]))
        for match in FENCE.finditer(text)
        if match[2] not in SHOWN
    ]


def run_blocks(page, blocks, read_output):
    """Runs blocks in the order of the page; returns (line, what was printed, what the page shows) of each."""
    names = {"__name__": f"docs.{page.stem}"}
    for block in blocks:
        if block.kind == "python":
            code = "\n" * block.line + block.text  # errors have the line of the page
            exec(compile(code, str(page), "exec"), names)
        else:
            for command in block.text.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(command.removeprefix("$ "), comments=True)
                assert program == "halfstep", command
                run_command(arguments)
        yield block.line, read_output(), block.shown


def check(page, blocks, capsys):
    def read_output():
        return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.strip("\n").splitlines())

    for line, printed, shown in run_blocks(page, blocks, read_output):
        assert printed == shown, f"{page.name}, line {line}"


BLOCKS = {page: read_blocks(page.read_text(encoding="utf-8")) for page in PAGES}


@pytest.mark.prove
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_blocks_of_a_page_print_what_it_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(page, [block for block in BLOCKS[page] if not block.slow], capsys)


@pytest.mark.prove
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.slow for block in BLOCKS[page])], ids=lambda page: page.stem
)
def test_the_slow_blocks_too(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # it remembers which sizes changed, as in no reader's process
    check(page, BLOCKS[page], capsys)


def test_every_fence_is_read():
    for page in PAGES:
        fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), flags=re.M)
        kinds = [kind for kind in fences if kind]
        assert len(fences) == 2 * len(kinds), page
        outputs = sum(bool(block.shown) for block in BLOCKS[page])
        assert kinds.count("text") == outputs, f"{page}: a block of text that shows no block's output"
        assert {*kinds} <= {"python", "console", "text", *SHOWN}, page


def commands_shown():
    """Returns (page, words) of each `halfstep` command that pages show without running it."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            for command in match[3].replace("\\\n", " ").splitlines() if match[2] == "sh" else ():
                words = shlex.split(command, comments=True)
                start = next((place for place, word in enumerate(words) if word == "halfstep"), None)
                if start is not None:
                    yield page, words[start + 1 :]


def test_commands_that_are_only_shown_can_be_read():
    shown = list(commands_shown())
    assert len(shown) > 20
    for page, words in shown:
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            pytest.fail(f"{page.name}: halfstep {shlex.join(words)}: {error}")


SLOW_FIGURES = {"memory_by_role"}  # it follows four steps of GPT-2


def draw(name):
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert {path.stem for path in (DOCS / "learn").glob("*.svg")} == {*figures.FIGURES}
    return figures.FIGURES[name]()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.prove] if path.stem in SLOW_FIGURES else [])
        for path in sorted((DOCS / "learn").glob("*.svg"))
    ],
)
def test_a_figure_is_current(name):
    assert (DOCS / "learn" / f"{name}.svg").read_text(encoding="utf-8") == draw(name), "run `make docs`"
