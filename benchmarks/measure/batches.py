"""Times training against autocast on an NVIDIA GPU, from batches where the host is the limit to large ones.

    python benchmarks/measure/batches.py [--compiled] [--graphs] [--sizes 2 8 32] [--micro-batches 1 8]

GPT-2 124M with clipping; a step has 1 or 8 micro-batches of `size` x 1024 tokens. The arms take short turns in one
process, in reverse order every other round: autocast with torch's fused AdamW, `prepare` with split masters, with
whole ones, and with whole ones and that same AdamW; with `--graphs` also one CUDA graph per update, of both.

Printed are the fastest turn and the median, in ms per step, each with its ratio to autocast. Small batches are
bound by the host. On a shared one a core runs at half its speed for seconds, whichever arm is on it; that only
adds time, so the fastest turn is what the code itself takes; short turns are four times as many, to meet the core
at its full speed. Exit code 1 if the fastest turn of an arm of ours is slower than autocast's.
"""

import argparse
import gc
import statistics
import sys
import time
from functools import partial

import torch
from autocast_arms import GRAPHS, POLICIES, Update, make_update, take_turns

from halfstep.tools.bench.arms.model import GPT2

BAR = 1.0


def gpt2_124m() -> GPT2:
    torch.manual_seed(0)
    return GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024).cuda()


def timed(update: Update, batches: list[tuple[torch.Tensor, torch.Tensor]], repeats: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        update(batches)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--arms", nargs="+", choices=[*POLICIES], default=[*POLICIES], help="besides autocast")
    parser.add_argument("--graphs", action="store_true", help="also time updates that are CUDA graphs")
    options = parser.parse_args()
    mode, worst = "compiled" if options.compiled else "eager", 0.0
    names = ("autocast", *options.arms, *(GRAPHS if options.graphs else ()))
    arms = {name: make_update(name, gpt2_124m(), compiled=options.compiled) for name in names}
    print(f"{'':32} fastest ratio     median ratio")
    for size in options.sizes:
        tokens = torch.randint(0, 50304, (size, 1025), device="cuda")
        for micro_batches in options.micro_batches:
            repeats = max(1, 16 // (size * micro_batches))
            batches = [(tokens[:, :-1], tokens[:, 1:])] * micro_batches
            rounds = options.rounds * (4 if size * micro_batches <= 16 else 1)
            times = take_turns(arms, rounds, partial(timed, batches=batches, repeats=repeats))
            for name, taken in times.items():
                fast, median = min(taken), statistics.median(taken)
                ratio = fast / min(times["autocast"])
                usual = median / statistics.median(times["autocast"])
                place = f"{mode:8} {size:2}x1024 x {micro_batches}"
                print(f"{place}  {name:14} {fast:8.2f} {ratio:5.2f}   {median:8.2f} {usual:5.2f}", flush=True)
                if name != "autocast":
                    worst = max(worst, ratio)
        gc.collect()
    print(f"\nslowest of ours: {worst:.2f} of autocast's time (at most {BAR})")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
