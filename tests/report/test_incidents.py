"""Incidents of a run, as the page shows them: one row each, in the order of time, each in one place."""

import math
import re

import pytest

from halfstep.report.history import History
from halfstep.report.incidents import NAMES, SHOWN, IncidentReader
from halfstep.report.number_format import occasions
from halfstep.report.page import render
from halfstep.training.telemetry import events as record
from halfstep.training.telemetry.events import read_events
from tests.training.runs import poison, starter

NAN = math.nan
WHERE = [{"file": "shards/a.bin", "offsets": [16, 4096]}]


def start(resumed_from=None, **more):
    return {"event": "start", "config": {}, "policy": "fp32", "resumed_from": resumed_from, **more}


def steps(first, last, **more):
    return [
        {"event": "step", "step": number, "loss": 2.0, "scale": 1.0, "skipped": 0, **more}
        for number in range(first, last + 1)
    ]


def skip(step, in_a_row=1, loss=NAN, scale=1.0, where=WHERE):
    numbers = {"loss": loss, "grad_norm": NAN, "scale": scale}
    return {"event": "skip", "step": step, "in_a_row": in_a_row, "where": where, **numbers}


def spike(step, in_a_row):
    return {"event": "spike", "step": step, "loss": 9.25, "median": 2.5, "in_a_row": in_a_row, "where": WHERE}


def saved(step):
    return {"event": "checkpoint", "step": step, "path": f"checkpoints/step-{step:06d}", "bytes": 1,
            "seconds": 1.0}  # fmt: skip


def failed(step):
    return {"event": "save_failed", "step": step, "message": f"`step-{step:06d}`: no space is left"}


def warning(message):
    return {"event": "warning", "message": message}


def stop(step, newest, reason="SIGTERM"):
    return {"event": "stop", "step": step, "reason": reason, "saved": newest}


def timed(*events):
    """Events and lists of events in a row, a minute apart."""
    flat = [one for part in events for one in (part if isinstance(part, list) else [part])]
    return [{"time": 1_760_000_000.0 + 60 * i, **event} for i, event in enumerate(flat)]


def read(events):
    history, reader = History(), IncidentReader()
    for event in events:
        history.take(event)
        reader.take(event)
    return history, reader.incidents(history.finish())


def incidents(*events):
    return read(timed(*events))[1]


def rows(*events):
    """(step, what, details) of each row, as they read."""
    return [(row.span, row.name, row.details.replace("`", "")) for row in incidents(*events).rows]


def test_one_line_says_that_nothing_happened_and_a_folder_used_again_forgets():
    calm = incidents(start(), steps(1, 4), saved(4), {"event": "end", "step": 4})
    assert (calm.rows, calm.summary) == ([], "Nothing out of the ordinary.")
    assert rows(start(), steps(1, 3), skip(3), start(), steps(1, 4)) == []


def test_a_skipped_update_and_a_loss_not_finite_have_the_place_of_their_data():
    (row,) = rows(start(), steps(1, 3), skip(3))
    assert row == (
        "3",
        "update skipped",
        "the loss was not a number, the gradient norm not a number; data: shards/a.bin at tokens 16, 4096",
    )
    events = [{**skip(step, in_a_row=step - 2, loss=math.inf), "event": "not_finite"} for step in (3, 4)]
    ((step, what, details),) = rows(start(), steps(1, 3), events)
    assert (step, what) == ("3 to 4", "loss not finite")
    assert "the gradients were finite; data: shards/a.bin at tokens 16, 4096" in details
    many = [{"file": f"{name}.bin", "offsets": list(range(0, 64, 8))} for name in "abc"]
    ((_, _, details),) = rows(start(), steps(1, 3), skip(3, where=many))
    assert details.endswith("; data: a.bin at tokens 0, 8, 16, 24 and 20 more places, in events.jsonl")
    ((_, _, details),) = rows(start(), steps(1, 3), skip(3, where=None))
    assert details.endswith("not a number")


def test_a_loss_scale_that_is_low_and_falling_is_a_row_though_its_overflows_are_not():
    alarm = {"event": "low_scale", "step": 6, "scale": 1024.0, "message": "the loss scale is 1024 and falling"}
    overflows = [skip(step, in_a_row=step - 4, loss=2.0, scale=2.0 ** (16 - step)) for step in (5, 6, 7)]
    shown = incidents(start(), steps(1, 4), overflows[:2], alarm, overflows[2], steps(8, 9))
    assert [(r.span, r.name, r.details) for r in shown.rows] == [("6", "loss scale low", alarm["message"])]
    assert shown.overflows == 3


