"""Checks that a run begun on one backend resumes on each other: nine pairs, killed in between.

    python benchmarks/prove/other_backends.py [--steps 40] [--json FILE]

`tiny`, cut to 40 steps and small shapes, in fp32. On each of torch, JAX and MLX a process begins the run and is
killed with SIGKILL in step 24; the newest checkpoint is that of step 20. For each ordered pair of backends another
process resumes a copy of what the first left, on the second, and must find masters, moments, averages and counts
bit for bit. It also evaluates that checkpoint, samples from it, and begins a run with its weights. Processes are
forked from one that has imported the frameworks and computed nothing.

**The bound.** A sum of n products in fp32, in any order, is the exact sum for weights changed by a relative
gamma = n u / (1 - n u) at most, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1, 3.5). So
a backend trains like exact arithmetic whose weights change by up to gamma before each step. A control run on torch
does that: before each step it multiplies every weight by 1 + gamma or 1 - gamma, at random. n is the longest sum
of the model: over the vocabulary, the tokens of a batch, or the inputs of a matrix. Errors of rounding cancel
and reach about sqrt(n) u, so the control errs more than a backend. Two computed runs are each that far from the
exact one, so a resumed run's losses may differ from the uninterrupted run's on torch by twice the most that the
control's do. The whole run counts: one that begins on MLX differs from its first step on.

Exit code 1 if a bit or a loss is out of bounds. 14 runs: 3 begun, 9 resumed, 1 uninterrupted, 1 control.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.cli.trained import held_out_text
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.evaluation import evaluate
from halfstep.training.loop import Loop
from halfstep.training.paths import CHECKPOINTS, EVENTS
from halfstep.training.run.resume import open_run
from halfstep.training.run.trained import generate, open_trained
from halfstep.training.telemetry.events import read_events

BACKENDS = ("torch", "jax", "mlx")
SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=4",
         "training.validate_every=1000", "training.validation_tokens=256", "training.save_every=20",
         "training.ema=0.9", "training.measure_ceiling=false", "training.compile=false"]  # fmt: skip
SMALL += ["monitor.on=false"]
U = 2.0**-24
PROMPT = [100, 101, 102]


def settings(folder: Path, *more: str) -> list[str]:
    """Returns the settings of a small run, on a text of its own."""
    return [f"data.source={folder / 'text.txt'}", *SMALL, *more]


def gamma(config: Any) -> float:
    """Returns the relative change of weights that stands for rounding in sums of any order."""
    model = config.model
    tokens = config.training.batch * model.context
    longest = max(model.vocabulary, tokens, 4 * model.width)
    return longest * U / (1 - longest * U)


def share_programs(folder: Path, backend: str) -> None:
    """Lets processes share what XLA compiled: a program is compiled once, not four times."""
    if backend == "jax":
        import jax

        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def begin(folder: Path, backend: str, out: Path, steps: int, kill: int | None, *, perturbed: bool = False) -> None:
    """Begins a run, and kills its process in a step if one is named."""
    share_programs(folder, backend)
    config = load("tiny", settings(folder, f"backend={backend}", f"training.steps={steps}"))
    loop = Loop(config, Policy.parse("fp32"), out, device="cpu")
    launch, change = loop.session.step, gamma(config)
    generator = np.random.default_rng(1)

    def step(batch: Any) -> Any:
        if perturbed:
            loop.session.load(_perturbed(loop.session.state(), change, generator))
        if loop.tally.step == kill:
            while checkpoint.latest(out / CHECKPOINTS) is None:  # the thread that writes it may need a moment
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(batch)

    loop.session.step = step  # type: ignore[method-assign]
    assert loop.run().finished


def _perturbed(state: dict[str, Stored], change: float, generator: np.random.Generator) -> dict[str, Stored]:
    changed = dict(state)
    for name, (dtype, shape, data) in state.items():
        if name.startswith("model."):
            weights = np.frombuffer(data, np.float32).astype(np.float64)
            weights *= 1 + change * generator.choice([-1.0, 1.0], weights.shape)
            changed[name] = Stored(dtype, shape, weights.astype(np.float32).tobytes())
    return changed


def resume(folder: Path, backend: str, out: Path) -> dict[str, Any]:
    """Resumes a run on a backend; returns what differs from its checkpoint, and what else reads it."""
    share_programs(folder, backend)
    saved = checkpoint.latest(out / CHECKPOINTS)
    assert saved is not None
    arrays = checkpoint.load(saved)[0]
    config = load("tiny", settings(folder, f"backend={backend}", "training.steps=1", f"init={saved}"))
    begun = Loop(config, Policy.parse("fp32"), folder / f"{out.name}-init", device="cpu")
    differ = _differ(begun.session.state(), arrays, "model.")
    begun.lock.release()
    trained = open_trained(saved, "cpu", backend=backend, weights="model")
    corpus = held_out_text(trained)
    loss = evaluate(trained.session, corpus, trained.config).loss
    text = [*generate(trained.session, PROMPT, 8, 0.0, 0, 0, alphabet=256)]
    opened = open_run(out, overrides=[f"backend={backend}"])
    loop = Loop(opened.config, Policy.parse("fp32"), out, device="cpu", opened=opened)
    differ += _differ(loop.session.state(), arrays, ("model.", "optimizer.", "average.", "scale.", "applied"))
    assert loop.run().finished
    return {"step": int(saved.name[-6:]), "differ": differ, "held_out": loss, "text": text}


def _differ(state: dict[str, Stored], saved: dict[str, Stored], prefixes: Any) -> list[str]:
    sides = [{n: (a[0], tuple(a[1]), bytes(a[2])) for n, a in s.items() if n.startswith(prefixes)}
             for s in (state, saved)]  # fmt: skip
    return sorted(n for n in sides[0].keys() | sides[1] if sides[0].get(n) != sides[1].get(n))


def losses(out: Path) -> list[float]:
    """Returns the loss of each step, of the last process that made it."""
    found = {event["step"]: event["loss"] for event in read_events(out / EVENTS) if event["event"] == "step"}
    return [found[step] for step in sorted(found)]


def run_all(folder: Path, steps: int) -> dict[str, Any]:
    """Makes all runs; returns the bound and what each pair did."""
    lines = (f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(2000))
    (folder / "text.txt").write_text("\n\n".join(lines))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["jax", "mlx.core", "torch", "halfstep.training.loop", "halfstep.torch.session",
                                   "halfstep.jax.session", "halfstep.mlx.session"])  # fmt: skip
    pairs = list(product(BACKENDS, BACKENDS))
    for backend in BACKENDS:
        child = server.Process(target=begin, args=(folder, backend, folder / backend, steps, steps * 6 // 10))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, (backend, child.exitcode)
        for other in BACKENDS:
            shutil.copytree(folder / backend, folder / f"{backend}-{other}")
    with ProcessPoolExecutor(1, server, max_tasks_per_child=1) as pool:
        for name, perturbed in (("plain", False), ("control", True)):
            pool.submit(begin, folder, "torch", folder / name, steps, None, perturbed=perturbed).result()
        plain, control = losses(folder / "plain"), losses(folder / "control")
        found = {}
        for pair in pairs:
            out = folder / "-".join(pair)
            result = pool.submit(resume, folder, pair[1], out).result()
            off = [abs(a - b) for a, b in zip(losses(out), plain, strict=True)]
            found["-".join(pair)] = {**result, "largest": max(off), "after": max(off[result["step"] :])}
    bound = 2 * max(abs(a - b) for a, b in zip(control, plain, strict=True))
    return {"steps": steps, "bound": bound, "first": plain[0], "last": plain[-1], "pairs": found}


def problems(result: dict[str, Any]) -> list[str]:
    """Returns what is out of bounds."""
    wrong = []
    first = result["pairs"]["torch-torch"]
    for pair, found in result["pairs"].items():
        if found["differ"]:
            wrong.append(f"{pair}: {len(found['differ'])} tensors differ, such as {found['differ'][0]}")
        if not max(found["largest"], abs(found["held_out"] - first["held_out"])) <= result["bound"]:
            wrong.append(f"{pair}: losses differ by {found['largest']:.2e}, the bound is {result['bound']:.2e}")
        if found["text"] != first["text"]:
            wrong.append(f"{pair}: the text differs")
    return wrong


def main() -> int:
    """Runs all of it and prints a table."""
    parser = argparse.ArgumentParser(description="A run begun on one backend and resumed on another.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(Path(folder), args.steps)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {time.monotonic() - began:.0f} s")
    ends = f"{result['first']:.4f} at step 1, {result['last']:.4f} at step {args.steps}"
    print(f"loss {ends}; bound {result['bound']:.2e}")
    print("begun   resumed  tensors that differ  largest difference of a loss  after the change  held-out loss")
    for pair, found in result["pairs"].items():
        begun, resumed = pair.split("-")
        print(f"{begun:7} {resumed:8} {len(found['differ']):19} {found['largest']:29.2e} {found['after']:17.2e} "
              f"{found['held_out']:14.6f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result))
    for line in (wrong := problems(result)):
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
