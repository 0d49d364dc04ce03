"""The device that a run begins on, what `auto` means there, and whether optimizers fit a policy."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.model import model_like, owner
from halfstep.core.arrays.measure import decide_once
from halfstep.core.choice import Choice
from halfstep.core.errors import AutoPolicyError, PolicyConflictError
from halfstep.core.formats import FP32
from halfstep.core.roles import Param
from halfstep.torch import measure
from halfstep.torch.convert.resolve import ModelPolicy
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import check_optimizers
from halfstep.torch.parallel.ranks import num_ranks


def measured_choice(model: nn.Module, tokens: int) -> Choice:
    """Returns what `auto` means for a model: what is fastest on its device, by a block as wide as its layers."""
    if num_ranks() > 1:
        raise AutoPolicyError(
            "`auto` is measured in each process, and two of them could choose differently",
            hint="`halfstep probe` measures; name what it chooses",
        )
    if device_of(model).type == "meta":
        raise AutoPolicyError(
            "`auto` is measured on the model's device, and the model is on the meta device",
            hint="`halfstep probe` measures; name what it chooses",
        )
    return decide_once(measure, device_of(model), model_like(p.shape for p in model.parameters()), tokens)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.get_default_device())


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