def test_what_comes_in_a_row_is_one_row_and_does_not_reach_across_a_resume():
    story = incidents(start(), steps(1, 5), skip(3), skip(4, 2), skip(5, 3), steps(6, 9), skip(9))
    assert [(row.span, row.name, row.times) for row in story.rows] == [
        ("3 to 5", "update skipped", 3),
        ("9", "update skipped", 1),
    ]
    assert occasions(story.rows[0].times, story.rows[0].time) == "3 times, first 2025-10-09 08:59 UTC"
    resumed = [start(4), *steps(5, 5), skip(5, 3)]
    spans = [(span, what) for span, what, _ in rows(start(), steps(1, 4), skip(3), skip(4, 2), saved(4), resumed)]
    assert spans == [("3 to 4", "update skipped"), ("4", "resumed"), ("5", "update skipped")]


def test_overflows_under_a_loss_scale_are_no_rows_and_of_very_many_the_last_are_shown():
    story = incidents(start(), steps(1, 9), skip(3, loss=2.0, scale=65536.0), skip(4, 2, loss=2.0, scale=32768.0))
    assert story.rows == []
    assert "Nothing out of the ordinary. 2 updates overflowed under the loss scale" in story.summary
    # A loss that is not finite is no matter of its scale.
    assert [row.name for row in incidents(start(), steps(1, 9), skip(3, scale=65536.0)).rows] == ["update skipped"]
    story = incidents(start(), steps(1, 999), [skip(2 * n) for n in range(1, 71)], stop(999, 998))
    assert story.caption == f"In order of time: the last {SHOWN} of 71"
    assert (story.summary, len(story.shown)) == ("In total: update skipped 70, stopped 1.", SHOWN)


def test_spikes_rollbacks_and_failed_saves_have_the_words_of_the_run():
    message = "the loss spiked: back from step 13 to the checkpoint of step 8, past the data since"
    back = {"event": "rollback", "step": 13, "to": 8, "skipped_data": 5, "message": message}
    spikes = [spike(11, 1), spike(12, 2), spike(13, 3)]
    assert rows(start(), steps(1, 10), saved(8), spikes, back, steps(9, 20)) == [
        ("11 to 13", "loss spike",
         "the loss was 9.25, the median of those before it 2.5; data: shards/a.bin at tokens 16, 4096"),
        ("13", "rolled back", message),
    ]  # fmt: skip
    events = [failed(4), *steps(5, 8), failed(8), *steps(9, 12), saved(12), saved(16)]
    assert rows(start(), steps(1, 4), events) == [
        ("4 to 8", "save failed", "step-000004: no space is left"),
        ("12", "saved again", "checkpoints/step-000012 is complete; failed saves before it: 2"),
    ]
    event = {"event": "stop", "step": 8, "reason": "the scale is stuck at its floor"}
    assert rows(start(), steps(1, 8), event) == [("8", "stopped", "the scale is stuck at its floor")]


@pytest.mark.parametrize(
    ("newest", "words"),
    [
        (8, "SIGTERM; step 8 was saved"),
        (6, "SIGTERM; not saved: 2 steps after the checkpoint of step 6"),
        (None, "SIGTERM; nothing was saved"),
    ],
)
def test_a_stop_says_by_what_and_what_was_saved(newest, words):
    assert rows(start(), steps(1, 8), stop(8, newest)) == [("8", "stopped", words)]


def test_a_resume_says_from_where_what_was_lost_and_what_was_ignored():
    first = [start(), *steps(1, 8), saved(8)]
    assert rows(first, stop(8, 8), start(8))[-1] == ("8", "resumed", "from the checkpoint of step 8")
    assert rows(first, steps(9, 11), start(8)) == [
        ("8", "resumed", "from the checkpoint of step 8; the session before it ended abruptly; lost: 3 steps")
    ]
    passed = "`step-000008/state.safetensors` is damaged; it was set aside, and the run resumes after step 4"
    first = [start(), *steps(1, 8), saved(4), saved(8), stop(8, 8)]
    assert rows(first, start(4), warning(passed), steps(5, 8))[1:] == [
        ("4", "resumed", "from the checkpoint of step 4; lost: 4 steps; ignored: the newer checkpoint of step 8"),
        ("4", "warning", passed.replace("`", "")),
    ]
    back = {"event": "rollback", "step": 13, "to": 8, "skipped_data": 5, "message": "back"}
    shown = rows(start(), steps(1, 13), saved(8), saved(12), back, steps(9, 9), start(8))
    assert shown[-1][2].endswith("ended abruptly; lost: 1 step")


