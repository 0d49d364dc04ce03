"""Pages in a real browser, wide and on a phone, light and dark, without a network; and the live page."""

import json
import re
import time

import pytest

from halfstep.report.page import render, write
from tests.report.page.chromium import PHONE, WIDE
from tests.report.page.made_up_runs import HOSTILE, RUNS, hostile_run, monitored, run, step, watched_run
from tests.report.page.parsed_page import Page
from tests.report.test_watch import lines, served

READING = "document.querySelector('[data-map={}] .reading').textContent"


def opened(browser, html, folder):
    (folder / "page.html").write_text(html, encoding="utf-8")
    browser.open((folder / "page.html").as_uri())
    return browser


def fits(browser):
    """Whether nothing sticks out to the right."""
    return browser.run("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "name",
    [
        "watched",
        *(pytest.param(n, marks=pytest.mark.prove) for n in ("eventful", "fp16", "one step", "just started")),
    ],
)
def test_a_browser_draws_every_chart_without_complaint(browser, name, tmp_path):
    html = render(RUNS[name], name)
    opened(browser, html, tmp_path)
    assert browser.run("document.documentElement.className") == "live"
    sizes = browser.run("[...document.querySelectorAll('.plot canvas')].map(c => [c.width, c.height])")
    page = Page(html)
    assert len(sizes) == len(page.data) + 3 * bool(page.embedded["layers"])
    assert all(width > 200 and height > 100 for width, height in sizes)
    assert browser.complaints == []
    assert browser.requests == [(tmp_path / "page.html").as_uri()]
    assert fits(browser)


def test_a_browser_runs_nothing_that_a_run_brought(browser, tmp_path):
    spoiled = json.loads(json.dumps([*monitored(20, 4)]).replace("embedding", json.dumps(HOSTILE)[1:-1]))
    opened(browser, render([*hostile_run(), *spoiled], HOSTILE), tmp_path)
    assert browser.run("document.documentElement.className") == "live"
    assert browser.run("document.querySelector('[data-choice=layer]').options[0].textContent") == HOSTILE
    browser.run("document.querySelector('[data-map=updates] .plot').focus()")
    browser.press("ArrowDown")
    assert browser.run(READING.format("updates")).startswith(HOSTILE)
    assert browser.complaints == []


@pytest.mark.prove
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_a_page_fits_every_screen_in_its_own_colors(browser, size, dark, tmp_path):
    browser.look(size, dark=dark, offline=True)
    opened(browser, render(watched_run(), "x"), tmp_path)
    assert fits(browser)
    red, green, blue = map(int, re.findall(r"\d+", browser.run("getComputedStyle(document.body).backgroundColor")))
    assert (red + green + blue < 150) == dark
    # A cell of the row that overflows is painted in the color that the key shows for it.
    bad = (
        "getComputedStyle(document.querySelector('[data-map=headroom] .key li:last-child .cell')).backgroundColor"
    )
    painted = (
        "(() => { const c = document.querySelector('[data-map=headroom] canvas'), u = c.getContext('2d');"
        " const over = document.querySelector('[data-map=headroom] .u-over').getBoundingClientRect();"
        " const r = over.width ? c.getBoundingClientRect() : null, k = c.width / r.width;"
        " const x = (over.right - r.left - 4) * k, y = (over.top - r.top + 13.5 / 26 * over.height) * k;"
        " const p = u.getImageData(x, y, 1, 1).data; return `rgb(${p[0]}, ${p[1]}, ${p[2]})`; })()"
    )
    assert browser.run(painted) == browser.run(bad)
    assert browser.complaints == []


