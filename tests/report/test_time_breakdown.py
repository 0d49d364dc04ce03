"""Where the time went, as the page shows it: parts that fill the whole, and what is not known."""

import re

import pytest

from halfstep.report.page import render
from halfstep.report.time_breakdown import time_breakdown, utilization
from halfstep.training.telemetry.meters import Ceiling
from tests.report.page.made_up_runs import read_history, run

SPENT = {"wall": 100.0, "training": 80.0, "first_step": 10.0, "input": 5.0, "saving": 3.0, "evaluation": 15.0,
         "other": 2.0}  # fmt: skip


def start(time=0.0, ceiling=None, **more):
    ceiling = ceiling or Ceiling(745e12, "bf16 <matmuls>")
    return {"event": "start", "time": time, "config": {}, "policy": "fp32", "flops_per_token": 854_654_976,
            "ceiling": ceiling.record(), "resumed_from": None} | more  # fmt: skip


def end(kind="end", **more):
    totals = {"mfu": 0.41, "busy": 0.997, "busy_unknown": None, "spent": SPENT}
    return {"event": kind, "time": 100.0, "step": 5, "seconds": 80.0} | totals | more


def shown(*events):
    html = render(events, "run").partition('<section aria-labelledby="time">')[2].partition("</section>")[0]
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_parts_have_their_time_and_share_and_fill_the_bar():
    text = shown(start(), end())
    for words in (
        "steps 1 min 05 s 65 %",
        "first step 10 s 10 %",
        "input 5 s 5 %",
        "saving 3 s 3 %",
        "other 2 s 2 %",
    ):
        assert words in text
    assert "utilization is 41 % of 745 TFLOP/s (bf16 &lt;matmuls&gt;), at 854.7M FLOPs per token" in text
    assert "A step was on the device 99.7 % of the training time." in text
    breakdown = time_breakdown(read_history([start(), end()]))
    assert [100 * part.share for part in breakdown.parts] == pytest.approx([65, 10, 5, 3, 15, 0, 2])
    assert [100 * part.begin for part in breakdown.parts] == pytest.approx([0, 65, 75, 80, 83, 98, 98])
    assert breakdown.description.startswith("steps 65 %")
    page = render([start(), end()], "run")
    assert "Where the time went" in page
    assert "<dt>model FLOPs utilization</dt><dd>41 %</dd>" in page
    assert "model FLOPs utilization</dt>" not in render([start(), end(mfu=None)], "run")
    page = render([start(), end(mfu=36.8)], "run")
    assert "model FLOPs utilization</dt>" not in page
    assert "is not known: steps did more than 100 % of 745 TFLOP/s" in page


def test_the_page_has_the_speed_that_the_terminal_has():
    events = run(20)
    assert "median of the steps" in render(events[:-1], "run")
    page = render([*events[:-1], events[-1] | {"tokens_per_second": 2515.0}], "run")
    assert "<dt>tokens per second</dt><dd>2.5" in page.replace("\n", "")
    assert "mean after the first step" in page


def test_sessions_are_added_up_and_what_is_not_known_has_its_reason():
    killed = start(time=200.0, resumed_from=5)
    again = start(time=300.0, resumed_from=5)
    last = end(mfu=0.2, spent=SPENT | {"training": 160.0, "first_step": 90.0})
    text = shown(start(), end("stop"), killed, again, last)
    assert "steps 2 min 10 s 46.4 %" in text
    assert "not in the table: 1 of 3." in text
    mean, _ = utilization(read_history([start(), end("stop"), again, last]))
    assert mean == pytest.approx((0.41 * 70 + 0.2 * 70) / 140)  # first steps are left out
    text = shown(
        start(ceiling=Ceiling(None, "bf16 is emulated")), end(mfu=None, busy=None, busy_unknown="no events")
    )
    assert "utilization is not known: bf16 is emulated." in text
    assert "not known: no events." in text


def test_sessions_with_other_ceilings_are_each_a_share_of_their_own():
    """A run that moved to a faster device: FLOPs done of FLOPs possible, and both ceilings are named."""
    moved = start(time=200.0, resumed_from=5, ceiling=Ceiling(100e12, "fp32 matmuls"))
    unknown = start(time=400.0, resumed_from=5, ceiling=Ceiling(None, "fp8 is emulated"))
    slow, fast = end("stop", mfu=0.5), end("stop", mfu=0.1, spent=SPENT | {"training": 170.0})
    first = start(ceiling=Ceiling(10e12, "bf16 matmuls"))
    history = read_history([first, slow, moved, fast, unknown, end(mfu=None)])
    mean, of = utilization(history)
    steps = 70.0, 160.0  # without the first step, as each session's own share
    done = 0.5 * 10e12 * steps[0] + 0.1 * 100e12 * steps[1]
    assert mean == pytest.approx(done / (10e12 * steps[0] + 100e12 * steps[1]))
    assert of == "of 10 TFLOP/s, then of 100 TFLOP/s, measured"
    text = " ".join(time_breakdown(history).notes)
    assert "of 10 TFLOP/s (bf16 matmuls), then of 100 TFLOP/s (fp32 matmuls), at 854.7M FLOPs per token" in text


@pytest.mark.parametrize("events", [[start()], [start(), end(spent=None)], [start(), end(spent={})]])
def test_without_totals_there_is_no_section(events):
    assert time_breakdown(read_history(events)) is None
    assert shown(*events) == ""
