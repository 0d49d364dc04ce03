"""Compares the host's time per update with autocast's, where nothing but the host is the limit.

    python benchmarks/measure/host.py [--rounds 12] [--device cpu]

A GPT-2 of 12 layers that is 16 wide, 8 tokens per micro-batch: its arithmetic takes next to no time, so what is
timed is Python, dispatch and autograd, in processor time, which a busy machine changes little. The arms take turns
in one process, in reverse order every other time: autocast with torch's fused AdamW and clipping; `prepare` with
split masters, whole ones, and that same AdamW. A time is the median over the rounds; `calls` are calls of Python
functions and built-ins per update.

Exit code 1 if an arm of ours is beyond its bar, with 1 or with 8 micro-batches. The bars are what holds today, so
that nothing creeps back. On a CPU split masters are joined and split in steps, and weight gradients widen their
operands; on a GPU both are kernels.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from halfstep.tools.bench.arms.model import GPT2
from halfstep.torch import AdamW, prepare

BARS = {"split masters": 1.35, "whole masters": 1.2, "torch's AdamW": 1.2}
POLICIES = {
    "split masters": "bf16-mixed,param=fp32:split",
    "whole masters": "bf16-mixed",
    "torch's AdamW": "bf16-mixed",
}


def arm(name: str, device: str, micro_batches: int) -> Callable[[], None]:
    """Returns a function that makes one update."""
    torch.manual_seed(0)
    model = GPT2(layers=12, width=16, heads=2, vocabulary=64, context=8).to(device)
    tokens = torch.randint(0, 64, (1, 9), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "autocast":

        def update() -> None:
            for _ in range(micro_batches):
                with torch.autocast(device, torch.bfloat16):
                    loss = model(inputs, targets)
                (loss / micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stock.step()
            stock.zero_grad()

        return update
    optimizer = stock if name == "torch's AdamW" else AdamW(model.parameters(), lr=1e-4)
    run = prepare(model, optimizer, POLICIES[name], clip_norm=1.0)
    batches = [(inputs, targets)] * micro_batches
    return lambda: run.step(lambda batch: model(*batch), batches) and None


def calls_of(update: Callable[[], None]) -> int:
    """Returns how many Python functions and built-ins one update calls, in this thread."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        update()
    finally:
        sys.setprofile(None)
    return count


def compare(device: str, micro_batches: int, rounds: int) -> bool:
    """Prints one table; returns whether every arm of ours is within its bar."""
    arms = {name: arm(name, device, micro_batches) for name in ("autocast", *POLICIES)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for each in range(rounds + 1):
        for name, update in list(arms.items())[:: 1 if each % 2 else -1]:
            started = time.process_time()
            for _ in range(max(1, 8 // micro_batches)):
                update()
            if device == "cuda":
                torch.cuda.synchronize()
            if each:  # the first warms up
                times[name].append((time.process_time() - started) / max(1, 8 // micro_batches))
    ms = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    print(f"\n{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per update, {device}")
    for name, update in arms.items():
        ratio, bar = ms[name] / ms["autocast"], f"at most {BARS[name]:.2f}" if name in BARS else ""
        print(f"  {name:14} {ms[name]:7.2f} ms  {ratio:5.2f}  {calls_of(update):6} calls  {bar}".rstrip())
    return all(ms[name] / ms["autocast"] <= bar for name, bar in BARS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    within = [compare(options.device, micro_batches, options.rounds) for micro_batches in (1, 8)]
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
