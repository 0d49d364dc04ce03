"""Policy to model: gives every module its precision and every parameter its storage format.

`apply` is the one place where a policy meets a torch model. It checks that the device can run what is asked for
before it changes anything, and refuses with the reason where it cannot: nothing is substituted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.roles import Param
from halfstep.torch.cast import quantize
from halfstep.torch.dtypes import dtype_of, supported

# What layers.py multiplies natively.
NATIVE = (FP32, BF16, FP16)
EMULATE = "add `emulate=true` to the policy: casts bit for bit, matmuls in fp32"


@dataclass(frozen=True)
class Applied:
    """What was done to a model: how many modules have a precision, and where each parameter's master is held."""

    policy: Policy
    modules: int
    masters: dict[str, Param]

    def __str__(self) -> str:
        held: dict[str, int] = {}
        for param in self.masters.values():
            held[str(param.format)] = held.get(str(param.format), 0) + 1
        told = ", ".join(f"{count} parameters in {fmt}" for fmt, count in held.items())
        return f"{self.policy}: {self.modules} modules, {told}"


def apply(model: nn.Module, policy: Policy, names: Sequence[str]) -> Applied:
    """Gives a model of halfstep's layers a policy. `names` are the modules that rules may match."""
    _check_masters(policy)
    count = set_precision(model, policy, names)
    values = policy.resolve([*names, *_loose(model, names)])
    masters = {}
    for name, parameter in model.named_parameters():
        param = values[name.rpartition(".")[0] or name].values["param"]
        assert isinstance(param, Param)
        masters[name] = param
        held = parameter.data
        if policy.emulate:
            parameter.data = quantize(held, param.format, overflow="inf") if param.format != FP32 else held
        else:
            parameter.data = held.to(dtype_of(param.format))
    return Applied(policy, count, masters)


def set_precision(model: nn.Module, policy: Policy, names: Sequence[str]) -> int:
    """Sets what each module computes in, and leaves the parameters alone; how many there are."""
    found = precisions(policy, [*names, *_loose(model, names)])
    check_supported([base_precision(policy), *found.values()], next(model.parameters()).device)
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "precision")}
    for name, module in modules.items():
        module.precision = found[name] if name else base_precision(policy)  # type: ignore[assignment]
    return len(modules)


def check_supported(wanted: Sequence[Precision], device: torch.device) -> None:
    """Refuses a format that the device cannot run, with the reason and the form that runs."""
    asked: dict[Format, Precision] = {fmt: p for p in wanted for fmt in p.formats}
    for fmt, precision in asked.items():
        support = supported(fmt, device, emulate=precision.emulate)
        if not support:
            raise PolicyError(
                f"{fmt} cannot run on {device}: {support.reason}",
                hint=EMULATE,
            )
        if fmt not in NATIVE and not precision.emulate:
            raise PolicyError(f"{fmt} matmuls are not implemented natively yet on {device}", hint=EMULATE)
        if precision.grad != precision.compute and not precision.emulate:
            raise PolicyError(
                f"grad={precision.grad} with compute={precision.compute}: torch keeps the gradient of an "
                "activation in the activation's own format",
                hint=f"write `grad={precision.compute}`, or {EMULATE}",
            )


def _check_masters(policy: Policy) -> None:
    if policy.param.split or any(
        isinstance(v, Param) and v.split for rule in policy.rules for _, v in rule.changes
    ):
        raise PolicyError(
            "`param=fp32:split` is not implemented on torch yet",
            hint="`param=fp32` holds the same numbers in 4 bytes and a cast",
        )


def _loose(model: nn.Module, known: Sequence[str]) -> list[str]:
    """Parameters that the model itself holds: rules see their own names."""
    return [name for name, _ in model.named_parameters() if "." not in name and name not in known]
