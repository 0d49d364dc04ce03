"""Micro-benchmarks: what every backend times, by which clock, and what it refuses. Real matmuls are tiny here."""

import itertools

import pytest

from halfstep.config.model import ModelConfig
from halfstep.core.choice import choose
from halfstep.core.errors import FormatError
from halfstep.core.formats import BF16, E4M3, FP16, FP32, TF32
from halfstep.core.measure import FORMATS

TINY = ((8, 8, 8), (16, 16, 32))
MODEL = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2)


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


def test_a_block_is_timed_forward_and_backward_in_each_format(backend, monkeypatch):
    module = backend.measure
    monkeypatch.setattr(module, "CPU_SHAPES", TINY)
    timings = module.measure_block("cpu", [FP32, BF16], MODEL, 32, budget=1e9, clock=clock())
    blocks = [timing for timing in timings if timing.work != "matmuls"]
    assert {timing.format for timing in blocks} == {FP32, BF16}
    assert {timing.work for timing in blocks} == {"training steps of a block"}
    assert (32, 16, 64) in {timing.shape for timing in blocks}
    assert {timing.format for timing in timings if timing.work == "matmuls"} == {FP32, BF16}
    assert choose(timings, {fmt: module.supported(fmt, "cpu") for fmt in (FP32, BF16, FP16)}).reason


def test_the_cpu_is_always_there_and_last(backend):
    assert backend.measure.devices()[-1] == "cpu"
    assert backend.measure.describe("cpu").kind == "cpu"
    assert backend.measure.version() == backend.session.version
    assert {FP32, BF16, FP16} <= {fmt for fmt in FORMATS if backend.measure.supported(fmt, "cpu")}
