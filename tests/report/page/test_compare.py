"""The page of a comparison: whole, safe, and drawn by a real browser."""

import pytest

from halfstep.report.compare import conclusion, html
from halfstep.tools.compare.judge import judge
from halfstep.tools.compare.runs import read_side
from tests.report.page.chromium import PHONE, WIDE
from tests.report.page.made_up_runs import HOSTILE
from tests.report.page.parsed_page import Page
from tests.tools.compare.made_up import make_run, make_runs


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    a, b = make_runs(folder / "a", worse=0.5, policy="bf16-true"), make_runs(folder / "b")
    return judge(("bf16-true", HOSTILE), read_side(str(a)), read_side(str(b)))


def test_the_page_says_what_was_decided_and_on_what_evidence(different):
    page = Page(html(different))
    assert page.faults == []
    assert page.parts["h2"] == ["Curves", "Pairs", "Side by side", "How it was decided"]
    assert ". ".join(conclusion(different)) in page.text
    assert list(page.data) == ["loss", "gap"]
    assert "21, in the loss" in page.text
    gap = page.data["gap"]["lines"]
    assert [line["look"] for line in gap] == ["main", "reference", "reference", "event"]
    assert page.data["loss"]["lines"][-1]["x"] == [21]
    for name, attributes in page.elements:
        assert not {"src", "href", "style"} & attributes.keys(), name
        assert not any(key.startswith("on") for key in attributes)


def test_a_page_without_a_verdict_is_whole_too(tmp_path):
    a, b = make_run(tmp_path / "a", digest="other"), make_run(tmp_path / "b")
    page = Page(html(judge(("A", "B"), read_side(str(a)), read_side(str(b)))))
    assert page.faults == []
    assert page.parts["h2"] == ["Side by side", "How it was decided"]
    assert "other data" in page.text


def test_a_browser_draws_the_charts_on_a_wide_screen_and_on_a_phone(different, browser, tmp_path):
    (tmp_path / "page.html").write_text(html(different), encoding="utf-8")
    for size in (PHONE, WIDE):
        browser.look(size, offline=True)
        browser.open((tmp_path / "page.html").as_uri())
        assert browser.run("document.documentElement.className") == "live"
        drawn = browser.run("[...document.querySelectorAll('.plot canvas')].map(c => [c.width, c.height])")
        assert len(drawn) == 2
        assert all(width > 200 and height > 100 for width, height in drawn)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.point("figure[data-chart=gap] .plot", 0.6)
    browser.until("/^step [0-9]+/.test(document.querySelector('figure[data-chart=gap] .at').textContent)")
    assert browser.complaints == []
    assert set(browser.requests) == {(tmp_path / "page.html").as_uri()}
