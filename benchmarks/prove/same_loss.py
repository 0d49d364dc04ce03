"""Compares the held-out losses of `halfstep train` on each backend: same recipe, steps and seed.

    python benchmarks/prove/same_loss.py [--steps 400] [--policy fp32] [--backends torch jax mlx]

The initial weights and the batches have the same bits. The order of sums differs, and every step amplifies that,
so the runs diverge, but less than two seeds do. The bound is a quarter of the difference that another seed makes
to this recipe after 400 steps in fp32 (0.0416 nats, docs/measurements/quality.md). Exit code 1 beyond it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BOUND = 0.0416 / 4


def train(backend: str, policy: str, steps: int, folder: Path) -> dict[str, float]:
    """Returns the outcome of one run, and the seconds it took."""
    command = [sys.executable, "-m", "halfstep", "train", "tiny", "--backend", backend, "--policy", policy]
    command += ["--set", f"training.steps={steps}", "--out", str(folder / f"{backend}"), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout), "seconds": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policy", default="fp32")
    parser.add_argument("--backends", nargs="+", default=["torch", "jax", "mlx"])
    options = parser.parse_args()
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in options.backends:
            outcomes[backend] = train(backend, options.policy, options.steps, Path(folder))
            print(f"{backend}: {outcomes[backend]}", file=sys.stderr, flush=True)
    losses = {backend: outcome["validation_loss"] for backend, outcome in outcomes.items()}
    first = losses[options.backends[0]]
    print(f"tiny, {options.policy}, {options.steps} steps, bound {BOUND:.4f} nats")
    print(f"{'backend':<9}{'held-out loss':>15}{'difference':>12}{'bits per byte':>15}{'seconds':>9}")
    for backend, outcome in outcomes.items():
        off = losses[backend] - first
        row = f"{backend:<9}{losses[backend]:>15.4f}{off:>+12.4f}{outcome['bits_per_byte']:>15.4f}"
        print(row + f"{outcome['seconds']:>9.0f}")
    return 0 if all(abs(loss - first) <= BOUND for loss in losses.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
