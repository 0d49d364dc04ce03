"""Real matmuls are tiny here; what takes time is compiling them, which the budget does not count."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.config.model import ModelConfig
from halfstep.core.choice import Timing
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, parse
from halfstep.jax import measure as module
from halfstep.jax.measure import ACCELERATOR_SHAPES, FORMATS, affordable, measure, supported

TINY = ((8, 8, 8), (16, 16, 32))
MODEL = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2)


def test_compiling_comes_before_the_clock(monkeypatch):
    prepared, clocked = [], []
    start = module._Bench.start

    def recorded(bench, fmt, shape):
        prepared.append((fmt, shape, len(clocked)))
        return start(bench, fmt, shape)

    def clock():
        clocked.append(time.process_time())  # what else the machine does is not counted
        return clocked[-1]

    monkeypatch.setattr(module._Bench, "start", recorded)
    measure("cpu", [FP32, BF16], budget=0.2, shapes=TINY[:1], clock=clock)
    assert prepared == [(FP32, TINY[0], 0), (BF16, TINY[0], 0)]
    assert clocked[-1] - clocked[0] < 0.2 + 0.5  # the budget, and the last matmul


class Kept:
    """Stands for a jitted function, lowered and compiled: keeps what it is called with."""

    def __init__(self, calls):
        self.calls = calls

    def lower(self, *_):
        return self

    def compile(self):
        return lambda a, b: self.calls.append((a, b)) or a


@pytest.mark.parametrize(
    ("fmt", "dtypes", "out"),
    [
        (FP32, ("float32", "float32"), "float32"),
        (TF32, ("float32", "float32"), "float32"),
        (BF16, ("bfloat16", "bfloat16"), "bfloat16"),
        (FP16, ("float16", "float16"), "float16"),
        (E4M3, ("float8_e4m3fn", "float8_e4m3fn"), "bfloat16"),
        (E5M2, ("float8_e5m2", "float8_e4m3fn"), "bfloat16"),
        (parse("e5m2fnuz"), ("float8_e5m2fnuz", "float8_e4m3fnuz"), "bfloat16"),
    ],
)
def test_operands_are_random_and_in_the_format(fmt, dtypes, out, monkeypatch):
    kept, real = [], module._matmul(fmt)
    monkeypatch.setattr(module, "_matmul", lambda fmt: Kept(kept))
    bench = module._Bench(jax.devices("cpu")[0])
    bench.start(fmt, (8, 16, 4))(3)
    assert len(kept) == 3
    a, b = kept[0]
    assert (a.shape, b.shape) == ((8, 16), (4, 16))
    assert (a.dtype.name, b.dtype.name) == dtypes
    for x in (np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)):
        assert x.std() > 0.5
        assert len(np.unique(x)) > 20
    assert jax.eval_shape(real, a, b).dtype.name == out


def test_the_precision_of_every_matmul_is_stated():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with jax.default_matmul_precision("bfloat16"):
        texts = {
            fmt: module._matmul(fmt).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
            for fmt in (FP32, TF32)
        }
    assert "[HIGHEST, HIGHEST]" in texts[FP32]
    assert "lhs_precision_type = tf32" in texts[TF32]


@pytest.mark.parametrize(("gflops", "expected"), [(1e6, 4096), (1.0, 16), (0.0001, 8)])
def test_a_block_is_as_large_as_can_be_afforded(gflops, expected):
    shape = (128, 128, 512)
    seconds = 2 * 128 * 128 * 512 / (gflops * 1e9)
    # A token is 6 x (12 x 16^2 + 2 x 16 x 16) operations, tripled: about 65 thousand, 1 ms for 16 at 1 GFLOP/s.
    assert affordable([Timing(FP32, shape, (seconds,))], MODEL, 4096, 1.2e-3) == expected
    assert affordable([Timing(FP32, shape, (seconds,))], MODEL, 4, 1.2e-3) == 4


def test_an_accelerator_comes_before_the_cpu(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["one"] if backend == "cuda" else [])
    assert module.devices() == ["cuda", "cpu"]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_on_a_gpu():
    formats = [fmt for fmt in FORMATS if supported(fmt, "cuda")]
    timings = measure("cuda", formats, budget=3.0)
    at_top = {t.format: t.typical for t in timings if t.shape == ACCELERATOR_SHAPES[-1]}
    assert set(at_top) == set(formats)
    assert at_top[BF16] < at_top[FP32]
