"""What a page says of the course of a run: its result, its end, its steps, rates and warnings."""

import json
import math

import pytest

from halfstep.report.charts import charts
from halfstep.report.page import render
from tests.report.page.made_up_runs import BEGAN, REASON, RUNS, STEPS, evaluation, read_history, run
from tests.report.page.parsed_page import Page


def test_the_headline_names_what_was_learned_from_and_not_what_was_held_out():
    events = [dict(event) for event in RUNS["fp32"]]
    described = "`train.txt` and, held out, `valid.txt`: 1,000 bytes to train on, 100 held out"
    events[0]["data"] = events[0]["data"] | {"description": described}
    page = Page(render(events, "run"))
    assert "2 min 14 s on train.txt. Held-out text takes" in page.headline
    assert "train.txt and, held out, valid.txt: 1,000" in page.text


def test_a_page_says_what_was_trained_how_why_and_with_what_result():
    page = Page(render(RUNS["fp32"], "runs/first"))
    assert page.headline == (
        "A decoder of 820k parameters trained in fp32 for 200 steps and 2 min 14 s on standard library of "
        "Python 3.11 (730 texts). "
        "Held-out text takes 2 bits per byte, 0.5 times its bigram entropy of 4, which is what each byte "
        "takes if only the one before it is known."
    )
    assert "runs/first" in page.text
    assert "(730 texts): 1,000 bytes to learn, 100 held out" in page.text
    assert "unfinished" not in page.text
    assert page.line("loss", "bigram entropy") == pytest.approx(
        {1: 4.0 * math.log(2), 200: 4.0 * math.log(2)}, rel=1e-5
    )
    assert page.parts["blockquote"] == [REASON]
    assert "The configuration asked for auto; a measurement chose fp32:" in page.text


def test_without_bits_per_byte_the_loss_is_the_result():
    events = [
        event | ({"bits_per_byte": None} if event["event"] in ("validation", "end") else {}) for event in run(40)
    ]
    page = Page(render(events, "x"))
    assert "The loss on held-out text is 1.386." in page.headline
    assert "bits per byte" not in page.text
    assert [line["label"] for line in page.data["loss"]["lines"]] == ["training", "smooth", "held-out"]


def test_warnings_are_shown_once_each_and_so_is_their_absence():
    events = run(20)
    events.insert(1, {"event": "warning", "time": BEGAN, "message": "bf16 is slow here"})
    events.insert(3, {"event": "warning", "time": BEGAN, "message": "the scale is low and falling"})
    happened, precision = Page(render(events, "x")).text.split("What happened")[1].split(" Precision ")
    assert "1 warning" in precision
    assert "bf16 is slow here 2025-10-09 08:53 UTC" in precision
    assert "the scale is low and falling 2025-10-09 08:53 UTC" in happened
    calm = Page(render(run(20), "x")).text
    assert "The run started without warnings." in calm
    assert "Nothing out of the ordinary." in calm
    events = run(20)
    events[1:1] = [{"event": "warning", "time": BEGAN + i, "message": "again"} for i in range(300)]
    events[1:1] = [{"event": "warning", "time": BEGAN, "message": f"message {i}"} for i in range(30)]
    page = Page(render(events, "x"))
    assert "330 warnings" in page.text
    assert "message 19" in page.text
    assert "message 20" not in page.text
    assert "and 11 other messages, in events.jsonl" in page.text
    page = Page(render([event for event in events if "message " not in event.get("message", "")], "x"))
    assert "again 300 times, first 2025-10-09 08:53 UTC" in page.text


