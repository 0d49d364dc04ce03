"""Matmul micro-benchmarks in torch, within a time budget, for the decisions of core.choice.

core.arrays.measure says what is timed on every backend, core.arrays.ladder which sizes may be started. "fp32" is
timed as fp32: TF32 is switched off for it, on for `tf32`, and restored afterwards.

`time_layer` times one linear layer, forward and backward, in two precisions (convert/fp8_choice.py). The layer is
between two activation functions, so that amax and casts fuse with what precedes them as in a model; a head that is
fused with its loss is timed with it. Compiled on a GPU, only device time counts: alone, a layer takes the host
longer to launch than the device to run.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.config.model import ModelConfig
from halfstep.core.arrays import measure as shared
from halfstep.core.arrays.ladder import Clock, Run, climb
from halfstep.core.arrays.measure import ACCELERATOR_SHAPES, BUDGET, CPU_SHAPES, FORMATS
from halfstep.core.cache import CachedTimer
from halfstep.core.choice import Shape, Timing
from halfstep.core.formats import E4M3, FP32, TF32, Format, parse
from halfstep.core.precision import Precision
from halfstep.core.refusal import check_measurable
from halfstep.core.roles import is_narrow
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.layers import CastedLinear, Layer, linear_cross_entropy
from halfstep.torch.loss.plain import Terms
from halfstep.torch.model import Block, rope_tables
from halfstep.torch.numerics.cast import to_native
from halfstep.torch.numerics.dtypes import describe, dtype_of, supported
from halfstep.torch.numerics.lowering import to_compute
from halfstep.torch.numerics.record import update_record
from halfstep.torch.numerics.split.parameter import make_split

__all__ = ["FORMATS", "describe", "devices", "measure", "measure_block", "supported", "version"]

# Cycles per second of the fastest GPU (a slower one pauses longer), and the longest pause in seconds.
CYCLES, LONGEST_PAUSE = 2.0e9, 1.0
# Seconds of a turn of a layer on a GPU, and the most passes in it: thousands of times the clock's resolution.
TURN, PASSES = 0.01, 10


def devices() -> list[str]:
    """Returns the kinds of device that torch finds, the fastest first."""
    found = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    return [*(kind for kind, module in found.items() if module.is_available()), "cpu"]


def version() -> str:
    """Returns the version of torch."""
    return str(torch.__version__)


def measure(
    device: torch.device | str,
    formats: Iterable[Format],
    *,
    budget: float = BUDGET,
    shapes: Sequence[Shape] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls in each supported format, for `budget` seconds; the clock starts after the device."""
    device, formats = torch.device(device), list(formats)
    check_measurable(formats, str(device), lambda fmt: supported(fmt, device))
    if shapes is None:
        shapes = CPU_SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES
    bench = _Bench(device)
    with warnings.catch_warnings(), torch.no_grad(), _tf32_restored():
        # torch warns of slow kernels; the timing shows that anyway.
        warnings.simplefilter("ignore")
        bench.start(FP32, (16, 16, 16))(1)
        timings = climb(bench.start, formats, shapes, budget=budget, clock=clock)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model needs blocks of other sizes
    return timings


