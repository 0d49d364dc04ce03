"""What was seen of a training loop so far: what it did, in order, and to which tensors.

Nothing computed here reaches the script. Numbers that lie on a device are kept there and read when the record is
made, so that hooks wait for nothing; the expensive statistics belong to collectors (collector.py), and those run
on a few updates.
"""

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.core.audit.record import Buffer, Call, CheckpointFacts, Record, Sync, Weight
from halfstep.torch.collect.collector import Collector
from halfstep.torch.collect.models import copied_models, full_name, models_of, names_of
from halfstep.torch.collect.places import place
from halfstep.torch.collect.updates import UpdateWatch
from halfstep.torch.collect.weights import buffers_of, format_name, weights_of
from halfstep.torch.shards import local

# The collectors of statistics take at most this share of the script's time; the first updates are always seen.
SHARE, FIRST = 0.2, 3  # a rule on adapters needs three updates, however long it takes to look at them
PROBE = 1024  # elements of a gradient that show what happened to it between backward and step


@dataclass(eq=False)
class Watched:
    """What is known of one optimizer."""

    name: str
    place: str | None
    steps: int = 0  # skipped ones included
    micro: int = 0  # backward passes that its gradients are the sum of
    scaled: bool = False  # its gradients are those of a scaled loss, and no scaler has unscaled them
    probe: tuple[Tensor, Tensor] | None = None  # a parameter, and a part of its gradient after backward
    ratio: Any = 1.0  # by what the script itself has divided the gradients since then
    grad_formats: dict[int, str] = field(default_factory=dict)  # by id of a parameter
    version: int | None = None  # of its first parameter, after its last step or at the last zeroing

    def restart(self) -> None:
        """Forgets the gradients: they were used, or set to zero."""
        self.micro, self.scaled, self.probe, self.ratio = 0, False, None, 1.0