def test_the_rate_of_every_optimizer_is_shown_as_it_was_in_each_session():
    own = ["optimizer.embedding_rate=0.06", "optimizer.muon_rate=0.01"]
    events = [*run(20, finished=False), *run(20, first=21, resumed_from=20, overrides=own)]
    chart = next(chart for chart in charts(read_history(events), None) if chart.id == "rate")
    last = {line.label: (line.series.values[19], line.series.values[-1]) for line in chart.lines}
    # 0.003 is recorded for the matrices; AdamW has 0.003 beside Muon's 0.02, then beside 0.01
    assert last.keys() == {"Muon, matrices in blocks", "AdamW, embeddings", "AdamW, gains and biases"}
    assert last["Muon, matrices in blocks"] == pytest.approx((3e-3, 3e-3))
    assert last["AdamW, embeddings"] == pytest.approx((3e-3 * 3e-3 / 0.02, 3e-3 * 6))
    assert last["AdamW, gains and biases"] == pytest.approx((3e-3 * 3e-3 / 0.02, 3e-3 * 0.3))
    assert "AdamW, embeddings: 2.25e-05 to 0.018." in Page(render(events, "x")).text
    together = next(chart for chart in charts(read_history(run(20)), None) if chart.id == "rate")
    assert [line.label for line in together.lines] == [
        "Muon, matrices in blocks", "AdamW, embeddings and gains and biases"]  # fmt: skip
    strange = run(20)
    strange[0]["config"]["optimizer"]["rate"] = "of another version"
    assert "Learning rate went from" in Page(render(strange, "x")).text


def test_how_a_run_ended_is_said_until_a_later_session_resumes():
    page = Page(render(RUNS["fp8"], "x"))
    assert "This run is unfinished: its events end at step 60, 2025-10-09 08:53 UTC." in page.text
    assert "has trained in fp8-mixed" in page.headline
    assert f"for 60 of {STEPS} steps and 15 s" in page.headline
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "the scale is stuck at its floor"}
    page = Page(render([*run(20, "fp16-mixed", finished=False), stop], "x"))
    assert "This run was stopped at step 20: the scale is stuck at its floor" in page.text
    assert "unfinished" not in page.text
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "asked to by SIGTERM"}
    page = Page(render([*run(20, finished=False), stop, *run(20, first=21, resumed_from=20)], "x"))
    assert "This run was stopped" not in page.text
    assert "asked to by SIGTERM" in page.text  # in the table of sessions


def test_of_steps_recorded_twice_the_later_count_and_what_was_dropped_is_not_shown():
    earlier, later = run(50, finished=False), RUNS["resumed"][len(run(50, finished=False)) :]
    page = Page(render(RUNS["resumed"], "x"))
    shown = page.line("loss", "training")
    assert sorted(shown) == list(range(1, 66))
    for events, steps in ((earlier, range(1, 41)), (later, range(41, 66))):
        losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
        assert all(shown[s] == pytest.approx(losses[s], rel=1e-5) for s in steps)
    assert "resumed once" in page.text
    assert (
        f"for 65 of {STEPS} steps and 19 s" in page.headline
    )  # 12.5 s and 6.25 s; the hour between is no training
    events = [*run(50, finished=False), *run(3, first=41, resumed_from=40, finished=False)]
    page = Page(render(events, "x"))
    assert max(page.line("loss", "training")) == 43
    assert "step-000040" in page.text
    events = [*run(60, finished=False), *run(3, first=41, resumed_from=40, finished=False)]
    assert "step-000060" not in Page(render(events, "x")).text
    page = Page(render([*run(50, "fp16-mixed", overflows=(2,)), *run(30, "bf16-mixed")], "x"))
    assert max(page.line("loss", "training")) == 30
    assert "trained in bf16-mixed" in page.headline
    assert "resumed" not in page.text.replace("resume state", "")


def test_losses_that_are_not_finite_are_gaps_and_not_older_numbers():
    events = [
        event | ({"loss": math.nan} if event.get("step") in (11, 12) else {})
        for event in run(60)
        if event["event"] == "step" or event["event"] == "start"
    ]
    events[31]["loss"] = math.inf
    html = render(events, "x")
    shown = Page(html).line("loss", "training")
    assert [step for step, value in shown.items() if value is None] == [11, 12, 31]
    assert "3 values were not finite and left a gap." in Page(html).text
    assert "NaN" not in json.dumps(Page(html).data)
    events = run(40, finished=False)
    events[-1:] = [evaluation(40, BEGAN + 11, math.nan)]
    assert "The loss on held-out text is not a number." in Page(render(events, "x")).headline
