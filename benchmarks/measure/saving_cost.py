"""Measures what saving costs: throughput with one checkpoint per minute over throughput with none, in one run.

    python benchmarks/measure/saving_cost.py [RECIPE] [--windows 3] [--seconds 40] [--every 60]
        [--out DIR] [--set K=V ...]

One loop trains the recipe in windows of `--seconds`: one with a save, one without, in reverse order each time. A
window of 40 seconds with a save is what a run with a checkpoint every 40 seconds sees, so the cost of one save
in `every` seconds is (1 - ratio) x seconds / every. A save starts early enough to be written inside its window.
The windows wait for the device at both ends, and a window without a save begins when nothing is being written.
Exit code 1 if the cost is 2 % or more.

On a GPU, with the precision that `auto` chooses there:

    python benchmarks/measure/saving_cost.py gpt2 --policy bf16-mixed --out /a/real/disk
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.training.data.batches import Prefetch
from halfstep.training.loop import Loop

BAR = 0.02
NEVER = 10**9


class Windows:
    """A run that saves by the clock."""

    def __init__(self, loop: Loop, batches: Prefetch, seconds: float):
        self.loop, self.batches, self.seconds = loop, batches, seconds

    def _steps(self, count: int) -> None:
        self.loop._steps(itertools.islice(self.batches, count))

    def run(self, save: bool) -> tuple[float, float]:
        """Trains for one window; returns steps per second, and how long writing the save took."""
        loop = self.loop
        loop.checkpointer.wait()
        self._steps(1)  # ends with its numbers read: the device has nothing left to do
        started, first = time.perf_counter(), loop.tally.step
        begun = written = 0.0
        while (now := time.perf_counter() - started) < self.seconds:
            self._steps(2)
            if save and not begun and now >= self.seconds / 4:
                begun = time.perf_counter()
                loop.checkpointer.save(loop.tally.step)
            if begun and not written and not loop.checkpointer.saver.is_busy:
                written = time.perf_counter() - begun
        speed = (loop.tally.step - first) / (time.perf_counter() - started)
        if save and not written:
            raise SystemExit("a save did not end in its window: raise --seconds")
        return speed, written


def main() -> int:
    parser = argparse.ArgumentParser(description="measure what saving costs")
    parser.add_argument("recipe", nargs="?", default="gpt2")
    parser.add_argument("--windows", type=int, default=3, help="of each kind")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two checkpoints")
    parser.add_argument("--policy", default="bf16-mixed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    overrides = [f"training.{key}={NEVER}" for key in ("steps", "save_every", "validate_every")]
    config = load(options.recipe, [*overrides, *options.overrides])
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        out = Path(folder) / "run"
        loop = Loop(config, Policy.parse(options.policy), out)
        speeds: dict[bool, list[float]] = {True: [], False: []}
        took: list[float] = []
        with (
            loop.events,
            loop.bar,
            loop.stop,
            Prefetch(loop.batches.at, 0, NEVER) as batches,
        ):
            loop.monitor.start(0)  # as a run does
            saver = loop.saver
            windows = Windows(loop, batches, options.seconds)
            windows._steps(5)  # compiles
            loop.checkpointer.save(loop.tally.step)  # pins memory
            waited = [saver.waited]
            for number in range(options.windows):
                for save in (True, False) if number % 2 else (False, True):
                    before = saver.waited
                    speed, seconds = windows.run(save)
                    speeds[save].append(speed)
                    if save:
                        took.append(seconds)
                        waited.append(saver.waited - before)
            size = sum(file.stat().st_size for file in (out / "checkpoints").glob("*/*.safetensors"))
    ratio = statistics.median(speeds[True]) / statistics.median(speeds[False])
    cost = (1 - ratio) * options.seconds / options.every
    tokens = loop._tokens_per_step
    for save, name in ((False, "without"), (True, "with a save")):
        listed = ", ".join(f"{speed * tokens:,.0f}" for speed in speeds[save])
        print(f"{name:<12} {listed} tokens/s in windows of {options.seconds:g} s")
    print(f"a checkpoint is {size / 2**20 / 2:,.0f} MiB; written in {', '.join(f'{t:.2f}' for t in took)} s")
    still = ", ".join(f"{t * 1e3:.1f}" for t in waited[1:])
    print(f"training waited {still} ms ({waited[0] * 1e3:.0f} the first time)")
    print(f"throughput with / without: {ratio:.4f} of windows with one save each")
    print(f"cost at one checkpoint in {options.every:g} s: {cost:.2%} (below {BAR:.0%})")
    return 0 if cost < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
