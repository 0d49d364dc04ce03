"""Trains several seeds of a policy, or of another library's recipe, and says whether it learns what fp32 learns.

    python benchmarks/race/seeds.py [--policies fp32 bf16-mixed autocast] [--seeds 0 1 2] [--steps 500]
        [--layers 12] [--width 768] [--heads 12] [--context 1024] [--vocabulary 50304] [--batch 8]
        [--rate 6e-4] [--source stdlib] [--log FILE] [--device cuda] [--against docs/measurements/seeds.jsonl]

The model is the race's (GPT-2-124M as people write it), the text is bytes of the standard library, and a seed
draws the first weights and the order of the batches, the same for every arm. An arm is prepared and compiled once,
for all seeds. AdamW with 5 % warmup and a linear way down, to a tenth by default. Each arm gets the verdict of
`halfstep compare` on its pairs with fp32, or without it with the first arm, at a margin of 0.5 % of its loss.
`--log` keeps the mean training loss of each ten steps and each held-out one, as JSON; `--against` takes fp32's
held-out losses of the same seeds from such a log, for they take longest. Exit code 1 if an arm is different.

Besides policies an arm may be autocast, autocast-fp16, torchao or pure-bf16 of arms.py. `benchmarks/study/run.py`
trains the arms of the registered study by these classes.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from benchmarks.race import arms, contract
from halfstep.core.compare.gaps import verdict
from halfstep.torch import AdamW, Muon, prepare
from halfstep.torch.instruments.collect.updates import UpdateWatch
from halfstep.training.data.batches import Batches, validation_readers
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus

CLIP_NORM = contract.CLIP_NORM
LIBRARIES = ("autocast", "autocast-fp16", "torchao", "pure-bf16")
SHAPE = ("layers", "width", "heads", "context", "vocabulary")
MARGIN = 0.005  # of the reference's loss
COUNTED = 10  # steps of a run whose updates are counted


@dataclass(frozen=True)
class Setting:
    """What all seeds of an arm share."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50304
    batch: int = 8
    steps: int = 500
    rate: float = 6e-4
    end: float = 0.1  # the last rate, as a share of the highest
    ema: float = 0.0  # the decay of averaged weights; 0 for none
    held_out: int = 64  # windows
    device: str = "cuda"
    optimizer: str = "adamw"  # or muon: for the matrices of the blocks
    memory: str = "fast"
    init: str = ""  # a file of weights to begin with
    rounded: bool = False  # whether the first weights are rounded to bf16
    nudge: int = 0  # moves each first weight by one unit in its last place; another number, another direction

    def factor(self, step: int) -> float:
        """Returns the schedule's factor at a step."""
        warmup = max(1, self.steps // 20)
        way = max(0, step - warmup) / (self.steps - warmup)
        return min((step + 1) / warmup, 1.0 - (1.0 - self.end) * way)

    def shape(self) -> dict[str, int]:
        """Returns the arguments of the model."""
        return {name: getattr(self, name) for name in SHAPE}

    def first_weights(self, seed: int) -> list[Tensor]:
        """Returns the parameters with which a seed begins."""
        torch.manual_seed(seed)
        model = GPT2(**self.shape())
        if self.init:
            given = load_file(self.init)
            model.load_state_dict({**given, "lm_head.weight": given["wte.weight"]})
        weights = [p.detach() for p in model.parameters()]
        if self.rounded:
            weights = [w.bfloat16().float() for w in weights]
        if self.nudge:
            chance = torch.Generator().manual_seed(1000 * self.nudge + seed)
            up = [torch.rand(w.shape, generator=chance) < 0.5 for w in weights]
            ends = [torch.where(each, torch.inf, -torch.inf) for each in up]
            weights = [torch.nextafter(w, end) for w, end in zip(weights, ends, strict=True)]
        return weights


def pairs(tokens: Any, device: str) -> tuple[Tensor, Tensor]:
    windows = torch.from_numpy(tokens.astype("int64")).to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Arm:
    """A model that is compiled once and trained with one seed after another."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    def __init__(self, setting: Setting):
        self.setting = setting

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Forgets all training, and begins with other weights."""
        raise NotImplementedError

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Makes an update; returns the loss, and whether it was skipped, on the device."""
        raise NotImplementedError

    def evaluation(self, *, averaged: bool) -> AbstractContextManager[Any]:
        """Inside, the model computes as it is evaluated, with its averaged weights or with the last."""
        raise NotImplementedError

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the mean loss of a batch."""
        return self.model(*batch)

    def facts(self) -> dict[str, Any]:
        """Returns what else there is to say of a finished run."""
        return {}

    def train(self, seed: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
        """Trains one seed; yields training losses as they come, and the held-out losses last."""
        s, start = self.setting, time.perf_counter()
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.reset(s.first_weights(seed))
        found = {"before": self.held_out(corpus, averaged=False)} if s.init else {}
        batches = Batches(corpus.train, micro_batches=1, seed=seed, context=s.context, batch=s.batch)
        skipped, total, since = torch.zeros((), device=s.device), torch.zeros((), device=s.device), 0
        for step in range(s.steps):
            for optimizer, highest in zip(self.optimizers, rates, strict=True):
                for group, rate in zip(optimizer.param_groups, highest, strict=True):
                    group["lr"] = rate * s.factor(step)
            loss, skip = self.step(pairs(batches.at(step)[0], s.device))
            skipped, total = skipped + skip, total + loss
            if step % 10 == 9 or step == s.steps - 1:
                yield {"step": step + 1, "loss": float(total) / (step + 1 - since)}
                total, since = torch.zeros_like(total), step + 1
        for optimizer, highest in zip(self.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = rate
        found["held_out_last"] = self.held_out(corpus, averaged=False)
        found["held_out"] = self.held_out(corpus, averaged=True) if s.ema else found["held_out_last"]
        seconds = time.perf_counter() - start
        yield {"step": s.steps, **found, **self.facts(), "skipped": int(skipped), "seconds": round(seconds, 1)}

    def held_out(self, corpus: Corpus, *, averaged: bool) -> float:
        """Returns the mean loss on the held-out text."""
        s, total, count = self.setting, 0.0, 0
        size = {"context": s.context, "batch": s.batch, "limit_tokens": s.held_out * s.context}
        with torch.no_grad(), self.evaluation(averaged=averaged):
            for read in validation_readers(corpus.validation, **size):
                tokens = read()
                total += float(self.loss(pairs(tokens, s.device))) * len(tokens)
                count += len(tokens)
        return total / count


class Policy(Arm):
    """A policy of ours."""

    def __init__(self, policy: str, setting: Setting):
        super().__init__(setting)
        s, self.model = setting, GPT2(**setting.shape()).to(setting.device)
        self.optimizers = self._make_optimizers()
        given = {"clip_norm": CLIP_NORM, "ema": s.ema, "memory": s.memory, "tokens": s.batch * s.context}
        self.run = prepare(self.model, [*self.optimizers], policy, **given)
        self.forward = torch.compile(self.model) if s.device != "cpu" else self.model
        self.begin = copy.deepcopy(self.run.state_dict())

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        named = dict(self.model.named_parameters())
        matrices = [p for name, p in named.items() if name.startswith("h.") and p.ndim == 2]
        matrices = matrices if self.setting.optimizer == "muon" else []
        others = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
        adamw = AdamW(others, lr=self.setting.rate, betas=contract.BETAS, weight_decay=contract.DECAY)
        return [Muon(matrices), adamw] if matrices else [adamw]

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Loads the state in which every seed begins, and puts the weights in."""
        self.run.load_state_dict(self.begin)
        with torch.no_grad(), self.run.edit():
            for held, given in zip(self.model.parameters(), weights, strict=True):
                held.copy_(given)
        if self.run.averages is not None:
            self.run.averages.restart()

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Lets the run step."""
        self.result = self.run.step(lambda batch: self.forward(*batch), [batch])
        return self.result.loss, self.result.skipped

    @contextmanager
    def evaluation(self, *, averaged: bool) -> Iterator[None]:
        """Evaluates as the policy says: fp8 in bf16."""
        with ExitStack() as stack:
            stack.enter_context(self.run.evaluation())
            if averaged:
                stack.enter_context(self.run.averaged())
            yield

    def facts(self) -> dict[str, Any]:
        """Returns the last loss scale."""
        return {"scale": float(self.result.scale)}


class Library(Arm):
    """A recipe of another library, as the race has it."""

    def __init__(self, name: str, setting: Setting):
        super().__init__(setting)
        given = {**setting.shape(), "batch": setting.batch, "micro_batches": 1, "seed": 0, "compile": None}
        worker = contract.Setting(arm=name, device=setting.device, tokens="", held_out="", **given)
        on_gpu = setting.device != "cpu"
        self.stock = arms.MAKERS[name](worker, torch.device(setting.device), compile=on_gpu)
        self.model, self.optimizers = self.stock.model, [self.stock.optimizer]
        self.parameters = list(self.model.parameters())
        self.averages: list[Tensor] = []
        for group in self.stock.optimizer.param_groups:
            group["lr"] = setting.rate
        self.stock.optimizer.register_step_pre_hook(self._before_step)
        self.stock.optimizer.register_step_post_hook(lambda optimizer, *_: bool(self.watch.after(optimizer)))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        narrow = self.parameters[0].dtype == torch.bfloat16
        if narrow and self.num_steps % max(1, self.setting.steps // COUNTED) == 0:
            self.watch.before(optimizer)

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Empties the optimizer, and puts the weights in."""
        self.stock.optimizer.state.clear()
        self.num_steps, self.watch = 0, UpdateWatch()
        with torch.no_grad():
            for held, given in zip(self.parameters, weights, strict=True):
                held.copy_(given)
        self.averages = [p.detach().float().clone() for p in self.parameters] if self.setting.ema else []

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Lets the recipe step, and averages its weights as `prepare(ema=...)` does."""
        loss = self.stock.step([batch])
        self.num_steps += 1
        with torch.no_grad():
            if self.averages:
                wide = [p.detach().float() for p in self.parameters]
                torch._foreach_lerp_(self.averages, wide, 1.0 - self.setting.ema)
        skipped = getattr(self.stock.optimizer, "found_inf", None)
        return loss, torch.zeros_like(loss) if skipped is None else skipped

    @contextmanager
    def evaluation(self, *, averaged: bool) -> Iterator[None]:
        """Evaluates in the context of training."""
        last = [p.detach().clone() for p in self.parameters] if averaged else []
        with torch.no_grad():
            for p, average in zip(self.parameters if averaged else [], self.averages, strict=False):
                p.copy_(average)
        yield
        with torch.no_grad():
            for p, value in zip(self.parameters, last, strict=False):
                p.copy_(value)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss as the recipe evaluates it."""
        return self.stock.evaluate(batch)

    def facts(self) -> dict[str, Any]:
        """Returns the share of updates that rounding undid, as the audit counts them."""
        counted = [counts for p in self.parameters if (counts := self.watch.counts(p)) is not None]
        intended = sum(counts.intended for counts in counted)
        return {"lost": sum(counts.lost for counts in counted) / intended} if intended else {}


def make_arm(name: str, setting: Setting) -> Arm:
    """Returns an arm: a policy, or one of LIBRARIES."""
    return Library(name, setting) if name in LIBRARIES else Policy(name, setting)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fp32", "bf16-mixed", "fp16-mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--source", default="stdlib", help="the text, as `data.source` names it")
    parser.add_argument("--log")
    parser.add_argument("--against", help="a log to take fp32's losses from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Setting):
        if field.name not in ("device", "init", "rounded", "nudge"):
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    names = {field.name for field in fields(Setting)}
    setting = Setting(**{name: value for name, value in vars(options).items() if name in names})
    corpus = load_corpus(options.source, 0.1, options.vocabulary)
    print(f"torch {torch.__version__}, {options.device}; {corpus.description}", flush=True)
    found: dict[str, list[float]] = read_reference(options.against, options.seeds) if options.against else {}
    with open(options.log or "/dev/null", "w", encoding="utf-8") as log:
        for policy in options.policies:
            arm = make_arm(policy, setting)
            for seed in options.seeds:
                for event in arm.train(seed, corpus):
                    print(json.dumps({"policy": policy, "seed": seed, **event}), file=log, flush=True)
                found.setdefault(policy, []).append(event["held_out"])
                summary = f"{policy}, seed {seed}: held-out {event['held_out']:.4f}, {event['seconds']:.0f} s"
                print(f"{summary}, {event['skipped']} skipped, last scale {event.get('scale', 1):g}", flush=True)
            del arm
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
    """Prints the table; arms are compared with fp32, or else with the first one."""
    base = "fp32" if "fp32" in found else next(iter(found))
    delta = MARGIN * statistics.fmean(found[base])
    print(f"\n{'arm':<32}{'held-out loss by seed':<34}{'mean':>8}{f'- {base}':>14}   margin {delta:.4f}")
    failed = False
    for policy, losses in found.items():
        said = verdict([a - b for a, b in zip(losses, found[base], strict=True)], delta)
        failed |= said.kind == "different"
        words = "" if policy == base else said.kind.upper()
        words += f", about {said.more_seeds} more pairs would" if said.more_seeds else ""
        row = f"{policy:<32}{' '.join(f'{loss:.4f}' for loss in losses):<34}{statistics.fmean(losses):>8.4f}"
        print(f"{row}{said.mean:>+14.4f}   {words}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
