"""A policy, resolved once for the names of one model, and checked against the model and its device.

`resolve` reads the policy's rules; `check_policy` refuses what the model, or a device, cannot run, before anything
changes. What comes of it is passed on: nothing later in `prepare` resolves a rule or checks a format again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from halfstep.config.model import owner
from halfstep.core.errors import PolicyConflictError, PolicyFitError, UnsupportedModelError
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions_of
from halfstep.core.refusal import EMULATE, check_formats, check_named, check_reach
from halfstep.core.roles import Param, Value, print_value
from halfstep.core.rules import Resolved
from halfstep.torch.convert import fp8_choice
from halfstep.torch.convert.known_packages import routers, with_routers
from halfstep.torch.convert.plan import Change, Plan, check_kernels, plans_of, reachable_names
from halfstep.torch.layers import Layer
from halfstep.torch.numerics.dtypes import DTYPES, FLOATS, expected_device, supported


@dataclass(frozen=True)
class ModelPolicy:
    """A policy and what its rules say about each name of one model."""

    policy: Policy
    values: Mapping[str, Resolved]  # of every role
    base: Precision  # where no rule applies
    precisions: Mapping[str, Precision]  # as the rules say
    ruled: Mapping[str, Precision]  # the same, with routers in fp32

    @property
    def wanted(self) -> list[Precision]:
        """Every precision that the policy asks for."""
        return [self.base, *self.precisions.values()]


class Masters(NamedTuple):
    """What a policy says about each trained parameter, by its first name."""

    roles: dict[str, Mapping[str, Value]]
    held: dict[str, Param]  # how its master is held
    whole: list[Change]  # masters that stay whole although the policy splits them


def resolve(model: nn.Module, policy: Policy, names: Sequence[str] | None = None) -> ModelPolicy:
    """Resolves a policy for a model, whose modules are called `names` if they are given."""
    values, base = policy.resolve(names_of(model, names)), base_precision(policy)
    found = precisions_of(policy, values)
    return ModelPolicy(policy, values, base, found, with_routers(found, base, routers(model)))


def check_policy(
    model: nn.Module, resolved: ModelPolicy, plans: list[Plan] | None = None, names: Sequence[str] | None = None
) -> Masters:
    """Refuses a policy that a model or its device cannot run; returns what it says about masters."""
    policy, base, ruled = resolved.policy, resolved.base, resolved.ruled
    plans, parameters = plans or plans_of(model), trainable(model)
    aliases = _aliases(model, parameters)
    check_reach(policy, reachable_names(plans, {owner(name) for held in aliases.values() for name in held}))
    check_named({p.name: p.module.named for p in plans if isinstance(p.module, Layer)}, ruled, base)
    evaluation = policy.evaluation()
    if evaluation is not policy:
        _check_precisions(model, plans, resolve(model, evaluation, names))
    _check_precisions(model, plans, resolved)
    for device in devices(model):
        fp8_choice.check_fast(plans, ruled, base, device)
    roles = {name: _roles(held, resolved.values) for name, held in aliases.items()}
    masters = {name: _check_master(name, parameters[name], roles[name], policy) for name in parameters}
    return Masters(roles, *_split_where_used(masters, parameters, plans))


def _check_precisions(model: nn.Module, plans: list[Plan], resolved: ModelPolicy) -> None:
    base, ruled = resolved.base, resolved.ruled
    for device in devices(model):
        check_supported([base, *ruled.values()], device)
        fp8_choice.check_narrow(plans, ruled, base, device)
    check_kernels(plans, ruled, base)


def devices(model: nn.Module) -> set[torch.device]:
    """Returns the devices that hold a model's parameters."""
    return {parameter.device for parameter in model.parameters()}


def check_supported(wanted: Sequence[Precision], device: torch.device) -> None:
    """Refuses what the device cannot run, with the reason and an alternative that runs."""
    check_formats(wanted, "torch", str(device), lambda fmt: supported(fmt, expected_device(device)), tuple(DTYPES))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters that a policy has a format for, by their first names."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in FLOATS}
    if not parameters:
        raise UnsupportedModelError(
            "the model has no parameters to train", hint="model.requires_grad_(True) makes them trainable"
        )
    return parameters


def names_of(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Returns the names that rules may match: modules, and parameters that the model itself holds."""
    names = list(names) if names is not None else [name for name, _ in model.named_modules() if name]
    return [*names, *(name for name, _ in model.named_parameters() if "." not in name and name not in names)]


def _aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    first = {parameter: name for name, parameter in parameters.items()}
    aliases: dict[str, list[str]] = {name: [] for name in parameters}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            aliases[first[parameter]].append(name)
    return aliases


def _roles(names: Sequence[str], values: Mapping[str, Resolved]) -> Mapping[str, Value]:
    """Returns the values of the roles at a parameter, whose owners must agree on how it is held."""
    owners = {owner(name): values[owner(name)].values for name in names if owner(name) in values}
    (one, ours), *others = owners.items()
    for other, theirs in others:
        for role in ("param", "moments"):
            if ours[role] != theirs[role]:
                raise PolicyConflictError(
                    f"`{names[0]}` is held by `{one}`, where {role}={print_value(ours[role])}, and by `{other}`, "
                    f"where {role}={print_value(theirs[role])}: it is one tensor",
                    hint=f"give both the same `{role}`",
                )
    return ours


def _check_master(name: str, parameter: Tensor, roles: Mapping[str, Value], policy: Policy) -> Param:
    param, grad_weight = cast(Param, roles["param"]), roles["grad_weight"]
    if parameter.dtype == torch.float16 and param.format != FP32:
        raise PolicyFitError(
            f"`{name}` is fp16 and trainable, and param={print_value(param)} would round it",
            hint="write `param=fp32`, which widens it, or round it yourself with model.bfloat16() before",
        )
    if not policy.emulate and param.format != FP32 and grad_weight != param.format:
        raise PolicyFitError(
            f"`{name}` is held in {param.format}, and torch keeps its gradient in that too, not in "
            f"grad_weight={print_value(grad_weight)}",
            hint=f"write `grad_weight={param.format}`, keep `param=fp32`, or {EMULATE}",
        )
    # Gains, biases and scalars are never split.
    return param if parameter.ndim > 1 else replace(param, split=False)


def _split_where_used(
    masters: dict[str, Param], parameters: Mapping[str, nn.Parameter], plans: Sequence[Plan]
) -> tuple[dict[str, Param], list[Change]]:
    """Returns the masters, split if the policy says so and every module that holds one can use its bf16 half."""
    reasons: dict[Tensor, str] = {}
    for planned in plans:
        kind, module = planned.kind, planned.module
        for name, parameter in module.named_parameters(recurse=False):
            layer = kind if kind is not None and issubclass(kind, Layer) else None
            reason = "it is used as it is held" if layer is None else layer.whole_because(module, name)
            if reason:
                reasons.setdefault(parameter, f"{reason} ({type(module).__name__} `{planned.name}`)")
    kept = [name for name, param in masters.items() if param.split and parameters[name] in reasons]
    changes = [Change(name, "Parameter", f"stays whole fp32: {reasons[parameters[name]]}") for name in kept]
    return {n: replace(param, split=False) if n in kept else param for n, param in masters.items()}, changes
