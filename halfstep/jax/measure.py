"""Matmul micro-benchmarks in JAX, within a time budget (core.arrays.measure).

Everything is compiled, which takes a second or more for a block and for whatever XLA tunes on a GPU. So there are
fewer shapes than elsewhere, all of them are compiled before the clock starts, and a block has one size: the
largest that is affordable, judging by the matmuls. The precision of every matmul is stated.

`time_product` times one matmul of a layer, forward and backward, in two precisions (convert/fp8_choice.py).
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, matmul_parameters, parameter_shapes
from halfstep.core import host
from halfstep.core.arrays.ladder import MARGIN, Clock, Run, climb
from halfstep.core.arrays.measure import BUDGET, FORMATS, MATMUL_SHARE, block_limits, take_turns, time_blocks
from halfstep.core.cache import CachedTimer
from halfstep.core.choice import ROUNDS, Shape, Timing
from halfstep.core.formats import BF16, E4M3, FP32, TF32, Format, parse
from halfstep.core.precision import Precision
from halfstep.core.refusal import check_measurable
from halfstep.core.roles import is_narrow
from halfstep.jax.fp8 import OPERANDS
from halfstep.jax.layers import COMPILER_OPTIONS, dot_general
from halfstep.jax.model import Block, rope_tables
from halfstep.jax.numerics.dtypes import as_device, describe, dtype_of, supported
from halfstep.jax.numerics.lowering import casts_of
from halfstep.jax.numerics.matmul import Dimensions

__all__ = ["FORMATS", "describe", "devices", "measure", "measure_block", "supported", "version"]

# GPT-2's MLP, at as many tokens as an fp8 matmul needs to take longer than its launch (H200). XLA tunes each
# format for seconds, so there is no second one.
ACCELERATOR_SHAPES: tuple[Shape, ...] = ((16384, 768, 3072),)
CPU_SHAPES: tuple[Shape, ...] = ((128, 128, 512), (512, 512, 2048), (1024, 768, 3072))

# A block takes longer than its matmuls: on a CPU twice as long, and more where it is small.
AROUND = 3.0


def devices() -> list[str]:
    """Returns the kinds of device JAX finds, the fastest first."""
    return [*(kind for kind in ("cuda", "rocm", "tpu") if _present(kind)), "cpu"]


def version() -> str:
    """Returns the version of JAX."""
    return str(jax.__version__)


def measure(
    device: jax.Device | str,
    formats: Iterable[Format],
    *,
    budget: float = BUDGET,
    shapes: Sequence[Shape] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls in each format, which must be supported, for at most `budget` seconds after compiling."""
    device, formats = as_device(device), list(formats)
    check_measurable(formats, str(device), lambda fmt: supported(fmt, device))
    if shapes is None:
        shapes = CPU_SHAPES if device.platform == "cpu" else ACCELERATOR_SHAPES
    compiled = cache(_Bench(device).start)
    for fmt, shape in product(dict.fromkeys(formats), shapes):
        compiled(fmt, shape)
    return climb(compiled, formats, shapes, budget=budget, clock=clock)


