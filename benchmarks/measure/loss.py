"""Times a linear layer with its cross-entropy, forward and backward, and a step of GPT-2 124M with and without it.

    python benchmarks/measure/loss.py [--repeats 12] [--no-step]

    torch       bf16 matmul of an fp32 weight, `F.cross_entropy` of widened logits, compiled
    rows        halfstep's linear layer, then its kernel on the logits, which stay as they are, compiled
    linear      `linear_cross_entropy`: the gradient is written over the logits, compiled
    4 chunks    the same in four chunks
    eager ...   without a compiler

Arms of one shape take turns; the median of their milliseconds, and the peak of memory beyond what the inputs take.
Needs an NVIDIA GPU; `--tiny` runs small shapes on any machine, only to show that it runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch import casts_for, linear, linear_cross_entropy
from halfstep.torch.layers import cross_entropy
from halfstep.torch.loss import plain as losses
from halfstep.torch.session import Session

SHAPES = [
    (32768, 768, 50304),
    (32768, 768, 50257),
    (16384, 2048, 50304),
    (16384, 2048, 128256),
    (8192, 4096, 128256),
]
TINY = [(64, 16, 48)]
CASTS = casts_for("bf16-mixed")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_torch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight.to(x.dtype)).float(), targets)


def of_rows(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(x, weight, None, CASTS), targets, CASTS) / targets.shape[0]


def in_chunks(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, targets, chunks=4)


def arms() -> dict[str, Loss]:
    eager = {"torch": of_torch, "rows": of_rows, "linear": linear_cross_entropy, "4 chunks": in_chunks}
    compiled = {name: torch.compile(loss, fullgraph=True) for name, loss in eager.items()}
    return {**compiled, "eager torch": of_torch, "eager linear": linear_cross_entropy}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str) -> float:
    """Returns milliseconds from launch to end, of work that keeps the device busy."""
    wait(device)
    begun = time.perf_counter()
    work()
    wait(device)
    return 1000 * (time.perf_counter() - begun)


def measure(shape: tuple[int, int, int], repeats: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Returns ms, peak MiB and loss of each arm."""
    tokens, width, vocabulary = shape
    x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    torch.compiler.reset()
    times: dict[str, list[float]] = {}
    peaks, found = {}, {}

    def passes(loss: Loss) -> Tensor:
        x.grad = weight.grad = None
        total = loss(x, weight, targets)
        total.backward()
        return total.detach()

    given = arms()
    for each in range(repeats + 2):
        for name, loss in list(given.items())[:: 1 if each % 2 else -1]:
            if device == "cuda":
                x.grad = weight.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = timed(partial(passes, loss), device)
            if each < 2:
                found[name] = float(passes(loss))
            else:
                times.setdefault(name, []).append(taken)
                if device == "cuda":
                    peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {name: (statistics.median(times[name]), peaks.get(name, 0.0), found[name]) for name in given}


def measure_step(repeats: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Returns ms, peak MiB and the last loss of a step of 124M, compiled, with and without our kernel."""
    sizes = [
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "model.context=32",
        "training.batch=2",
        "model.vocabulary=64",
    ]
    extra = [] if device == "cuda" else [*sizes, "training.compile=false"]
    config = load("gpt2", ["training.micro_batches=1", "training.measure_ceiling=false", *extra])
    shape = (repeats, 1, config.training.batch, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, shape).astype(np.int32)
    real, results = losses.has_kernel, {}
    ways: dict[str, tuple[Callable[[Tensor], bool], int]] = {
        "step, torch's loss": (lambda _: False, 1),
        "step, linear": (real, 1),
        "step, 4 chunks": (real, 4),
    }
    for name, (losses.has_kernel, chunks) in ways.items():
        torch.compiler.reset()
        session = Session(config, Policy.parse("bf16-mixed,param=fp32:split"), device)
        session.model.loss_chunks = chunks
        for batch in tokens[:4]:
            result = session.step(batch)
        wait(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = [timed(partial(session.step, batch), device) for batch in tokens]
        result = session.step(tokens[0])
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
        results[name] = (statistics.median(taken), peak, session.read(result)["loss"])
        del session, result
    losses.has_kernel = real
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--no-step", action="store_true", help="leave the steps of 124M out")
    parser.add_argument("--tiny", action="store_true", help="use small shapes on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    begun, lines = time.perf_counter(), []
    results = {} if options.no_step else {"124M, 32 x 1024": measure_step(options.repeats, device)}
    for shape in TINY if options.tiny else SHAPES:
        results["{} x {} x {}".format(*shape)] = measure(shape, options.repeats, device)
        print(f"{shape} after {time.perf_counter() - begun:.0f} s", flush=True)
    for name, rows in results.items():
        first = next(iter(rows.values()))[0]
        for arm, (ms, mib, loss) in rows.items():
            lines.append(f"| {name} | {arm} | {ms:.2f} | {first / ms:.2f} | {mib:,.0f} | {loss:.5f} |")
    print("| tokens x width x vocabulary | arm | ms | speed | peak MiB | loss |\n|---|---|---|---|---|---|")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
