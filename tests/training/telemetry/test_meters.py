"""Where time goes: parts add up, waits are counted where they were lost, and nothing unknown is a number."""

import contextlib
import itertools

import pytest

from halfstep.config.load import load
from halfstep.core.formats import BF16, FP32
from halfstep.training.telemetry.events import Events, EventsError, read_events
from halfstep.training.telemetry.meters import (
    UNMEASURED,
    Ceiling,
    Meters,
    Watch,
    describe_totals,
    format_flops,
    recorded_ceiling,
)
from tests.training.runs import SMALL, before_step, starter, stop

BASE = ["training.micro_batches=2", "training.steps=6", "training.validate_every=3", "training.save_every=2"]


class Clock:
    """A clock that moves when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Session:
    """A device that says how long steps took it."""

    untimed = "untimed"

    def __init__(self, *times):
        self.times = iter(times) if times else itertools.repeat(None)

    def device_time(self, result):
        return next(self.times)

    def memory(self):
        return 77


@pytest.fixture
def clock():
    return Clock()


def meters(clock, *times, ceiling=UNMEASURED, begun=None):
    given = (load("tiny", [*SMALL, *BASE]), ceiling, Session(*times), Watch())
    return Meters(*given, begun=begun, clock=clock)


def test_utilization_is_that_of_each_of_several_devices():
    one, four = (
        Meters(load("tiny", [*SMALL, *BASE]), UNMEASURED, Session(), Watch(), devices=n).flops_per_step
        for n in (1, 4)
    )
    assert one == 4 * four > 0


def slow(clock, waits):
    for wait in waits:
        clock.now += wait
        yield wait


def steps(found, clock, waits, seconds):
    """Takes steps: each waits for its batch, then computes for so long."""
    read = []
    for wait, taken in zip(found.timed_batches(slow(clock, waits)), seconds, strict=True):
        clock.now += taken
        found.watch.seconds += wait + taken
        read.append(found.read("result", 2.0))
    return read


def test_waits_for_input_are_in_their_step_and_what_was_lost_in_the_totals(clock):
    found = meters(clock)
    assert [t["input_wait"] for t in steps(found, clock, [0.5, 0.25], [1, 1])] == [0.5, 0.25]
    assert found.totals()["spent"]["input"] == 0.75
    found = meters(clock, (1.0, None), (1.0, 0.125), (1.0, 9.0))
    assert [t["input_wait"] for t in steps(found, clock, [0.5, 0.5, 0.5], [1, 1, 1])] == [0.5, 0.5, 0.5]
    # Unknown: all of the wait; a short pause of the device: that; a long one, after an evaluation: the wait.
    assert found.totals()["spent"]["input"] == 0.5 + 0.125 + 0.5
    found = meters(clock)
    batches = found.timed_batches(slow(clock, [5.0, 5.0]))
    next(batches), next(batches)  # launched, and never read: the run goes back
    assert [t["input_wait"] for t in steps(found, clock, [0.25], [1])] == [0.25]


def test_the_first_step_counts_from_the_start_of_the_command(clock):
    clock.now += 20
    found = meters(clock, begun=clock.now - 15)
    assert found.totals()["until_first_step"] is None
    steps(found, clock, [0.5, 0.0], [4.0, 1.0])
    assert found.totals()["until_first_step"] == 19.5


def test_parts_add_up_to_the_wall(clock):
    found = meters(clock)
    steps(found, clock, [0.5, 0.0, 0.0], [4.0, 1.0, 1.0])
    with found.part("saving"):
        clock.now += 2
    with contextlib.suppress(RuntimeError), found.part("evaluation"):
        clock.now += 3
        raise RuntimeError  # what failed took its time too
    with found.part("monitor"):
        clock.now += 0.25
    clock.now += 1
    spent = found.totals()["spent"]
    assert spent == {"wall": 12.75, "training": 6.5, "first_step": 4.5, "input": 0.5, "saving": 2.0,
                     "evaluation": 3.0, "monitor": 0.25, "other": 1.0}  # fmt: skip


def test_busy_utilization_and_speed_are_of_the_steps_after_the_first(clock):
    found = meters(clock, (9.0, None), (0.5, 0.0), (1.0, 0.0), ceiling=Ceiling(1e9, "by hand"))
    events = steps(found, clock, [0, 0, 0], [10.0, 1.0, 1.0])
    per_step = found.flops_per_step
    assert per_step == 64 * (6 * (12 * 16 * 16 + 256 * 16) + 12 * 16 * 16)
    assert events[0]["mfu"] == pytest.approx(2.0 * per_step / 1e9)  # by the speed it was given
    totals = found.totals()
    assert totals["busy"] == pytest.approx(1.5 / 2.0)
    assert totals["busy_unknown"] is None
    assert (totals["mfu"], totals["memory"]) == (pytest.approx(2 / 2.0 * per_step / 1e9), 77)
    found = meters(clock)
    assert found.speed() == 0.0
    steps(found, clock, [0.0, 0.0], [10.0, 0.0])  # two that were read at once
    assert found.speed() == pytest.approx(2 / 10.0)
    assert found.totals()["mfu"] is None
    steps(found, clock, [0.0, 0.0], [1.0, 3.0])
    assert found.speed() == pytest.approx(3 / 4.0)


def test_the_speed_while_it_runs_forgets_the_first_step_if_no_pause_did(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("halfstep.training.telemetry.meters.time.perf_counter", lambda: now[0])
    watch, read = Watch(), []
    watch.start(0)
    for step, seconds in enumerate((20.0, 1.0, 1.0, 2.0), 1):
        now[0] += seconds
        read.append(watch.read(step))
    assert read == [1 / 20, 2 / 21, 2 / 2, 3 / 4]
    watch.start(4)  # a pause: all after it counts, a third step of the run or not
    for step, seconds in enumerate((4.0, 4.0, 4.0), 5):
        now[0] += seconds
        assert watch.read(step) == 1 / 4
    assert watch.seconds == 24 + 12
    watch = Watch()
    for step, seconds in enumerate((20.0, 1.0, 2.0, 2.0)):
        watch.start(step)
        now[0] += seconds
        assert watch.read(step + 1) == 1 / seconds


def test_an_unknown_number_is_null_with_the_reason_before_any_step_too(clock):
    found = meters(clock, (1.0, None), (1.0, 0.0), None)
    events = steps(found, clock, [0, 0, 0], [1, 1, 1])
    totals = found.totals()
    assert {e["mfu"] for e in events} == {None}
    assert (totals["mfu"], totals["busy"]) == (None, None)
    assert totals["busy_unknown"] == "untimed"
    assert describe_totals(totals, UNMEASURED).startswith("unknown: this device was not measured")
    totals = meters(clock).totals()
    assert (totals["mfu"], totals["busy"], totals["spent"]["wall"]) == (None, None, 0.0)
    assert "lost to input 0.0 %" in describe_totals(totals, UNMEASURED)


def test_the_line_shows_share_ceiling_and_losses():
    totals = {"mfu": 0.41, "busy": 0.997, "spent": {"wall": 1000.0, "input": 1.0, "saving": 3.0}}
    line = describe_totals(totals, Ceiling(745e12, "bf16"))
    assert line == "41 % of 745 TFLOP/s; lost to input 0.1 %, to saving 0.3 %; device busy 99.7 %"
    line = describe_totals(totals | {"mfu": 1.62}, Ceiling(2e10, "fp32"))
    assert line.startswith("unknown: steps did more than 100 % of 20 GFLOP/s; lost")


@pytest.mark.parametrize(
    ("number", "text"),
    [(2.5e15, "2.5 PFLOP/s"), (745.3e12, "745 TFLOP/s"), (6.2e10, "62 GFLOP/s"), (5e6, "5 MFLOP/s")],
)
def test_flops_have_a_unit(number, text):
    assert format_flops(number) == text


def test_a_recorded_ceiling_is_of_the_same_device_and_format_and_the_newest(tmp_path):
    path = tmp_path / "events.jsonl"
    with Events(path) as events:
        for flops, name in ((1e12, "one"), (2e12, "one"), (None, "one"), (3e12, "other")):
            ceiling = Ceiling(flops, "fp32").record()
            events.write("start", policy="fp32", device={"kind": "cpu", "name": name}, ceiling=ceiling)
        events.write("start", device={"kind": "cpu", "name": "one"})  # of a version without ceilings
    with open(path, "ab") as file:
        file.write(b'{"event": "start", "device": {"name": "one"}, "ceil')  # a kill
    assert recorded_ceiling(path, "one", FP32) == Ceiling(2e12, "fp32")
    assert recorded_ceiling(path, "one", BF16) is None  # the precision was changed
    assert recorded_ceiling(path, "third", FP32) is None
    assert recorded_ceiling(tmp_path / "none", "one", FP32) is None  # checkpoints alone were moved
    with pytest.raises(EventsError, match="cannot be read"):
        recorded_ceiling(tmp_path, "one", FP32)


def test_a_run_records_all_of_it(text, tmp_path):
    ceiling = Ceiling(1e9, "by hand")
    outcome = starter(*BASE)(text, tmp_path / "run", ceiling=ceiling).run()
    events = read_events(tmp_path / "run" / "events.jsonl")
    start, end = events[0], events[-1]
    assert start["ceiling"] == {"flops": 1e9, "told": "by hand"}
    per_token = 6 * (12 * 16 * 16 + 256 * 16) + 12 * 16 * 16
    assert start["flops_per_token"] == per_token
    for event in events:
        if event["event"] == "step":
            assert event["mfu"] == pytest.approx(event["tokens_per_second"] * per_token / 1e9)
            assert event["input_wait"] >= 0
    spent = end["spent"]
    assert spent["training"] == end["seconds"]
    assert all(spent[part] > 0 for part in ("first_step", "input", "saving", "evaluation"))
    parts = spent["training"] + spent["saving"] + spent["evaluation"] + spent["other"]
    assert parts == pytest.approx(spent["wall"])
    assert spent["saving"] >= sum(e["waited"] for e in events if e["event"] == "checkpoint")
    assert end["mfu"] > 0
    assert (end["busy"], end["busy_unknown"]) == (None, "torch times no steps on cpu")
    assert outcome.totals["spent"] == spent


def test_a_stopped_run_records_its_totals(text, tmp_path):
    assert not before_step(starter(*BASE)(text, tmp_path / "run"), stop).run().finished
    last = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert last["event"] == "stop"
    assert last["spent"]["saving"] > 0
