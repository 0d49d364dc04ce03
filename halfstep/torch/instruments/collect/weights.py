"""The parameters and buffers of a model, and what optimizers hold of them, as an audit records them."""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.audit.record import Buffer, CheckpointFacts, Weight, buffer_kind, weight_kind
from halfstep.core.errors import StateError
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


def moments_of(held: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the moments in what an optimizer, or its saved state, holds of one parameter."""
    for key, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
            yield str(key), value


# Files

_SCALER = {"scale", "growth_factor", "growth_interval"}  # of GradScaler's state
_MODELS = ("state_dict", "model", "module", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_states", "optimizer_state_dict", "optimizers")


def read_into(file: Path, facts: CheckpointFacts, shapes: Mapping[str, list[int]]) -> str | None:
    """Adds what a file holds to a checkpoint's facts; returns why it could not be read, if so.

    `shapes` are those of known weights: torch numbers moments, and each goes to the next weight of its shape.
    """
    try:
        content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        return str(error).partition("\n")[0]
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise StateError(f"`{file}` is torn or damaged: {str(error).partition(chr(10))[0]}") from None
    known = dict(shapes)
    _add(content, facts, known)
    return None


def _add(content: Any, facts: CheckpointFacts, shapes: dict[str, list[int]]) -> None:
    if not isinstance(content, Mapping):
        return
    if content.keys() >= _SCALER:
        facts.scaler = True
    elif "state" in content and "param_groups" in content:
        _add_moments(content["state"], facts, shapes)
    elif content and all(isinstance(value, Tensor) for value in content.values()):
        for name, value in content.items():
            if value.is_floating_point():
                facts.weights[str(name)], shapes[str(name)] = format_name(value.dtype), list(value.shape)
    else:
        for key, value in sorted(content.items(), key=lambda item: item[0] in _OPTIMIZERS):  # weights first
            if key in _MODELS or key in _OPTIMIZERS or "scaler" in str(key):
                for each in value if isinstance(value, list | tuple) else [value]:
                    _add(each, facts, shapes)


def _add_moments(state: Any, facts: CheckpointFacts, shapes: dict[str, list[int]]) -> None:
    left = {name: list(shape) for name, shape in shapes.items()}
    for index, held in state.items() if isinstance(state, Mapping) else ():
        moments = dict(moments_of(held))
        shape = next((list(value.shape) for value in moments.values()), None)
        fitting = next((n for n, s in left.items() if s == shape), str(index))
        name = index if isinstance(index, str) else fitting
        left.pop(name, None)
        facts.moments |= {f"{name}/{key}": format_name(value.dtype) for key, value in moments.items()}
