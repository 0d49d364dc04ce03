"""Lost updates of any torch optimizer: copies parts of weights before a step, and compares after it.

    watch = UpdateWatch()
    watch.before(optimizer); optimizer.step(); watch.after(optimizer)
    watch.counts(parameter)                                     an UpdateCounts, or None if it was never stepped

Of a tensor with more than LIMIT elements, evenly spaced ones stand for all; an `UpdateCounts` says how
many elements were looked at. Weights that are stored in a narrow format are counted in full. Of fp32 ones, whose
updates no rule asks for, only gradient and motion are noted, on the device. Everything that a step needs travels
to the host in one copy: one sync per step, and only where narrow weights are trained.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.core.audit.record import UpdateCounts
from halfstep.core.audit.updates import FORMULAS, Seen, count_each, count_each_unknown
from halfstep.torch.instruments.collect.tensors import belongs_to_halfstep, is_split, local, stored_values

LIMIT = 2048
_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Functions of torch whose formula is known; a subclass with a step of its own is an unknown optimizer.
_KNOWN = {"torch.optim.sgd": "SGD", "torch.optim.adam": "Adam", "torch.optim.adamw": "AdamW"}
_OWN_ADAMW = ("halfstep.torch.optim.adamw", "AdamW")


@dataclass
class _Watched:
    """What is kept of one parameter."""

    first: Tensor  # its values at the first step
    counts: UpdateCounts = field(default_factory=UpdateCounts)
    gradient: Tensor | None = None  # the largest gradient so far, on the device


@dataclass
class _Pending:
    """Copies of a parameter that is about to be stepped."""

    parameter: Tensor
    group: dict[str, Any]
    before: Tensor
    gradient: Tensor
    earlier: dict[str, Tensor]


class UpdateWatch:
    """Counts the updates of the optimizers around whose steps it is called; changes none of their numbers."""

    def __init__(self) -> None:
        self._watched: Any = WeakTensorKeyDictionary()
        self._pending: dict[int, list[_Pending]] = {}

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies what the step will change."""
        pending, wide, is_lion = [], [], formula_of(optimizer) == "Lion"
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.is_floating_point() or p.grad.is_sparse or not local(p).numel():
                    continue
                values = self._part(stored_values(p), copy=True)
                if p not in self._watched:
                    self._watched[p] = _Watched(values)
                gradient = self._part(p.grad)
                if _format(p) is None:
                    wide.append((self._watched[p], gradient))
                else:
                    moments = self._state(optimizer.state.get(p, {}), p) if is_lion else {}
                    earlier = {key: value.clone() for key, value in moments.items()}
                    pending.append(_Pending(p, group, values, gradient.clone(), earlier))
        self._pending[id(optimizer)] = pending
        largest = torch._foreach_norm([gradient for _, gradient in wide], float("inf")) if wide else []
        for (watched, _), norm in zip(wide, largest, strict=True):
            watched.gradient = norm if watched.gradient is None else torch.fmax(watched.gradient, norm)
            watched.counts.steps += 1

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts what the step has changed; returns whether `before` has seen this step."""
        pending = self._pending.pop(id(optimizer), None)
        if pending:
            self._count(optimizer, pending)
        return pending is not None

    def _count(self, optimizer: torch.optim.Optimizer, pending: list[_Pending]) -> None:
        scalars = [_scalar(optimizer, "found_inf", 0.0), _scalar(optimizer, "grad_scale", 1.0)]
        parts: list[dict[str, Tensor]] = []
        for each in pending:
            state = self._state(optimizer.state.get(each.parameter, {}), each.parameter)
            after = self._part(stored_values(each.parameter))
            parts.append(
                {"weight": each.before, "after": after, "gradient": each.gradient}
                | {f"state.{key}": value for key, value in state.items()}
                | {f"earlier.{key}": value for key, value in each.earlier.items()}
            )
        (found_inf, scale), arrays = _to_host(scalars, parts)
        if found_inf:
            return
        name = formula_of(optimizer)
        alike: dict[tuple[int, str, float], list[int]] = {}
        for i, each in enumerate(pending):
            if float(each.group.get("lr", 1.0)) != 0:
                step = float(arrays[i].get("state.step", [0.0])[0])
                alike.setdefault((id(each.group), _format(each.parameter) or "fp32", step), []).append(i)
        for (_, fmt, _), chosen in alike.items():
            settings = _settings(optimizer, pending[chosen[0]].group)
            counted = _counts([arrays[i] for i in chosen], settings, fmt, scale, name)
            for i, counts in zip(chosen, counted, strict=True):
                watched = self._watched[pending[i].parameter]
                watched.counts = watched.counts.merge(counts)

    def counts(self, parameter: Tensor) -> UpdateCounts | None:
        """Returns what happened to a parameter so far; None if no step had a gradient for it."""
        watched = self._watched.get(parameter)
        if watched is None:
            return None
        moved = bool((self._part(stored_values(parameter)) != watched.first).any())
        gradient = 0 if watched.gradient is None else int(bool(watched.gradient != 0))
        return watched.counts.merge(UpdateCounts(gradient=gradient, moved=moved))

    def _part(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        flat = local(tensor).detach().reshape(-1)
        if flat.numel() > LIMIT:
            flat = flat[:: -(-flat.numel() // LIMIT)]
        return flat.clone() if copy else flat

    def _state(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Returns what the formulas read of an optimizer's state: numbers, and parts of what has the shape."""
        kept = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.ndim == 0 or value.shape == parameter.shape):
                kept[key] = value.reshape(1) if value.ndim == 0 else self._part(value)
            elif isinstance(value, int | float):
                kept[key] = torch.tensor([float(value)])
        return kept


