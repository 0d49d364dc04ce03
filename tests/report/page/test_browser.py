"""Pages in a real browser."""

import json
import re
import shutil
import subprocess

import pytest

from halfstep.report.page import render
from tests.report.page.made_up_runs import HOSTILE, RUNS, hostile_run, run
from tests.report.page.parsed_page import Page


@pytest.fixture(scope="module")
def browser():
    """Runs a page in a real browser: the document after its scripts, and what the console said."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium or google-chrome on this machine: the page's script is not tried")

    def visit(html, folder, *more):
        (folder / "page.html").write_text(html, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--virtual-time-budget=3000"]
        flags += ["--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
        command = [program, *flags, *more, "--dump-dom", (folder / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return visit


@pytest.mark.parametrize(
    "name", ["eventful", *(pytest.param(n, marks=pytest.mark.prove) for n in ("fp16", "one step", "just started"))]
)
def test_a_browser_draws_every_chart_without_complaint(browser, name, tmp_path):
    html = render(RUNS[name], name)
    document, complaints = browser(html, tmp_path)
    assert complaints == []
    assert re.search(r'<html lang="en" class="live">', document)
    drawn = re.findall(r'<canvas width="(\d+)" height="(\d+)"', document)
    assert len(drawn) == len(Page(html).data)
    assert all(int(width) > 200 and int(height) > 100 for width, height in drawn)


@pytest.mark.prove
def test_on_a_phone_the_columns_of_a_table_align(browser, tmp_path):
    """Each row is a grid of its own there: time and share end at the same place in all of them."""
    spent = {"wall": 100.0, "training": 80.0, "first_step": 3.0, "input": 1.5, "saving": 12.2, "evaluation": 7.0}
    *events, end = run(60)
    html = render([*events, end | {"spent": spent | {"other": 0.8}, "mfu": None, "busy": None}], "x")
    html = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    measure = "[...document.querySelectorAll('[aria-label=Time] tbody tr')].map(row => [...row.children]"
    measure += ".slice(1, 3).map(cell => [cell.getBoundingClientRect().right, cell.getBoundingClientRect().top]))"
    script = f"<script>document.body.dataset.places = JSON.stringify({measure})</script></body>"
    document, _ = browser(html.replace("</body>", script), tmp_path, "--window-size=390,800")
    places = json.loads(re.search(r'data-places="([^"]*)"', document)[1])
    assert len(places) == 6
    assert len({(time[0], share[0]) for time, share in places}) == 1
    assert all(time[1] == share[1] and time[0] < share[0] for time, share in places)


def test_a_browser_runs_nothing_that_a_run_brought(browser, tmp_path):
    document, complaints = browser(render(hostile_run(), HOSTILE), tmp_path)
    assert complaints == []
    assert re.search(r'<html lang="en" class="live">', document)
