"""Times what the monitor costs: a recipe's model and batch with it and without it, interleaved in one process.

    python benchmarks/measure/monitor.py [--recipe gpt2] [--policy bf16-mixed] [--steps 100] [--samples 5]
        [--set training.deterministic=true ...]
    python benchmarks/measure/monitor.py --set training.micro_batches=1    the shortest step
    python benchmarks/measure/monitor.py --tiny              a small model on the CPU, only to see that it runs

Steps are taken in blocks, with and without in turn, each of which waits for the device once. With the monitor,
numbers are recorded every `monitor.every` steps and one sample is taken every `monitor.sample_every`, both read
as a run does. Prints the bars of the monitor, and exits with 1 if one is missed: time and memory at most 2 %
more, a sampled step at most 1.6 times a plain one, as many graphs. Losses of both are compared; they can be the
same bit for bit only if steps repeat themselves: `--set training.deterministic=true`.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from halfstep.config.load import load
from halfstep.config.run import RunConfig
from halfstep.core.observed import COUNT
from halfstep.core.policy import Policy
from halfstep.training.session import open_session

MEAN, SAMPLED = 1.02, 1.6
BLOCK, WARM = 10, 5
TINY = (
    "training.micro_batches=1",
    "training.batch=2",
    "training.compile=false",
    "model.layers=2",
    "model.width=32",
    "model.context=16",
)
SMALL = ("model.heads=2", "model.vocabulary=128")


class Arm:
    """A session, and the steps it has made."""

    def __init__(self, config: RunConfig, policy: str, device: str, *, monitor: bool):
        self.config, self.device, self.monitor = config, device, monitor
        counters.clear()
        self._before = self._allocated()
        self.session: Any = open_session(config, Policy.parse(policy), device)
        self.layers = self.session.watch(config.monitor.slice) if monitor else []
        shape = (config.training.micro_batches, config.training.batch, config.model.context + 1)
        draw = np.random.default_rng(0)
        self.batches = [draw.integers(0, config.model.vocabulary, shape).astype(np.int32) for _ in range(8)]
        self.losses, self.unread = list[torch.Tensor](), list[Any]()
        self.done = self.recorded = 0
        self.run(WARM)
        if monitor:
            if not self.session.layer_numbers().read()[..., COUNT].any():
                raise SystemExit("the monitor has counted nothing")
            self.record()
            self.sample()
        self.wait()
        self.graphs = counters["stats"]["unique_graphs"]
        self._reset()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def _reset(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Returns the peak of bytes since the last call, without those of the other arm."""
        return torch.cuda.max_memory_allocated() - self._before if self.device == "cuda" else 1

    def wait(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def step(self) -> None:
        """Trains one step."""
        result = self.session.step(self.batches[self.done % len(self.batches)])
        self.losses.append(result.loss)
        self.done += 1

    def run(self, steps: int) -> None:
        """Trains several steps; with the monitor, records as often as a run does, and reads one step later."""
        for _ in range(steps):
            if self.monitor and (self.done + 1) % self.config.monitor.every == 0:
                self.record()
            else:
                self.step()
            if self.recorded < self.done:
                while self.unread:
                    self.unread.pop().read()

    def record(self) -> None:
        """Trains one step whose numbers the monitor records."""
        weights = self.session.weight_numbers()
        self.step()
        self.unread += [weights, self.session.layer_numbers()]
        self.recorded = self.done

    def sample(self) -> None:
        """Samples a batch, up to the event that a run would write."""
        samples = self.session.sample(self.batches[self.done % len(self.batches)])
        for roles in samples.values():
            for sample in roles.values():
                sample.to_dict()

    def timed(self, work: Any) -> float:
        """Returns how many seconds an action takes, waiting for the device at both ends."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun


def measure(plain: Arm, watched: Arm, steps: int, samples: int) -> dict[str, float]:
    """Returns seconds: of a step of each arm on average, of a plain one, of one with a sample."""
    blocks: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * steps // BLOCK):
        arm = (plain, watched)[(block + block // 2) % 2]  # each goes first as often
        blocks[arm.monitor].append(arm.timed(lambda arm=arm: arm.run(BLOCK)))

    def with_sample() -> None:
        watched.step()
        watched.sample()

    sampled = [watched.timed(with_sample) for _ in range(samples)]
    single = [plain.timed(plain.step) for _ in range(samples)]
    step = statistics.median(single)
    more = max(0.0, statistics.median(sampled) - step) / (watched.config.monitor.sample_every or steps)
    return {
        "plain": sum(blocks[False]) / steps,
        "watched": sum(blocks[True]) / steps + more,
        "single": step,
        "sampled": statistics.median(sampled),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--policy", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=100, help="of each arm")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tiny", action="store_true", help="use a small model on the CPU; no bar counts")
    options = parser.parse_args()
    config = load(options.recipe, [*(TINY + SMALL if options.tiny else ()), *options.overrides])
    device = "cpu" if options.tiny else "cuda"
    policy = "fp32" if options.tiny else options.policy
    watched = Arm(config, policy, device, monitor=True)  # first: to watch a model compiles others again
    watched.run(WARM)
    watched.sample()
    watched.wait()
    most = watched.peak()
    plain = Arm(config, policy, device, monitor=False)
    plain.run(WARM)
    peak = plain.peak()
    seconds = measure(plain, watched, options.steps, options.samples)
    count = min(plain.done, watched.done)
    same = torch.equal(torch.stack(plain.losses[:count]), torch.stack(watched.losses[:count]))
    bars = {
        "time, mean": (seconds["watched"] / seconds["plain"], MEAN),
        "memory": (most / peak, MEAN),
        "sampled step": (seconds["sampled"] / seconds["single"], SAMPLED),
        "graphs": (watched.graphs / plain.graphs if plain.graphs else 1.0, 1.0),
    }
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(f"{options.recipe} in {policy} on {name}, torch {torch.__version__}, {len(watched.layers)} layers")
    print(
        f"{1000 * seconds['plain']:.2f} ms without, {1000 * seconds['watched']:.2f} ms with; a step alone ", end=""
    )
    print(f"{1000 * seconds['single']:.2f} ms, with a sample {1000 * seconds['sampled']:.2f} ms")
    print(f"{plain.graphs} graphs without, {watched.graphs} with; {peak / 2**30:.2f} GiB without")
    print(f"losses of {count} steps: {'the same bits' if same else 'not the same bits'}")
    for bar, (ratio, limit) in bars.items():
        print(f"{bar:>14}: {ratio:.4f} of at most {limit}{'' if ratio <= limit else '   MISSED'}")
    missed = any(ratio > limit for ratio, limit in bars.values())
    deterministic_differs = config.training.deterministic and not same
    return int(not options.tiny and (deterministic_differs or missed))


if __name__ == "__main__":
    sys.exit(main())
