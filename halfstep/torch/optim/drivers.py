"""Drivers: how a run steps any optimizer that follows torch's interface.

A step must be skipped when its gradients are not finite. Whether they are is known on the device; reading it makes
the host wait until everything before is done. The first driver that fits is taken:

    HalfstepDriver    our optimizers take `found_inf` as an argument, and fp32 gradients of narrower parameters
    FusedDriver       sets `optimizer.found_inf`, the protocol of GradScaler: fused kernels do nothing if it is 1
    RollbackDriver    `capturable` optimizers of torch keep all their state on the device: the step is made, and
                      torch.where undoes it if it must be skipped. Costs a copy of parameters and state.
    SyncDriver        all others: the flag is read, one sync per step, and the summary says so

All but the first get fp32 masters and gradients (`Masters.open`), and moments widened for the step. A step()
that a plain loop calls itself (update/own_steps.py) is skipped by the same means, between `begin` and `end`.
Closures are refused: an optimizer that evaluates the loss again (LBFGS) would use gradients that were not unscaled
or checked.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.model import owner
from halfstep.core.errors import (
    AutocastError,
    OptimizerParametersError,
    PolicyConflictError,
    UnsupportedOptimizerError,
    type_name,
)
from halfstep.core.formats import FP32, Format
from halfstep.core.roles import Param
from halfstep.torch.convert.known_packages import refuse_wrapped_optimizer
from halfstep.torch.convert.resolve import ModelPolicy
from halfstep.torch.kernels import reachable
from halfstep.torch.numerics.dtypes import dtype_of
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.optim.adamw import Grads, Optimizer, is_plain, readable
from halfstep.torch.optim.masters import Masters


class Driver(ABC):
    """Steps one optimizer of a run."""

    is_stepping = False  # whether the optimizer's step is the run's own

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters, moments: Mapping[str, Format]):
        self.optimizer, self.masters, self.moments = optimizer, masters, moments
        self._narrow_moments = any(fmt != FP32 for fmt in moments.values())

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer holds now."""
        return held_by(self.optimizer)

    @property
    @abstractmethod
    def cost(self) -> str:
        """Describes what a step waits for, with the reason."""

    @abstractmethod
    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """Updates by gradients times `scale` unless `found_inf` is 1; `count` updates were made, for rounding."""

    def check(self, grads: Grads) -> None:  # noqa: B027
        """Refuses gradients that the optimizer cannot take."""

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the optimizer's step is the run's own."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    @abstractmethod
    def begin(self, found_inf: Tensor) -> dict[str, Any]:
        """Makes a step() that the user calls skip if `found_inf` is 1; returns arguments for it.

        Masters are whole and fp32, and so are gradients and moments.
        """

    def end(self) -> None:  # noqa: B027
        """Undoes what `begin` did, after the step."""

    def cast_moments(self, *, widen: bool = False) -> None:
        """Casts state that has its parameter's shape to the moments format, or to fp32 for the step."""
        for p in self.parameters:
            fmt = FP32 if widen else self.moments.get(self.masters.names.get(p, ""), FP32)
            for key, value in self.optimizer.state.get(p, {}).items():
                if is_moment(p, value):
                    self.optimizer.state[p][key] = value.to(dtype_of(fmt))


class HalfstepDriver(Driver):
    """Steps an optimizer of ours, which takes the flag as an argument."""

    optimizer: Optimizer

    @property
    def cost(self) -> str:
        """What a step costs besides its arithmetic, and how an optimizer that has a choice computes it."""
        return f"no sync; {self.optimizer.note}" if self.optimizer.note else "no sync"

    def check(self, grads: Grads) -> None:
        if not grads.plain:
            self.optimizer.check_grads(grads)

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        with self.stepping():
            self.optimizer.step(grads, found_inf=found_inf, scale=scale)

    def begin(self, found_inf: Tensor) -> dict[str, Any]:
        return {"found_inf": found_inf}


