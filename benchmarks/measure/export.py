"""How fast exports predict on this CPU, at the shape of a recipe: onnxruntime in fp32 and narrower, beside ours.

    python benchmarks/measure/export.py [--recipe gpt2] [--tokens 128] [--block 32] [--rounds 15] [--limit 120]
                                        [--threads N]

The weights are drawn from the seed. Each arm gets one text and returns the logits after it. Rounds interleave;
each arm is compared with onnxruntime's fp32 of the same round, and the median of these ratios counts. Where torch
converts bf16 instead of multiplying it, one pass takes minutes: it is tried first, in a process that is stopped
after `--limit` seconds, and only one that ends in time takes part in the rounds. Sizes are those of the files.
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
import torch

from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy
from halfstep.tools.export.targets import ONNX, TARGETS, Job, OtherModel
from halfstep.training.session import open_session

OURS, BASE = ("fp32", "bf16-mixed"), "onnxruntime fp32"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = load(given.recipe, ["training.compile=false"])
    text = [int(token) for token in np.random.default_rng(0).integers(0, config.model.vocabulary, given.tokens)]
    arms: dict[str, Any] = {}
    for policy in OURS:
        trial = multiprocessing.get_context("spawn").Process(
            target=once, args=(config, policy, text, given.threads)
        )
        trial.start()
        trial.join(given.limit)
        if trial.is_alive():
            trial.kill()
            print(f"halfstep {policy:13} more than {given.limit:.0f} s for one pass: stopped")
        else:
            arms[f"halfstep {policy}"] = open_session(config, Policy.parse(policy), "cpu", train=False)
    weights = dict(initial_weights(config.model, config.seed))
    job = Job(config.model, weights, FP32, arms["halfstep fp32"], "cpu", None, "", given.block)
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for to in ("onnx", "int8", "int4", "int2"):
            name = BASE if to == "onnx" else f"onnxruntime {to}"
            place = Path(folder, to)
            place.mkdir()
            TARGETS[to].write(job, place)
            sizes[name] = sum(file.stat().st_size for file in place.iterdir())
            arms[name] = serve(place / ONNX, config.model, given.threads)
        took: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(given.rounds + 1):
            for name, model in arms.items():
                start = perf_counter()
                model.logits(text)
                if turn > 0:  # the first warms up
                    took[name].append(perf_counter() - start)
    print(f"{given.recipe}, {given.tokens} tokens, {given.rounds} rounds, {given.threads} threads")
    for name, seconds in took.items():
        ratio = median(base / each for base, each in zip(took[BASE], seconds, strict=True))
        size = f"{sizes[name]:>14,} bytes" if name in sizes else ""
        print(f"{name:22} {median(seconds):7.3f} s, fastest {min(seconds):7.3f} s, {ratio:6.2f} x fp32 {size}")


def once(config: Any, policy: str, text: list[int], threads: int) -> None:
    """Predicts once."""
    torch.set_num_threads(threads)
    open_session(config, Policy.parse(policy), "cpu", train=False).logits(text)


def serve(file: Path, model: Any, threads: int) -> OtherModel:
    """Returns a graph as onnxruntime runs it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return OtherModel(lambda tokens: session.run(["logits"], {"tokens": tokens})[0], model)


if __name__ == "__main__":
    main()
