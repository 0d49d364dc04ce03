"""Measures what reading data costs per step: batches from packed data against batches already on the device.

    python benchmarks/measure/input_cost.py [--recipe gpt2] [--policy bf16-mixed] [--data DIR] [--gigabytes 2]
                                    [--rounds 6] [--steps 10] [--device cuda] [--set training.compile=false ...]

Two arms take turns in one process, with one model:

    fed     as training does it: a thread reads windows from memory-mapped shards, batches reach the device through
            pinned memory while the previous step runs, and results are read one step late
    held    the same step on batches that are already on the device

Neither arm repeats a batch: memorized batches have different gradients, and a GPU's speed depends on them.
Without --data, the script first writes shards of random tokens. Each turn begins with untimed steps that use up
the batches prefetched while the other arm ran. Exit code 1 if the median of `fed` is more than 1 % above that of
`held`. It also runs on a CPU (`--recipe tiny --device cpu --gigabytes 0.01 --steps 2 --rounds 2`), but means
little there, because the thread takes a core from the step.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.config.load import load
from halfstep.config.run import RunConfig
from halfstep.core.policy import Policy
from halfstep.training.data.batches import Prefetch, make_batches
from halfstep.training.data.index import Index, write_index
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack.writer import ShardWriter
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.session import open_session

BAR = 0.01
UNTIMED = 3


def write_random(folder: Path, vocabulary: int, gigabytes: float) -> None:
    """Writes packed data of random tokens, with a small held-out part."""
    dtype, generator = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4"), np.random.default_rng(0)
    left = int(gigabytes * 1e9) // dtype.itemsize
    sides = {}
    for side, number in (("train", left), ("val", 100_000)):
        writer = ShardWriter(folder, side, dtype, 100_000_000, None)
        while number > 0:
            tokens = generator.integers(0, vocabulary, min(number, 10_000_000)).astype(dtype)
            writer.append(tokens, np.zeros(1, dtype=np.int64))
            number -= len(tokens)
        writer.commit(final=True)
        sides[side] = writer.record()
    identity = dataclasses.replace(BytesTokenizer().identity(), vocabulary=vocabulary)
    write_index(folder, Index("random", identity, {}, {}, None, sides["train"], sides["val"]))


def turn(step: Callable[[], Any], read: Callable[[Any], Any], steps: int, wait: Callable[[], None]) -> float:
    """Returns seconds per step, measured after some untimed steps."""
    pending = None
    for number in range(UNTIMED + steps):
        if number == UNTIMED:
            wait()
            started = time.perf_counter()
        result = step()
        if pending is not None:
            read(pending)
        pending = result
    read(pending)
    wait()
    return (time.perf_counter() - started) / steps


def measure(config: RunConfig, policy: str, options: argparse.Namespace) -> int:
    corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
    batches = make_batches(config, corpus.train)
    session: Any = open_session(config, Policy.parse(policy), options.device)
    cuda = session.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    sent = session._to_device
    turns = options.rounds + 1
    held = [sent(batches.at(number)) for number in range(turns * (UNTIMED + options.steps))]
    print(f"{corpus.description}\n{session.description.name}, {policy}, order `{batches.order}`")
    started = time.perf_counter()
    for number in range(20):
        batches.at(number)
    print(
        f"reading a batch of {held[0].numel():,} tokens takes {(time.perf_counter() - started) / 20 * 1e3:.2f} ms"
    )
    seconds: dict[str, list[float]] = {"held": [], "fed": []}
    with Prefetch(batches.at, len(held), 1 << 40) as feed:
        arms = {
            "held": (lambda tokens: tokens, lambda: session.step(held.pop())),
            "fed": (sent, lambda: session.step(next(feed))),
        }
        for to_device, step in arms.values():  # compiles, allocates
            session._to_device = to_device
            turn(step, session.read, 1, wait)
        before = allocations(cuda)
        for number in range(options.rounds):
            for name in ("held", "fed") if number % 2 else ("fed", "held"):
                session._to_device, step = arms[name]
                seconds[name].append(turn(step, session.read, options.steps, wait))
        if cuda:
            print(f"pinned memory allocated {allocations(cuda) - before} times in {options.rounds} rounds")
    return report(seconds)


def allocations(cuda: bool) -> int:
    """Returns how often the driver was asked for pinned memory."""
    stats = getattr(torch.cuda, "host_memory_stats", dict)() if cuda else {}
    return int(stats.get("num_host_alloc", 0))


def report(seconds: dict[str, list[float]]) -> int:
    print(f"\n{'arm':<6}{'ms per step':>12}{'lowest':>10}{'highest':>10}")
    for name, taken in seconds.items():
        middle, low, high = (1e3 * each for each in (statistics.median(taken), min(taken), max(taken)))
        print(f"{name:<6}{middle:>12.3f}{low:>10.3f}{high:>10.3f}")
    cost = statistics.median(seconds["fed"]) / statistics.median(seconds["held"]) - 1
    print(f"\ninput costs {cost:+.2%} of a step; at most {BAR:.0%} is allowed")
    return 0 if cost <= BAR else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--policy", default="bf16-mixed")
    parser.add_argument("--data", help="packed data (default: random tokens)")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.data or folder
        config = load(options.recipe, [f"data.source={source}", *options.settings])
        if options.data is None:
            write_random(Path(folder), config.model.vocabulary, options.gigabytes)
        return measure(config, options.policy, options)


if __name__ == "__main__":
    sys.exit(main())
