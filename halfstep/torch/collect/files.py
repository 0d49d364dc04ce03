"""What a file that torch wrote holds, without its numbers: names and formats of weights, moments, a scaler.

torch reads it with `weights_only`, which builds tensors and plain data and runs no code of the file, onto the meta
device, so that nothing is loaded.
"""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.core.audit.record import CheckpointFacts
from halfstep.core.errors import HalfstepError
from halfstep.torch.collect.weights import format_name

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
        raise HalfstepError(f"`{file}` is torn or damaged: {str(error).partition(chr(10))[0]}") from None
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
        moments = dict(_moments(held))
        shape = next((list(value.shape) for value in moments.values()), None)
        name = (
            str(index) if isinstance(index, str) else next((n for n, s in left.items() if s == shape), str(index))
        )
        left.pop(name, None)
        facts.moments |= {f"{name}/{key}": format_name(value.dtype) for key, value in moments.items()}


def _moments(held: Any) -> Iterator[tuple[str, Tensor]]:
    for key, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
            yield str(key), value
