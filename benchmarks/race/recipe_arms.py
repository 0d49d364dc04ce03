"""The two arms of recipes.py, each in its own process: the recipe trained by halfstep, and as its source does."""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config as partitioning

from benchmarks.race import recipe_tokens, workers
from benchmarks.race.recipe_sources import Arm
from halfstep.config.run import RunConfig
from halfstep.config.weights import initial_weights
from halfstep.core.policy import Policy
from halfstep.training.data.batches import Batches, Prefetch, validation_readers
from halfstep.training.data.load import load_corpus
from halfstep.training.evaluation import evaluate
from halfstep.training.schedule import build_schedule
from halfstep.training.session import open_session
from halfstep.training.weights.artifact import describe_origin, masters, score

Answer = dict[str, Any]


def serve(options: argparse.Namespace, config: RunConfig) -> int:
    """Answers the requests of recipes.py."""

    def start() -> tuple[Answer, Callable[[Answer], Answer]]:
        arm = {"halfstep": Halfstep, "source": Source}[options.worker](options, config)
        return arm.hello(), arm.answer

    return workers.serve(start)


class Trainer:
    """What both arms share: tokens, turns and clocks."""

    def __init__(self, options: argparse.Namespace, config: RunConfig):
        self.options, self.config, training = options, config, config.training
        self.device = torch.device(options.device)
        self.corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
        self.batches = Batches(
            self.corpus.train,
            context=config.model.context,
            batch=training.batch,
            micro_batches=training.micro_batches,
            seed=config.seed,
        )
        self.done, self.memory = 0, 1
        self.set_up()

    def hello(self) -> Answer:
        """Describes the device, the framework and the data."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        return {"device": name, "torch": torch.__version__, "train_tokens": len(self.corpus.train)}

    def answer(self, request: Answer) -> Answer:
        """Answers one request."""
        if request["do"] == "train":
            return self.train(request["steps"])
        if request["do"] == "evaluate":
            return {"loss": self.evaluate()}
        return self.finish()

    def train(self, steps: int) -> Answer:
        """Trains for one turn; returns the losses, and the seconds of each update but the first."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # evaluation is not training
        marks, losses = [self.mark()], []
        with Prefetch(self.batches.at, self.done, self.done + steps) as batches:
            for tokens in batches:
                losses.append(self.update(tokens))
                marks.append(self.mark())
                self.done += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            seconds = [before.elapsed_time(after) / 1000 for before, after in pairwise(marks[1:])]
        else:
            seconds = [after - before for before, after in pairwise(marks[1:])]
        first = self.done == steps  # compiles, also at its second update, and tries kernels on copies
        if self.device.type == "cuda" and not first:
            self.memory = max(self.memory, torch.cuda.max_memory_allocated())
        answer = {"losses": [float(x) for x in losses], "memory": self.memory}
        return {"seconds": seconds[2:] if first else seconds, **answer}

    def mark(self) -> Any:
        """Marks the present on the device's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> Answer:
        """Returns what to report after the last turn."""
        return {}

    def set_up(self) -> None:
        """Builds the model."""
        raise NotImplementedError

    def update(self, tokens: Any) -> Any:
        """Takes one update; returns its loss, still on the device."""
        raise NotImplementedError

    def evaluate(self) -> float:
        """Returns the held-out loss."""
        raise NotImplementedError


class Halfstep(Trainer):
    """Trains as `halfstep train` does."""

    def set_up(self) -> None:
        """Builds the model."""
        if self.options.recompute_far:  # less memory, more time: docs/measurements/recipes.md
            partitioning.ban_recompute_used_far_apart = False
        self.session = open_session(self.config, Policy.parse(self.options.policy), self.options.device)

    def update(self, tokens: Any) -> Any:
        """Takes one update; returns its loss, still on the device."""
        return self.session.step(tokens).loss

    def evaluate(self) -> float:
        """Returns the held-out loss."""
        return evaluate(self.session, self.corpus, self.config).loss

    def finish(self) -> Answer:
        """Returns what to report after the last turn."""
        if self.config.artifact.format == "none":
            return {}
        before = evaluate(self.session, self.corpus, self.config)
        weights = masters(self.session.state(), self.config.model, averaged=False)
        data = {"digest": self.corpus.digest, "description": "", "bytes_per_token": None}
        known = {"policy": str(self.session.policy), "config": asdict(self.config), "data": data}
        origin = describe_origin(known, self.config.training.steps, "model")
        with tempfile.TemporaryDirectory() as folder:
            scored = score(
                self.session, self.corpus, self.config, Path(folder) / "model", before, weights, origin
            ).record()
        counts = json.loads((self.options.tokens / recipe_tokens.SUMMARY).read_text())
        bits = counts["val_tokens"] / counts["val_bytes"] / math.log(2)  # bits per byte for one nat per token
        return {
            "artifact": {
                **scored,
                "bits_per_byte_before": scored["loss_before"] * bits,
                "bits_per_byte_after": scored["loss_after"] * bits,
            }
        }


class Source(Trainer):
    """Trains as the recipe's source does."""

    def set_up(self) -> None:
        """Builds the model."""
        weights = dict(initial_weights(self.config.model, self.config.seed))
        self.arm = Arm(self.config, weights, self.device)

    def update(self, tokens: Any) -> Any:
        """Takes one update; returns its loss, still on the device."""
        rate = build_schedule(self.config.training)(np.float32(self.done), np)
        return self.arm.step(self.done, [self.batch(part) for part in tokens], float(rate))

    def evaluate(self) -> float:
        """Returns the held-out loss."""
        total, count = 0.0, 0
        readers = validation_readers(
            self.corpus.validation,
            context=self.config.model.context,
            batch=self.config.training.batch,
            limit_tokens=self.config.training.validation_tokens,
        )
        for windows in (read() for read in readers):
            total += float(self.arm.evaluate(self.batch(windows))) * windows[:, 1:].size
            count += windows[:, 1:].size
        return total / count

    def batch(self, windows: Any) -> Any:
        """Returns inputs and targets, on the device."""
        tokens = torch.from_numpy(np.ascontiguousarray(windows))
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        tokens = tokens.long()
        return tokens[:, :-1], tokens[:, 1:]
