"""Times the first half of an MLP with its activation function, forward and backward, by all that could fuse it.

    python benchmarks/measure/epilogue.py [--seconds 60] [--rounds 8]

Forward: h = x W1^T (+ bias) and act(h), both written. Backward: dh = (dy W2) act'(h).

    matmul alone            cuBLAS, without the activation function: what a perfect epilogue would cost
    cuBLAS, pointwise       what runs today: torch.compile of the plain function
    _addmm_activation       the one epilogue that torch offers; it does not keep h, which the backward pass needs
    cuBLASLt GELU           its GELU_AUX and DGELU epilogues, which torch does not offer, called here by ctypes
    inductor ...            max_autotune_gemm with Triton's templates, which may take the epilogue
    kernel ...              ours (activated.py, in this folder); after 124M, its two best forms

Arms of one shape take turns, in reverse order every other time, as CUDA graphs; printed are the median, and the
time of what runs today relative to it. `off` is how far the results are from those of today, relative to their
norm: rounding is about 0.003. What fails is reported and left out. Inductor compiles for long: an arm of it that
would not begin within `--seconds` is left out. Needs an NVIDIA GPU; `--tiny` runs small shapes of some arms on the
CPU, only to show that it runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cublaslt as lt
import torch
import torch.nn.functional as F
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
Forms = list[tuple[Any, ...]]


class Shape(NamedTuple):
    """Rows, width, hidden width, and what follows the matmul."""

    name: str
    rows: int
    width: int
    hidden: int
    kind: str
    bias: bool


SHAPES = [
    Shape("124M", 32768, 768, 3072, "gelu", True),
    Shape("1.3B", 16384, 2048, 8192, "gelu", True),
    Shape("speedrun", 65536, 768, 3072, "relu2", False),
    Shape("golf", 65536, 512, 1024, "relu2", False),
]
TINY = [Shape("tiny", 64, 16, 32, "gelu", True), Shape("tiny", 64, 16, 32, "relu2", False)]
# Rows, columns and depth of a block, warps, stages, parts, programs per multiprocessor, flattened loops.
FORMS: Forms = [
    (128, 256, 64, 8, 3, 2, 1, True),
    (128, 256, 64, 8, 4, 2, 1, False),
    (128, 128, 64, 8, 4, 2, 1, True),
    (128, 128, 64, 4, 3, 2, 2, False),
]
INDUCTOR = {"inductor TRITON": "TRITON", "inductor ATEN,TRITON": "ATEN,TRITON"}


class Inputs:
    """What one shape is given, and the plain functions of it."""

    def __init__(self, shape: Shape, device: str):
        torch.manual_seed(0)

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device=device) * scale).bfloat16()

        self.kind = shape.kind
        self.x, self.grad = draw(shape.rows, shape.width), draw(shape.rows, shape.width)
        self.up = draw(shape.hidden, shape.width, scale=shape.width**-0.5)
        self.down = draw(shape.width, shape.hidden, scale=shape.hidden**-0.5)
        self.bias = draw(shape.hidden) if shape.bias else None
        self.hidden = F.linear(self.x, self.up, self.bias)

    def forward(self, x: Tensor, up: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Returns h and act(h)."""
        hidden = F.linear(x, up, bias)
        out = F.relu(hidden).square() if self.kind == "relu2" else F.gelu(hidden, approximate="tanh")
        return hidden, out

    def backward(self, grad: Tensor, down: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradient of h."""
        product = grad @ down
        if self.kind == "relu2":
            return (product * 2 * F.relu(hidden),)
        return (torch.ops.aten.gelu_backward(product, hidden, approximate="tanh"),)

    def given(self, side: str) -> tuple[Any, ...]:
        """Returns what one of the two is called with."""
        return (self.x, self.up, self.bias) if side == "forward" else (self.grad, self.down, self.hidden)


# ---- arms


def plain_arms(inputs: Inputs, side: str, device: str) -> dict[str, Callable[[], Work]]:
    """Returns how each arm of torch is made."""
    given, function = inputs.given(side), getattr(inputs, side)

    def alone() -> Work:
        if side == "forward":
            return lambda: (F.linear(inputs.x, inputs.up, inputs.bias),)
        return lambda: (inputs.grad @ inputs.down,)

    def today() -> Work:
        return partial(
            torch.compile(function, fullgraph=True, dynamic=False) if device == "cuda" else function, *given
        )

    def offered() -> Work:
        return lambda: (torch._addmm_activation(inputs.bias, inputs.x, inputs.up.T, use_gelu=True),)

    arms = {"matmul alone": alone, "cuBLAS, pointwise": today}
    if side == "forward" and inputs.kind == "gelu":
        arms["_addmm_activation, no h"] = offered
    return arms


def inductor_arm(inputs: Inputs, side: str, backends: str) -> Work:
    """Returns the plain function by Triton's templates, all that inductor knows for this GPU."""
    options = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": backends,
        "epilogue_fusion": True,
        "triton.enable_persistent_tma_matmul": True,
    }
    compiled = torch.compile(getattr(inputs, side), fullgraph=True, dynamic=False, options=options)
    return partial(compiled, *inputs.given(side))


