"""Hooks on what a loop does in every update: backward, clip, step, zero, the schedule and the loss scaler."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.core.audit.record import BY_HAND, Call
from halfstep.torch.instruments.collect.graphs import graphs_compiled
from halfstep.torch.instruments.collect.log import TrackedOptimizer, TrainingLog
from halfstep.torch.instruments.collect.losses import Root, is_scale, root_of
from halfstep.torch.instruments.collect.models import params_of, unwrap, version_of
from halfstep.torch.instruments.collect.patches import Around, Patches, is_watched
from halfstep.torch.instruments.collect.tensors import format_name, is_narrow, local

# Elements of a gradient that show what happened to it between backward and step, and how many gradients are looked
# at: those of one may be zero, as the rows of an embedding that no token used.
PROBE, PROBES = 1024, 16
MOST_NAMES = 8  # of tensors in one call
CLOSELY = 20  # updates whose gradients are looked at for what the script does to them by itself


def install(log: TrainingLog, patches: Patches) -> None:
    """Installs the hooks."""
    hooks = LoopHooks(log)
    # Activation checkpointing runs one backward pass inside another.
    patches.wrap(torch.autograd, "backward", hooks.backward, outermost=True)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.wrap_everywhere([torch.nn.utils, torch.nn.utils.clip_grad], name, hooks.clip)
    patches.hook(register_optimizer_step_pre_hook, patches.guard.hook(hooks.before_step))
    patches.hook(register_optimizer_step_post_hook, patches.guard.hook(hooks.after_step))
    patches.wrap(Optimizer, "__init__", hooks.init)
    patches.wrap(Optimizer, "zero_grad", hooks.zero_grad, traced=False)  # torch, too, keeps dynamo out of it
    ScalerHooks(log, patches).wrap(GradScaler)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            patches.wrap(kind, "step", hooks.schedule, outermost=True)  # a schedule of schedules counts as one


def probe_of(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns some parameters that have a dense gradient, each with a copy of the gradient's first elements."""
    dense = [(p, p.grad) for p in params if p.grad is not None and not p.grad.is_sparse]
    here = [(p, grad) for p, grad in dense if p.device == dense[0][0].device]
    return [(p, _first(grad).clone()) for p, grad in here[:: len(here) // PROBES + 1]]


def applied_divisor(probe: list[tuple[Tensor, Tensor]]) -> Any:
    """Returns what gradients were divided by since they were probed; 1.0 if that cannot be known."""
    pairs = [(before, _first(p.grad)) for p, before in probe if p.grad is not None]
    if not pairs:
        return 1.0
    before, now = (torch.stack(torch._foreach_norm(list(each))).norm() for each in zip(*pairs, strict=True))
    return before / now


def _first(grad: Tensor) -> Tensor:
    return local(grad.detach()).flatten()[:PROBE].float()


class LoopHooks:
    """Logs backward passes, clips, and the construction, steps and zeroing of optimizers, and schedules."""

    def __init__(self, log: TrainingLog):
        self.log = log
        self.stepping: list[tuple[Optimizer, Call]] = []  # an optimizer may step another one

    def backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs a backward pass for each optimizer whose gradients it changes, and the loss that it begins from."""
        log = self.log
        if any(not each.steps for each in log.optimizers.values()):
            log.find_models()
        before = {each: _gradients(log.summed_in(each)) for each in log.optimizers}
        by_scaler = scaled = log.scaled_losses > 0
        if not scaled:
            root = self._see_root(tensors, *args, **kwargs)
            log.add_losses(tensors)
            scaled = is_scale(root.factor)
        log.in_backward = True
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            log.in_backward = False
        log.scaled_losses -= by_scaler
        for optimizer, grads in before.items():
            now = _gradients(log.summed_in(optimizer))
            if changed := [was for was, became in zip(grads, now, strict=False) if was != became]:
                self._record_pass(optimizer, scaled, fresh=not any(grads), summed=any(changed))
        return result

    def _see_root(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> Root:
        """Logs that the script scales its loss by itself, or replaces NaN in it."""
        losses, grads = (each if isinstance(each, list | tuple) else [each] for each in (tensors, grad_tensors))
        root = root_of(losses[0] if losses else None, grads[0] if grads else None)
        if is_scale(root.factor):
            self.log.add_call("scale", BY_HAND, numbers={"scale": root.factor})
        if root.replaced is not None:
            bad = (~torch.isfinite(local(root.replaced.detach()))).sum()
            self.log.add_number(self.log.add_call("replace", "the loss"), "nonfinite", bad)
        return root

    def _record_pass(self, optimizer: Optimizer, scaled: bool, *, fresh: bool, summed: bool) -> None:
        tracked = self.log.track(optimizer)
        if fresh:
            tracked.restart()
        tracked.micro = tracked.micro + 1 if summed else 1
        tracked.scaled |= scaled
        numbers = {"micro": float(tracked.micro), "scaled": float(scaled)}
        call = self.log.add_call("backward", tracked.name, numbers=numbers)
        params = self.log.summed_in(optimizer)
        narrow = [p.grad.dtype for p in params if p.grad is not None and is_narrow(p.grad.dtype)]
        if narrow:
            call.format, numbers["narrow"] = format_name(narrow[0]), float(len(narrow))
        if tracked.steps < CLOSELY:
            self._find_nonfinite(call, params)
        if tracked.scaled:
            tracked.probe = probe_of(params_of(optimizer))

    def clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs that gradients are clipped, and whether they are still scaled."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in params}
        clipped = [
            tracked
            for optimizer, tracked in self.log.optimizers.items()
            if any(id(p) in ids for p in params_of(optimizer))
        ]
        calls = [self._record_clip(tracked) for tracked in clipped]
        with self.log.library_call():
            norm = original(parameters if isinstance(parameters, Tensor) else params, *args, **kwargs)
        for call, tracked in zip(calls, clipped, strict=True):
            self.log.add_number(call, "norm", norm)
            tracked.probe = probe_of([p for p, _ in tracked.probe])
        return norm

    def _record_clip(self, tracked: TrackedOptimizer) -> Call:
        call = self.log.add_call("clip", tracked.name, numbers={"scaled": float(tracked.scaled)})
        if tracked.scaled:
            tracked.ratio = tracked.ratio * applied_divisor(tracked.probe)
            self.log.add_number(call, "divided", tracked.ratio)
        return call

    def init(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Begins to track a new optimizer, and remembers where it was constructed."""
        original(optimizer, *args, **kwargs)
        self.log.track(optimizer).version = version_of(optimizer)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Logs a step; torch calls it before the step of any optimizer."""
        if torch.compiler.is_compiling():
            return
        log = self.log
        tracked = log.track(optimizer)
        log.before_step(optimizer)
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        call = log.add_call("step", tracked.name, update=tracked.steps)
        if autocast:
            call.numbers["region"] = float(log.regions)
        if tracked.scaled and not log.scaler_steps:
            call.numbers["scaled"] = 1.0
            log.add_number(call, "divided", tracked.ratio * applied_divisor(tracked.probe))
        self._find_nonfinite(call, params_of(optimizer))
        self.stepping.append((optimizer, call))
        log.library_depth += 1

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Completes a step; torch calls it after any step, of a fused optimizer also if the scaler skips it."""
        if torch.compiler.is_compiling():
            return
        log = self.log
        while self.stepping:  # a step that raised an error has left its entry
            stepped, call = self.stepping.pop()
            log.library_depth -= 1
            if stepped is optimizer:
                break
        else:
            return
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            log.read_later(found, lambda value: setattr(call, "skipped", bool(value)))
        log.after_step(optimizer, found if isinstance(found, Tensor) else False)

    def zero_grad(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Logs that gradients are dropped. If weights changed without a step, compiled code has made the step."""
        log = self.log
        tracked = log.track(optimizer)
        version = version_of(optimizer)
        if tracked.version not in (None, version) and graphs_compiled():
            log.unseen[f"the steps of {tracked.name}: they are compiled"] = None
            log.check_end(tracked)
            log.add_call("step", tracked.name, update=tracked.steps)
            log.after_step(optimizer, False)
        log.add_call("zero", tracked.name)
        tracked.restart()
        tracked.version = version
        with log.library_call():
            return original(optimizer, *args, **kwargs)

    def _find_nonfinite(self, call: Call, params: Iterable[Tensor]) -> None:
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for p in params:
            if p.grad is not None and not p.grad.is_sparse:
                name, grad = self.log.names.get(id(p), ""), local(p.grad.detach())
                if grad.numel():  # a rank may have no rows of a small tensor
                    by_device.setdefault(grad.device, []).append((name, grad))
        for named in by_device.values():
            largest = torch._foreach_norm([grad for _, grad in named], float("inf"))
            finite = torch.isfinite(torch.stack([each.float() for each in largest]))
            self.log.read_later(finite, partial(_name_nonfinite, call, [name for name, _ in named]))

    def schedule(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs the step of a schedule, and the update it follows."""
        if self.log.updates:  # the constructor of a schedule steps it once
            optimizer = getattr(schedule, "optimizer", None)
            target = self.log.track(optimizer).name if isinstance(optimizer, Optimizer) else None
            self.log.add_call("schedule", target)
        with self.log.library_call():
            return original(schedule, *args, **kwargs)


def _gradients(params: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """Returns what identifies gradients: another tensor, or another version of it, is new."""
    grads = [p.grad for p in params]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


def _name_nonfinite(call: Call, names: list[str], finite: Tensor) -> None:
    bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
    if bad:
        call.numbers["nonfinite"] = call.numbers.get("nonfinite", 0.0) + len(bad)
        call.names = [*call.names, *bad][:MOST_NAMES]


def _sizes(params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the norm of all gradients and the largest of their numbers, on their device."""
    grads = [local(p.grad.detach()) for p in params if p.grad is not None and not p.grad.is_sparse]
    here = [grad for grad in grads if grad.device == grads[0].device and grad.numel()]
    if not here:
        return {}
    norms, largest = (torch.stack(torch._foreach_norm(here, order)).float() for order in (2.0, float("inf")))
    return {"norm": norms.norm(), "largest": largest.max()}


class ScalerHooks:
    """Logs what a loss scaler does."""

    def __init__(self, log: TrainingLog, patches: Patches):
        self.log, self.patches = log, patches
        hooks = {"scale": self.scale, "unscale_": self.unscale, "step": self.step, "update": self.update}
        self._hooks: dict[str, Around] = {name: partial(self._call, hook) for name, hook in hooks.items()}
        self._hooks["__init__"] = self.init

    def wrap(self, kind: type) -> None:
        """Wraps the methods that a class itself defines."""
        for name, hook in self._hooks.items():
            if name in vars(kind) and not is_watched(vars(kind)[name]):
                self.patches.wrap(kind, name, hook, outermost=True)

    def _call(self, hook: Any, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():  # it does nothing
            return original(scaler, *args, **kwargs)
        return hook(self.log.library_call()(original), scaler, *args, **kwargs)

    def init(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps the class of a new scaler."""
        for kind in type(scaler).__mro__[:-1]:
            if issubclass(kind, GradScaler):
                self.wrap(kind)
        original(scaler, *args, **kwargs)

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Logs the loss before it is scaled."""
        log = self.log
        log.add_losses(outputs)
        log.scaled_losses += len(outputs) if isinstance(outputs, list | tuple) else 1
        call = log.add_call("scale", log.name_scaler(scaler))
        result = original(scaler, outputs)
        log.add_number(call, "scale", scaler._scale)
        return result

    def unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        """Logs that gradients are unscaled, by the user or by `step`."""
        tracked = self.log.track(optimizer)
        call = self.log.add_call("unscale", tracked.name)
        if tracked.scaled and tracked.steps < CLOSELY:
            self.log.add_number(call, "divided", tracked.ratio * applied_divisor(tracked.probe))
            for name, value in _sizes(params_of(unwrap(optimizer))).items():
                self.log.add_number(call, name, value)
        result = original(scaler, optimizer)
        tracked.scaled = False
        return result

    def step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs a skipped update if the scaler does not step the optimizer."""
        log = self.log
        inner = unwrap(optimizer)
        tracked = log.track(inner)
        log.check_end(tracked)
        before = tracked.steps
        log.scaler_steps += 1
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            log.scaler_steps -= 1
        if tracked.steps == before:
            log.add_call("step", tracked.name, update=before, skipped=True)
            log.after_step(inner, True)
        return result

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs the scale before and after its update."""
        call = self.log.add_call("update", self.log.name_scaler(scaler))
        self.log.add_number(call, "before", scaler._scale)
        result = original(scaler, *args, **kwargs)
        self.log.add_number(call, "after", scaler._scale)
        return result