class Seen:
    """Everything that was seen so far; hooks call it."""

    def __init__(
        self,
        collectors: Sequence[Collector] = (),
        *,
        steps: int | None = None,
        end: Callable[[], None] = lambda: None,
        counted: Callable[[int], None] = lambda updates: None,
        share: float = SHARE,
    ):
        self.collectors, self.share = collectors, share
        self.steps, self.end, self.counted = steps, end, counted
        self.forget()

    def forget(self) -> None:
        """Begins anew: nothing was seen."""
        self.rank = 0
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, Watched] = weakref.WeakKeyDictionary()
        self.calls: list[Call] = []
        self.losses: list[Tensor] = []
        self.scalers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.models: dict[str, nn.Module] = {}
        self.names: dict[int, str] = {}
        self.lost_updates = UpdateWatch()
        self.trainer: Any = None  # of transformers
        self.saves: list[CheckpointFacts] = []
        self.syncs: dict[tuple[str, str], list[int]] = {}  # how many in each update, by place and kind
        self.switches: dict[str, str | float | bool | None] = {}
        self.unseen: dict[str, None] = {}  # in order, each once
        self.regions = 0  # of autocast, that were entered so far
        self.scaled_losses = 0  # that had no backward pass yet
        self.scaler_steps = 0  # that are running
        self.inside = 0  # how many of torch's own calls are running: what those call is not the user's doing
        self._later: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: set[Optimizer] = set()  # kept for the record; one that never stepped may be dropped
        self._sampling: set[Optimizer] = set()
        self._spent, self._began = 0.0, 0.0

    @property
    def updates(self) -> int:
        """How many updates were made, or skipped by a scaler."""
        return max((each.steps for each in self.optimizers.values()), default=0)

    def call(self, what: Any, target: str | None = None, **facts: Any) -> Call:
        """Writes down that the loop did something."""
        facts.setdefault("place", place())
        facts.setdefault("update", self.updates)
        call = Call(what, target=target, **facts)
        self.calls.append(call)
        return call

    def number(self, call: Call, name: str, value: Any) -> None:
        """Adds a number to a call; one on a device is read when the record is made."""
        if isinstance(value, Tensor):
            self.later(value, lambda known: call.numbers.__setitem__(name, float(known)))
        elif value is not None:
            call.numbers[name] = float(value)

    def later(self, value: Tensor, use: Callable[[Tensor], None]) -> None:
        """Gives a copy of a small tensor to a function, on the host, when the record is made."""
        self._later.append((local(value.detach()).clone(), use))

    def lose(self, outputs: Any) -> None:
        """Keeps the losses among what a backward pass begins from."""
        tensors = outputs if isinstance(outputs, list | tuple) else [outputs]
        losses = [each for each in tensors if isinstance(each, Tensor) and each.numel() == 1]
        self.losses += [local(each.detach()).clone() for each in losses]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, torch is at work: what waits for the device there is not the user's doing."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def optimizer(self, optimizer: Optimizer) -> Watched:
        """Returns what is known of an optimizer; a new one is added."""
        optimizer = unwrapped(optimizer)
        if optimizer not in self.optimizers:
            kind = type(optimizer).__name__
            same = sum(each.name.split(" ")[0] == kind for each in self.optimizers.values())
            self.optimizers[optimizer] = Watched(kind if not same else f"{kind} {same + 1}", place())
        return self.optimizers[optimizer]

    def scaler(self, scaler: Any) -> str:
        """Returns the name of a loss scaler."""
        if scaler not in self.scalers:
            kind = type(scaler).__name__
            self.scalers[scaler] = kind if not self.scalers else f"{kind} {len(self.scalers) + 1}"
        return self.scalers[scaler]

    # Models

    def find_models(self) -> None:
        """Looks for the models, if there is an optimizer that was not there before, and starts the collectors."""
        if all(each in self._named for each in self.optimizers):
            return
        self._named = weakref.WeakSet(self.optimizers)
        self.models = models_of([p for each in self.optimizers for p in params_of(each)])
        self.names = names_of(self.models)
        for optimizer, watched in self.optimizers.items():
            unnamed = [p for p in params_of(optimizer) if id(p) not in self.names]
            if unnamed and len(unnamed) == len(params_of(optimizer)):
                self._find_copied(watched, unnamed)
            else:
                self.names |= {id(p): f"{watched.name}.{i}" for i, p in enumerate(unnamed)}
        for collector in self.collectors:
            collector.start(self.models)

    def _find_copied(self, watched: Watched, params: list[Tensor]) -> None:
        for name, model in copied_models(params).items():
            self.models[name or type(model).__name__ if self.models else ""] = model
            trained = [n for n, p in model.named_parameters() if p.requires_grad]
            self.names |= {id(p): n for p, n in zip(params, trained, strict=True)}
            return
        self.names |= {id(p): f"{watched.name}.{i}" for i, p in enumerate(params)}

    # Updates

    def check_end(self, watched: Watched) -> None:
        """Ends the script at the beginning of the first update too many: all before it are whole."""
        if self.steps is not None and watched.steps >= self.steps:
            self.end()

    def before_step(self, optimizer: Optimizer) -> None:
        """Lets the collectors see an update unless they took enough time; ends the script after the last."""
        watched = self.optimizer(optimizer)
        self.check_end(watched)
        if not watched.steps:
            self.rank = rank()
            self.trainer = self.trainer or trainer_of(sys._getframe())
        self._began = self._began or time.perf_counter()
        watched.grad_formats |= {
            id(p): format_name(p.grad.dtype) for p in params_of(optimizer) if p.grad is not None
        }
        elapsed = time.perf_counter() - self._began
        if watched.steps < FIRST or self._spent <= self.share * elapsed:
            self.find_models()
            self._sampling.add(optimizer)
            with self._timed():
                self.lost_updates.before(optimizer)
                for collector in self.collectors:
                    collector.before_step(optimizer, self.names)

    def after_step(self, optimizer: Optimizer, skipped: bool | Tensor) -> None:
        """Counts an update, and lets the collectors see what it did; `skipped` may still lie on the device."""
        watched = self.optimizer(optimizer)
        watched.steps += 1
        watched.restart()
        watched.version = version_of(optimizer)
        self._stepped.add(optimizer)
        if optimizer in self._sampling:
            self._sampling.discard(optimizer)
            with self._timed():
                self.lost_updates.after(optimizer)
                for collector in self.collectors:
                    collector.after_step(optimizer, self.names, bool(skipped))
        if watched.steps == self.updates:
            self.counted(watched.steps)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        with self.quiet():
            yield
        self._spent += time.perf_counter() - began

    # The record

    def record(self) -> Record:
        """Returns everything seen so far."""
        with self.quiet():
            self.find_models()
            for value, use in self._later:
                use(value.cpu())
            self._later.clear()
            record = Record(source="script", rank=self.rank, updates=self.updates, calls=list(self.calls))
            record.switches = self._switches()
            record.weights = list(self._weights())
            record.buffers = list(self._buffers())
            losses = [float(loss) for loss in self.losses]
            record.losses = [loss if math.isfinite(loss) else None for loss in losses]
            record.syncs = self._syncs()
            record.checkpoints = self._saves()
            if self.trainer is not None:
                record.switches["nan_filter"] = bool(self.trainer.args.logging_nan_inf_filter)
                logged = [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]
                record.logged = [value if math.isfinite(value) else None for value in map(float, logged)]
            for collector in self.collectors:
                collector.fill(record)
            record.unseen += [*self.unseen, *self._unseen()]
        return record

    def _weights(self) -> Iterable[Weight]:
        watched = {id(p): its for each, its in self.optimizers.items() for p in params_of(each)}
        by_name = {self.names[key]: (key, its) for key, its in watched.items() if key in self.names}
        for name, model in self.models.items():
            for weight in weights_of(model, self.optimizers, self.lost_updates):
                weight.name = full_name(name, weight.name)
                key, its = by_name.pop(weight.name, (0, None))
                if its is not None:
                    weight.place, weight.grad_format = its.place, its.grad_formats.get(key)
                yield weight
        held = {id(p): p for each in self.optimizers for p in params_of(each)}
        for name, (key, its) in by_name.items():  # of no model
            p = held[key]
            yield Weight(
                name,
                format_name(p.dtype),
                list(p.shape),
                kind="matrix" if p.ndim >= 2 else "other",
                optimizer=its.name.split(" ")[0],
                grad_format=its.grad_formats.get(key),
                place=its.place,
                updates=self.lost_updates.counts(p),
            )

    def _buffers(self) -> Iterable[Buffer]:
        for name, model in self.models.items():
            for buffer in buffers_of(model):
                buffer.name = full_name(name, buffer.name)
                yield buffer

    def _saves(self) -> list[CheckpointFacts]:
        """The last save with an optimizer's state. A library may put a scaler's into a file of its own."""
        last = next((each for each in reversed(self.saves) if each.moments), None)
        if last is None:
            return []
        scaler = any(each.scaler for each in self.saves) if self.scalers else None
        return [replace(last, scaler=scaler)]

    def _syncs(self) -> list[Sync]:
        updates = max(self.updates, 1)
        counts = {key: [*seen, *[0] * (updates - len(seen))] for key, seen in self.syncs.items()}
        return [Sync(place, what, median(seen)) for (place, what), seen in counts.items() if median(seen)]

    def _switches(self) -> dict[str, str | float | bool | None]:
        matmul = torch.backends.cuda.matmul
        return {
            "device": next((p.device.type for each in self.optimizers for p in params_of(each)), None),
            "fp16_reduced_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
            "bf16_reduced_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
            "fp16_sums": bool(getattr(matmul, "allow_fp16_accumulation", False)),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **self.switches,
        }

    def _unseen(self) -> list[str]:
        unseen = []
        if has_compiled():
            unseen.append("what compiled code does inside: clipping, autocast, waiting for the device")
        foreign = {
            f"{type(each).__module__}.{type(each).__name__}"
            for each in self.optimizers
            if not type(each).__module__.startswith(("torch.optim", "halfstep."))
        }
        for name in sorted(foreign):
            unseen.append(f"how {name} computes its updates: it is not an optimizer of torch")
        return unseen


def version_of(optimizer: Optimizer) -> int:
    """Returns a number that grows when the weights of an optimizer change."""
    return params_of(optimizer)[0]._version


def has_compiled() -> bool:
    """Whether dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])


def unwrapped(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside a wrapper, such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def rank() -> int:
    """Returns which of the processes of a job this is."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def trainer_of(frame: FrameType | None) -> Any:
    """Returns the transformers.Trainer that called, if one did."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer" and "self" in frame.f_locals:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def probe_of(params: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Returns the first parameter that has a dense gradient, and a copy of the gradient's first elements."""
    for p in params:
        if p.grad is not None and not p.grad.is_sparse:
            return p, _first(p.grad).clone()
    return None


def divided_by(probe: tuple[Tensor, Tensor] | None) -> Any:
    """Returns by what a gradient was divided since it was probed; 1.0 if that cannot be known."""
    if probe is None or probe[0].grad is None:
        return 1.0
    return probe[1].norm() / _first(probe[0].grad).norm()


def _first(grad: Tensor) -> Tensor:
    return local(grad.detach()).flatten()[:PROBE].float()
