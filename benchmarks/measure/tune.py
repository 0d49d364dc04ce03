"""Tunes a GPT on this device, and compares what was found with fp8-mixed: time by turns, and held-out loss.

    python benchmarks/measure/tune.py                     1.3B parameters (24 x 2048): some six minutes on an H200
    python benchmarks/measure/tune.py --device cpu --layers 1 --width 32 --heads 2 --context 16 --batch 2
        --vocabulary 256 --steps 4 --rounds 1               the same on any machine, to see that it runs

Runs of the search are eager, so that none waits for a compiler, have a quarter of the rows, and begin with weights
that are drawn on the device. Layers are timed with all rows, and the time of a step is that of compiled blocks, of
both policies by turns. Exit code 1 if the tuned policy is slower by more than the spread of its rounds, or its
held-out loss is higher than fp8-mixed's and not "same". What it may lose is what fp8-mixed may lose (its 90 %
interval), with the layers that fp8-mixed finds faster here, and half the spread of seeds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from halfstep.core.compare.gaps import seed_spread, verdict
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.tools.tune.reasons import describe_saving, describe_verdict, policy_file
from halfstep.tools.tune.rules import apply_assignment
from halfstep.tools.tune.search import Option
from halfstep.tools.tune.targets import base_of
from halfstep.tools.tune.tune import Settings, Tuner, TuneResult
from halfstep.torch import AdamW, prepare
from halfstep.torch.convert.plan import matmuls, plans_of
from halfstep.torch.instruments.tuning import Study, Trial
from halfstep.training.data.load import load_corpus

HELD_OUT = 8  # batches


class Shape:
    """A GPT of some size on the bytes of the standard library: a target of the tuner."""

    named, note = None, ""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device, self.compiled = options, options.device, options.device != "cpu"
        corpus = load_corpus("stdlib", 0.1, 256)
        self.text = {"train": torch.tensor(corpus.train), "held_out": torch.tensor(corpus.validation)}

    def batches(self, part: str, count: int, rows: int) -> list[Any]:
        """Returns the first batches of a text: inputs and targets."""
        size = self.options.context + 1
        tokens = self.text[part][: count * rows * size].view(count, rows, size).long().to(self.device)
        return [(each[:, :-1], each[:, 1:]) for each in tokens]

    def make(self) -> tuple[Any, ...]:
        """Returns what a factory does; weights come from torch's random state."""
        o = self.options
        with torch.device(self.device):
            model = GPT2(layers=o.layers, width=o.width, heads=o.heads, vocabulary=o.vocabulary, context=o.context)
        rows = max(o.batch // 4, 1)
        train, held_out = self.batches("train", o.steps, rows), self.batches("held_out", HELD_OUT, rows)
        return model, AdamW(model.parameters(), lr=1e-4), lambda pair: model(*pair), train, held_out

    def trial(self, policy: Policy, seed: int) -> Trial:
        """Returns a new model under a policy."""
        torch.manual_seed(seed)
        return Trial(self.make, policy, seed)

    def train(self, policy: Policy, seed: int, steps: int, report: Callable[[int], None]) -> float:
        """Trains a new model; returns its held-out loss."""
        return self.trial(policy, seed).train(steps, report)

    def study(self, base: Policy, seed: int, steps: int, report: Callable[[int], None]) -> Study:
        """Studies the gradients of one sequence, to be quick; the layers have the rows of a whole batch."""
        trial = self.trial(base, seed)
        trial.train(steps, report)
        study = Study(trial.run, trial.loss_fn, self.batches("train", 1, 1))
        rows = self.options.batch * self.options.context
        study.layers = [replace(layer, rows=rows) for layer in study.layers]
        return study


def arm(shape: Shape, policy: str) -> Callable[[int], float]:
    """Returns a function that takes so many compiled steps and returns the seconds of one."""
    torch.manual_seed(0)
    model, optimizer, *_ = shape.make()
    batches = shape.batches("train", 4, shape.options.batch)
    tokens = shape.options.batch * shape.options.context
    run = prepare(model, optimizer, policy, clip_norm=1.0, tokens=tokens)
    if shape.compiled:  # block by block, which compiles one of each kind
        for block in model.h:
            block.compile()

    def take(count: int) -> float:
        wait(shape.device)
        begun = time.perf_counter()
        for i in range(count):
            run.step(lambda pair: model(*pair), [batches[i % len(batches)]])
        wait(shape.device)
        return (time.perf_counter() - begun) / count

    take(3 if shape.compiled else 1)  # compiles
    return take


def wait(device: str) -> None:
    """Waits for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def race(shape: Shape, policies: dict[str, str]) -> dict[str, list[float]]:
    """Returns the seconds of a step of each policy, by turns."""
    arms = {name: arm(shape, policy) for name, policy in policies.items()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(shape.options.rounds):
        for name, take in arms.items():
            taken[name].append(take(5 if shape.compiled else 1))
    return taken


def rival_of(shape: Shape, base: Policy) -> Policy:
    """Returns what fp8-mixed is on this device: a rule for each layer that it times and finds faster."""
    model, optimizer, *_ = shape.make()
    named = "fp8-mixed" if shape.device != "cpu" else "fp8-mixed,emulate=true"
    run = prepare(model, optimizer, named, tokens=shape.options.batch * shape.options.context)
    print(f"fp8-mixed: {run.conversion.measured.description}")
    print(*dict.fromkeys(run.conversion.measured.notes.values()), sep="\n", flush=True)
    narrow = run.conversion.measured.narrow or {plan.name: True for plan in matmuls(plans_of(run.model))}
    forward, backward = precisions(Policy.parse(named), [*narrow])[next(iter(narrow))].operands
    option = Option(str(forward.format), str(backward.format))
    return apply_assignment(base, [*narrow], {name: option for name, chosen in narrow.items() if chosen})[0]


def losses_of(shape: Shape, policy: Policy) -> list[float]:
    """Returns the held-out loss of each seed."""
    return [
        shape.train(policy, seed, shape.options.steps, lambda step: None) for seed in range(shape.options.seeds)
    ]


def tune(shape: Shape, budget: float, out: Path) -> TuneResult:
    """Searches."""
    o = shape.options
    base = str(base_of(shape, None))
    settings = Settings("1.3B", base, ("e4m3",), ("e5m2",), str(budget), o.steps, o.seeds, o.seeds + 2, 4)
    begun = time.perf_counter()

    def progress(done: int, total: int, words: str) -> None:
        if done % 50 == 0:
            print(f"{time.perf_counter() - begun:6.0f} s  {done}/{total}  {words}", flush=True)

    return Tuner(shape, settings, out, progress).run()


def main() -> int:
    """Tunes, races and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 24, "width": 2048, "heads": 16, "context": 1024, "batch": 16, "vocabulary": 50304}
    for name, value in (sizes | {"steps": 40, "seeds": 4, "rounds": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape(options)
    base = Policy.parse(str(base_of(shape, None)))
    rival = rival_of(shape, base if options.device != "cpu" else replace(base, emulate=True))
    reference, lost = losses_of(shape, base), losses_of(shape, rival)
    of_rival = verdict([a - b for a, b in zip(lost, reference, strict=True)], 0.0)
    print(f"fp8-mixed has a gap of {of_rival.mean:+.4f} to the base; "
          f"up to {of_rival.interval90[1]:+.4f} at 90 %", flush=True)  # fmt: skip
    delta = seed_spread(reference) / 2
    tuned = tune(shape, max(of_rival.interval90[1], 0.0) + delta, options.out or Path(tempfile.mkdtemp()))
    for each in tuned.evaluations:
        outcome = f"{describe_verdict(each)}; {describe_saving(tuned, each)}"
        print(f"{len(each.modules)} of {len(tuned.rows)} narrow: {outcome}", flush=True)
    if tuned.met:
        print(policy_file(tuned), flush=True)
    alike = precisions(tuned.policy, tuned.rows) == precisions(rival, tuned.rows)
    if alike:
        print("tuned and fp8-mixed have the same formats in every layer: one set of runs", flush=True)
    losses = {"tuned": lost if alike else losses_of(shape, tuned.policy), "fp8-mixed": lost}
    print(json.dumps({"held_out": losses}), flush=True)
    taken = race(shape, {"tuned": str(tuned.policy), "fp8-mixed": str(rival)})
    print(json.dumps({"seconds": taken}), flush=True)
    medians = {name: median(each) for name, each in taken.items()}
    spread = max(taken["tuned"]) - min(taken["tuned"])
    gaps = verdict([a - b for a, b in zip(losses["tuned"], lost, strict=True)], delta)
    slower, worse = medians["tuned"] - spread > medians["fp8-mixed"], gaps.mean > 0 and gaps.kind != "same"
    print(f"tuned / fp8-mixed: {medians['tuned'] / medians['fp8-mixed']:.3f} of the time, "
          f"{gaps.mean:+.4f} of held-out loss: {gaps.kind}")  # fmt: skip
    return int(slower or worse)


if __name__ == "__main__":
    raise SystemExit(main())
