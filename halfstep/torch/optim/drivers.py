"""Any optimizer that follows torch's interface, as a run steps it.

A step must be skipped when its gradients are not finite. Whether they are is known on the device; asking for it
makes the host wait until everything before is done. There are four ways, the first that fits is taken:

    ours        takes `found_inf` as an argument, and fp32 gradients beside narrower parameters
    told        `optimizer.found_inf`, the protocol of torch's GradScaler: fused kernels do nothing where it is 1
    undone      `capturable` optimizers of torch keep all their state on the device: the step is made, and where it
                should not have been, everything is put back by torch.where. Costs a copy of parameters and state.
    asked       all others: the flag is read, one sync a step, and the summary says so

All but ours are handed fp32 masters and fp32 gradients through the seam of masters.py; state of a parameter's
shape is held in the moments format and widened for the step.

Closures are refused: an optimizer that evaluates the loss anew within its step (LBFGS) would do so on gradients
that nobody unscaled, clipped or found finite.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32, Format
from halfstep.torch.convert.known_packages import refuse_wrapped_optimizer
from halfstep.torch.dtypes import dtype_of
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.run.accumulation import values_of
from halfstep.torch.optim.masters import Masters

Grads = Mapping[Tensor, Tensor]


class Driver(ABC):
    """One optimizer of a run."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters, moments: Mapping[str, Format]):
        self.optimizer, self.masters, self.moments = optimizer, masters, moments

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer holds now."""
        return list(held_by(self.optimizer))

    @property
    @abstractmethod
    def cost(self) -> str:
        """What a step waits for, in words, with the reason."""

    @abstractmethod
    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """One update by gradients times `scale` unless `found_inf` is 1; `count` is its number, for rounding."""

    def check(self, grads: Grads) -> None:  # noqa: B027
        """Refuses gradients that the optimizer cannot take."""

    def cast_moments(self, *, widen: bool = False) -> None:
        """State that has its parameter's shape, in the moments format, or in fp32 for the step."""
        for p in self.parameters:
            fmt = FP32 if widen else self.moments.get(self.masters.names.get(p, ""), FP32)
            for key, value in self.optimizer.state.get(p, {}).items():
                if is_moment(p, value):
                    self.optimizer.state[p][key] = value.to(dtype_of(fmt))


class Ours(Driver):
    """An optimizer of adamw.py."""

    optimizer: Optimizer
    cost = "no sync"

    def check(self, grads: Grads) -> None:
        """Ours take dense gradients."""
        self.optimizer.check_grads(grads)

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """One update unless `found_inf` is 1."""
        mine = {p: grads[p] for p in self.parameters if p in grads}
        self.optimizer.step(mine, found_inf=found_inf, scale=scale)


class Stock(Driver):
    """What is common to optimizers that know nothing of halfstep."""

    _making = False

    def refuse_alone(self, *_: Any) -> None:
        """Before any step: one that the run does not make would be made on bf16 halves, or on scaled gradients."""
        if self._making:
            return
        narrow = any(not self.masters.is_whole(p) for p in self.parameters)
        why = (
            "parameters are held narrower than their masters: small updates would be lost"
            if narrow
            else "this policy scales the loss: its gradients are not scaled, or never unscaled"
        )
        raise HalfstepError(
            f"{label(self.optimizer)}.step() was called by itself, and {why}",
            hint="run.update() makes the step, on the masters",
        )

    def make(self, grads: Grads, scale: Tensor, count: Tensor) -> None:
        """The optimizer's own step, on fp32 masters, gradients and moments."""
        torch._foreach_mul_([values_of(grads[p]) for p in self.parameters if p in grads], scale)
        with self.masters.opened([p for p in self.parameters if p.requires_grad], count):
            handed = [p for p in self.parameters if p in grads and p.grad is not grads[p]]
            for p in handed:
                p.grad = grads[p].to(p.dtype)
            self.cast_moments(widen=True)
            self._making = True
            try:
                self.optimizer.step()
            finally:
                self._making = False
            self.cast_moments()
            for p in handed:
                p.grad = None


class Told(Stock):
    """A fused optimizer: its kernel reads the flag."""

    @property
    def cost(self) -> str:
        """What a step waits for."""
        if any(group.get("momentum") for group in self.optimizer.param_groups) and "dampening" in self._settings:
            return "no sync, but for the first step: its kernel would start from momentum that nobody wrote"
        return "no sync"

    @property
    def _settings(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """One update unless `found_inf` is 1."""
        if self._unwritten(grads) and bool(found_inf):
            return
        self.optimizer.found_inf, self.optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        try:
            self.make(grads, scale, count)
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]

    def _unwritten(self, grads: Grads) -> bool:
        """Fused SGD allocates its momentum and leaves the first write to the kernel, which is told not to."""
        return "dampening" in self._settings and any(
            group["momentum"] and self.optimizer.state.get(p, {}).get("momentum_buffer") is None
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p in grads
        )


class Asked(Stock):
    """An optimizer that cannot be told: the flag is read."""

    @property
    def cost(self) -> str:
        """What a step waits for."""
        offered = [way for way in ("fused", "capturable") if way in self.optimizer.defaults]
        better = f"; {' or '.join(f'{way}=True' for way in offered)} would need none" if offered else ""
        return f"one sync a step, because it cannot be told on the device to skip one{better}"

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """One update unless `found_inf` is 1, which is read."""
        if not bool(found_inf):
            self.make(grads, scale, count)


