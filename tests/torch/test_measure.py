"""Real matmuls are tiny here: a CPU without bf16 instructions runs them hundreds of times slower."""

import time
from dataclasses import replace

import pytest
import torch

from halfstep.core.choice import choose
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.torch import measure as module
from halfstep.torch.measure import (
    ACCELERATOR_SHAPES,
    CPU_SHAPES,
    FORMATS,
    LayerWork,
    measure,
    supported,
    time_layer,
)

TINY = ((8, 8, 8), (16, 16, 32))
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def operands_of(fmt, shape, monkeypatch):
    kept = []
    monkeypatch.setattr(torch, "matmul", lambda a, b: kept.append((a, b)))
    module._Bench(torch.device("cpu")).start(fmt, shape)(1)
    return kept[0]


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(FP32, torch.float32), (TF32, torch.float32), (BF16, torch.bfloat16), (FP16, torch.float16)]
)
def test_operands_are_random_and_in_the_format(fmt, dtype, monkeypatch):
    a, b = operands_of(fmt, (8, 16, 4), monkeypatch)
    assert (a.shape, b.shape) == ((8, 16), (16, 4))
    assert a.dtype == b.dtype == dtype
    for x in (a.float(), b.float()):
        assert x.std() > 0.5
        assert x.unique().numel() > 32


def test_the_budget_holds_and_the_process_keeps_its_own_choice_about_tf32(monkeypatch):
    begun = time.process_time()  # what else the machine does is not counted
    timings = measure("cpu", [FP32], budget=0.3, clock=time.process_time)
    assert time.process_time() - begun < 1.0  # the budget, and what starting adds
    assert timings[0].shape == CPU_SHAPES[0]
    assert len(timings) > 1
    before = torch.backends.cuda.matmul.fp32_precision
    measure("cpu", [FP32], budget=0.1, shapes=TINY[:1])
    assert torch.backends.cuda.matmul.fp32_precision == before

    def broken(*arguments, **options):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "climb", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure("cpu", [FP32])
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_layers_take_turns_and_the_median_counts():
    """Three turns on a CPU, in each of which both forms are timed once, after three passes that are not."""
    seconds = iter([1.0, 3.0, 50.0, 5.0, 2.0, 4.0])
    now, ticks = [0.0], [0]

    def clock():
        ticks[0] += 1
        if ticks[0] % 2 == 0:
            now[0] += next(seconds)
        return now[0]

    work = LayerWork(16, 16, 16, bias=False, split=False, device=torch.device("cpu"))
    assert time_layer(work, (Precision(), Precision()), clock=clock) == [2.0, 4.0]
    assert ticks[0] == 12


@pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)
def test_a_probe_of_a_cpu_times_fp8_where_torch_has_it_and_never_chooses_it():
    ticks = iter(range(10**6))
    formats = [FP32, BF16, E4M3, E5M2]
    timings = measure("cpu", formats, budget=1e9, shapes=[(16, 16, 32)], clock=lambda: 1e-3 * next(ticks))
    assert {timing.format for timing in timings} == {FP32, BF16, E4M3, E5M2}
    quick = [replace(t, seconds=(1e-9,)) if t.format in (E4M3, E5M2) else t for t in timings]
    assert choose(quick, {fmt: supported(fmt, "cpu") for fmt in FORMATS}).preset != "fp8-mixed"


@CUDA
def test_a_layer_on_a_gpu_is_compiled_and_fp8_pays_where_it_is_wide():
    narrow = precisions(Policy.parse("fp8-mixed"), ["a"])["a"]
    if not supported(E4M3, "cuda"):
        pytest.skip(supported(E4M3, "cuda").reason)
    work = LayerWork(4096, 4096, 16384, bias=False, split=True, device=torch.device("cuda"), compiled=True)
    wide, fp8 = time_layer(work, (narrow.widened(), narrow))
    assert fp8 < wide


@CUDA
def test_launch_time_of_the_host_does_not_count():
    x = torch.ones(64, device="cuda")

    def run(count):
        for _ in range(count):
            time.sleep(0.002)
            x.mul_(1.0)

    run(3)
    assert module.device_seconds(run, 10) < 0.0005


@CUDA
def test_on_a_gpu():
    formats = [fmt for fmt in FORMATS if supported(fmt, "cuda")]
    begun = time.perf_counter()
    timings = measure("cuda", formats, budget=3.0)
    assert time.perf_counter() - begun < 20  # the context included
    at_top = {t.format: t.typical for t in timings if t.shape == ACCELERATOR_SHAPES[-1]}
    assert set(at_top) == set(formats)
    if supported(E5M2, "cuda") and supported(E4M3, "cuda"):
        assert at_top[E4M3] < at_top[BF16] < at_top[FP32]
