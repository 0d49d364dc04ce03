"""Policy to model: gives every module its precision and every parameter its storage format.

`apply` is the one place where a policy meets a torch model. It checks that the device can run what is asked for
before it changes anything, and refuses with the reason where it cannot: nothing is substituted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.config.model import owner
from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import EMULATE, check_formats, check_implemented, check_reach
from halfstep.core.roles import Accumulator, Operand, Param, Value, print_value
from halfstep.torch.cast import carried
from halfstep.torch.dtypes import dtype_of, supported
from halfstep.torch.layers import Layer, Matmul

# What layers.py multiplies natively.
NATIVE = (FP32, BF16, FP16)


@dataclass(frozen=True)
class Applied:
    """What was done to a model: how many modules have a precision, and how parameters and moments are held."""

    policy: Policy
    modules: int
    masters: dict[str, Param]
    moments: dict[str, Format]

    def __str__(self) -> str:
        held: dict[str, int] = {}
        for param in self.masters.values():
            held[str(param.format)] = held.get(str(param.format), 0) + 1
        told = ", ".join(f"{count} parameters in {fmt}" for fmt, count in held.items())
        return f"{self.policy}: {self.modules} modules, {told}"


def apply(model: nn.Module, policy: Policy, names: Sequence[str]) -> Applied:
    """Gives a model of halfstep's layers a policy. `names` are the modules that rules may match."""
    device = next(model.parameters()).device
    values = policy.resolve([*names, *_loose(model, names)])
    check_implemented(policy, "torch", _not_implemented)
    multiplying = [name for name, module in model.named_modules() if isinstance(module, Matmul)]
    check_reach(policy, multiplying, {owner(name) for name, _ in model.named_parameters()})
    found = precisions(policy.evaluation(), [*names, *_loose(model, names)])
    check_supported([base_precision(policy.evaluation()), *found.values()], device)
    count = set_precision(model, policy, names)
    masters, moments = {}, {}
    for name, parameter in model.named_parameters():
        roles = values[owner(name)].values
        param, masters[name], moments[name] = roles["param"], roles["param"], roles["moments"]
        assert isinstance(param, Param)
        _check_gradient(name, param, roles["grad_weight"], policy)
        held = parameter.data
        if policy.emulate:
            parameter.data = carried(held, param.format)
        else:
            parameter.data = held.to(dtype_of(param.format))
    return Applied(policy, count, masters, moments)  # type: ignore[arg-type]


def set_precision(model: nn.Module, policy: Policy, names: Sequence[str]) -> int:
    """Sets what each module computes in, and leaves the parameters alone; how many there are."""
    found = precisions(policy, [*names, *_loose(model, names)])
    check_supported([base_precision(policy), *found.values()], next(model.parameters()).device)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    for name, module in modules.items():
        module.precision = found[name] if name else base_precision(policy)
    return len(modules)


def check_supported(wanted: Sequence[Precision], device: torch.device) -> None:
    """Refuses what the device cannot run, with the reason and the form that runs."""
    check_formats(wanted, str(device), lambda fmt: supported(fmt, device), NATIVE)
    for precision in dict.fromkeys(wanted):
        if precision.grad != precision.compute and not precision.emulate:
            raise PolicyError(
                f"grad={precision.grad} with compute={precision.compute}: torch keeps the gradient of an "
                "activation in the activation's own format",
                hint=f"write `grad={precision.compute}`, or {EMULATE}",
            )


def _not_implemented(role: str, value: Value) -> str:
    if isinstance(value, Param) and value.split:
        return "`param=fp32` holds the same numbers in 4 bytes and a cast"
    if isinstance(value, Operand) and value.measured:
        return "leave `measured` out, and name the matmuls by rules"
    if isinstance(value, Operand) and value.amax == "delayed":
        return "`current` scales by this step's own amax"
    if isinstance(value, Accumulator) and value.fast:
        return "matmuls sum in fp32"
    if role in ("buffers", "router", "reduce") and value != FP32:
        return "the reference decoder has none of these, and it is fp32 where they will be"
    return ""


def _check_gradient(name: str, param: Param, grad_weight: Value, policy: Policy) -> None:
    if not policy.emulate and param.format != FP32 and grad_weight != param.format:
        raise PolicyError(
            f"`{name}` is held in {param.format}, and torch keeps its gradient in that too, not in "
            f"grad_weight={print_value(grad_weight)}",
            hint=f"write `grad_weight={param.format}`, keep `param=fp32`, or {EMULATE}",
        )


def _loose(model: nn.Module, known: Sequence[str]) -> list[str]:
    """Parameters that the model itself holds: rules see their own names."""
    return [name for name, _ in model.named_parameters() if "." not in name and name not in known]
