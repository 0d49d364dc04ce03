"""Compares the host's time per update with that of a plain loop, where nothing but the host is the limit.

    python benchmarks/measure/host.py [--rounds 12] [--device cpu]

A GPT-2 of 12 layers that is 16 wide, 8 tokens per micro-batch: its arithmetic takes next to no time, so what is
timed is Python, dispatch and autograd, in processor time. The arms take turns in one process, in reverse order
every other time: autocast and fp32 in a plain loop, with torch's fused AdamW and clipping; `prepare` in bf16-mixed
with split masters, whole ones, and whole ones and that same AdamW; and in fp32 with it. A time is the median over
the rounds, its ratio that to autocast's or the plain loop's; `calls` are calls of Python functions and built-ins
per update.

Exit code 1 if an arm of ours makes more calls than its bar allows, with 1 or with 8 micro-batches. The bars are
what holds today and 2 % more, so that nothing creeps back. Calls are the same in every run; times are not, where
other processes share the machine. On a CPU split masters are joined and split in steps, and weight gradients widen
their operands; on a GPU both are kernels.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from benchmarks.measure.autocast_arms import POLICIES, USUAL, Update, make_update, take_turns

# The most calls per update, by the number of its micro-batches.
BARS = {
    1: {"split masters": 6_850, "whole masters": 5_655, "torch's AdamW": 6_960, "fp32": 4_835},
    8: {"split masters": 39_070, "whole masters": 32_850, "torch's AdamW": 34_160, "fp32": 19_230},
}


def small_model(device: str) -> GPT2:
    torch.manual_seed(0)
    return GPT2(layers=12, width=16, heads=2, vocabulary=64, context=8).to(device)


def calls_of(update: Update, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Returns how many Python functions and built-ins one update calls, in this thread."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        update(batches)
    finally:
        sys.setprofile(None)
    return count


def compare(device: str, micro_batches: int, rounds: int) -> bool:
    """Prints one table; returns whether every arm of ours makes no more calls than its bar allows."""
    arms = {name: make_update(name, small_model(device)) for name in (*USUAL, *POLICIES)}
    tokens = torch.randint(0, 64, (1, 9), device=device)
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())] * micro_batches
    repeats = max(1, 8 // micro_batches)

    def timed(update: Update) -> float:
        started = time.process_time()
        for _ in range(repeats):
            update(batches)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.process_time() - started) / repeats

    times = take_turns(arms, rounds, timed)
    ms = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    print(f"\n{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per update, {device}")
    calls, bars = {name: calls_of(update, batches) for name, update in arms.items()}, BARS[micro_batches]
    for name in arms:
        usual = USUAL[name in ("plain loop", "fp32")]
        ratio, bar = ms[name] / ms[usual], f"at most {bars[name]}" if name in bars else ""
        print(f"  {name:14} {ms[name]:7.2f} ms  {ratio:5.2f}  {calls[name]:6} calls  {bar}".rstrip())
    return all(calls[name] <= bar for name, bar in bars.items())


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
