"""The page of a search: true to its numbers, whole, and quiet in a browser."""

import math
import re
from dataclasses import replace

import pytest

from halfstep.report.tune import HEIGHT, LEFT, TOP, WIDTH, html
from halfstep.tools.tune.tune import Tuner
from tests.report.page.chromium import PHONE, WIDE
from tests.tools.tune.test_tune import FRAGILE, NAMES, SETTINGS, Fake

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    target = Fake({FRAGILE: 0.5})
    return Tuner(target, SETTINGS, tmp_path_factory.mktemp("tune"), lambda *_: None).run()


def circles(page):
    number = r'<circle cx="([\d.]+)" cy="([\d.]+)"'
    return [(float(x), float(y)) for x, y in re.findall(number, page)]


def test_points_are_where_their_numbers_are(found):
    base, uniform, chosen = circles(html(found))
    assert base == (LEFT + WIDTH, TOP + HEIGHT / 2)
    assert uniform[0] == LEFT
    assert uniform[1] < chosen[1]
    share = (found.evaluations[1].cost - found.evaluations[0].cost) / (found.base_cost - found.evaluations[0].cost)
    assert chosen[0] == pytest.approx(LEFT + WIDTH * share, abs=0.1)
    assert 'class="chosen"' in html(found)
    assert 'class="missed"' in html(found)


def test_page_names_every_module_and_what_it_was_given(found):
    page = html(found)
    for name in NAMES:
        assert f"<code>{name}</code>" in page
    assert f"<td><code>{FRAGILE}</code></td><td>fp32</td><td>50 %" in page
    assert str(found.policy) in page


def test_page_of_a_run_that_diverged_or_found_nothing_is_whole(found):
    beyond = replace(found.evaluations[0].verdict, mean=math.inf, interval90=(math.inf, math.inf), diverged=4)
    lost = replace(found, evaluations=[replace(found.evaluations[0], verdict=beyond)])
    assert "4 of 4 runs diverged" in html(lost)
    assert "inf" not in re.sub("<[^>]*>", "", html(lost)).split()
    assert "nan" not in html(lost)
    assert html(replace(found, evaluations=[])).endswith("</html>")


@pytest.mark.prove
def test_a_browser_shows_it_wide_and_on_a_phone_and_runs_nothing_that_a_name_brings(found, browser, tmp_path):
    hostile = replace(found, settings=replace(found.settings, target=HOSTILE), kept={HOSTILE: "`a` rule"})
    (tmp_path / "page.html").write_text(html(hostile), encoding="utf-8")
    for size in (WIDE, PHONE):
        browser.look(size, offline=True)
        browser.open((tmp_path / "page.html").as_uri())
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("document.querySelectorAll('circle').length") == 3
        assert browser.run("document.querySelectorAll('script').length") == 0
    assert browser.complaints == []
    assert browser.run("document.querySelector('h1').textContent") == f"What {HOSTILE} bears"
