"""Compares the throughput of our loop with a bare PyTorch loop of the same model, interleaved in one run.

    python benchmarks/measure/overhead.py [--chunks 12] [--steps 20]

The bare arm is a hand-written loop: batch, loss, backward, clip, torch.optim.AdamW, zero_grad. Our arm is what
`halfstep train` runs: prefetch, finite check, unscale, clip, the same AdamW with a schedule, and results written
as events. The arms alternate in chunks, in reverse order each time. The ratio compares the median times per
step. Exit code 1 below 0.97.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.policy import Policy
from halfstep.torch.model import Decoder
from halfstep.training.data.batches import Prefetch
from halfstep.training.loop import Loop

BAR = 0.97


def bare_arm(loop: Loop, steps: int):
    """Returns a function that trains `steps` steps in a plain loop."""
    config = loop.config
    device = loop.session.device
    model = Decoder(config.model)
    model.set_weights(initial_weights(config.model, config.seed))
    model.to(device)
    decaying = [p for p in model.parameters() if p.ndim >= 2]
    steady = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": config.optimizer.weight_decay},
            {"params": steady, "weight_decay": 0.0},
        ],
        lr=config.optimizer.rate,
        betas=config.optimizer.betas,
        fused=True,
    )
    position = itertools.count()

    def run() -> None:
        for _ in range(steps):
            (batch,) = loop.batches.at(next(position))
            tokens = torch.from_numpy(batch).to(device, torch.int64)
            loss = model.loss(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="our loop against a bare one")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    total = (options.chunks + 1) * options.steps
    overrides = ["optimizer.name=adamw", f"training.steps={total}", "training.batch=16"]
    overrides += ["training.validate_every=1000000", "training.save_every=1000000"]
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(load("tiny", overrides), Policy.parse("fp32"), Path(folder) / "run")
        bare = bare_arm(loop, options.steps)
        times: dict[str, list[float]] = {"ours": [], "bare": []}
        with (
            loop.events,
            loop.bar,
            loop.stop,
            Prefetch(loop.batches.at, 0, total) as batches,
        ):
            loop.monitor.start(0)  # as a run does; its records are part of what our arm costs

            def ours() -> None:
                loop._steps(itertools.islice(batches, options.steps))

            for chunk in range(options.chunks + 1):
                arms = [("ours", ours), ("bare", bare)]
                for name, arm in arms if chunk % 2 else reversed(arms):
                    started = time.perf_counter()
                    arm()
                    if chunk:  # the first warms up
                        times[name].append((time.perf_counter() - started) / options.steps)
    ms = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    ratio = ms["bare"] / ms["ours"]
    spread = {name: f"{min(t) * 1e3:.2f}-{max(t) * 1e3:.2f}" for name, t in times.items()}
    for name in ("bare", "ours"):
        print(f"{name}  {ms[name]:.2f} ms per step ({spread[name]}), {options.chunks} chunks of {options.steps}")
    print(f"throughput of ours over bare: {ratio:.3f} (at least {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
