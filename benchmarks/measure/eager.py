"""Times eager training at a small batch, where the host is the limit: autocast and `prepare` on an NVIDIA GPU.

    python benchmarks/measure/eager.py [--batch 2] [--rounds 3]

GPT-2 124M, not compiled, one micro-batch of `batch` x 1024 tokens per step, with clipping. The arms take turns,
one process each: ms per step of each round.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from halfstep.tools.bench.arms.model import GPT2
from halfstep.torch import AdamW, prepare

ARMS = {"autocast": "", "split masters": "bf16-mixed,param=fp32:split", "whole masters": "bf16-mixed"}


def time_arm(arm: str, batch: int) -> float:
    """Returns the median milliseconds per step."""
    torch.manual_seed(0)
    model = GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024).cuda()
    tokens = torch.randint(0, 50304, (batch, 1025), device="cuda")

    def loss_of(tokens):
        return model(tokens[:, :-1], tokens[:, 1:])

    if not ARMS[arm]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        run = prepare(model, AdamW(model.parameters(), lr=3e-4), ARMS[arm], clip_norm=1.0)

        def step():
            run.step(loss_of, [tokens])

    times = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 100)
    return statistics.median(times[1:])  # the first warms up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help="time this arm alone")
    options = parser.parse_args()
    if options.arm:
        print(f"{time_arm(options.arm, options.batch):.1f}")
        return 0
    for _ in range(options.rounds):
        for arm in ARMS:
            command = [sys.executable, __file__, "--arm", arm, "--batch", str(options.batch)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(f"{arm:14} {done.stdout.strip()} ms per step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
