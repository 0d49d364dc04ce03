"""Micro-benchmarks: what every backend times, by which clock, and what it refuses. Real matmuls are tiny here."""

import itertools
import warnings

import numpy as np
import pytest

from halfstep.config.model import ModelConfig
from halfstep.core.arrays import ladder
from halfstep.core.arrays.measure import FORMATS, decide_once
from halfstep.core.choice import ROUNDS, Timing, choose
from halfstep.core.errors import FormatError
from halfstep.core.formats import BF16, E4M3, FP16, FP32, TF32, parse
from halfstep.core.policy import Policy

TINY = ((8, 8, 8), (16, 16, 32))
WEIGHT = np.zeros((96, 32), np.float32)
MODEL = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(ladder, "REPEATS", 2)


def clock(tick=1e-3):
    """A clock of its own: on a busy machine a launch may take as long as the budget allows for a larger matmul."""
    ticks = itertools.count()
    return lambda: tick * next(ticks)


def test_times_come_for_each_format_and_shape_by_the_clock_that_is_given(backend):
    timings = backend.measure.measure("cpu", [FP32, BF16, FP16], budget=1e9, shapes=TINY, clock=clock())
    assert {(timing.format, timing.shape) for timing in timings} == {
        (fmt, shape) for fmt in (FP32, BF16, FP16) for shape in TINY
    }
    assert all(timing.typical == pytest.approx(1e-3, rel=1) for timing in timings)
    timings = backend.measure.measure("cpu", [FP32], budget=1e9, shapes=TINY, clock=clock(1.0))
    assert {second for timing in timings for second in timing.seconds} == {1.0}


def test_a_format_that_the_device_lacks_is_refused_before_anything_is_timed(backend, monkeypatch):
    def never():
        raise AssertionError("the clock was read")

    refused = TF32 if backend.name == "torch" else E4M3  # torch may have an fp8 product on a CPU
    with pytest.raises(FormatError, match=f"{refused} cannot be timed on .*cpu") as caught:
        backend.measure.measure("cpu", [BF16, refused], clock=never)
    assert "halfstep probe" in caught.value.hint


def test_a_block_is_timed_forward_and_backward_in_each_format(slow_backend, monkeypatch):
    module = slow_backend.measure
    monkeypatch.setattr(module, "CPU_SHAPES", TINY)
    random = slow_backend.random_state()
    timings = module.measure_block("cpu", [FP32, BF16], MODEL, 32, budget=1e9, clock=clock())
    blocks = [timing for timing in timings if timing.work != "matmuls"]
    assert {timing.format for timing in blocks} == {FP32, BF16}
    assert {timing.work for timing in blocks} == {"training steps of a block"}
    assert (32, 16, 64) in {timing.shape for timing in blocks}
    assert {timing.format for timing in timings if timing.work == "matmuls"} == {FP32, BF16}
    assert choose(timings, {fmt: module.supported(fmt, "cpu") for fmt in (FP32, BF16, FP16)}).reason
    assert slow_backend.random_state() == random  # what the user draws next does not depend on it


@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_auto_is_measured_for_a_model_of_ones_own_and_the_run_has_the_reason(backend, monkeypatch, preset):
    """As for a recipe: by a block as wide as the model, forward and backward, on its device."""
    seconds, asked = {FP32: 1.0, BF16: 2.0, FP16: 2.0} | {parse(preset.partition("-")[0]): 0.5}, []

    def measure_block(device, formats, model, tokens, *, budget):
        asked.append((model.width, tokens, budget))
        return [Timing(fmt, (8, 8, 8), (seconds[fmt],) * ROUNDS, "training steps of a block") for fmt in formats]

    decide_once.cache_clear()
    monkeypatch.setattr(backend.measure, "measure_block", measure_block)
    toys = [backend.toy("auto,norm=bf16", WEIGHT, rate=1.0) for _ in range(2)]
    decide_once.cache_clear()
    assert asked == [(32, 16384, 3.0)]  # once in a process
    for run in (toy.prepared() for toy in toys):
        assert run.policy == Policy.parse(f"{preset},norm=bf16")
        assert (run.choice.preset, "training steps of a block" in run.choice.reason) == (preset, True)
        summary = run.summary() if backend.name != "jax" else str(run)
        assert f"auto chose {preset}: {run.choice.reason}" in summary
    assert backend.toy("fp32", WEIGHT, rate=1.0).prepared().choice is None


def test_a_run_says_what_the_name_of_another_library_was_read_as(backend):
    for policy in ("BF16,norm=bf16", "bf16-mixed"):
        run = backend.toy(policy, WEIGHT, rate=1.0).prepared()
        summary = run.summary() if backend.name != "jax" else str(run)
        assert ("`BF16` is read as `bf16-mixed`, which is what" in summary) == policy.startswith("BF16")


def test_a_loss_scale_with_bf16_and_one_that_is_no_power_of_two_run_with_a_warning(backend):
    """As the source document of the JAX step teaches it: a static scale and bf16."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy = backend.toy("bf16,scale=static:value=1000", np.zeros((1, 2), np.float32), rate=1.0)
    assert [str(one.message) for one in caught] == Policy.parse("bf16,scale=static:value=1000").warnings
    assert len(caught) == 2
    assert caught[0].filename.endswith("conftest.py")  # the line that called prepare or init
    assert toy.step([(np.float32([[1, 2]]), np.float32([[1]]), 1.0)]).scale == 1000
    assert toy.weight()[1] == pytest.approx(np.float32([[-1, -2]]), rel=2.0**-22)


def test_the_cpu_is_always_there_and_last(backend):
    assert backend.measure.devices()[-1] == "cpu"
    assert backend.measure.describe("cpu").kind == "cpu"
    assert backend.measure.version() == backend.session.version
    assert {FP32, BF16, FP16} <= {fmt for fmt in FORMATS if backend.measure.supported(fmt, "cpu")}
