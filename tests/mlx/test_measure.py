"""Real matmuls are tiny here: MLX multiplies slowly on a CPU."""

import time

import mlx.core as mx
import numpy as np
import pytest

from halfstep.config.model import ModelConfig
from halfstep.core.formats import BF16, FP16, FP32
from halfstep.mlx import measure as module
from halfstep.mlx.measure import CPU_SHAPES, FORMATS, measure, supported

TINY = ((8, 8, 8), (16, 16, 32))
MODEL = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2)


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


@pytest.mark.parametrize(("fmt", "dtype"), [(FP32, mx.float32), (BF16, mx.bfloat16), (FP16, mx.float16)])
def test_operands_are_random_and_in_the_format(fmt, dtype, monkeypatch):
    kept = []
    monkeypatch.setattr(module._Bench, "_repeat", lambda self, product: kept.append(product.args))
    module._Bench(mx.Device(mx.cpu)).start(fmt, (8, 16, 4))
    a, b = kept[0]
    assert (a.shape, b.shape) == ((8, 16), (16, 4))
    assert a.dtype == b.dtype == dtype
    for x in (a, b):
        values = np.array(x.astype(mx.float32))
        assert values.std() > 0.5
        assert len(np.unique(values)) > 32
    assert not np.array_equal(np.array(a.astype(mx.float32))[:4], np.array(b.astype(mx.float32)).T)


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


@pytest.mark.skipif(not (mx.metal.is_available() or mx.cuda.is_available()), reason="needs a GPU")
def test_on_a_gpu():
    formats = [fmt for fmt in FORMATS if supported(fmt, "gpu")]
    timings = measure("gpu", formats, budget=3.0)
    assert {timing.format for timing in timings} == set(formats)
