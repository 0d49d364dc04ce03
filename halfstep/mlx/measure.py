"""Matmul micro-benchmarks in MLX, within a time budget (core.arrays.measure).

TF32 is switched off by dtypes.pin_matmuls. MLX is lazy, so each product goes to the device as soon as it exists,
and evaluating the last one waits for all.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from halfstep.config.model import ModelConfig
from halfstep.core.arrays.ladder import Clock, Run, climb
from halfstep.core.arrays.measure import (
    ACCELERATOR_SHAPES,
    BUDGET,
    CPU_SHAPES,
    FORMATS,
    MATMUL_SHARE,
    accelerator_shapes,
    block_limits,
    halved,
    time_blocks,
)
from halfstep.core.choice import Shape, Timing
from halfstep.core.formats import FP32, Format
from halfstep.core.precision import Precision
from halfstep.core.refusal import check_measurable
from halfstep.mlx.layers import Layer
from halfstep.mlx.model import Block, rope_tables
from halfstep.mlx.numerics.dtypes import as_device, describe, dtype_of, kind_of, pin_matmuls, supported, version

__all__ = ["FORMATS", "describe", "devices", "measure", "measure_block", "supported", "version"]


def devices() -> list[str]:
    """Returns the kinds of device MLX finds, the fastest first."""
    return [*(["gpu"] if mx.metal.is_available() or mx.cuda.is_available() else []), "cpu"]


def measure(
    device: mx.Device | str,
    formats: Iterable[Format],
    *,
    budget: float = BUDGET,
    shapes: Sequence[Shape] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls in each format, which must be supported, for at most `budget` seconds."""
    device, formats = as_device(device), list(formats)
    check_measurable(formats, kind_of(device), lambda fmt: supported(fmt, device))
    pin_matmuls(device)
    if shapes is None:
        shapes = CPU_SHAPES if device.type == mx.cpu else ACCELERATOR_SHAPES
    bench = _Bench(device)
    bench.start(FP32, (16, 16, 16))(1)
    return climb(bench.start, formats, shapes, budget=budget, clock=clock)


def measure_block(
    device: mx.Device | str,
    formats: Iterable[Format],
    model: ModelConfig,
    tokens: int,
    *,
    budget: float = BUDGET,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls and, on a CPU, a block of the model on as many tokens as `budget` seconds allow."""
    device = as_device(device)
    if device.type != mx.cpu:
        own = accelerator_shapes(model, tokens)
        return measure(device, formats, budget=budget, shapes=own, clock=clock)
    formats = list(formats)
    matmuls = measure(device, formats, budget=budget * MATMUL_SHARE, clock=clock)
    bench, limits = _Bench(device), block_limits(matmuls, formats)
    state: Any = mx.random.state
    high, low = state[0].tolist()  # the first weights of a block are drawn from it
    blocks = time_blocks(bench.start_block, limits, model, halved(tokens), budget=budget, clock=clock)
    mx.random.seed((high << 32) | low)
    return [*matmuls, *blocks]


class _Bench:
    def __init__(self, device: mx.Device):
        self.device = device
        self.key = mx.random.key(0)

    def start(self, fmt: Format, shape: Shape) -> Run:
        m, k, n = shape
        with mx.stream(self.device):
            a, b = self._random((m, k), fmt), self._random((n, k), fmt)
            mx.eval(a, b)
        return self._repeat(partial(mx.matmul, a, b.T))

    def start_block(self, fmt: Format, model: ModelConfig, tokens: int) -> Run:
        context = min(model.context, tokens)
        block = Block(model)
        precision = Precision.in_format(fmt)
        for module in block.modules():
            if isinstance(module, Layer):
                module.precision = precision
        with mx.stream(self.device):
            block.update(tree_map(lambda p: 0.02 * self._random(p.shape, FP32), block.parameters()))
            x = self._random((tokens // context, context, model.width), fmt)
            cos_TK, sin_TK = (table[:context] for table in rope_tables(model))
            parameters = block.parameters()
            mx.eval(parameters, x, cos_TK, sin_TK)

        def total(parameters: dict[str, Any], x: mx.array) -> mx.array:
            block.update(parameters)
            y, _ = block(x, x, None, (cos_TK, sin_TK))
            return y.astype(mx.float32).sum()

        gradients = mx.grad(total, argnums=(0, 1))
        return self._repeat(lambda: gradients(parameters, x))

    def _repeat(self, work: Callable[[], object]) -> Run:
        def run(count: int) -> None:
            with mx.stream(self.device):
                for _ in range(count):
                    last = work()
                    mx.async_eval(last)
                mx.eval(last)

        return run

    def _random(self, shape: Sequence[int], fmt: Format) -> mx.array:
        self.key, key = mx.random.split(self.key)
        return mx.random.normal(shape, key=key).astype(dtype_of(fmt))
