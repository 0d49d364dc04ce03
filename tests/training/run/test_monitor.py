"""When a run looks at its layers, or at a step in fp32: as often as asked, and without changing the run."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import ConfigError
from halfstep.core.observed import LayerInfo
from halfstep.core.policy import Policy
from halfstep.training.job import Job
from halfstep.training.run.monitor import RECORDS, REST, SAMPLES, WHILE, Alarms, Findings, Monitor
from halfstep.training.telemetry.events import NoEvents
from tests.refusals import refuses
from tests.training.runs import events_of, final_state, interrupt_at, starter

start = starter("training.steps=8", "training.save_every=4", "optimizer.name=adamw")
BACKENDS = ("torch", pytest.param("jax", marks=pytest.mark.prove), "mlx")
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
        self.written, self.notes = [], []

    def write(self, kind, /, **fields):
        self.written.append((kind, fields))


def monitor(*settings, steps=1000, **parts):
    config = load("tiny", [f"training.steps={steps}", *(f"monitor.{each}" for each in settings)])
    meters = SimpleNamespace(part=lambda name: nullcontext())
    log = Log()
    made = parts.get("session") or FakeSession(), meters, parts.get("job") or Job(), log, log.notes.append
    return Monitor(config, *made)


def drive(monitor, steps, bad=(), late=0, numbers=None):
    """Runs steps as the loop does, and reads each `late` steps later; returns the steps that were sampled."""
    sampled = []
    monitor.start(steps[0] - 1)
    for step in steps:
        with monitor.observe_step(step):
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
        with watching.observe_step(step):
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


def found(
    activation=(0, 0, 0),
    gradient=(0, 0, 0),
    lost=0.0,
    formats=("fp16", "fp16", "bf16"),
    policy="fp16-mixed",
    amax=1.0,
    steps=100,
):
    """Returns what is found in numbers (count, overflow, underflow) of three layers, and not again."""
    named = dict(zip(("activation", "gradient", "weight"), formats, strict=True))
    layers = [LayerInfo(f"blocks.{i}.mlp.up", "matmul", named) for i in range(3)]
    rows = [[[count, 1.0, over, under, 0] for count, over, under in (activation, gradient)] for _ in range(3)]
    rows[1][1][1] = amax
    weights = np.array([[1.0, 1.0, 1.0, lost]] * 3)
    findings = Findings(layers, Policy.parse(policy))
    first, again = (findings.new(np.array(rows), weights, steps) for _ in range(2))
    assert again == []
    return first


def test_findings_name_the_layers_once():
    assert found() == []
    (finding,) = found(activation=(4096, 3, 0))
    assert (finding.rule, finding.where) == (
        "HS409",
        ["blocks.0.mlp.up"],
    )  # what comes after it was given infinities
    assert "overflow fp16" in finding.message
    (finding,) = found(gradient=(4096, 0, 3000))
    assert finding.rule == "HS410"
    assert finding.where == [f"blocks.{i}.mlp.up" for i in range(3)]
    assert (
        "73% of those of what `blocks.0.mlp.up` returns are too small; one of 3 modules in fp16: `blocks.0"
        in finding.message
    )
    (finding,) = found(lost=0.845)
    assert (finding.rule, finding.evidence) == ("HS101", {"lost_share": 0.845})
    assert (
        "`blocks.0.mlp.up` are stepped in bf16 without an fp32 master: 84.5% of their updates" in finding.message
    )


def test_gradients_that_are_all_too_small_are_found_though_fp16_has_made_them_zero():
    for amax, steps in ((0.0, 100), (5e-7, 5)):  # 5e-7 has 3 bits
        (finding,) = found(gradient=(4096, 0, 0), amax=amax, steps=steps)
        assert (finding.rule, finding.where) == ("HS410", ["blocks.1.mlp.up"])
    assert found(gradient=(4096, 0, 0), amax=0.0, steps=5) == []  # weights that begin at zero
    assert found(gradient=(4096, 0, 0), amax=2e-6) == []
    for format in ("bf16", "e5m2"):  # which has the range; which is scaled
        assert found(gradient=(4096, 0, 0), amax=0.0, formats=("fp16", format, "fp32")) == []


def test_findings_are_about_the_format_alone():
    assert found(activation=(4096, 3, 0), gradient=(4096, 0, 3000), formats=("bf16", "bf16", "fp32")) == []
    assert found(gradient=(4096, 5, 100)) == []  # a search of the loss scale, and the tail of a distribution
    assert found(lost=0.9, formats=("fp16", "fp16", "fp32")) == []
    assert found(lost=math.nan) == []
    assert found(lost=0.9, policy="bf16-mixed,param=bf16:stochastic") == []


def test_a_finding_is_an_event_and_a_line():
    watching = monitor("every=10")
    watching._session.weight_numbers = lambda: Numbers([[3.0, 4.0, 0.5, 0.25]])
    watching._session.watch = lambda slice: [replace(LAYER, formats=LAYER.formats | {"weight": "bf16"})]
    drive(watching, range(1, 31))
    (event,) = records(watching, "finding")
    assert (event["step"], event["rule"], event["where"]) == (10, "HS101", [LAYER.name])
    assert watching._events.notes == [f"step 10: HS101: {event['message']}"]


SOON = ("monitor.every=2", "monitor.sample_every=3", "monitor.slice=64")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_bit_of_a_run_depends_on_the_monitor_and_resuming_continues_it(text, tmp_path, backend):
    """Also not on an alarm, with its samples and its search, nor on a kill."""
    settings = (f"backend={backend}", "training.steps=6", "training.save_every=2", "training.micro_batches=2")
    off, on = tmp_path / "off", tmp_path / "on"
    start(text, off, *settings, "monitor.on=false").run()
    interrupt_at(start(text, on, *settings, *SOON), 4)
    start(text, on, *settings, *SOON, resume=True).run()
    assert final_state(on)[0] == final_state(off)[0]
    losses = [{event["step"]: event["loss"] for event in events_of(out, "step")} for out in (off, on)]
    assert losses[0] == losses[1]
    began, again = events_of(on, "monitor")
    assert (began["step"], again["step"]) == (0, 4)
    names = [layer["name"] for layer in began["layers"]]
    assert "blocks.0.mlp.up" in names
    rows = events_of(on, "layers")
    assert [(row["since"], row["step"]) for row in rows] == [(0, 2), (2, 4), (4, 6)]
    at = names.index("blocks.0.mlp.up")
    for row in rows:
        # 2 steps of 2 micro-batches, 64 elements each
        assert [row[role]["count"][at] for role in ("activation", "gradient")] == [256, 256]
        assert row["activation"]["amax"][at] > 0
        assert row["weight"]["update_norm"][at] > 0
        assert row["weight"]["lost"][at] < 0.5
    samples = events_of(on, "sample")
    assert [(each["step"], each["why"]) for each in samples] == [(3, "schedule"), (6, "schedule")]
    sampled = samples[-1]["layers"]["blocks.0.mlp.up"]
    assert sorted(sampled) == ["activation", "gradient", "weight"]
    assert sampled["weight"]["exponents"]
    assert sampled["activation"]["what_if"]["e4m3"]["sqnr"] > 10
    assert events_of(on, "finding") == []


def test_an_alarm_changes_no_bit_either(text, tmp_path):
    outs = [tmp_path / "off", tmp_path / "on"]
    for out, settings in zip(outs, (["monitor.on=false"], SOON), strict=True):
        loop = start(text, out, "training.steps=6", *settings)
        real = loop.session._loss  # the data of the third step is bad, however often it runs
        bad = loop.batches.at(2)[0, 0, :-1].tolist()
        loop.session._loss = lambda x, y, real=real, bad=bad: (
            real(x, y) * (math.nan if x[0].tolist() == bad else 1)
        )
        assert loop.run().finished
    assert final_state(outs[0])[0] == final_state(outs[1])[0]
    (cause,) = events_of(outs[1], "cause")
    assert (cause["step"], cause["pass"], cause["operation"], cause["micro_batch"]) == (3, "forward", "mul", 0)
    samples = [(each["step"], each["why"]) for each in events_of(outs[1], "sample")]
    assert samples == [(3, "alarm: the loss was not finite"), (6, "schedule")]


begin = starter("training.steps=4", "training.save_every=2", "model.context=8", "monitor.sample_every=0")
EVERY, POLICY = "monitor.shadow_every=2", "bf16-mixed,emulate=true"


@pytest.mark.prove
def test_a_run_is_the_same_with_shadows(tmp_path, text):
    plain, shadowed = tmp_path / "plain", tmp_path / "shadowed"
    begin(text, plain, policy=POLICY).run()
    interrupt_at(begin(text, shadowed, EVERY, policy=POLICY), 3)
    begin(text, shadowed, EVERY, policy=POLICY, resume=True).run()
    assert final_state(plain)[0] == final_state(shadowed)[0]
    losses = [{e["step"]: e["loss"] for e in events_of(out, "step")} for out in (plain, shadowed)]
    assert losses[0] == losses[1]
    shadows = events_of(shadowed, "shadow")
    assert [event["step"] for event in shadows] == [2, 4, 4]  # the last one twice: it was interrupted
    assert events_of(plain, "shadow") == []
    for event in shadows:
        # Before the step, with its weights and batch: the loss is that of the step.
        assert event["loss"] == pytest.approx(losses[0][event["step"]], rel=2.0**-20)
        assert event["band"][0] <= event["difference"] <= event["band"][1]
        assert event["causes"] == []
        assert not any(layer["outside"] for layer in event["layers"].values())
        assert event["noise"] == "bf16"
    assert events_of(shadowed, "finding") == []


def test_a_layer_outside_is_found_once_and_watched_closely(tmp_path, text):
    begin(text, tmp_path / "run", EVERY, policy="fp32; blocks.0.mlp_norm: norm=bf16").run()
    found = events_of(tmp_path / "run", "finding")
    assert [(event["rule"], event["where"], event["step"]) for event in found] == [
        ("shadow", ["blocks.0.mlp_norm"], 2)
    ]
    assert "more than noise of fp32" in found[0]["message"]
    assert found[0]["policy_rule"] == '"blocks.0.mlp_norm" = "compute=fp32"'
    assert [event["causes"] for event in events_of(tmp_path / "run", "shadow")] == [["blocks.0.mlp_norm"]] * 2
    assert "gradients differ from fp32 by more than noise" in events_of(tmp_path / "run", "sample")[0]["why"]


@pytest.mark.parametrize("backend", ["jax", "mlx"])
def test_other_backends_refuse_it(backend):
    with refuses(ConfigError, f"monitor.shadow_every = 2, and backend {backend} cannot run a step again", "torch"):
        load("tiny", [EVERY, f"backend={backend}"])
