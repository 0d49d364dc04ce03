"""Checks that a policy learns what fp32 learns: a GPT-2 of torch's own layers through `prepare`, several seeds.

    python benchmarks/race/seeds.py [--policies fp32 bf16-mixed fp16-mixed] [--seeds 0 1 2] [--steps 500]
        [--layers 12] [--width 768] [--heads 12] [--context 1024] [--batch 8] [--log FILE] [--device cuda]
        [--against docs/measurements/seeds.jsonl]

The model is the race's (GPT-2-124M as people write it), the text is bytes of the standard library, and a seed
draws the first weights and the order of the batches, the same for every policy. AdamW with 5 % warmup and a
linear way down to a tenth. A policy passes when the mean of its held-out losses lies within the spread of fp32's
seeds (their largest minus their smallest) of fp32's mean. `--log` keeps every tenth training loss and each
held-out one, a line of JSON each; `--against` takes fp32's held-out losses of the same seeds from such a log,
for they take longest by far. Exit code 1 if a policy fails.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from halfstep.tools.bench.arms.model import GPT2
from halfstep.torch import AdamW, prepare
from halfstep.training.data.batches import Batches, validation_batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus

VOCABULARY, RATE, CLIP_NORM, HELD_OUT = 50304, 6e-4, 1.0, 65536


def factor(step: int, steps: int) -> float:
    """Returns the schedule's factor at a step."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, 1.0 - 0.9 * max(0, step - warmup) / (steps - warmup))


def pairs(tokens: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.from_numpy(tokens.astype("int64")).to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(policy: str, seed: int, corpus: Corpus, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains one model; yields training losses as they come, and the held-out loss last."""
    torch.manual_seed(seed)
    shape = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    model = GPT2(vocabulary=VOCABULARY, **shape).to(options.device)
    optimizer = AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    run = prepare(model, optimizer, policy, clip_norm=CLIP_NORM, seed=seed)
    forward = torch.compile(model) if options.device != "cpu" else model
    size = {"context": options.context, "batch": options.batch}
    batches = Batches(corpus.train, micro_batches=1, seed=seed, **size)
    start, skipped = time.perf_counter(), torch.zeros((), device=options.device)
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = RATE * factor(step, options.steps)
        result = run.step(lambda batch: forward(*batch), [pairs(batches.at(step)[0], options.device)])
        skipped += result.skipped
        if step % 10 == 9:
            yield {"step": step + 1, "loss": float(result.loss)}
    seconds = time.perf_counter() - start
    losses = []
    with torch.no_grad():
        for tokens in validation_batches(corpus.validation, limit_tokens=HELD_OUT, **size):
            losses.append((float(model(*pairs(tokens, options.device))), len(tokens)))
    held_out = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    yield {"held_out": held_out, "seconds": seconds, "skipped": int(skipped), "scale": float(result.scale)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fp32", "bf16-mixed", "fp16-mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log")
    parser.add_argument("--against", help="a log to take fp32's losses from")
    numbers = {"steps": 500, "layers": 12, "width": 768, "heads": 12, "context": 1024, "batch": 8}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    corpus = load_corpus("stdlib", 0.1, VOCABULARY)
    print(f"torch {torch.__version__}, {options.device}; {corpus.description}", flush=True)
    found: dict[str, list[float]] = recorded(options.against, options.seeds) if options.against else {}
    with open(options.log or "/dev/null", "w", encoding="utf-8") as log:
        for seed in options.seeds:
            for policy in options.policies:
                for event in train(policy, seed, corpus, options):
                    print(json.dumps({"policy": policy, "seed": seed, **event}), file=log, flush=True)
                found.setdefault(policy, []).append(event["held_out"])
                summary = f"{policy}, seed {seed}: held-out {event['held_out']:.4f}, {event['seconds']:.0f} s"
                print(f"{summary}, {event['skipped']} skipped, last scale {event['scale']:g}", flush=True)
                torch.compiler.reset()
    return judge(found)


def recorded(log: str, seeds: list[int]) -> dict[str, list[float]]:
    """Returns fp32's held-out losses from a log, in the order of the seeds."""
    with open(log, encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    losses = {e["seed"]: e["held_out"] for e in events if e["policy"] == "fp32" and "held_out" in e}
    if missing := [seed for seed in seeds if seed not in losses]:
        raise SystemExit(f"{log} has no held-out loss of fp32 with seed {missing[0]}")
    return {"fp32": [losses[seed] for seed in seeds]}


def judge(found: dict[str, list[float]]) -> int:
    """Prints the table; policies are compared with fp32, or else with the first one."""
    base = "fp32" if "fp32" in found else next(iter(found))
    mean, spread = statistics.mean(found[base]), max(found[base]) - min(found[base])
    print(f"\n{'policy':<32}{'held-out loss by seed':<34}{'mean':>8}{f'- {base}':>14}   spread {spread:.4f}")
    failed = False
    for policy, losses in found.items():
        off = statistics.mean(losses) - mean
        verdict = "" if policy == base else "inside" if abs(off) <= spread else "OUTSIDE"
        failed |= verdict == "OUTSIDE"
        row = f"{policy:<32}{' '.join(f'{loss:.4f}' for loss in losses):<34}{statistics.mean(losses):>8.4f}"
        print(f"{row}{off:>+14.4f}   {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
