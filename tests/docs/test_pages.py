"""The reference pages are what the schema says today, and links in the documentation lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("halfstep_docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "policies.md", "formats.md"])
def test_a_page_is_current(name):
    page = generator().PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page, "run `python docs/generate.py`"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_examples_run_and_say_what_is_true():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    *lines, last = first.strip().splitlines()
    shown = re.search(r"# (\[.*\])", last)[1]
    scope = {}
    exec("\n".join(lines), scope)
    assert str(eval(last, scope).tolist()) == shown
    for block in others:
        exec(block, {})
