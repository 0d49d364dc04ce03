"""The parameters and buffers of a model, and what optimizers hold of them, as an audit records them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.audit.record import Buffer, Weight, buffer_kind, weight_kind
from halfstep.torch.instruments.collect.tensors import belongs_to_halfstep, format_name, is_split
from halfstep.torch.instruments.collect.updates import UpdateWatch

# What third-party optimizers call it in their settings or state: torchao, optimi, pytorch_optimizer.
_SMALL_UPDATES = re.compile(r"stochastic|kahan|(^|_)comp(ensation)?($|_)")

_Held = tuple[Any, dict[str, Any], Tensor]  # an optimizer, its group, and the parameter that it steps


def weights_of(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), watch: UpdateWatch | None = None
) -> list[Weight]:
    """Returns every parameter of a model, with what its optimizer holds and what happened to its updates."""
    held = {id(p): (opt, group, p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
    masters = _separate_masters(model, held)
    found: dict[int, Weight] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in found:  # tied: the first name stands for it
                continue
            optimizer, group, stepped = held.get(id(p)) or masters.get(id(p)) or (None, {}, p)
            whole = f"{prefix}.{name}" if prefix else name
            apart = None if stepped is p else format_name(stepped.dtype)
            found[id(p)] = Weight(
                name=whole,
                format=format_name(p.dtype),
                trainable=p.requires_grad,
                kind=weight_kind(whole, p.shape, type(module).__name__),
                optimizer=type(optimizer).__name__ if optimizer else None,
                master="fp32" if is_split(p) else apart,
                moments=_moment_formats(optimizer, stepped),
                counter=_counter_format(optimizer, stepped),
                grad_format=None if p.grad is None else format_name(p.grad.dtype),
                updates=watch.counts(stepped) if watch else None,
                stochastic=optimizer is not None and _keeps_small_updates(optimizer, group, stepped),
            )
    return [*found.values()]


def buffers_of(model: nn.Module) -> list[Buffer]:
    """Returns every buffer of a model that holds real numbers."""
    return [
        Buffer(name, format_name(b.dtype), buffer_kind(name))
        for name, b in model.named_buffers()
        if b.is_floating_point()
    ]


def _separate_masters(model: nn.Module, held: dict[int, _Held]) -> dict[int, _Held]:
    """Pairs narrow weights that no optimizer holds with fp32 tensors that one holds and the model does not.

    Libraries that keep masters apart give the optimizer copies, in the order of the model.
    """
    own = {id(p) for p in model.parameters()}
    copies = [its for key, its in held.items() if key not in own and its[-1].dtype == torch.float32]
    paired = {}
    for p in model.parameters():
        if id(p) not in held and p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            match = next((its for its in copies if its[-1].shape == p.shape), None)
            if match is not None:
                copies = [its for its in copies if its is not match]
                paired[id(p)] = match
    return paired


def _keeps_small_updates(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> bool:
    """Returns whether an optimizer says that it rounds stochastically, or keeps what rounds away (Kahan's sum)."""
    if belongs_to_halfstep(optimizer) and hasattr(optimizer, "masters"):
        return bool(optimizer.masters.of(parameter).stochastic)
    settings = {**vars(optimizer), **group}
    said = any(_SMALL_UPDATES.search(str(name)) and value is True for name, value in settings.items())
    state = optimizer.state.get(parameter, {})
    return said or any(
        _SMALL_UPDATES.search(str(key)) and isinstance(value, Tensor) for key, value in state.items()
    )


def _moment_formats(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> dict[str, str]:
    state = optimizer.state.get(parameter, {}) if optimizer else {}
    return {
        key: format_name(value.dtype)
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.ndim
        and value.shape == parameter.shape
        and not _SMALL_UPDATES.search(str(key))
    }


def _counter_format(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> str | None:
    step = optimizer.state.get(parameter, {}).get("step") if optimizer else None
    return format_name(step.dtype) if isinstance(step, Tensor) else None


def moments_of(held: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the moments in what an optimizer, or its saved state, holds of one parameter."""
    for key, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
            yield str(key), value