class StockDriver(Driver):
    """Steps an optimizer that knows nothing of halfstep; each kind has its own way to skip a step."""

    _held_back: Sequence[tuple[Tensor, Tensor]] = ()

    @abstractmethod
    def start(self, parameters: Sequence[Tensor], found_inf: Tensor) -> bool:
        """Makes the step of parameters one that `end` completes; True if it must not be made at all."""

    def end(self) -> None:
        """Shows gradients again that were held back."""
        for p, grad in self._held_back:
            p.grad = grad
        self._held_back = ()

    def step(self, grads: Grads, scale: Tensor, found_inf: Tensor, count: Tensor) -> None:
        """Updates fp32 masters by the optimizer's own step, with fp32 gradients and moments."""
        held = self.parameters
        parameters = [p for p in held if id(p) in grads]
        if not parameters or self.start(parameters, found_inf):
            return
        given = [grads[id(p)] for p in parameters]
        try:
            torch._foreach_mul_(given if grads.plain else numbers_of(given), scale)
            self._step_masters(held, parameters, given, count)
        finally:
            self.end()

    def begin(self, found_inf: Tensor) -> dict[str, Any]:
        """Starts the step; one that must not be made finds no gradient, without which no parameter moves."""
        given = [(p, p.grad) for p in self.parameters if p.grad is not None]
        if self.start([p for p, _ in given], found_inf):
            self._held_back = given
            for p, _ in given:
                p.grad = None
        return {}

    def _step_masters(
        self, held: list[Tensor], parameters: list[Tensor], grads: list[Tensor], count: Tensor
    ) -> None:
        with self.masters.open(held, count):
            pairs = zip(parameters, grads, strict=True)
            given = [(p, g) for p, g in pairs if p.grad is not g or g.dtype is not p.dtype]
            for p, g in given:
                p.grad = g.to(p.dtype)
            if self._narrow_moments:
                self.cast_moments(widen=True)
            with self.stepping():
                self.optimizer.step()
            if self._narrow_moments:
                self.cast_moments()
            for p, _ in given:
                p.grad = None


class FusedDriver(StockDriver):
    """Steps a fused optimizer, whose kernel reads the flag."""

    @property
    def cost(self) -> str:
        sgd = "dampening" in self.optimizer.defaults
        if sgd and any(group.get("momentum") for group in self.optimizer.param_groups):
            return "no sync except in the first step: its kernel would start from uninitialized momentum"
        return "no sync"

    def start(self, parameters: Sequence[Tensor], found_inf: Tensor) -> bool:
        """Sets the flag, unless it must be read."""
        if self._lacks_momentum(parameters) and bool(found_inf):
            return True
        self.optimizer.found_inf, self.optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        return False

    def end(self) -> None:
        """Removes the flag."""
        super().end()
        for name in ("found_inf", "grad_scale"):
            vars(self.optimizer).pop(name, None)

    def _lacks_momentum(self, parameters: Sequence[Tensor]) -> bool:
        """Fused SGD allocates its momentum and leaves the first write to the kernel, which may skip it."""
        if "dampening" not in self.optimizer.defaults:
            return False
        ids = set(map(id, parameters))
        return any(
            group["momentum"] and self.optimizer.state.get(p, {}).get("momentum_buffer") is None
            for group in self.optimizer.param_groups
            for p in group["params"]
            if id(p) in ids
        )


class SyncDriver(StockDriver):
    """Steps an optimizer that cannot skip on the device: the flag is read."""

    @property
    def cost(self) -> str:
        offered = [way for way in ("fused", "capturable") if way in self.optimizer.defaults]
        better = f"; {' or '.join(f'{way}=True' for way in offered)} would need none" if offered else ""
        return f"one sync per step, because it cannot skip a step on the device{better}"

    def start(self, parameters: Sequence[Tensor], found_inf: Tensor) -> bool:
        return bool(found_inf)