def measure_block(
    device: torch.device | str,
    formats: Iterable[Format],
    model: ModelConfig,
    tokens: int,
    *,
    budget: float = BUDGET,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times matmuls and, on a CPU, a block of the model, with as many tokens as `budget` seconds allow."""
    device, formats = torch.device(device), list(formats)
    if device.type != "cpu":
        own = shared.accelerator_shapes(model, tokens)
        return measure(device, formats, budget=budget, shapes=own, clock=clock)
    matmuls = measure(device, formats, budget=budget * shared.MATMUL_SHARE, clock=clock)
    bench, limits = _Bench(device), shared.block_limits(matmuls, formats)
    counts = shared.halved(tokens)
    with warnings.catch_warnings(), torch.enable_grad(), torch.random.fork_rng([]), _tf32_restored():
        warnings.simplefilter("ignore")
        blocks = shared.time_blocks(bench.start_block, limits, model, counts, budget=budget, clock=clock)
    return [*matmuls, *blocks]


@dataclass(frozen=True)
class LayerWork:
    """A linear layer to time."""

    inputs: int
    outputs: int
    tokens: int
    bias: bool
    split: bool  # its weight is a split master
    device: torch.device
    compiled: bool = False
    loss: int = 0  # it is a head whose loss is computed with it, in this many chunks (loss/plain.py)
    softcap: float = 0.0  # of that loss

    @property
    def amount(self) -> int:
        """The numbers in its weight."""
        return self.inputs * self.outputs

    @property
    def place(self) -> str:
        """The device, in words that hold in another process."""
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"{describe(self.device).name}{threads}"


def time_layer(
    work: LayerWork,
    precisions: Sequence[Precision],
    *,
    before: Callable[[Sequence[Run]], None] = lambda runs: None,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Returns the seconds of a training pass of the layer in each precision: medians of alternating turns.

    `before` is called with what will run, in each precision, before it does.
    """
    bench = _Bench(work.device)
    rounds, count = (3, 1) if work.device.type == "cpu" else (7, PASSES)
    on_device = work.compiled and work.device.type == "cuda"
    stream = torch.cuda.device(work.device) if on_device else nullcontext()  # of the events
    with warnings.catch_warnings(), torch.enable_grad(), torch.random.fork_rng(), _tf32_restored(), stream:
        warnings.simplefilter("ignore")
        runs = [bench.start_layer(work, precision) for precision in precisions]
        before(runs)
        for run in runs:
            run(3)  # compiles, and selects kernels
        _wait(work.device)
        if on_device:
            count = min(count, max(1, round(TURN / max(device_seconds(run, 1) for run in runs))))

        def seconds_of(run: Run) -> float:
            if on_device:
                return device_seconds(run, count)
            begun = clock()
            run(count)
            _wait(work.device)
            return (clock() - begun) / count

        medians = shared.take_turns(runs, rounds, seconds_of)
    del runs, run
    if work.device.type == "cuda":
        torch.cuda.empty_cache()  # the model needs blocks of other sizes
    return medians


time_layer_once = CachedTimer(time_layer, "torch", version)
"""The same, unless an earlier run on this machine has timed the layer."""


class _Bench:
    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def start(self, fmt: Format, shape: Shape) -> Run:
        """Creates operands; returns a function that multiplies them n times and waits."""
        m, k, n = shape
        a, b = self._random(m, k), self._random(n, k).t()
        if is_narrow(fmt):
            multiply = _fp8(a, b, fmt)
        else:
            # TF32 is a way to multiply fp32 tensors.
            dtype = torch.float32 if fmt == TF32 else dtype_of(fmt)
            multiply = partial(torch.matmul, a.to(dtype), b.to(dtype))

        def run(count: int) -> None:
            _set_tf32(self.device, fmt == TF32)
            for _ in range(count):
                multiply()
            _wait(self.device)

        _wait(self.device)
        return run

    def start_block(self, fmt: Format, model: ModelConfig, tokens: int) -> Run:
        """Creates a block with fp32 masters; returns a function that trains it n times and waits."""
        context, block = min(model.context, tokens), Block(model).to(self.device)
        precision = Precision.in_format(fmt)
        for module in block.modules():
            if isinstance(module, Layer):
                module.precision = precision
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=self.generator)
        x = self._random(tokens // context * context, model.width).view(-1, context, model.width)
        x = x.to(dtype_of(fmt)).requires_grad_()
        g = torch.ones_like(x)
        angles = tuple(table[:context].to(self.device) for table in rope_tables(model))

        def run(count: int) -> None:
            _set_tf32(self.device, False)
            for _ in range(count):
                y, _ = block(x, x, None, angles)
                y.backward(g)
                block.zero_grad(set_to_none=True)
            _wait(self.device)

        _wait(self.device)
        return run

    def start_layer(self, work: LayerWork, precision: Precision) -> Run:
        """Creates a layer between two activation functions; returns a function that trains it, without waiting."""
        layer = CastedLinear(work.inputs, work.outputs, work.bias, device=self.device)
        if work.split:
            layer.weight = nn.Parameter(layer.weight.detach().bfloat16())
            make_split(layer.weight, torch.zeros_like(layer.weight, dtype=torch.int16))
        layer.precision = precision
        if precision.delayed:
            update_record(layer, history=Amaxes([""], self.device).layers[""])
        casts, terms = layer.casts, Terms(softcap=work.softcap)
        x, g = self._random(work.tokens, work.inputs).to(casts.compute).requires_grad_(), None
        if work.loss:
            targets = torch.randint(work.outputs, (work.tokens,), device=self.device, generator=self.generator)
        else:
            g = self._random(work.tokens, work.outputs).to(casts.compute)

        def forward(x: Tensor) -> Tensor:
            x = to_compute(functional.silu(x), casts)
            if work.loss:
                given = (x, layer.weight, layer.bias, targets, casts, terms, work.loss)
                return linear_cross_entropy(*given, history=layer.halfstep.history)[0]
            return to_compute(functional.silu(layer(x)), casts)

        if work.compiled and precision.narrow:
            # A graph for each shape, of which dynamo allows eight by default: with dynamic sizes it would be
            # another kernel than the model's. Wide matmuls fuse with nothing: not compiled, they run the same
            # kernels, seconds earlier.
            forward = torch.compile(forward, fullgraph=True, dynamic=False)

        def run(count: int) -> None:
            _set_tf32(self.device, False)
            with torch._dynamo.config.patch(recompile_limit=256) if work.compiled else nullcontext():
                for _ in range(count):
                    forward(x).backward(g)
                    layer.zero_grad(set_to_none=True)
                    x.grad = None

        _wait(self.device)
        return run

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, generator=self.generator)


def _fp8(a: Tensor, b: Tensor, fmt: Format) -> Callable[[], Tensor]:
    # A gradient in e5m2 meets a weight in e4m3: no hardware multiplies two e5m2.
    other = parse("e4m3fnuz") if fmt.specials == "fnuz" else E4M3
    lp_a, lp_b = to_native(a, fmt, overflow="saturate"), to_native(b, other, overflow="saturate")
    one = torch.ones((), device=a.device)
    # As in fp8/linear.py: torch 2.11's functional.scaled_mm has no kernel on a CPU.
    return lambda: torch._scaled_mm(lp_a, lp_b, one, one, out_dtype=torch.bfloat16)


def device_seconds(run: Run, count: int) -> float:
    """Returns the GPU seconds of each pass. They are queued behind a pause, so that none waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(count)
    launched = time.perf_counter() - begun
    torch.cuda._sleep(int(CYCLES * min(2 * launched, LONGEST_PAUSE)))
    start.record()
    run(count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


def _wait(device: torch.device) -> None:
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _set_tf32(device: torch.device, on: bool) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


@contextmanager
def _tf32_restored() -> Iterator[None]:
    found = torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = found