def test_a_warning_is_shown_in_one_place_and_repeated_ones_in_one_row():
    again = warning("bf16 is slow here")
    events = timed(start(), again, steps(1, 4), warning("a logger failed"), saved(4), start(4), again, steps(5, 6))
    history, shown = read(events)
    assert [event["message"] for event in history.warnings] == ["bf16 is slow here"] * 2
    assert ("4", "warning", "a logger failed") in [(row.span, row.name, row.details) for row in shown.rows]
    assert "bf16 is slow here" not in str(shown.rows)
    (row,) = incidents(
        start(), steps(1, 2), warning("again"), steps(3, 4), warning("again"), warning("again")
    ).rows
    assert (row.span, row.times) == ("2 to 4", 3)


def test_steps_that_a_rollback_dropped_do_not_count_and_the_chart_marks_incidents():
    back = {"event": "rollback", "step": 13, "to": 8, "skipped_data": 5, "message": "back"}
    for last in (8, 10):  # ended before another step was taken, and after two
        history, _ = read(timed(start(), steps(1, 13), saved(8), saved(12), back, steps(9, last)))
        assert [*history.steps] == [*range(1, last + 1)]
        assert [*history.checkpoints] == [8]
    back = {"event": "rollback", "step": 8, "to": 4, "skipped_data": 4, "message": "back"}
    events = timed(start(), steps(1, 8), saved(4), skip(6), back, warning("no place of its own"), steps(5, 9))
    html = render(events, "x")
    assert '{"label":"incidents","look":"event","names":["update skipped","rolled back"],"x":[6,8],' in html
    assert 'incidents <span class="value" data-line="2">2</span>' in html
    assert "Vertical lines mark incidents" in html
    assert '"look":"event"' not in render(timed(start(), steps(1, 8)), "x")


# The kinds of events that are part of every run.
ORDINARY = ("start", "step", "validation", "checkpoint", "artifact", "end")
ELSEWHERE = ("monitor", "layers", "sample", "shadow", "finding")  # on the page, and not a row in this table


def test_every_kind_of_event_is_an_incident_or_known_to_be_ordinary():
    kinds = re.findall(r"^    (\w+) {2,}\w", record.__doc__, re.MULTILINE)
    assert len(kinds) > 10
    assert sorted(kinds) == sorted({*NAMES, *ORDINARY, *ELSEWHERE} - {"saved", "resume"})


def test_malformed_events_are_shown_as_far_as_possible():
    odd = [
        {"event": "skip"},
        {"event": "spike", "step": "many", "where": [{}, None, {"file": 3, "offsets": "x"}]},
        {"event": "rollback", "to": None},
        {"event": "save_failed"},
        {"event": "warning"},
        {"event": "stop"},
    ]
    assert [what for _, what, _ in rows(start(), steps(1, 2), odd)] == [
        "update skipped",
        "loss spike",
        "rolled back",
        "save failed",
        "warning",
        "stopped",
    ]


def test_a_real_run_that_skips_and_rolls_back(tmp_path):
    pytest.importorskip("torch")
    text = tmp_path / "odd <b>name.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
    start_run = starter("training.steps=16", "training.save_every=4", "training.rollback=2.0", "monitor.on=true")
    loop = poison(poison(start_run(text, tmp_path / "run"), range(10, 13), 10.0), [2], NAN)
    assert loop.run().finished
    _, shown = read(read_events(tmp_path / "run" / "events.jsonl"))
    cause = ("3", "cause of a NaN or infinity")
    expected = [("3", "update skipped"), cause, ("11 to 13", "loss spike"), ("13", "rolled back")]
    assert [(row.span, row.name) for row in shown.rows] == expected
    (first, *_) = loop.batches.locate(2)
    assert f"odd <b>name.txt` at tokens {first['offsets'][0]}, " in shown.rows[0].details
