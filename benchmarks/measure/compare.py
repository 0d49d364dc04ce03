"""Calibrates `halfstep compare`: how often does it call runs different that differ by their seeds alone?

    python benchmarks/measure/compare.py [--first SEED] [--pool 64] [--draws 100] [--runs 8] [--steps 40]
        [--out DIR] [--json FILE]

Trains a pool of micro runs in fp32, each with a seed of its own, then draws 8 + 8 of them again and again and lets
`halfstep compare` judge them: whatever it calls different is a false alarm. At a level of 1 % one of 100 is
expected; more than 5 have a chance of 0.05 %, and the exit code is 1. The share of "same" and "cannot tell" is
reported, and how often the curves are said to part. With --out the pool is kept, and not trained again.
"""

import argparse
import collections
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from halfstep.config.load import load
from halfstep.core.compare.divergence import first_divergence
from halfstep.core.compare.gaps import seed_spread, verdict
from halfstep.tools.compare.curves import PARTING, Curve, common_steps, stack_runs
from halfstep.tools.compare.runs import train_policies
from halfstep.training.session import backend_version

MICRO = ("layers=1", "width=32", "heads=2", "context=32")
ALLOWED = 0.05  # of the draws


def pool(first: int, size: int, steps: int, out: Path) -> list[Curve]:
    """Returns the runs, one for each seed."""
    settings = [f"model.{each}" for each in MICRO]
    config = load("tiny", [*settings, "training.batch=4", "training.validation_tokens=8192"])
    print(
        f"torch {backend_version(config)}; {size} runs of {steps} steps, from seed {first} on: {', '.join(MICRO)}"
    )
    begin = time.perf_counter()
    show = partial(_show, size * steps)
    curves = train_policies(config, ["fp32"], range(first, first + size), steps, show, out=out)["fp32"]
    print(f"trained, or read, in {time.perf_counter() - begin:.0f} s", flush=True)
    return list(curves.values())


def _show(total: int, done: int, words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} steps  {words:<20}", end="", file=sys.stderr, flush=True)


def draw(a: list[Curve], b: list[Curve]) -> tuple[str, bool]:
    """Returns the verdict on two sets of runs, and whether their curves are said to part."""
    losses_a, losses_b = ([float(curve.held_out or 0) for curve in curves] for curves in (a, b))
    gaps = [x - y for x, y in zip(losses_a, losses_b, strict=True)]
    steps = {name: at for name, at in common_steps([*a, *b]).items() if name.startswith(PARTING)}
    parted = first_divergence(stack_runs(a, steps), stack_runs(b, steps)) is not None
    return verdict(gaps, seed_spread(losses_b) / 2).kind, parted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"first": 0, "pool": 64, "draws": 100, "runs": 8, "steps": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        curves = pool(options.first, options.pool, options.steps, options.out or Path(temporary))
    losses = [float(curve.held_out or 0) for curve in curves]
    print(f"held-out loss {np.mean(losses):.4f}, seed spread {seed_spread(losses):.4f}")
    rng, kinds, parted = np.random.default_rng(0), collections.Counter[str](), 0
    for _ in range(options.draws):
        chosen = [curves[i] for i in rng.choice(len(curves), 2 * options.runs, replace=False)]
        kind, parts = draw(chosen[: options.runs], chosen[options.runs :])
        kinds[kind] += 1
        parted += parts
    for kind in ("different", "same", "cannot tell"):
        print(f"{kind:<12} {kinds[kind]:>4} of {options.draws}")
    print(f"curves part  {parted:>4} of {options.draws}")
    if options.json:
        options.json.write_text(json.dumps({"losses": losses, "verdicts": kinds, "parted": parted}) + "\n")
    return int(kinds["different"] > ALLOWED * options.draws)


if __name__ == "__main__":
    sys.exit(main())
