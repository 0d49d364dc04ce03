"""The picture of a race: a whole SVG, true to the numbers, with nothing from outside."""

from xml.etree import ElementTree

import pytest

from halfstep.report.race import SPEED_LENGTH, html, svg
from halfstep.tools.bench.contract import CEILING, Setting
from halfstep.tools.bench.standings import ArmResult, BenchResult

SPACE = "{http://www.w3.org/2000/svg}"


def race(*arms, **facts):
    setting = Setting(CEILING, None, 12, 768, 12, 50304, 1024, 32, 1, None, 0, "", "")
    facts = {"device": "NVIDIA <H200>", "data": "a text & more", "stopped": ""} | facts
    return BenchResult(setting, facts["device"], "cuda", facts["data"], arms, (8e14,), 3, 10, facts["stopped"])


ARMS = (
    ArmResult("autocast", "", False, seconds=(0.060, 0.061, 0.062), memory=2 * 2**30, held_out=2.34561),
    ArmResult("halfstep", "", True, seconds=(0.0305,), memory=2**30, held_out=2.3),
    ArmResult("fabric", "", False, missing="lightning is not installed"),
)


def parts(picture, kind):
    return list(ElementTree.fromstring(picture).iter(f"{SPACE}{kind}"))


def test_the_picture_is_true_to_the_numbers_and_says_them():
    bars = {
        (rect.get("class"), rect.get("x")): float(rect.get("width")) for rect in parts(svg(race(*ARMS)), "rect")
    }
    assert bars[("ours", "192")] == SPEED_LENGTH
    assert bars[("base", "192")] == pytest.approx(SPEED_LENGTH / 2, abs=0.1)
    assert bars[("ours", "600")] == pytest.approx(bars[("base", "600")] / 2, abs=0.1)
    said = [text.text for text in parts(svg(race(*ARMS)), "text")]
    assert said[0] == "GPT-2 of 12 layers and width 768, trained on NVIDIA <H200>"
    for word in ("halfstep", "1.07M", "2.000x", "1.00 GiB", "0.500x", "2.3000", "2.3456"):
        assert word in said
    assert said[-1] == "fabric: lightning is not installed"
    (desc,) = parts(svg(race(*ARMS)), "desc")
    assert desc.text.startswith("halfstep: 1.07M tokens per second, 2.000 times autocast, 1.00 GiB at the peak")


def test_without_memory_or_arms_and_nothing_comes_from_outside():
    assert "GiB" not in svg(race(ArmResult("fp32", "", False, seconds=(1.0,))))
    empty = svg(race(ARMS[2], stopped="after 0 of 6 rounds: no arm is left"))
    said = [text.text for text in parts(empty, "text")]
    assert said[-1] == "fabric: lightning is not installed; stopped after 0 of 6 rounds: no arm is left"
    page = html(race(*ARMS))
    assert page.startswith("<!doctype html>")
    assert page.count("http:") == 1  # the name of the SVG's own language
    assert "<script" not in page
    assert "NVIDIA &lt;H200&gt;" in page
