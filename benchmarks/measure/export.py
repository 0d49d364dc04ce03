"""How fast exports predict on this CPU, at the shape of a recipe: onnxruntime in fp32 and int8, beside ours.

    python benchmarks/measure/export.py [--recipe gpt2] [--tokens 128] [--rounds 5] [--json FILE]

The weights are drawn from the seed. Each arm gets one text and returns the logits after it; rounds are
interleaved, and the fastest of each arm counts. An arm that takes 20 times as long as another runs once. Sizes are
those of the files.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy
from halfstep.tools.export.targets import TARGETS, Job
from halfstep.training.session import open_session


def main() -> None:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = load(options.recipe, ["training.compile=false"])
    weights = dict(initial_weights(config.model, config.seed))
    sessions = {
        name: open_session(config, Policy.parse(name), "cpu", train=False) for name in ("fp32", "bf16-mixed")
    }
    job = Job(config.model, weights, FP32, sessions["fp32"], "cpu", None, "")
    text = [int(t) for t in np.random.default_rng(0).integers(0, config.model.vocabulary, options.tokens)]
    arms, sizes = {f"halfstep {name}": session for name, session in sessions.items()}, {}
    with tempfile.TemporaryDirectory() as folder:
        for to in ("onnx", "int8"):
            place = Path(folder, to)
            place.mkdir()
            TARGETS[to].write(job, place)
            sizes[f"onnxruntime {to}"] = sum(file.stat().st_size for file in place.iterdir())
            arms[f"onnxruntime {to}"] = TARGETS[to].load(job, place)
        best = dict.fromkeys(arms, float("inf"))
        for _ in range(options.rounds + 1):  # the first warms up, and may be the fastest too
            for name, model in arms.items():
                if float("inf") > best[name] > 20 * min(best.values()):
                    continue
                start = perf_counter()
                model.logits(text)
                best[name] = min(best[name], perf_counter() - start)
    rows = [
        {"arm": name, "seconds": seconds, "tokens_per_second": options.tokens / seconds, "bytes": sizes.get(name)}
        for name, seconds in best.items()
    ]
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes']:>14,} bytes"
        print(f"{row['arm']:22} {row['seconds']:9.3f} s {row['tokens_per_second']:10.1f} tokens/s {size}")
    if options.json:
        options.json.write_text(
            json.dumps({"recipe": options.recipe, "tokens": options.tokens, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
