"""The log of a training loop: what it did, in order, and to which tensors. Hooks write it, `record` returns it.

Nothing computed here reaches the script. Numbers on a device stay there until the record is made, so that no hook
waits for the device; expensive statistics (updates.py, formats.py) are of a few updates only.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.core.audit.record import Call, CheckpointFacts, Record, Sync, Weight, finite_or_none
from halfstep.torch.instruments.collect.averages import WRITES, AverageWatch
from halfstep.torch.instruments.collect.formats import Formats
from halfstep.torch.instruments.collect.graphs import graphs_compiled
from halfstep.torch.instruments.collect.models import (
    copied_model,
    full_name,
    models_of,
    names_of,
    params_of,
    unwrap,
    version_of,
)
from halfstep.torch.instruments.collect.tensors import format_name, local, place
from halfstep.torch.instruments.collect.updates import UpdateWatch
from halfstep.torch.instruments.collect.weights import buffers_of, weights_of

# Statistics take at most this share of the script's time, but always cover the first updates: a rule on adapters
# needs three of them, however long they take.
SHARE, FIRST = 0.2, 3


@dataclass(eq=False)
class TrackedOptimizer:
    """What is known of one optimizer."""

    name: str
    place: str | None
    steps: int = 0  # skipped ones included
    micro: int = 0  # how many backward passes its gradients are the sum of
    scaled: bool = False  # its gradients are those of a scaled loss, and no scaler has unscaled them
    # Parameters, and parts of their gradients after backward.
    probe: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ratio: Any = 1.0  # what the script itself has divided the gradients by since then
    grad_formats: dict[int, str] = field(default_factory=dict)  # by id of a parameter
    version: int | None = None  # of its first parameter, after its last step or at the last zeroing

    def restart(self) -> None:
        """Resets what is known of the gradients, when they have been used or set to zero."""
        self.micro, self.scaled, self.probe, self.ratio = 0, False, [], 1.0


class TrainingLog:
    """Everything that a process has done so far in training.

    `end` is called at the beginning of update number `steps` + 1, `on_update` after each update.
    """

    def __init__(
        self,
        formats: Formats | None = None,
        *,
        steps: int | None = None,
        end: Callable[[], None] = lambda: None,
        on_update: Callable[[int], None] = lambda updates: None,
    ):
        self.formats = formats
        self.steps, self.end, self.on_update = steps, end, on_update
        self.forget()

    def forget(self) -> None:
        """Empties the log."""
        self.rank = 0
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, TrackedOptimizer] = weakref.WeakKeyDictionary()
        self.calls: list[Call] = []
        self.losses: list[Tensor] = []
        self.scalers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.models: dict[str, nn.Module] = {}
        self.names: dict[int, str] = {}
        self.lost_updates, self.averages = UpdateWatch(), AverageWatch()
        # Of optimizers that step copies of weights: the weights themselves, in whose gradients passes are summed.
        self.copied: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()
        self.trainer: Any = None  # of transformers
        self.saves: list[CheckpointFacts] = []
        self.syncs: dict[tuple[str, str], list[int]] = {}  # how many in each update, by place and kind
        self.unseen: dict[str, None] = {}  # in order, each once
        self.regions = 0  # autocast regions entered so far
        self.scaled_losses = 0  # scaled losses that have had no backward pass yet
        self.in_backward = False
        self.scaler_steps = 0  # calls of GradScaler.step that are running
        self.library_depth = 0  # nested calls of torch that are running: what they do is not the user's doing
        self._later: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: set[Optimizer] = set()  # kept for the record; one that never stepped may be dropped
        self._spent, self._began = 0.0, 0.0

    @property
    def updates(self) -> int:
        """How many updates there were, those skipped by a scaler included."""
        return max((each.steps for each in self.optimizers.values()), default=0)

    def add_call(self, what: Any, target: str | None = None, **facts: Any) -> Call:
        """Adds something that the loop did."""
        facts.setdefault("place", place())
        facts.setdefault("update", self.updates)
        call = Call(what, target=target, **facts)
        self.calls.append(call)
        return call

    def add_number(self, call: Call, name: str, value: Any) -> None:
        """Adds a number to a call; a number on a device is read when the record is made."""
        if isinstance(value, Tensor):
            self.read_later(value, lambda known: call.numbers.__setitem__(name, float(known)))
        elif value is not None:
            call.numbers[name] = float(value)

    def read_later(self, value: Tensor, use: Callable[[Tensor], None]) -> None:
        """Copies a small tensor, and passes the copy to `use` on the host when the record is made."""
        self._later.append((local(value.detach()).clone(), use))

    def add_losses(self, outputs: Any) -> None:
        """Keeps those tensors that are losses, which have one element."""
        tensors = outputs if isinstance(outputs, list | tuple) else [outputs]
        losses = [each for each in tensors if isinstance(each, Tensor) and each.numel() == 1]
        self.losses += [local(each.detach()).clone() for each in losses]

    @contextmanager
    def library_call(self) -> Iterator[None]:
        """Inside, torch is at work: waiting for the device is not counted as the user's doing."""
        self.library_depth += 1
        try:
            yield
        finally:
            self.library_depth -= 1

    def track(self, optimizer: Optimizer) -> TrackedOptimizer:
        """Returns what is known of an optimizer, and begins to track a new one."""
        optimizer = unwrap(optimizer)
        if optimizer not in self.optimizers:
            kind = type(optimizer).__name__
            same = sum(each.name.split(" ")[0] == kind for each in self.optimizers.values())
            self.optimizers[optimizer] = TrackedOptimizer(kind if not same else f"{kind} {same + 1}", place())
        return self.optimizers[optimizer]

    def name_scaler(self, scaler: Any) -> str:
        """Returns the name of a loss scaler."""
        if scaler not in self.scalers:
            kind = type(scaler).__name__
            self.scalers[scaler] = kind if not self.scalers else f"{kind} {len(self.scalers) + 1}"
        return self.scalers[scaler]

    # Models

    def find_models(self) -> None:
        """Looks for the models, and begins to watch their formats, if there is a new optimizer."""
        if all(each in self._named for each in self.optimizers):
            return
        self._named = weakref.WeakSet(self.optimizers)
        self.models = models_of([p for each in self.optimizers for p in params_of(each)])
        self.names = names_of(self.models)
        for optimizer, tracked in self.optimizers.items():
            unnamed = [p for p in params_of(optimizer) if id(p) not in self.names]
            alone = len(unnamed) == len(params_of(optimizer))
            if unnamed and alone and (model := copied_model(unnamed)) is not None:
                self.models[type(model).__name__ if self.models else ""] = model
                trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
                self.names |= {id(p): name for p, name in zip(unnamed, trained, strict=True)}
                self.copied[optimizer] = [*trained.values()]
            else:
                self.names |= {id(p): f"{tracked.name}.{i}" for i, p in enumerate(unnamed)}
        if self.formats is not None:
            self.formats.start(self.models)

    # Updates

    def check_end(self, tracked: TrackedOptimizer) -> None:
        """Ends the script when it begins an update beyond the limit: every update before it is complete."""
        if self.steps is not None and tracked.steps >= self.steps:
            self.end()

    def before_step(self, optimizer: Optimizer) -> None:
        """Copies what a step will change, unless the share of time is spent; ends the script at its limit."""
        tracked = self.track(optimizer)
        self.check_end(tracked)
        if not tracked.steps:
            in_group = dist.is_available() and dist.is_initialized()
            self.rank = dist.get_rank() if in_group else int(os.environ.get("RANK", "0"))
            self.trainer = self.trainer or trainer_of(sys._getframe())
            if any(self.names.get(id(p), "").startswith(f"{tracked.name}.") for p in params_of(optimizer)):
                self._named.discard(optimizer)  # FSDP2 has put its shards back into the model since backward
        self._began = self._began or time.perf_counter()
        tracked.grad_formats |= {
            id(p): format_name(p.grad.dtype) for p in params_of(optimizer) if p.grad is not None
        }
        elapsed = time.perf_counter() - self._began
        if tracked.steps < FIRST or self._spent <= SHARE * elapsed:
            self.find_models()
            with self._timed():
                self.lost_updates.before(optimizer)

    def after_step(self, optimizer: Optimizer, skipped: bool | Tensor) -> None:
        """Counts an update and examines its effect; `skipped` may still be on the device."""
        tracked = self.track(optimizer)
        tracked.steps += 1
        tracked.restart()
        tracked.version = version_of(optimizer)
        self._stepped.add(optimizer)
        with self._timed():
            examined = self.lost_updates.after(optimizer)
            if examined and self.formats is not None:
                self.formats.after_step(bool(skipped))
            if examined or tracked.steps <= 2 * WRITES:
                self._look_for_averages()
        if tracked.steps == self.updates:
            self.on_update(tracked.steps)

    def summed_in(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the tensors in whose gradients backward passes are summed for an optimizer."""
        return [*params_of(optimizer), *self.copied.get(optimizer, [])]

    def _look_for_averages(self) -> None:
        stepped = [p for optimizer in self.optimizers for p in params_of(optimizer)]
        held = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ]
        grads = [p.grad for optimizer in self.optimizers for p in self.summed_in(optimizer) if p.grad is not None]
        weights = {self.names[id(p)]: p for p in stepped if id(p) in self.names}
        self.averages.look(weights, [*stepped, *held, *grads])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        with self.library_call():
            yield
        self._spent += time.perf_counter() - began

    # The record

    def record(self) -> Record:
        """Returns everything logged so far."""
        with self.library_call():
            self.find_models()
            for value, use in self._later:
                use(value.cpu())
            self._later.clear()
            record = Record(source="script", rank=self.rank, updates=self.updates, calls=list(self.calls))
            record.switches = self._switches()
            record.weights = list(self._weights())
            record.buffers = [
                replace(buffer, name=full_name(name, buffer.name))
                for name, model in self.models.items()
                for buffer in buffers_of(model)
            ]
            record.averages = [*self.averages.averages()]
            record.losses = [finite_or_none(loss) for loss in self.losses]
            counts = {key: [*known, *[0] * (self.updates - len(known))] for key, known in self.syncs.items()}
            medians = {key: median(each) for key, each in counts.items()}
            record.syncs = [Sync(place, what, each) for (place, what), each in medians.items() if each]
            record.checkpoints = self._saves()
            if self.trainer is not None:
                record.switches["nan_filter"] = bool(self.trainer.args.logging_nan_inf_filter)
                entries = self.trainer.state.log_history
                record.logged = [finite_or_none(entry["loss"]) for entry in entries if "loss" in entry]
            if self.formats is not None:
                self.formats.fill(record)
            record.unseen += [*self.unseen, *self._unseen()]
        return record

    def _weights(self) -> Iterable[Weight]:
        held = {id(p): (p, its) for each, its in self.optimizers.items() for p in params_of(each)}
        by_name = {self.names[key]: pair for key, pair in held.items() if key in self.names}
        for name, model in self.models.items():
            for weight in weights_of(model, self.optimizers, self.lost_updates):
                weight.name = full_name(name, weight.name)
                if (pair := by_name.pop(weight.name, None)) is not None:
                    p, its = pair
                    weight.place, weight.grad_format = its.place, its.grad_formats.get(id(p))
                yield weight
        for name, (p, its) in by_name.items():  # of no model
            yield Weight(
                name,
                format_name(p.dtype),
                kind="matrix" if p.ndim >= 2 else "other",
                optimizer=its.name.split(" ")[0],
                grad_format=its.grad_formats.get(id(p)),
                place=its.place,
                updates=self.lost_updates.counts(p),
            )

    def _saves(self) -> list[CheckpointFacts]:
        """Returns the last save with an optimizer's state; a library may save the scaler in a separate file."""
        last = next((each for each in reversed(self.saves) if each.moments), None)
        if last is None:
            return []
        scaler = any(each.scaler for each in self.saves) if self.scalers else None
        return [replace(last, scaler=scaler)]

    def _switches(self) -> dict[str, str | float | bool | None]:
        matmul = torch.backends.cuda.matmul
        return {
            "device": next((p.device.type for each in self.optimizers for p in params_of(each)), None),
            "fp16_reduced_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
            "bf16_reduced_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
            "fp16_sums": bool(getattr(matmul, "allow_fp16_accumulation", False)),
        }

    def _unseen(self) -> list[str]:
        inside = ["what compiled code does inside: clipping, autocast, waiting for the device"]
        foreign = {
            f"{type(each).__module__}.{type(each).__name__}"
            for each in self.optimizers
            if not type(each).__module__.startswith(("torch.optim", "halfstep."))
        }
        rules = [f"how {name} computes its updates: it is not an optimizer of torch" for name in sorted(foreign)]
        return (inside if graphs_compiled() else []) + rules


def trainer_of(frame: FrameType | None) -> Any:
    """Returns the transformers.Trainer that called, if one did."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer" and "self" in frame.f_locals:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
