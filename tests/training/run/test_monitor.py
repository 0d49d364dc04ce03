"""When a run looks at its layers: as often as asked, closer after an alarm, and without changing the run."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.observed import LayerInfo
from halfstep.core.policy import Policy
from halfstep.training.job import Job
from halfstep.training.run.monitor import RECORDS, REST, SAMPLES, WHILE, Alarms, Monitor
from halfstep.training.telemetry.events import NoEvents
from tests.training.runs import events_of, starter

start = starter("training.steps=8", "training.save_every=4", "optimizer.name=adamw")
FINE = {"loss": 2.0, "scale": 1.0, "skipped": 0, "grad_norm": 1.0}
LAYER = LayerInfo("blocks.0.mlp.up", "matmul", {"activation": "bf16", "gradient": "bf16", "weight": "fp32"})
SAMPLE = SimpleNamespace(to_dict=lambda: {"exponents": {"-3": 1}, "sqnr": 40.0})


class Numbers:
    """Numbers that may only be read after the step they were launched with."""

    def __init__(self, values, log=None):
        self.values, self.log = np.asarray(values, dtype=np.float32), log

    def read(self):
        return self.values


class FakeSession:
    """A session of which only the layers matter: each step counts one element."""

    policy = Policy.parse("fp16-mixed")

    def __init__(self):
        self.counted, self.slices, self.sampled, self.measured = 0, [], [], []

    def watch(self, slice):
        self.slices.append(slice)
        return [LAYER]

    def layer_numbers(self):
        counted, self.counted = self.counted, 0
        return Numbers([[[counted, 2.0, 0, 0, 0], [counted, math.inf, 1, 0, 0]]])

    def weight_numbers(self):
        self.measured.append(None)
        return Numbers([[3.0, 4.0, 0.5, math.nan]])

    def sample(self, micro_batches, share=1 / 16):
        self.sampled.append(micro_batches)
        return {LAYER.name: {"activation": SAMPLE}}


class Log(NoEvents):
    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, kind, /, **fields):
        self.written.append((kind, fields))


def monitor(*settings, steps=1000, **parts):
    config = load("tiny", [f"training.steps={steps}", *(f"monitor.{each}" for each in settings)])
    meters = SimpleNamespace(part=lambda name: nullcontext())
    return Monitor(config, parts.get("session") or FakeSession(), meters, parts.get("job") or Job(), Log())


def drive(monitor, steps, bad=(), late=0, numbers=None):
    """Runs steps as the loop does, and reads each `late` steps later; returns the steps that were sampled."""
    sampled = []
    monitor.start(steps[0] - 1)
    for step in steps:
        with monitor.around(step):
            monitor._session.counted += 1
        if step - late >= steps[0]:
            loss = math.nan if step - late in bad else 2.0
            monitor.read(step - late, FINE | {"loss": loss, "skipped": step - late in bad} | (numbers or {}))
        if why := monitor.sample_due(step):
            monitor.sample(step, step, why)
            sampled.append((step, why))
    return sampled


def records(monitor, kind="layers"):
    return [fields for name, fields in monitor._events.written if name == kind]


@pytest.mark.parametrize("late", [0, 1])
def test_each_layer_is_recorded_as_often_as_asked(late):
    watching = monitor("every=10", "sample_every=0")
    drive(watching, range(1, 36), late=late)
    seen = records(watching)
    assert [(event["since"], event["step"]) for event in seen] == [(0, 10), (10, 20), (20, 30)]
    for event in seen:
        assert event["activation"] == {
            "count": [10], "amax": [2.0], "overflow": [0], "underflow": [0], "subnormal": [0]
        }  # fmt: skip
        assert event["gradient"]["amax"] == [math.inf]
        assert event["weight"] == {"norm": [3.0], "gradient_norm": [4.0], "update_norm": [0.5], "lost": [None]}
    assert len(watching._session.measured) == 3  # weights are compared on these steps alone


def test_the_session_counts_as_many_elements_as_asked():
    watching = monitor("slice=64")
    watching.start(7)
    assert watching._session.slices == [64]
    (event,) = records(watching, "monitor")
    assert event == {
        "step": 7, "every": 100, "slice": 64,
        "layers": [LAYER.to_dict()],
    }  # fmt: skip


def test_samples_are_as_frequent_as_asked():
    assert drive(monitor("sample_every=20"), range(1, 70)) == [(step, "schedule") for step in (20, 40, 60)]
    assert drive(monitor("sample_every=0", steps=30), range(1, 31)) == [(30, "schedule")]  # and at the end


@pytest.mark.parametrize("late", [0, 1])
def test_after_an_alarm_it_looks_closer_for_a_while_and_then_rests(late):
    watching = monitor("sample_every=0", steps=5000)
    sampled = drive(watching, range(1, 1500), bad=range(300, 1500), late=late)
    why = "alarm: the loss was not finite"
    first, second = 300 + late, 300 + WHILE + REST + 1 + late
    close = [*range(first, 300 + WHILE + 1, SAMPLES)]
    assert sampled[: len(close)] == [(step, why) for step in close]
    assert sampled[len(close)] == (second, why)  # the same alarm counts again after a rest
    steps = [event["step"] for event in records(watching)]
    begin = 300 + RECORDS
    assert steps[:3] == [100, 200, 300]
    assert [step for step in steps if 300 < step < second] == [
        *range(begin, 351, RECORDS),
        400,
        500,
        600,
        700,
        800,
    ]


def test_what_an_alarm_is():
    scale = Policy.parse("fp16-mixed").scale

    def last(*numbers, rollback=0.0):
        alarms = Alarms(scale, rollback)
        return [alarms.observe(FINE | {"scale": 65536.0} | each) for each in numbers][-1]

    assert last({}) == ""
    assert last({"loss": math.nan}) == "the loss was not finite"
    assert last({"skipped": 1}) == "gradients were not finite"
    assert last({"skipped": 1, "scale": 1.0}) == "the loss scale is low and falling"
    assert last(*[{}] * 10, {"loss": 3.5}) == "the loss jumped"
    assert last(*[{}] * 10, {"loss": 2.9}) == ""
    assert last(*[{}] * 10, {"loss": 2.9}, rollback=0.5) == "the loss jumped"


class TwoRanks:
    rank, ranks, has_notes = 0, 2, False

    def note(self, key, text):
        pass

    def gather(self, text):
        return [text, text.replace("2.0", "8.0").replace("4.0", "3.0").replace("NaN", "0.5")]


@pytest.mark.parametrize("sharded", [False, True])
def test_numbers_of_ranks_are_merged(sharded):
    job = Job(TwoRanks())
    job.is_sharded = sharded
    watching = monitor("every=10", job=job)
    drive(watching, range(1, 11))
    (event,) = records(watching)
    assert event["activation"]["count"] == [20]
    assert event["activation"]["amax"] == [8.0]
    assert event["gradient"]["overflow"] == [2]
    assert event["weight"]["gradient_norm"] == [5.0 if sharded else 4.0]
    assert event["weight"]["lost"] == [0.5 if sharded else None]


def test_a_rollback_forgets_what_was_counted():
    watching = monitor("every=10", "sample_every=0")
    drive(watching, range(1, 26))
    watching.roll_back(12)
    for step in range(13, 21):
        with watching.around(step):
            watching._session.counted += 1
        watching.read(step, FINE)
    last = records(watching)[-1]
    assert (last["since"], last["step"], last["activation"]["count"]) == (12, 20, [8])


def test_a_run_without_the_monitor_records_no_layers(text, out):
    start(text, out, "monitor.on=false").run()
    assert events_of(out, "monitor", "layers", "sample") == []
    off = monitor("on=false")
    assert off._session is None
    assert off.sample_due(1000) == ""
