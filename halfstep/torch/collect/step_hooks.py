"""Hooks on what every loop does: backward, clip, step, zero, and the schedule."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.core.audit.record import Call
from halfstep.torch.collect.patches import Patches
from halfstep.torch.collect.seen import Seen, Watched, divided_by, has_compiled, params_of, probe_of, version_of
from halfstep.torch.collect.weights import format_name
from halfstep.torch.shards import local

NAMED = 8  # so many tensors are named in a call


def install(seen: Seen, patches: Patches) -> None:
    """Installs them."""
    patches.wrap_everywhere([torch.autograd], "backward", BackwardHook(seen))
    clip = torch.nn.utils.clip_grad
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.wrap_everywhere([torch.nn.utils, clip], name, ClipHook(seen))
    steps = StepHooks(seen)
    patches.later(register_optimizer_step_pre_hook(steps.before).remove)
    patches.later(register_optimizer_step_post_hook(steps.after).remove)
    patches.wrap(Optimizer, "__init__", steps.made)
    patches.wrap(Optimizer, "zero_grad", steps.zeroed, traced=False)  # torch, too, keeps dynamo out of it
    schedule = ScheduleHook(seen)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            patches.wrap(kind, "step", schedule)


class BackwardHook:
    """Writes down a backward pass for each optimizer whose parameters it reaches, and the loss it began from."""

    def __init__(self, seen: Seen):
        self.seen, self.running = seen, False

    def __call__(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        if self.running:  # activation checkpointing runs one inside another
            return original(tensors, *args, **kwargs)
        seen = self.seen
        if any(not each.steps for each in seen.optimizers.values()):
            seen.find_models()
        before = {each: _gradients(each) for each in seen.optimizers}
        scaled = seen.scaled_losses > 0
        if not scaled:
            seen.lose(tensors)
        self.running = True
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self.running = False
        seen.scaled_losses -= scaled
        for optimizer, grads in before.items():
            if _gradients(optimizer) != grads:
                self._reached(optimizer, _format(tensors), scaled, fresh=not any(grads))
        return result

    def _reached(self, optimizer: Optimizer, loss: str | None, scaled: bool, fresh: bool) -> None:
        watched = self.seen.optimizer(optimizer)
        if fresh:
            watched.restart()
        watched.micro += 1
        watched.scaled |= scaled
        numbers = {"micro": float(watched.micro), "scaled": float(scaled)}
        self.seen.call("backward", watched.name, numbers=numbers, format=loss)
        if watched.scaled:
            watched.probe = probe_of(params_of(optimizer))


def _format(tensors: Any) -> str | None:
    first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
    return format_name(first.dtype) if isinstance(first, Tensor) else None


def _gradients(optimizer: Optimizer) -> list[tuple[int, int] | None]:
    """Returns what identifies the gradients of an optimizer: another tensor, or another version of it, is new."""
    grads = [p.grad for p in params_of(optimizer)]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


class ClipHook:
    """Writes down a clipping of gradients, and whether they were still scaled."""

    def __init__(self, seen: Seen):
        self.seen = seen

    def __call__(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clips."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in params}
        clipped = [
            watched
            for optimizer, watched in self.seen.optimizers.items()
            if any(id(p) in ids for p in params_of(optimizer))
        ]
        calls = [self._entered(watched) for watched in clipped]
        with self.seen.quiet():
            norm = original(parameters if isinstance(parameters, Tensor) else params, *args, **kwargs)
        for call, watched in zip(calls, clipped, strict=True):
            self.seen.number(call, "norm", norm)
            if watched.scaled and watched.probe is not None:
                watched.probe = probe_of([watched.probe[0]])
        return norm

    def _entered(self, watched: Watched) -> Call:
        call = self.seen.call("clip", watched.name, numbers={"scaled": float(watched.scaled)})
        if watched.scaled:
            watched.ratio = watched.ratio * divided_by(watched.probe)
            self.seen.number(call, "divided", watched.ratio)
        return call


class StepHooks:
    """Writes down the making, the steps and the zeroing of optimizers; an optimizer may step another one."""

    def __init__(self, seen: Seen):
        self.seen = seen
        self.stepping: list[tuple[Optimizer, Call]] = []

    def made(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Remembers where an optimizer was made."""
        original(optimizer, *args, **kwargs)
        self.seen.optimizer(optimizer).version = version_of(optimizer)

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch before a step of any optimizer."""
        if torch.compiler.is_compiling():
            return
        seen = self.seen
        watched = seen.optimizer(optimizer)
        seen.before_step(optimizer)
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        call = seen.call("step", watched.name, update=watched.steps)
        if autocast:
            call.numbers["region"] = float(seen.regions)
        if watched.scaled and not seen.scaler_steps:
            call.numbers["scaled"] = 1.0
            seen.number(call, "divided", watched.ratio * divided_by(watched.probe))
        self._find_nonfinite(call, optimizer)
        self.stepping.append((optimizer, call))
        seen.inside += 1

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch after it. A fused optimizer comes here on steps that the scaler skips, too."""
        if torch.compiler.is_compiling():
            return
        seen = self.seen
        while self.stepping:  # a step that raised has left its entry
            stepped, call = self.stepping.pop()
            seen.inside -= 1
            if stepped is optimizer:
                break
        else:
            return
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            seen.later(found, lambda value: setattr(call, "skipped", bool(value)))
        seen.after_step(optimizer, found if isinstance(found, Tensor) else False)

    def zeroed(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Writes down that gradients were dropped. Weights that changed unseen had a step in compiled code."""
        seen = self.seen
        watched = seen.optimizer(optimizer)
        version = version_of(optimizer)
        if watched.version not in (None, version) and has_compiled():
            seen.unseen[f"the steps of {watched.name}: they are compiled"] = None
            seen.check_end(watched)
            seen.call("step", watched.name, update=watched.steps)
            seen.after_step(optimizer, False)
        seen.call("zero", watched.name)
        watched.restart()
        watched.version = version
        with seen.quiet():
            return original(optimizer, *args, **kwargs)

    def _find_nonfinite(self, call: Call, optimizer: Optimizer) -> None:
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for p in params_of(optimizer):
            if p.grad is not None and not p.grad.is_sparse:
                name, grad = self.seen.names.get(id(p), ""), local(p.grad.detach())
                if grad.numel():  # a rank may have no rows of a small tensor
                    by_device.setdefault(grad.device, []).append((name, grad))
        for named in by_device.values():
            largest = torch._foreach_norm([grad for _, grad in named], float("inf"))
            finite = torch.isfinite(torch.stack([each.float() for each in largest]))
            self.seen.later(finite, partial(_name_nonfinite, call, [name for name, _ in named]))


def _name_nonfinite(call: Call, names: list[str], finite: Tensor) -> None:
    bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
    if bad:
        call.numbers["nonfinite"] = call.numbers.get("nonfinite", 0.0) + len(bad)
        call.names = [*call.names, *bad][:NAMED]


class ScheduleHook:
    """Writes down the steps of a schedule, and the update they follow; one that wraps others steps once."""

    def __init__(self, seen: Seen):
        self.seen, self.running = seen, False

    def __call__(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps it."""
        if self.running or not self.seen.updates:  # a schedule steps once when it is made
            return original(schedule, *args, **kwargs)
        self.running = True
        optimizer = getattr(schedule, "optimizer", None)
        target = self.seen.optimizer(optimizer).name if isinstance(optimizer, Optimizer) else None
        self.seen.call("schedule", target)
        try:
            with self.seen.quiet():
                return original(schedule, *args, **kwargs)
        finally:
            self.running = False
