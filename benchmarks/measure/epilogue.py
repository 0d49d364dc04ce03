"""Times the first half of an MLP with its ReLU^2, forward and backward, by what could fuse it with the matmul.

    python benchmarks/measure/epilogue.py [--seconds 60] [--rounds 8]

Forward: h = x W1^T and relu(h)^2, both written. Backward: dh = (dy W2) 2 relu(h). A GELU is cuBLASLt's (mlp.py),
which has no ReLU^2.

    matmul alone            cuBLAS, without the activation function: what a perfect epilogue would cost
    cuBLAS, pointwise       what runs today: torch.compile of the plain function
    inductor ...            max_autotune_gemm with Triton's templates, which may take the epilogue
    kernel ...              ours (activated.py, in this folder); after the first shape, its two best forms

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

import torch
import torch.nn.functional as F
from mlp import captured, milliseconds
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
Forms = list[tuple[Any, ...]]


class Shape(NamedTuple):
    """Rows, width and hidden width."""

    name: str
    rows: int
    width: int
    hidden: int


SHAPES = [Shape("speedrun", 65536, 768, 3072), Shape("golf", 65536, 512, 1024)]
TINY = [Shape("tiny", 64, 16, 32)]
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

        self.x, self.grad = draw(shape.rows, shape.width), draw(shape.rows, shape.width)
        self.up = draw(shape.hidden, shape.width, scale=shape.width**-0.5)
        self.down = draw(shape.width, shape.hidden, scale=shape.hidden**-0.5)
        self.hidden = F.linear(self.x, self.up)

    def forward(self, x: Tensor, up: Tensor, bias: None) -> tuple[Tensor, ...]:
        """Returns h and relu(h)^2."""
        hidden = F.linear(x, up, bias)
        return hidden, F.relu(hidden).square()

    def backward(self, grad: Tensor, down: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradient of h."""
        return (grad @ down * 2 * F.relu(hidden),)

    def given(self, side: str) -> tuple[Any, ...]:
        """Returns what one of the two is called with."""
        return (self.x, self.up, None) if side == "forward" else (self.grad, self.down, self.hidden)


# ---- arms


def plain_arms(inputs: Inputs, side: str, device: str) -> dict[str, Callable[[], Work]]:
    """Returns how each arm of torch is made."""
    given, function = inputs.given(side), getattr(inputs, side)

    def alone() -> Work:
        if side == "forward":
            return lambda: (F.linear(inputs.x, inputs.up),)
        return lambda: (inputs.grad @ inputs.down,)

    def today() -> Work:
        return partial(
            torch.compile(function, fullgraph=True, dynamic=False) if device == "cuda" else function, *given
        )

    return {"matmul alone": alone, "cuBLAS, pointwise": today}


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


def kernel_arm(inputs: Inputs, side: str, form: tuple[Any, ...]) -> Work:
    """Returns our kernel in one form."""
    import activated  # needs Triton

    def work() -> tuple[Tensor, ...]:
        found = getattr(activated, side)(*inputs.given(side), "relu2", activated.Form(*form))
        return found if side == "forward" else (found,)

    return work


def makers_of(inputs: Inputs, side: str, device: str, forms: Forms, tuned: bool) -> dict[str, Callable[[], Work]]:
    """Returns how each arm is made."""
    makers = plain_arms(inputs, side, device)
    if device == "cpu":
        return makers
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


# ---- measuring


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
    makers = makers_of(inputs, side, device, forms, tuned=shape.name == "speedrun")
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
    forms = {"backward": FORMS, "forward": FORMS}
    for shape in TINY if options.tiny else SHAPES:
        for side in forms:
            print(f"{shape.name}, {side}, after {time.perf_counter() - begun:.0f} s", flush=True)
            rows = measure(shape, side, device, options.rounds, begun + options.seconds, forms[side])
            timed = [form for form in forms[side] if f"kernel {form}" in rows]
            forms[side] = sorted(timed, key=lambda form: rows[f"kernel {form}"][0])[:2]
            today = rows["cuBLAS, pointwise"][0]
            for name, (ms, distance) in rows.items():
                work = f"{shape.name} {side}"
                lines.append(f"| {work} | {name} | {ms:.3f} | {today / ms:.2f} | {distance:.4f} |")
    print("| work | arm | ms | speed | off |\n|---|---|---|---|---|")
    print(*lines, sep="\n")
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
