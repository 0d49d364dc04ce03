"""Checks of the arguments of `prepare`; the model, optimizers and policy are checked where they are used."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.model import model_like, owner
from halfstep.core.choice import Choice
from halfstep.core.errors import PolicyError
from halfstep.core.measure import decide_once
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.torch import measure
from halfstep.torch.apply import names_of
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.ema import check_decay


def check_settings(clip_norm: Any, seed: Any, ema: float, tokens: int) -> None:
    """Refuses values that are no settings of a run."""
    check_numbers(clip_norm=clip_norm, seed=seed, tokens=tokens)
    if ema:
        check_decay(ema)


def measured_choice(model: nn.Module, tokens: int) -> Choice:
    """Returns what `auto` means for a model: what is fastest on its device, by a block as wide as its layers."""
    if _num_processes() > 1:
        raise PolicyError(
            "`auto` is measured in each process, and two of them could choose differently",
            hint="`halfstep probe` measures; name what it chooses",
        )
    return decide_once(measure, device_of(model), model_like(p.shape for p in model.parameters()), tokens)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.get_default_device())


def check_moments(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, policy: Policy) -> None:
    """Refuses moments formats of an optimizer that contradict the policy."""
    values, named = policy.resolve(names_of(model, None)), model.named_parameters()
    wanted: Mapping[Tensor, Any] = {p: values[owner(n)].values["moments"] for n, p in named if owner(n) in values}
    for optimizer in (o for o in optimizers if isinstance(o, Optimizer)):
        for p, fmt in optimizer.given.items():
            if fmt != wanted.get(p, fmt):
                raise PolicyError(
                    f"{type(optimizer).__name__} was given moments={fmt} for `{optimizer.names[p]}`, and the "
                    f"policy says moments={wanted[p]}",
                    hint=f"set it in the policy, `bf16-mixed,moments={fmt}`, or omit it from the optimizer",
                )


def _num_processes() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def check_replicas(*, split: bool) -> None:
    """Refuses split masters if there are several processes: their gradients would not be summed."""
    if split and _num_processes() > 1:
        raise PolicyError(
            "split masters are not implemented for more than one process: DDP does not see their gradients",
            hint="hold masters whole, with `param=fp32`",
        )
