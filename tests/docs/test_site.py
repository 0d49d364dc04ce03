"""The site: what its build refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import module_at

pytest.importorskip("zensical", reason="the site is built by zensical, of the extra `site`")
ROOT = Path(__file__).parents[2]
CHECK = module_at(ROOT / "docs" / "check.py")


def built(folder):
    """Builds the site of a folder and returns what Zensical printed."""
    command = [sys.executable, "-m", "zensical", "build", "--clean"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


PLANTED = """
# Home

A [page](gone.md), an [anchor](page.md#gone), a [file](../mkdocs.yml), and ![a picture](https://example.com/x.png).
A [page](page.md), an [anchor](page.md#here) and a [site](https://example.com) that are there.
"""


def test_a_link_to_nowhere_a_page_without_a_place_and_a_request_to_the_outside_are_errors(tmp_path):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(settings + "nav: [index.md, page.md]\n")
    (tmp_path / "docs").mkdir()
    pages = {"index": PLANTED, "page": "# Page\n\n## Here\n", "lost": "# Lost\n"}
    for name, text in pages.items():
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    built(tmp_path)
    assert list(CHECK.complaints(tmp_path / "site", tmp_path / "docs")) == [
        "lost.md is not in the navigation: add it to `nav` in mkdocs.yml",
        "index.html loads https://example.com/x.png, from outside",
        "index.html links to gone.html, which does not exist",
        "index.html links to page.html#gone, which has no such anchor",
        "index.html links to ../mkdocs.yml, which does not exist",
    ]