def formula_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the name of the formula that an optimizer's step follows, or None if that is not known."""
    kind = type(optimizer)
    if belongs_to_halfstep(optimizer):
        return "AdamW" if (kind.__module__, kind.__qualname__) == _OWN_ADAMW else None
    step: Callable[..., Any] = inspect.unwrap(kind.step)
    if step.__qualname__ == "Lion.step":
        return "Lion"
    name = _KNOWN.get(step.__module__)
    # torch 2.13 has AdamW inherit the step of Adam, with a flag in its groups.
    return name if name == step.__qualname__.partition(".")[0] else None


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    factor = float(getattr(optimizer, "_factor", 1.0)) if belongs_to_halfstep(optimizer) else 1.0
    numbers = {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
    return numbers | {"lr": float(group["lr"]) * factor} if "lr" in group else numbers


def _counts(
    parts: list[dict[str, NDArray[np.float64]]], settings: dict[str, Any], fmt: str, scale: float, name: str | None
) -> list[UpdateCounts]:
    """Returns the counts of tensors that one formula updates with the same settings and step, joined to one."""
    sizes = [part["weight"].size for part in parts]
    shared = [key for key in parts[0] if all(key in part for part in parts)]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in shared}
    before, after, gradient = joined["weight"], joined["after"], joined["gradient"] / scale
    if name is None:
        return count_each_unknown(before, after, gradient, sizes)
    state, earlier = (
        {key.partition(".")[2]: value for key, value in joined.items() if key.startswith(prefix)}
        for prefix in ("state.", "earlier.")
    )
    if name != "SGD" and "exp_avg" not in state:  # the step did nothing, for a reason of its own
        return [UpdateCounts() for _ in parts]
    state = {key: value[0] if key == "step" else value for key, value in state.items()}
    intended = FORMULAS[name](Seen(before, gradient, state, earlier, settings))
    return count_each(before, after, intended, fmt, gradient, sizes)


def _to_host(
    scalars: list[Tensor], parts: list[dict[str, Tensor]]
) -> tuple[list[float], list[dict[str, NDArray[np.float64]]]]:
    """Returns numbers and tensors on the host, by one copy per device. All fit into fp32; MPS has no fp64."""
    flat = [*scalars, *(tensor for part in parts for tensor in part.values())]
    devices = {tensor.device for tensor in flat}
    moved: dict[int, NDArray[np.float64]] = {}
    for device in devices:
        here = [tensor for tensor in flat if tensor.device == device]
        joined = torch.cat([tensor.reshape(-1).float() for tensor in here]).cpu().numpy().astype(np.float64)
        ends = np.cumsum([tensor.numel() for tensor in here])[:-1]
        moved |= {id(t): values for t, values in zip(here, np.split(joined, ends), strict=True)}
    return [float(moved[id(t)][0]) for t in scalars], [{k: moved[id(t)] for k, t in p.items()} for p in parts]


def _scalar(optimizer: torch.optim.Optimizer, name: str, default: float) -> Tensor:
    value = getattr(optimizer, name, None)
    return torch.tensor([default]) if value is None else torch.as_tensor(value).reshape(1).clone()


def _format(parameter: Tensor) -> str | None:
    """Returns the narrow format that a parameter is stored in; None if it is fp32 or wider."""
    return None if is_split(parameter) else _NARROW.get(parameter.dtype)
