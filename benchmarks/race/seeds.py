"""Checks that a policy learns what fp32 learns: a GPT-2 of torch's own layers through `prepare`, several seeds.

    python benchmarks/race/seeds.py [--policies fp32 bf16-mixed fp16-mixed] [--seeds 0 1 2] [--steps 500]
        [--layers 12] [--width 768] [--heads 12] [--context 1024] [--vocabulary 50304] [--batch 8]
        [--rate 6e-4] [--source stdlib] [--log FILE] [--device cuda] [--against docs/measurements/seeds.jsonl]

The model is the race's (GPT-2-124M as people write it), the text is bytes of the standard library, and a seed
draws the first weights and the order of the batches, the same for every policy. A policy is prepared and compiled
once, for all seeds. AdamW with 5 % warmup and a linear way down to a tenth. A policy passes when the mean of its
held-out losses lies within the spread of fp32's seeds (their largest minus their smallest) of fp32's mean; without
fp32, of the first policy. `--log` keeps every tenth training loss and each held-out one, a line of JSON each;
`--against` takes fp32's held-out losses of the same seeds from such a log, for they take longest by far. Exit code
1 if a policy fails.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from halfstep.torch import AdamW, prepare
from halfstep.training.data.batches import Batches, validation_readers
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus

CLIP_NORM, HELD_OUT = 1.0, 64  # windows
SHAPE = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304}


def factor(step: int, steps: int) -> float:
    """Returns the schedule's factor at a step."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, 1.0 - 0.9 * max(0, step - warmup) / (steps - warmup))


def pairs(tokens: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.from_numpy(tokens.astype("int64")).to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Policy:
    """A model under one policy, compiled once, and the state in which every seed begins."""

    def __init__(self, policy: str, options: argparse.Namespace):
        self.options = options
        self.model = self.draw_model(options.seeds[0]).to(options.device)
        self.optimizer = AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
        tokens = options.batch * options.context
        self.run = prepare(self.model, self.optimizer, policy, clip_norm=CLIP_NORM, tokens=tokens)
        self.forward = torch.compile(self.model) if options.device != "cpu" else self.model
        self.begin = copy.deepcopy(self.run.state_dict())

    def draw_model(self, seed: int) -> GPT2:
        """Returns a model with the first weights of a seed."""
        torch.manual_seed(seed)
        shape = {name: getattr(self.options, name) for name in SHAPE}
        return GPT2(**shape)

    def reset(self, seed: int) -> None:
        """Forgets all training, and begins with the weights of a seed."""
        self.run.load_state_dict(self.begin)
        with torch.no_grad(), self.run.edit():
            for held, given in zip(self.model.parameters(), self.draw_model(seed).parameters(), strict=True):
                held.copy_(given)

    def train(self, seed: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
        """Trains one seed; yields training losses as they come, and the held-out loss last."""
        options = self.options
        self.reset(seed)
        size = {"context": options.context, "batch": options.batch}
        batches = Batches(corpus.train, micro_batches=1, seed=seed, **size)
        start, skipped = time.perf_counter(), torch.zeros((), device=options.device)
        for step in range(options.steps):
            self.optimizer.param_groups[0]["lr"] = options.rate * factor(step, options.steps)
            batch = pairs(batches.at(step)[0], options.device)
            result = self.run.step(lambda batch: self.forward(*batch), [batch])
            skipped += result.skipped
            if step % 10 == 9:
                yield {"step": step + 1, "loss": float(result.loss)}
        seconds = time.perf_counter() - start
        losses, limit = [], HELD_OUT * options.context
        with torch.no_grad(), self.run.evaluation():
            for read in validation_readers(corpus.validation, limit_tokens=limit, **size):
                tokens = read()
                losses.append((float(self.model(*pairs(tokens, options.device))), len(tokens)))
        held_out = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        yield {"held_out": held_out, "seconds": seconds, "skipped": int(skipped), "scale": float(result.scale)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fp32", "bf16-mixed", "fp16-mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--source", default="stdlib", help="the text, as `data.source` names it")
    parser.add_argument("--log")
    parser.add_argument("--against", help="a log to take fp32's losses from")
    for name, value in {"steps": 500, "batch": 8, **SHAPE}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    corpus = load_corpus(options.source, 0.1, options.vocabulary)
    print(f"torch {torch.__version__}, {options.device}; {corpus.description}", flush=True)
    found: dict[str, list[float]] = read_reference(options.against, options.seeds) if options.against else {}
    with open(options.log or "/dev/null", "w", encoding="utf-8") as log:
        for policy in options.policies:
            prepared = Policy(policy, options)
            for seed in options.seeds:
                for event in prepared.train(seed, corpus):
                    print(json.dumps({"policy": policy, "seed": seed, **event}), file=log, flush=True)
                found.setdefault(policy, []).append(event["held_out"])
                summary = f"{policy}, seed {seed}: held-out {event['held_out']:.4f}, {event['seconds']:.0f} s"
                print(f"{summary}, {event['skipped']} skipped, last scale {event['scale']:g}", flush=True)
            del prepared
            torch.compiler.reset()
    return judge(found)


def read_reference(log: str, seeds: list[int]) -> dict[str, list[float]]:
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
