"""The site: what its build refuses, every page in a real browser, and the page that a search finds."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.docs.test_pages import module_at
from tests.report.page.chromium import PHONE, PROGRAM, WIDE, Chromium

pytest.importorskip("zensical", reason="the site is built by zensical, of the extra `site`")
pytestmark = pytest.mark.prove
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, served on this machine: its address and its pages."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    built(folder)
    assert list(CHECK.complaints(folder / "site", folder / "docs")) == []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder / "site"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(path.relative_to(folder / "site").as_posix() for path in (folder / "site").rglob("*.html"))
    yield f"http://127.0.0.1:{server.server_port}/", pages
    server.shutdown()


@pytest.fixture
def browser(tmp_path):
    """A browser that has seen nothing yet."""
    if PROGRAM is None:
        pytest.skip("no chromium or google-chrome on this machine: the site is not looked at")
    with Chromium(tmp_path) as chromium:
        yield chromium


@pytest.mark.prove
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_fits_has_the_colors_of_the_system_and_loads_nothing_from_outside(browser, site, size, dark):
    address, pages = site
    browser.look(size, dark=dark)
    if (size, dark) != (PHONE, True):  # there, every page
        pages = ["index.html", "solve.html", "learn/numbers.html", "api/torch.html"]
    for page in pages:
        browser.open(address + page)
        browser.until("document.body.dataset.mdColorScheme")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), page
        color = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 150) == dark, (page, color)
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith((address, "data:"))] == []


# What people type, and the pages of which one must be among the first three results.
SEARCHES = {
    "nan loss": {"solve"},
    "gradscaler": {"migration"},
    "bf16 vs fp16": {"learn/loss_scale"},
    "out of memory": {"solve"},
    "resume": {"checkpoints", "start/your_loop"},
    "accelerate": {"integrations", "start/frameworks"},
    "fp8 slower": {"solve"},
    "jax": {"start/jax"},
    "mlx": {"start/mlx"},
    "lora": {"guides/lora"},
    "checkpoint": {"checkpoints"},
    "loss scale": {"learn/loss_scale", "policies", "solve"},
    "compile": {"solve"},
    "hugging face": {"models"},
    "lightning": {"start/frameworks"},
    "fsdp": {"many_gpus"},
    "tensorboard": {"logging"},
    "export": {"export"},
    "audit": {"audit"},
    "plan": {"plan"},
}
SEARCH = "document.body.lastElementChild.shadowRoot"  # of the dialog


@pytest.mark.prove
def test_the_right_page_is_among_the_first_three_that_a_search_finds(browser, site):
    address, _ = site
    browser.look(WIDE)
    browser.open(address + "index.html")
    browser.until("!!document.querySelector('.md-search__button')")
    browser.run("document.querySelector('.md-search__button').click()")
    browser.until(f"!!{SEARCH}?.querySelector('input')")
    results, found = f"[...{SEARCH}.querySelectorAll('[role=option]')]", {}
    for words in SEARCHES:
        for text in ("qqqq", words):  # the first finds nothing, so that results are those of the second
            browser.run(
                f"(() => {{ const box = {SEARCH}.querySelector('input'); box.value = {json.dumps(text)};"
                " box.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
            browser.until(f"({results}.length > 0) === {json.dumps(text == words)}")
        links = browser.run(f"{results}.slice(0, 3).map(a => new URL(a.href).pathname)")
        found[words] = [link.strip("/").removesuffix(".html") for link in links]
    assert {words: pages for words, pages in found.items() if not SEARCHES[words] & set(pages)} == {}