class Undone(Stock):
    """A capturable optimizer: its step is made, and undone where it should not have been."""

    cost = "no sync after the first step; each is made and, where it must be skipped, undone: a copy of its state"

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """One update, put back where `found_inf` is 1."""
        params = [p for p in self.parameters if p in grads]
        if any(not self.optimizer.state.get(p) for p in params):
            if not bool(found_inf):  # the first step makes the state, and cannot unmake it
                self.make(grads, scale, count)
            return
        before = {key: tensor.clone() for key, tensor in self._live(params)}
        self.make(grads, scale, count)
        for key, now in self._live(params):
            now.copy_(torch.where(found_inf > 0, before[key], now))

    def _live(self, params: list[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """Every tensor that a step may change."""
        for p in params:
            yield p, p.detach()
            if self.masters.is_split(p):
                yield (p, "remainder"), self.masters.remainders[self.masters.names[p]]
            yield from (((p, key), v) for key, v in self.optimizer.state[p].items() if isinstance(v, Tensor))


def driver_of(optimizer: torch.optim.Optimizer, masters: Masters, moments: Mapping[str, Format]) -> Driver:
    """The cheapest way to step an optimizer that skips when it must."""
    kind: type[Driver] = Asked
    if isinstance(optimizer, Optimizer):
        kind = Ours
    elif getattr(optimizer, "_step_supports_amp_scaling", False) and _everywhere(optimizer, "fused"):
        kind = Told
    elif type(optimizer).__module__.startswith("torch.optim.") and _everywhere(optimizer, "capturable"):
        kind = Undone
    return kind(optimizer, masters, moments)


def label(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's name with where it is from, as `AdamW (torch, fused)`."""
    ways = [way for way in ("fused", "foreach", "capturable") if optimizer.defaults.get(way)]
    return f"{type(optimizer).__name__} ({', '.join([type(optimizer).__module__.partition('.')[0], *ways])})"


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_moment(parameter: Tensor, value: Any) -> bool:
    """Whether a piece of state is of the kind that the moments format is for: floating, and one a number."""
    plain = isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter)
    return plain and value.is_floating_point() and value.ndim > 0 and value.shape == parameter.shape


def check_optimizers(given: Any, model: nn.Module, *, narrow: bool) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list, or the reason why they cannot be run.

    `narrow` says that some masters are not the fp32 parameter itself.
    """
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    if not optimizers:
        raise HalfstepError("no optimizer was given", hint="prepare(model, torch.optim.AdamW(...), policy)")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    taken: dict[Tensor, str] = {}
    for optimizer in optimizers:
        _check_kind(optimizer, narrow=narrow)
        for p in held_by(optimizer):
            if p not in names:
                raise HalfstepError(
                    f"{label(optimizer)} holds a parameter of shape {tuple(p.shape)} that the model does not",
                    hint="make it of model.parameters() of this very model, after it was copied, moved or loaded",
                )
            if p in taken:
                raise HalfstepError(
                    f"`{names[p]}` is held by {taken[p]} and again by {label(optimizer)}: it would move twice",
                    hint="give each parameter to one optimizer",
                )
            taken[p] = label(optimizer)
    if not taken:
        raise HalfstepError("the optimizers hold no parameters", hint="make them of model.parameters()")
    devices = sorted({str(p.device) for p in taken})
    if len(devices) > 1:
        raise HalfstepError(
            f"the parameters are on {len(devices)} devices: {', '.join(devices)}",
            hint="a run takes one device; move the model to it before it is prepared",
        )
    return optimizers


def _check_kind(optimizer: Any, *, narrow: bool) -> None:
    refuse_wrapped_optimizer(optimizer)
    if isinstance(optimizer, torch.amp.GradScaler):
        raise HalfstepError(
            "a GradScaler was given where an optimizer belongs: a run scales the loss itself, by the policy",
            hint="leave it out; `fp16-mixed` has a dynamic scale, bf16 needs none, and run.load_torch_amp takes "
            "over the state of this one",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HalfstepError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer: nothing says where its parameters are",
            hint="prepare(model, optimizer, policy) takes an optimizer or a list of them",
        )
    required = _required(optimizer)
    if required and not isinstance(optimizer, Optimizer):
        raise HalfstepError(
            f"{label(optimizer)} needs `{required[0]}` for a step: it would evaluate the loss within it, on "
            "gradients that nobody unscaled, clipped or found finite",
            hint="use an optimizer whose step() takes nothing, as AdamW or SGD",
        )
    if narrow and callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise HalfstepError(
            f"{label(optimizer)} rewrites parameters outside of step(), by its train() and eval(), and there they "
            "are narrower than their masters",
            hint="hold masters as they are, with `param=fp32`",
        )


def _required(optimizer: torch.optim.Optimizer) -> list[str]:
    """What its step cannot do without."""
    # Of the class: a scheduler puts a wrapper on the instance, which takes `self`.
    _, *taken = inspect.signature(type(optimizer).step).parameters.values()
    return [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _everywhere(optimizer: torch.optim.Optimizer, way: str) -> bool:
    """Whether every group goes that way; `fused` of other projects' optimizers has no such switch."""
    return all(group.get(way, way == "fused") for group in optimizer.param_groups)
