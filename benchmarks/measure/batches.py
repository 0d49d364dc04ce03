"""Times training against autocast on an NVIDIA GPU, from batches where the host is the limit to large ones.

    python benchmarks/measure/batches.py [--compiled] [--sizes 2 8 32] [--micro-batches 1 8] [--rounds 5]

GPT-2 124M with clipping; a step has 1 or 8 micro-batches of `size` x 1024 tokens. The arms take turns in one
process, in reverse order every other round: autocast with torch's fused AdamW, `prepare` with split masters, with
whole ones, and with whole ones and that same AdamW. A number is the median of the rounds, in ms per step; the
ratio is to autocast in the same rounds. Exit code 1 if an arm of ours is slower.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch

from halfstep.tools.bench.arms.model import GPT2
from halfstep.torch import AdamW, prepare

ARMS = {
    "autocast": "",
    "split masters": "bf16-mixed,param=fp32:split",
    "whole masters": "bf16-mixed",
    "torch's AdamW": "bf16-mixed",
}
BAR = 1.0
Step = Callable[[torch.Tensor, int], object]


def arm(name: str, *, compiled: bool) -> Step:
    """Returns a function that makes one step of so many micro-batches."""
    torch.manual_seed(0)
    model = GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024).cuda()
    stock = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if not ARMS[name]:
        forward = torch.compile(model) if compiled else model

        def step(tokens: torch.Tensor, micro_batches: int) -> None:
            for _ in range(micro_batches):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = forward(tokens[:, :-1], tokens[:, 1:])
                (loss / micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stock.step()
            stock.zero_grad()

        return step
    optimizer = stock if name == "torch's AdamW" else AdamW(model.parameters(), lr=3e-4)
    run = prepare(model, optimizer, ARMS[name], clip_norm=1.0)
    prepared = torch.compile(model) if compiled else model
    return lambda tokens, micro_batches: run.step(
        lambda t: prepared(t[:, :-1], t[:, 1:]), [tokens] * micro_batches
    )


def timed(step: Step, tokens: torch.Tensor, micro_batches: int, repeats: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        step(tokens, micro_batches)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=[*ARMS][1:], default=[*ARMS][1:], help="besides autocast")
    options = parser.parse_args()
    mode, worst = "compiled" if options.compiled else "eager", 0.0
    arms = {name: arm(name, compiled=options.compiled) for name in ("autocast", *options.arms)}
    for size in options.sizes:
        tokens = torch.randint(0, 50304, (size, 1025), device="cuda")
        for micro_batches in options.micro_batches:
            repeats = max(1, 80 // (size * micro_batches))
            times: dict[str, list[float]] = {name: [] for name in arms}
            for each in range(options.rounds + 1):
                for name in list(arms)[:: 1 if each % 2 else -1]:
                    taken = timed(arms[name], tokens, micro_batches, repeats)
                    if each:  # the first warms up
                        times[name].append(taken)
            ms = {name: statistics.median(taken) for name, taken in times.items()}
            for name, taken in times.items():
                ratio = ms[name] / ms["autocast"]
                spread = f"{min(taken):.1f}-{max(taken):.1f}"
                place = f"{mode:8} {size:2}x1024 x {micro_batches}"
                print(f"{place}  {name:14} {ms[name]:8.2f} ms ({spread:13}) {ratio:5.2f}", flush=True)
                worst = max(worst, ratio)
        gc.collect()
    print(f"\nslowest: {worst:.2f} of autocast's time (at most {BAR})")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
