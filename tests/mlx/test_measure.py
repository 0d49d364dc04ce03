"""Real matmuls are tiny here: MLX multiplies slowly on a CPU."""

import time

import mlx.core as mx
import numpy as np
import pytest

from halfstep.config.model import ModelConfig
from halfstep.core.choice import choose
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32
from halfstep.mlx import measure as module
from halfstep.mlx.measure import (
    CPU_SHAPES,
    FORMATS,
    describe,
    devices,
    measure,
    measure_block,
    supported,
    version,
)

TINY = ((8, 8, 8), (16, 16, 32))
MODEL = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2)


def test_times_come_for_each_format_and_shape():
    # A clock of its own: on a busy machine a launch may take as long as the budget allows for a larger matmul.
    ticks = iter(range(10**6))
    timings = measure("cpu", [FP32, BF16, FP16], budget=1e9, shapes=TINY, clock=lambda: 1e-3 * next(ticks))
    assert {(timing.format, timing.shape) for timing in timings} == {
        (fmt, shape) for fmt in (FP32, BF16, FP16) for shape in TINY
    }
    assert all(timing.typical == pytest.approx(1e-3, rel=1) for timing in timings)


def test_a_run_waits_for_every_product(monkeypatch):
    """MLX only notes what is to be done: all products must be handed over, and the last one awaited."""
    handed, waited = [], []
    eager = mx.eval
    run = module._Bench(mx.Device(mx.cpu)).start(FP32, (4, 4, 4))
    monkeypatch.setattr(module.mx, "async_eval", handed.append)
    monkeypatch.setattr(module.mx, "eval", lambda *arrays: waited.append(arrays) or eager(*arrays))
    run(5)
    assert len({id(array) for array in handed}) == 5
    assert waited[-1][0] is handed[-1]


def test_the_budget_holds_at_the_real_shapes():
    begun = time.process_time()  # what else the machine does is not counted
    timings = measure("cpu", [FP32], budget=0.3, clock=time.process_time)
    assert time.process_time() - begun < 1.0  # the budget, and what starting adds
    assert timings[0].shape == CPU_SHAPES[0]
    assert len(timings) > 1


def test_the_clock_is_the_one_given():
    ticks = iter(range(10**6))
    timings = measure("cpu", [FP32], budget=1e9, shapes=TINY, clock=lambda: float(next(ticks)))
    assert {second for timing in timings for second in timing.seconds} == {1.0}


@pytest.mark.parametrize(("fmt", "dtype"), [(FP32, mx.float32), (BF16, mx.bfloat16), (FP16, mx.float16)])
def test_operands_are_random_and_in_the_format(fmt, dtype, monkeypatch):
    kept = []
    monkeypatch.setattr(module, "_plain", lambda a, b: kept.append((a, b)) or (lambda: a @ b))
    module._Bench(mx.Device(mx.cpu)).start(fmt, (8, 16, 4))
    a, b = kept[0]
    assert (a.shape, b.shape) == ((8, 16), (16, 4))
    assert a.dtype == b.dtype == dtype
    for x in (a, b):
        values = np.array(x.astype(mx.float32))
        assert values.std() > 0.5
        assert len(np.unique(values)) > 32
    assert not np.array_equal(np.array(a.astype(mx.float32))[:4], np.array(b.astype(mx.float32)).T)


def test_a_format_that_the_device_has_not_is_refused_before_anything_is_timed():
    def never():
        raise AssertionError("the clock was read")

    with pytest.raises(FormatError, match="e4m3 cannot be timed on cpu") as caught:
        measure("cpu", [BF16, E4M3], clock=never)
    assert "halfstep probe" in caught.value.hint


def test_a_block_is_timed_forward_and_backward_in_each_format(monkeypatch):
    monkeypatch.setattr(module, "CPU_SHAPES", TINY)
    ticks = iter(range(10**6))  # so that no format is found too slow
    timings = measure_block("cpu", [FP32, BF16], MODEL, 32, budget=1e9, clock=lambda: float(next(ticks)))
    blocks = [timing for timing in timings if timing.work == "training steps of a block"]
    assert {timing.format for timing in blocks} == {FP32, BF16}
    assert {timing.shape for timing in blocks} == {(tokens, 16, 64) for tokens in (8, 16, 32)}
    assert choose(timings, {fmt: supported(fmt, "cpu") for fmt in (FP32, BF16, FP16)}).reason


def test_the_block_that_is_timed_runs_in_the_format_and_has_all_gradients(monkeypatch):
    results, blocks = [], []
    made = module.Block
    monkeypatch.setattr(module, "Block", lambda config: blocks.append(made(config)) or blocks[-1])
    monkeypatch.setattr(module._Bench, "_repeat", lambda self, work: results.append(work()))
    module._Bench(mx.Device(mx.cpu)).start_block(BF16, MODEL, 32)
    assert {layer.precision.operand.format for layer in blocks[0].modules()} == {BF16}
    gradients, grad_x = results[0]
    assert (grad_x.shape, grad_x.dtype) == ((2, 16, 16), mx.bfloat16)
    for layer in (gradients["mlp"]["down"], gradients["attn"]["q"]):
        assert layer["weight"].dtype == mx.float32
        assert mx.abs(layer["weight"]).max() > 0


def test_the_cpu_is_always_there_and_last():
    assert devices()[-1] == "cpu"
    assert describe("cpu").kind == "cpu"
    assert version() == mx.__version__


def test_what_cannot_run_is_asked_about_and_refused():
    assert [fmt for fmt in FORMATS if supported(fmt, "cpu")] == [FP32, BF16, FP16]
    assert {TF32, E4M3, E5M2} < set(FORMATS)


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_not_measured():
    for ask in (lambda: measure("gpu", [FP32]), lambda: measure_block("gpu", [FP32], MODEL, 32)):
        with pytest.raises(HalfstepError, match="finds no `gpu`"):
            ask()


@pytest.mark.skipif(not (mx.metal.is_available() or mx.cuda.is_available()), reason="needs a GPU")
def test_on_a_gpu():
    formats = [fmt for fmt in FORMATS if supported(fmt, "gpu")]
    timings = measure("gpu", formats, budget=3.0)
    assert {timing.format for timing in timings} == set(formats)