@pytest.mark.prove
def test_mouse_and_keys_read_cells_and_choices_change_what_is_shown(browser, tmp_path):
    opened(browser, render(watched_run(), "x"), tmp_path)
    browser.point("[data-map=headroom] .u-over", 0.99, 13.5 / 26)
    assert re.match(
        r"blocks\.2\.attn\.norm, steps 191 to 200: -3\.\d+ bits in fp16", browser.run(READING.format("headroom"))
    )
    assert browser.run(READING.format("updates")).startswith("blocks.2.attn.norm, steps 191 to 200: ")
    assert "for its numbers" in browser.run(READING.format("exponents"))
    browser.point("[data-chart=loss] .u-over", 149 / 199)
    assert browser.run("document.querySelector('[data-chart=loss] .at').textContent") == "step 150: loss spike"
    assert "for its numbers" in browser.run(READING.format("headroom"))  # a cursor elsewhere has no row
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.run("document.querySelector('[data-map=updates] .plot').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        browser.press(key)
    assert browser.run(READING.format("updates")).startswith("blocks.0.attn.norm, steps 181 to 190: ")
    browser.run(
        "(() => { const s = document.querySelector('[data-map=headroom] [data-choice=format]'); s.value = 'bf16';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    browser.point("[data-map=headroom] .u-over", 0.99, 13.5 / 26)
    assert " bits in bf16; the largest is " in browser.run(READING.format("headroom"))
    assert browser.complaints == []


@pytest.mark.prove
def test_the_loss_beside_fp32_is_drawn_and_the_layers_outside_are_named(browser, tmp_path):
    opened(browser, render(watched_run(100), "x"), tmp_path)
    width = browser.run("document.querySelector('[data-chart=shadow] .plot canvas').width")
    assert width > 200
    rows = browser.run("[...document.querySelectorAll('table')].map(t => t.textContent)")
    table = next(text for text in rows if "noise does not explain" in text)
    assert "blocks.0.mlp_norm" in table
    assert "blocks.0.mlp.up" not in table
    browser.look(PHONE)
    assert fits(browser)
    assert browser.complaints == []


@pytest.mark.prove
def test_the_numbers_of_every_chart_are_one_click_away(browser, tmp_path):
    opened(browser, render(watched_run(), "a run"), tmp_path)
    files = tmp_path / "files"
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(files))
    buttons = browser.run("document.querySelectorAll('[data-csv]').length")
    browser.run(
        "document.querySelectorAll('[data-csv]').forEach((button, i) => setTimeout(() => button.click(), 150 * i))"
    )
    end = time.monotonic() + 20
    while len(list(files.glob("*.csv"))) < buttons:
        assert time.monotonic() < end, list(files.glob("*"))
        time.sleep(0.1)
    text = {path.stem: path.read_text().splitlines() for path in files.glob("*.csv")}
    assert text["a_run-headroom"][0] == "layer,kind,after_step,to_step,activation.amax"
    assert len(text["a_run-headroom"]) == 1 + 26 * 20
    assert len(text["a_run-what-if"]) == 1 + 26 * 3 * 6
    assert "incidents,150,loss spike" in text["a_run-loss"]
    shares = [float(line.split(",")[-1]) for line in text["a_run-exponents"][1:] if ",200," in line]
    assert sum(shares) == pytest.approx(1, rel=1e-3)


@pytest.mark.prove
def test_ten_thousand_steps_of_48_layers_are_light_and_fast(browser, tmp_path):
    """Every step recorded would be 75 MB of events; this is five times as dense as the default."""
    (tmp_path / "events.jsonl").write_text(lines(watched_run(10_000, 48, every=20, sample_every=200)))
    write(tmp_path / "events.jsonl", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 5_000_000
    began = time.monotonic()
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.run("[...document.querySelectorAll('[data-map] canvas')].length") == 3
    assert time.monotonic() - began < 5
    assert browser.complaints == []


@pytest.mark.prove
def test_on_a_phone_the_columns_of_a_table_align(browser, tmp_path):
    """Each row is a grid of its own there: time and share end at the same place in all of them."""
    spent = {"wall": 100.0, "training": 80.0, "first_step": 3.0, "input": 1.5, "saving": 12.2, "evaluation": 7.0}
    *events, end = run(60)
    browser.look(PHONE)
    opened(
        browser,
        render([*events, end | {"spent": spent | {"other": 0.8}, "mfu": None, "busy": None}], "x"),
        tmp_path,
    )
    places = browser.run(
        "[...document.querySelectorAll('[aria-label=Time] tbody tr')].map(row => [...row.children]"
        ".slice(1, 3).map(cell => [cell.getBoundingClientRect().right, cell.getBoundingClientRect().top]))"
    )
    assert len(places) == 7
    assert len({(time[0], share[0]) for time, share in places}) == 1
    assert all(time[1] == share[1] and time[0] < share[0] for time, share in places)


@pytest.mark.prove
def test_a_live_page_keeps_up_without_being_loaded_again_and_says_when_it_ends(browser, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    first, *rest = watched_run(200)
    early = [event for event in rest if event.get("step", 0) <= 100]
    (folder / "events.jsonl").write_text(lines([first, *early]))
    browser.look(WIDE)
    with served(folder) as server:
        browser.open(server.url)
        assert "for 100 of" in browser.run("document.querySelector('h1').textContent")
        browser.run("window.kept = 1; document.querySelector('details').open = true")
        browser.run("document.querySelector('[data-chart=loss] [data-switch=log]').click()")
        browser.run(
            "(() => { const s = document.querySelector('[data-choice=layer]'); s.value = '3';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        with open(folder / "events.jsonl", "a") as record:
            record.write(lines(event for event in rest if event.get("step", 0) > 100))
        browser.until("document.querySelector('h1').textContent.includes('for 200 steps')")
        assert browser.run("window.kept") == 1
        assert browser.run("document.querySelector('details').open")
        assert browser.run("document.querySelector('[data-switch=log]').getAttribute('aria-pressed')") == "true"
        assert browser.run("document.querySelector('[data-choice=layer]').value") == "3"
        assert browser.run("document.querySelectorAll('.plot canvas').length") == 10
        assert set(browser.requests) == {server.url}
        with open(folder / "events.jsonl", "a") as record:
            record.write("damage\n" + lines([step(201, 1e9)]))
        browser.until("document.querySelector('main').textContent.includes('this line is not JSON')")
    assert [words for words in browser.complaints if "500" not in words] == []
    browser.until("document.querySelector('p.live').textContent.startsWith('no longer live')")