def measure_block(
    device: jax.Device | str,
    formats: Iterable[Format],
    model: ModelConfig,
    tokens: int,
    *,
    budget: float = BUDGET,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls and, on a CPU, a block of the model on as many tokens as `budget` seconds allow."""
    bench = _Bench(as_device(device))
    if bench.device.platform != "cpu":
        own = (tokens, model.width, model.size_of_mlp)
        largest = max(*ACCELERATOR_SHAPES, own, key=math.prod)
        return measure(bench.device, formats, budget=budget, shapes=[largest], clock=clock)
    formats = list(dict.fromkeys([FP32, *formats]))
    matmuls = measure(bench.device, formats, budget=budget * MATMUL_SHARE, clock=clock)
    limits = block_limits(matmuls, formats)
    # Each format gets a share of the budget that its turns must fit into; fp32's matmuls say how long they take.
    share = budget * (1 - MATMUL_SHARE) / 2 / len(limits)
    count = affordable(matmuls, model, tokens, share / (ROUNDS * MARGIN * max(limits.values())))
    compiled = cache(bench.start_block)
    return [*matmuls, *time_blocks(compiled, limits, model, [count], budget=budget, clock=clock)]


def affordable(matmuls: Sequence[Timing], model: ModelConfig, tokens: int, seconds: float) -> int:
    """Returns `tokens`, or the half, the quarter, ... of it whose fp32 block takes at most `seconds`."""
    top = max((timing for timing in matmuls if timing.format == FP32), key=lambda timing: math.prod(timing.shape))
    weights = (matmul_parameters(model) - model.vocabulary * model.width) // model.layers
    for count in (tokens >> halves for halves in range(20)):
        attended = 2 * min(count, model.context) * model.heads * model.size_of_head
        if count < 16 or AROUND * 6 * count * (weights + attended) <= seconds * top.flops:
            return max(count, min(tokens, 8))
    return min(tokens, 8)


@dataclass(frozen=True)
class Product:
    """A product to time: rows of activations and a weight, or a stack of each, multiplied as a layer does it."""

    rows: tuple[int, ...]
    matrix: tuple[int, ...]
    dims: Dimensions
    split: bool  # the weight is the bf16 half of its master
    device: jax.Device
    compiled = True

    @property
    def tokens(self) -> int:
        """The rows."""
        return self.rows[-2]

    @property
    def amount(self) -> int:
        """The numbers in its weight."""
        return math.prod(self.matrix)

    @property
    def place(self) -> str:
        """The device, in words that hold in another process."""
        threads = f", {host.threads()} threads" if self.device.platform == "cpu" else ""
        return f"{describe(self.device).name}{threads}"


def time_product(work: Product, precisions: Sequence[Precision]) -> list[float]:
    """Returns the seconds of a training pass of the product in each precision: medians of alternating turns."""
    bench = _Bench(work.device)
    rounds, count = (3, 1) if work.device.platform == "cpu" else (7, 10)
    runs = [bench.start_product(work, precision) for precision in precisions]
    for run in runs:
        run(1)

    def seconds_of(run: Run) -> float:
        begun = time.perf_counter()
        run(count)
        return (time.perf_counter() - begun) / count

    return take_turns(runs, rounds, seconds_of)


time_product_once = CachedTimer(time_product, "jax", version)
"""The same, unless an earlier run on this machine has timed the product."""


class _Bench:
    def __init__(self, device: jax.Device):
        self.device = device
        self.generator = np.random.default_rng(0)

    def start(self, fmt: Format, shape: Shape) -> Run:
        m, k, n = shape
        sizes = zip(((m, k), (n, k)), _dtypes(fmt), strict=True)
        a, b = (self._put(self._random(*size).astype(dtype)) for size, dtype in sizes)
        multiply = _matmul(fmt).lower(a, b).compile()
        return self._repeat(lambda: multiply(a, b))

    def start_block(self, fmt: Format, model: ModelConfig, tokens: int) -> Run:
        context = min(model.context, tokens)
        batch = tokens // context
        precision = Precision.in_format(fmt)
        block = Block(model, "block", lambda name: precision)
        sizes = _block_shapes(model).items()
        params = {f"block.{name}": self._put(self._random(*size) * np.float32(0.02)) for name, size in sizes}
        x = self._put(self._random(batch, context, model.width).astype(dtype_of(fmt)))
        cos, sin = (table[:context] for table in rope_tables(model))

        def train(params: dict[str, Array], x: Array) -> Any:
            def forward(params: dict[str, Array], x: Array) -> Array:
                return block(params, x, x, None, (jnp.asarray(cos), jnp.asarray(sin)))[0]

            y, pull = jax.vjp(forward, params, x)
            return pull(jnp.ones_like(y))

        step = jax.jit(train, compiler_options=COMPILER_OPTIONS).lower(params, x).compile()
        return self._repeat(lambda: step(params, x))

    def start_product(self, work: Product, precision: Precision) -> Run:
        casts = casts_of(precision)
        amaxes = jnp.ones(OPERANDS) if precision.delayed else None

        def multiply(x: Array, weight: Array) -> Array:
            weight = weight.astype(jnp.float32)
            return dot_general(x, weight, work.dims, casts, amaxes=amaxes)

        def train(x: Array, weight: Array) -> Any:
            y, pull = jax.vjp(multiply, x, weight)
            return pull(y)

        x = self._put(self._random(*work.rows).astype(casts.compute))
        held = jnp.bfloat16 if work.split else jnp.float32
        weight = self._put((self._random(*work.matrix) * np.float32(0.02)).astype(held))
        step = jax.jit(train, compiler_options=COMPILER_OPTIONS).lower(x, weight).compile()
        return self._repeat(lambda: step(x, weight))

    def _repeat(self, once: Callable[[], Any]) -> Run:
        # Without waiting for each, a CPU would run several at once.
        one_by_one = self.device.platform == "cpu"

        def run(count: int) -> None:
            results = [jax.block_until_ready(once()) if one_by_one else once() for _ in range(count)]
            jax.block_until_ready(results)

        return run

    def _random(self, *size: int) -> NDArray[np.float32]:
        return self.generator.standard_normal(size, np.float32)

    def _put(self, x: NDArray[Any]) -> Array:
        return jax.block_until_ready(jax.device_put(x, self.device))


def _dtypes(fmt: Format) -> tuple[Any, Any]:
    """Returns the operands' dtypes. A gradient in e5m2 meets a weight in e4m3: no hardware multiplies two e5m2."""
    if is_narrow(fmt):
        return dtype_of(fmt), dtype_of(parse("e4m3fnuz") if fmt.specials == "fnuz" else E4M3)
    dtype = dtype_of(FP32 if fmt == TF32 else fmt)
    return dtype, dtype


def _matmul(fmt: Format) -> Any:
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32 if fmt == TF32 else lax.Precision.HIGHEST
    out = dtype_of(BF16) if is_narrow(fmt) else _dtypes(fmt)[0]

    def multiply(a: Array, b: Array) -> Array:
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)

    return jax.jit(multiply)


def _block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    first = "blocks.0."
    return {name.removeprefix(first): s for name, s in parameter_shapes(model).items() if name.startswith(first)}


def _present(kind: str) -> bool:
    try:
        return bool(jax.local_devices(backend=kind))
    except RuntimeError:
        return False