def lt_arm(inputs: Inputs, side: str) -> Work:
    """Returns cuBLASLt's own fusion."""
    hidden, out = torch.empty_like(inputs.hidden), torch.empty_like(inputs.hidden)
    if side == "forward":
        epilogue = lt.GELU_AUX if inputs.bias is None else lt.GELU_AUX_BIAS
        matmul = lt.LtMatmul(inputs.x, inputs.up, out, epilogue, hidden, inputs.bias, turned="right")
    else:
        matmul = lt.LtMatmul(inputs.grad, inputs.down, out, lt.DGELU, inputs.hidden)
    print(f"    cuBLASLt GELU: {matmul.settle(milliseconds)}", flush=True)

    def work() -> tuple[Tensor, ...]:
        matmul()
        return (hidden, out) if side == "forward" else (out,)

    return work


def kernel_arm(inputs: Inputs, side: str, form: tuple[Any, ...]) -> Work:
    """Returns our kernel in one form."""
    import activated  # needs Triton

    def work() -> tuple[Tensor, ...]:
        found = getattr(activated, side)(*inputs.given(side), inputs.kind, activated.Form(*form))
        return found if side == "forward" else (found,)

    return work


def makers_of(inputs: Inputs, side: str, device: str, forms: Forms, tuned: bool) -> dict[str, Callable[[], Work]]:
    """Returns how each arm is made."""
    makers = plain_arms(inputs, side, device)
    if device == "cpu":
        return makers
    if inputs.kind == "gelu":
        makers["cuBLASLt GELU"] = partial(lt_arm, inputs, side)
    for form in forms:
        makers[f"kernel {form}"] = partial(kernel_arm, inputs, side, form)
    for name, backends in INDUCTOR.items() if tuned else ():
        makers[name] = partial(inductor_arm, inputs, side, backends)
    return makers


def ready_arms(makers: dict[str, Callable[[], Work]], device: str, deadline: float) -> dict[str, Work]:
    """Returns every arm that works."""
    arms = {}
    for name, make in makers.items():
        begun = time.perf_counter()
        if name.startswith("inductor") and begun > deadline:
            print(f"    {name}: left out, no time is left")
            continue
        try:
            work = make()
            work()
            arms[name] = captured(work, device)
        except Exception as error:  # whatever a compiler says: the other arms still count
            print(f"    {name}: failed: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        print(f"    {name}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
    return arms


def captured(work: Work, device: str) -> Work:
    """Returns the same as a CUDA graph: what the host does for a launch does not count."""
    if device == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


# ---- measuring


def milliseconds(work: Callable[[], Any], repeats: int, device: str = "cuda") -> float:
    """Returns ms per call, by the device's own clock if it has one."""
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1000 * (time.perf_counter() - begun) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def off(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Returns the largest relative distance of what an arm returns; if it returns less, of the last of it."""
    pairs = zip(reversed(found), reversed(expected), strict=False)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def kernels_of(work: Work) -> list[str]:
    """Returns the kernels that a call runs: whether something was fused."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [event.key[:60] for event in profiler.key_averages() if event.self_device_time_total > 0]


def measure(
    shape: Shape, side: str, device: str, rounds: int, deadline: float, forms: Forms
) -> dict[str, tuple[float, float]]:
    """Returns ms of each arm, and its distance from what runs today."""
    torch.compiler.reset()
    inputs = Inputs(shape, device)
    makers = makers_of(inputs, side, device, forms, tuned=shape.name == "124M")
    arms = ready_arms(makers, device, deadline)
    expected = getattr(inputs, side)(*inputs.given(side))
    distances = {name: off(work(), expected) for name, work in arms.items() if name != "matmul alone"}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for each in range(rounds + 1):
        for name in [*arms][:: 1 if each % 2 else -1]:
            taken = milliseconds(arms[name], 10 if device == "cuda" else 1, device)
            if each:  # the first round warms up
                times[name].append(taken)
    for name in arms:
        if name.startswith("inductor"):
            print(f"    {name} runs {', '.join(kernels_of(arms[name]))}", flush=True)
    return {name: (statistics.median(times[name]), distances.get(name, 0.0)) for name in arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which inductor compiles nothing more")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="use small shapes on the CPU")
    options = parser.parse_args()
    device, begun, lines = "cpu" if options.tiny else "cuda", time.perf_counter(), []
    offered = [name for name in torch._C._dispatch_get_all_op_names() if "addmm_activation" in name]
    print(f"torch {torch.__version__} offers these epilogues of cuBLASLt: {', '.join(offered)}")
    forms = {"backward": FORMS, "forward": FORMS}
    for shape in TINY if options.tiny else SHAPES:
        for side in forms:
            print(f"{shape.name}, {side}, after {time.perf_counter() - begun:.0f} s", flush=True)
            rows = measure(shape, side, device, options.rounds, begun + options.seconds, forms[side])
            timed = [form for form in forms[side] if f"kernel {form}" in rows]
            forms[side] = sorted(timed, key=lambda form: rows[f"kernel {form}"][0])[:2]
            today = rows["cuBLAS, pointwise"][0]
            for name, (ms, distance) in rows.items():
                work = f"{shape.name} {shape.kind} {side}"
                lines.append(f"| {work} | {name} | {ms:.3f} | {today / ms:.2f} | {distance:.4f} |")
    print("| work | arm | ms | speed | off |\n|---|---|---|---|---|")
    print(*lines, sep="\n")
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
