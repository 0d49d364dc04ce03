"""Matmul micro-benchmarks in MLX, inside a time budget: what core.choice decides by.

core.ladder says which sizes may be started. Here are the operands and the multiplication as a step has them:
random numbers (zeros draw less power, and a device runs them faster), tokens x width x 4 width as in an MLP,
the result in the format of the operands. "fp32" is timed as fp32: dtypes.pin_matmuls switches TF32 off. MLX is
lazy, so each product is handed to the device as it is made, and evaluating the last one waits for all.

`measure` times the matmul alone, which compares formats. `measure_block` times what a policy makes of it: a
block of the decoder, forward and backward, with its casts and islands. That is what `policy = "auto"` decides
by on a CPU, at the recipe's own shape: there a bf16 matmul can be faster than an fp32 one and the small block
around it slower. On an accelerator a small block would time how fast the host launches kernels, which a
compiled step does not wait for; there the matmuls decide.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from halfstep.config.model import ModelConfig
from halfstep.core.choice import Shape, Timing, gain
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format
from halfstep.core.ladder import Clock, Run, climb
from halfstep.core.precision import Precision
from halfstep.core.refusal import check_measurable
from halfstep.core.roles import Operand
from halfstep.mlx.dtypes import as_device, describe, dtype_of, pin_matmuls, supported, version
from halfstep.mlx.layers import Layer
from halfstep.mlx.model import Block, rope_tables

__all__ = ["FORMATS", "describe", "devices", "measure", "measure_block", "supported", "version"]

FORMATS = (FP32, TF32, BF16, FP16, E4M3, E5M2)
"""The formats a probe asks about."""
# GPT-2's MLP.
ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    (256, 256, 1024),
    (1024, 512, 2048),
    (4096, 768, 3072),
    (16384, 768, 3072),
)
CPU_SHAPES: tuple[Shape, ...] = (
    (32, 32, 128),
    (64, 64, 256),
    (128, 128, 512),
    (256, 256, 1024),
    (512, 512, 2048),
    (1024, 768, 3072),
)


# A format whose matmuls are this many times slower than fp32's is out of the race: no block need be waited for.
TOO_SLOW = 4


def devices() -> list[str]:
    """The kinds of device MLX finds, the fastest first."""
    return [*(["gpu"] if mx.metal.is_available() or mx.cuda.is_available() else []), "cpu"]


def measure(
    device: mx.Device | str,
    formats: Iterable[Format],
    *,
    budget: float = 3.0,
    shapes: Sequence[Shape] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls in each format, which must be supported, for at most `budget` seconds.

    Starting the device (its libraries, the first kernel) comes before the clock.
    """
    device, formats = as_device(device), list(formats)
    check_measurable(formats, str(device.type).rpartition(".")[2], lambda fmt: supported(fmt, device))
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
    budget: float = 3.0,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls and, on a CPU, a block of the model on as many tokens as `budget` seconds allow."""
    device = as_device(device)
    if device.type != mx.cpu:
        return measure(device, formats, budget=budget, clock=clock)
    bench = _Bench(device)
    formats = list(formats)

    def start(fmt: Format, shape: Shape) -> Run:
        return bench.start_block(fmt, model, shape[0])

    # A block of few tokens is mostly launches, which say nothing of how slow a format's matmuls are: these come
    # first, and where no block in the format can be afforded, they are the answer.
    matmuls = measure(device, formats, budget=budget / 3, clock=clock)
    gains = {fmt: found.ratio for fmt in formats if (found := gain(matmuls, fmt)) is not None}
    fast = [fmt for fmt, ratio in gains.items() if ratio > 1 / TOO_SLOW]
    halved = [tokens >> halves for halves in range(20) if tokens >> halves >= 8] or [tokens]
    ladder = [(count, model.width, model.size_of_mlp) for count in halved]
    for fmt in fast:
        start(fmt, ladder[-1])(1)  # the first backward of a process takes longer than all that is timed
    blocks = climb(
        start,
        fast,
        ladder[::-1],
        budget=budget * 2 / 3,
        clock=clock,
        work="training steps of a block",
        slowest={fmt: max(2.0, 2 / ratio) for fmt, ratio in gains.items()},
    )
    return [*matmuls, *blocks]


class _Bench:
    """Makes and multiplies operands on one device."""

    def __init__(self, device: mx.Device):
        self.device = device
        self.key = mx.random.key(0)

    def start(self, fmt: Format, shape: Shape) -> Run:
        """Operands, and what multiplies them so many times and waits."""
        m, k, n = shape
        with mx.stream(self.device):
            a, b = self._random((m, k), fmt), self._random((n, k), fmt)
            mx.eval(a, b)
        return self._repeat(_plain(a, b.T))

    def start_block(self, fmt: Format, model: ModelConfig, tokens: int) -> Run:
        """A block with fp32 masters, and what trains it so many times and waits."""
        context = min(model.context, tokens)
        block = Block(model)
        precision = Precision(compute=fmt, operand=Operand(fmt), grad=fmt, grad_operand=Operand(fmt))
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


def _plain(a: mx.array, b: mx.array) -> Callable[[], mx.array]:
    return lambda: a @ b