class RollbackDriver(StockDriver):
    """Steps a capturable optimizer, and undoes the step on the device if it must be skipped."""

    cost = "no sync after the first step; a step that must be skipped is made and undone: a copy of its state"
    _before: tuple[Sequence[Tensor], dict[Any, Tensor], Tensor] | None = None  # what may change, and the flag

    def start(self, parameters: Sequence[Tensor], found_inf: Tensor) -> bool:
        """Remembers everything that the step may change; the first step makes the state, and cannot unmake it."""
        if any(not self.optimizer.state.get(p) for p in parameters):
            return bool(found_inf)
        self._before = parameters, {key: tensor.clone() for key, tensor in self._live(parameters)}, found_inf
        return False

    @torch.no_grad()
    def end(self) -> None:
        """Undoes the step if it must be skipped."""
        super().end()
        if self._before is None:
            return
        (parameters, before, found_inf), self._before = self._before, None
        for key, now in self._live(parameters):
            now.copy_(torch.where(found_inf > 0, before[key], now))
        self.masters.note_writes(parameters)

    def _live(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        for p in parameters:
            yield p, values_of(p)
            if self.masters.is_split(p):
                yield (p, "remainder"), self.masters.remainder(p)
            yield from (((p, key), v) for key, v in self.optimizer.state[p].items() if isinstance(v, Tensor))


def driver_of(optimizer: torch.optim.Optimizer, masters: Masters, moments: Mapping[str, Format]) -> Driver:
    """Returns the cheapest driver that can skip a step."""
    kind: type[Driver] = SyncDriver
    if isinstance(optimizer, Optimizer):
        kind = HalfstepDriver
    elif getattr(optimizer, "_step_supports_amp_scaling", False) and _everywhere(optimizer, "fused"):
        kind = FusedDriver
    elif type(optimizer).__module__.startswith("torch.optim.") and _everywhere(optimizer, "capturable"):
        kind = RollbackDriver
    return kind(optimizer, masters, moments)


def label(optimizer: torch.optim.Optimizer) -> str:
    """Returns an optimizer's name and where it is from, such as `AdamW (torch, fused)`."""
    ways = [way for way in ("fused", "foreach", "capturable") if optimizer.defaults.get(way)]
    return f"{type(optimizer).__name__} ({', '.join([type(optimizer).__module__.partition('.')[0], *ways])})"


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def numbers_of(grads: list[Tensor]) -> list[Tensor]:
    """Returns the numbers of gradients as dense, real ones: their norm and factor are the gradients'."""
    if is_plain(grads):
        return grads
    dense = [g._values() if g.is_sparse else g for g in grads]
    return [torch.view_as_real(g) if g.is_complex() else g for g in dense]


def norm_of(grads: list[Tensor]) -> Tensor:
    """Returns the norm of all gradients together, in fp32."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(numbers_of(grads))).float())


class GradNorm:
    """`norm_of`, by our kernel where it can read the gradients."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self.kernel: Any = None

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Returns the norm of all gradients together, in fp32."""
        if not (all(reachable(grads[:1])) and readable(grads)):
            return norm_of(grads)
        sizes = [g.numel() for g in grads]
        if sizes != self._sizes:
            from halfstep.torch.kernels.norm import Norm  # Triton is installed: the gradients are within reach

            self._sizes, self.kernel = sizes, Norm(sizes, grads[0].device)
        return self.kernel(grads)  # type: ignore[no-any-return]


def is_moment(parameter: Tensor, value: Any) -> bool:
    """Whether a piece of state has the moments format: floating point, and one value per number."""
    plain = isinstance(value, Tensor) and (type(value) in (Tensor, nn.Parameter) or is_shard(value))
    return plain and value.is_floating_point() and value.ndim > 0 and value.shape == parameter.shape


def check_optimizers(given: Any, model: nn.Module, *, narrow: bool) -> list[torch.optim.Optimizer]:
    """Returns a list of optimizers that can be run. `narrow`: some masters are not the fp32 parameter itself."""
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    if not optimizers:
        raise UnsupportedOptimizerError(
            "no optimizer was given", hint="prepare(model, torch.optim.AdamW(...), policy)"
        )
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    taken: dict[Tensor, str] = {}
    for optimizer in optimizers:
        _check_kind(optimizer, narrow=narrow)
        for p in held_by(optimizer):
            if p not in names:
                raise OptimizerParametersError(
                    f"{label(optimizer)} holds a parameter of shape {tuple(p.shape)} that the model does not",
                    hint="create it from model.parameters() of this model, after it was copied, moved, loaded or "
                    "sharded",
                )
            if p in taken:
                raise OptimizerParametersError(
                    f"`{names[p]}` is held by {taken[p]} and again by {label(optimizer)}: it would move twice",
                    hint="give each parameter to one optimizer",
                )
            taken[p] = label(optimizer)
    if not taken:
        raise OptimizerParametersError(
            "the optimizers hold no parameters", hint="create them from model.parameters()"
        )
    devices = sorted({str(p.device) for p in taken})
    if len(devices) > 1:
        raise OptimizerParametersError(
            f"the parameters are on {len(devices)} devices: {', '.join(devices)}",
            hint="a run uses one device; move the model to it before preparing it",
        )
    return optimizers


def check_given(given: Any, model: nn.Module, resolved: ModelPolicy) -> list[torch.optim.Optimizer]:
    """Returns a list of optimizers that can train a model under a policy; changes nothing."""
    policy = resolved.policy
    params = [value for rule in policy.rules for _, value in rule.changes if isinstance(value, Param)]
    narrow = any(param.split or param.format != FP32 for param in (policy.param, *params))
    optimizers = check_optimizers(given, model, narrow=narrow)
    values, named = resolved.values, model.named_parameters()
    wanted: Mapping[Tensor, Any] = {p: values[owner(n)].values["moments"] for n, p in named if owner(n) in values}
    for optimizer in (o for o in optimizers if isinstance(o, Optimizer)):
        for p, fmt in optimizer.given.items():
            if fmt != wanted.get(p, fmt):
                raise PolicyConflictError(
                    f"{type(optimizer).__name__} was given moments={fmt} for `{optimizer.names[p]}`, and the "
                    f"policy says moments={wanted[p]}",
                    hint=f"set it in the policy, `bf16-mixed,moments={fmt}`, or omit it from the optimizer",
                )
    return optimizers


def _check_kind(optimizer: Any, *, narrow: bool) -> None:
    refuse_wrapped_optimizer(optimizer)
    if isinstance(optimizer, torch.amp.GradScaler):
        raise AutocastError(
            "a GradScaler was given instead of an optimizer: a run scales the loss itself, as the policy says",
            hint="omit it; `fp16-mixed` has a dynamic scale, bf16 needs none, and run.load_torch_amp takes over "
            "the state of this one",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOptimizerError(
            f"{type_name(optimizer)} is not a torch.optim.Optimizer: its parameters are unknown",
            hint="prepare(model, optimizer, policy) takes an optimizer or a list of them, such as "
            "torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )
    # From the class: a scheduler puts a wrapper on the instance, which takes `self`.
    _, *taken = inspect.signature(type(optimizer).step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in taken if p.default is p.empty and p.kind not in variable]
    if required and not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizerError(
            f"{label(optimizer)} needs `{required[0]}` for a step: it would evaluate the loss within it, with "
            "gradients that were not unscaled, clipped or checked",
            hint="use an optimizer whose step() takes no arguments, such as AdamW or SGD",
        )
    if narrow and callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise UnsupportedOptimizerError(
            f"{label(optimizer)} rewrites parameters outside of step(), by its train() and eval(), and there they "
            "are narrower than their masters",
            hint="hold masters as they are, with `param=fp32`",
        )


def _everywhere(optimizer: torch.optim.Optimizer, way: str) -> bool:
    """Whether every group has the option; `fused` of other projects' optimizers is no option but a fact."""
    return all(group.get(way, way == "fused") for group in optimizer.param_groups)
