"""Policy to model: gives every module its precision and every parameter its storage format.

`apply` is the one place where a policy meets a torch model. It checks that the device can run what is asked for
before it changes anything, and refuses with the reason where it cannot: nothing is substituted.

Any `nn.Module` will do. A module is changed by its class (modules.py); `restore` puts the first class back.

    halfstep's own layers                    are given their precision
    Linear, MultiheadAttention, Embedding    multiply and look up in their own precision; weight gradients are fp32
    Conv*, RNN, LSTM, GRU                    the same, with weight gradients that leave the kernel in compute
    LayerNorm, BatchNorm, Softmax, ...       are islands: fp32 inside, compute out
    CrossEntropyLoss, MSELoss, ...           are islands: fp32 inside and out
    other modules that hold parameters       are leaves: they run as written, in fp32, and give compute
    routers of mixtures                      fp32 inside and out; their experts multiply in compute
    the model itself                         gives what it returns in the loss format

A subclass that somebody else wrote is treated as what it is a subclass of, unless it has a forward of its own:
then it is a leaf. `Applied.changes` has a row for each module that was changed and for each that was not, with the
reason. What a model computes by functions of its own, as `F.softmax(x)`, is reached as well (mode.py).

A parameter is held as the policy says (`hold`) and keeps its identity: its data are replaced. A matrix is split
only where every module that holds it can use its bf16 half (split.py). Frozen parameters, and those that are none
of fp32, bf16 and fp16, stay as they are: nobody owns a master of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from halfstep.config.model import owner
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import EMULATE, check_formats, check_implemented, check_reach
from halfstep.core.roles import Param, Value, print_value
from halfstep.core.rules import Resolved
from halfstep.torch.cast import carried, split
from halfstep.torch.convert.fp8_choice import (
    TOKENS,
    Measured,
    Timer,
    add_histories,
    check_fast,
    check_narrow,
    measure_all,
)
from halfstep.torch.convert.known_packages import routers, with_routers
from halfstep.torch.convert.modules import Island, Leaf
from halfstep.torch.convert.plan import (
    Change,
    Originals,
    Plan,
    change_of,
    check_held,
    check_kernels,
    check_model,
    convert,
    give,
    plans_of,
    restore_all,
    statistics,
)
from halfstep.torch.dtypes import DTYPES, FLOATS, dtype_of, supported
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.layers import Layer, Matmul
from halfstep.torch.measure import time_layer
from halfstep.torch.split import Holder, make_split, make_whole

__all__ = ["Applied", "Change", "adopt", "apply", "check_supported", "hold", "restore", "set_precision", "whole"]

# What layers.py multiplies natively.
NATIVE = tuple(DTYPES)


@dataclass(frozen=True)
class Applied:
    """What was done to a model: the modules that changed, and how parameters and moments are held.

    Masters, moments and remainders are those of the parameters that are trained, by name; one that is held twice
    has its first name. A parameter that is trained and is not among them has a dtype that no policy knows.
    """

    policy: Policy
    modules: int  # that have a precision
    masters: dict[str, Param]
    moments: dict[str, Format]
    remainders: dict[str, Tensor]  # of split masters: what the bf16 in the model leaves out; updated in place
    widened: tuple[str, ...]  # parameters and statistics that were given narrower than they are held
    changes: tuple[Change, ...]
    originals: Originals = field(repr=False)
    measured: Measured | None = None  # where rules say `measured`
    amaxes: Amaxes | None = None  # where operands are delayed

    def __str__(self) -> str:
        held: dict[str, int] = {}
        for param in self.masters.values():
            held[print_value(param)] = held.get(print_value(param), 0) + 1
        told = ", ".join(f"{count} parameters in {fmt}" for fmt, count in held.items())
        return f"{self.policy}: {self.modules} modules, {told}"


def apply(
    model: nn.Module,
    policy: Policy,
    names: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    compiled: bool = True,
    timer: Timer = time_layer,
) -> Applied:
    """Gives a model a policy. `names` are the modules that rules may match; unless given, all that it has.

    Layers that are to be measured are timed by `timer`, with the `tokens` of a micro-batch, `compiled` or not.
    """
    check_model(model)
    parameters, names, plans = trainable(model), names_of(model, names), plans_of(model)
    values = policy.resolve(names)
    check_implemented(policy, "torch", _not_implemented)
    aliases = _aliases(model, parameters)
    multiplying = [p.name for p in plans if p.kind is not None and issubclass(p.kind, Matmul) and not p.router]
    check_reach(policy, multiplying, {owner(name) for held in aliases.values() for name in held})
    for chosen in (policy.evaluation(), policy):
        base = base_precision(chosen)
        found = with_routers(precisions(chosen, names), base, routers(model))
        for device in {parameter.device for parameter in model.parameters()}:
            check_supported([base, *found.values()], device)
            check_narrow(plans, found, base, device)
            if chosen is policy:
                check_fast(plans, found, base, device)
        check_kernels(plans, found, base)
    roles = {name: _roles(held, values) for name, held in aliases.items()}
    masters = {name: _checked(name, parameters[name], roles[name], policy) for name in parameters}
    masters, kept_whole = _split_where_used(masters, parameters, plans)
    held: dict[Tensor, Param] = {parameters[name]: param for name, param in masters.items()}
    check_held(plans, held)
    ruled = found
    measured = measure_all(plans, ruled, held, tokens, compiled=compiled, timer=timer)
    found = ruled if measured is None else measured.settle(ruled)
    widened = [name for name, p in parameters.items() if p.dtype != torch.float32 and masters[name].format == FP32]
    widened += _widen_statistics(plans)
    remainders = _hold_all(parameters, masters, policy, plans)
    amaxes = add_histories(plans, ruled, next(iter(parameters.values())).device)
    originals = convert(model, plans, found, base)
    notes = {} if measured is None else measured.notes
    changes = [c for p in plans if (c := change_of(p, found.get(p.name, base), notes.get(p.name, "")))]
    return Applied(
        policy=policy,
        modules=sum(isinstance(module, Layer | Island | Leaf) for module in model.modules()),
        masters=masters,
        moments={name: cast(Format, roles[name]["moments"]) for name in parameters},
        remainders=remainders,
        widened=tuple(widened),
        changes=(*changes, *kept_whole, *_left_alone(model)),
        originals=originals,
        measured=measured,
        amaxes=amaxes,
    )


def hold(wide: Tensor, param: Param, policy: Policy) -> tuple[Tensor, Tensor | None]:
    """An fp32 number in the form its master is held in, rounded to nearest, and the remainder of a split one."""
    if param.split:
        return split(wide)
    if policy.emulate:
        return carried(wide, param.format), None
    return wide.to(dtype_of(param.format)), None


def whole(param: Param, tensor: Tensor) -> Param:
    """How a tensor is held: gains, biases and scalars are never split."""
    return replace(param, split=False) if tensor.ndim < 2 else param


def set_precision(
    model: nn.Module, policy: Policy, names: Sequence[str] | None = None, measured: Measured | None = None
) -> int:
    """Sets what each module computes in, and leaves the parameters alone; how many there are.

    `measured` is what `apply` found, if rules say `measured`: without it they would all be narrow.
    """
    base = base_precision(policy)
    found = with_routers(precisions(policy, names_of(model, names)), base, routers(model))
    found = found if measured is None else measured.settle(found)
    for device in {parameter.device for parameter in model.parameters()}:
        check_supported([base, *found.values()], device)
    return sum([give(module, found.get(name, base), base) for name, module in model.named_modules()])


def adopt(model: nn.Module, applied: Applied, narrow: Mapping[str, bool]) -> Applied:
    """Takes over which of the measured layers are narrow, from a run that goes on here."""
    assert applied.measured is not None
    changed = applied.measured.adopt(narrow)
    modules = dict(model.named_modules())
    base = base_precision(applied.policy)
    found = with_routers(precisions(applied.policy, names_of(model, None)), base, routers(model))
    settled = applied.measured.settle(found)
    for name in changed:
        give(modules[name], settled[name], base)
    plans = {p.name: p for p in plans_of(model) if p.name in changed}
    told = {n: change_of(p, settled[n], applied.measured.notes[n]) for n, p in plans.items()}
    return replace(applied, changes=tuple(told.get(c.name) or c for c in applied.changes))


def restore(applied: Applied) -> None:
    """Gives every module its own class and attributes back. The numbers of parameters are not touched."""
    for module, _, _ in applied.originals:
        for name in module.remainders if isinstance(module, Holder) else ():
            make_whole(cast(nn.Parameter, module._parameters[name]))
    restore_all(applied.originals)


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


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that gradients are taken of and a policy has a format for, by their first names."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in FLOATS}
    if not found:
        raise HalfstepError(
            "the model has no parameters to train", hint="model.requires_grad_(True) makes them trainable"
        )
    return found


def names_of(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """The names that rules may match: modules, and the parameters that the model itself holds."""
    names = list(names) if names is not None else [name for name, _ in model.named_modules() if name]
    return [*names, *(name for name, _ in model.named_parameters() if "." not in name and name not in names)]


def _not_implemented(role: str, value: Value) -> str:
    if role in ("buffers", "router", "reduce") and value != FP32:
        return "buffers stay as they are, routers are fp32, and there is no second device to sum over"
    return ""


def _aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Every name that each parameter has, by its first."""
    first = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, list[str]] = {name: [] for name in parameters}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            found[first[parameter]].append(name)
    return found


def _roles(names: Sequence[str], values: Mapping[str, Resolved]) -> Mapping[str, Value]:
    """The values of the roles at a parameter, whose owners must agree on how it is held."""
    found = {owner(name): values[owner(name)].values for name in names if owner(name) in values}
    (one, ours), *others = found.items()
    for other, theirs in others:
        for role in ("param", "moments"):
            if ours[role] != theirs[role]:
                raise PolicyError(
                    f"`{names[0]}` is held by `{one}`, where {role}={print_value(ours[role])}, and by `{other}`, "
                    f"where {role}={print_value(theirs[role])}: it is one tensor",
                    hint=f"give both the same `{role}`",
                )
    return ours


def _checked(name: str, parameter: Tensor, roles: Mapping[str, Value], policy: Policy) -> Param:
    """How a parameter is to be held, if it can be."""
    param, grad_weight = cast(Param, roles["param"]), roles["grad_weight"]
    if parameter.dtype == torch.float16 and param.format != FP32:
        raise PolicyError(
            f"`{name}` is fp16 and trainable, and param={print_value(param)} would round it",
            hint="write `param=fp32`, which widens it, or choose its numbers with model.bfloat16() before",
        )
    if not policy.emulate and param.format != FP32 and grad_weight != param.format:
        raise PolicyError(
            f"`{name}` is held in {param.format}, and torch keeps its gradient in that too, not in "
            f"grad_weight={print_value(grad_weight)}",
            hint=f"write `grad_weight={param.format}`, keep `param=fp32`, or {EMULATE}",
        )
    return whole(param, parameter)


def _split_where_used(
    masters: dict[str, Param], parameters: Mapping[str, nn.Parameter], plans: Sequence[Plan]
) -> tuple[dict[str, Param], list[Change]]:
    """The masters, split where the policy says so and every module that holds one can use a half."""
    reasons: dict[Tensor, str] = {}
    for plan in plans:
        for name, parameter in plan.module.named_parameters(recurse=False):
            reason = _whole_because(plan, name)
            if reason:
                reasons.setdefault(parameter, f"{reason} ({type(plan.module).__name__} `{plan.name}`)")
    kept = [name for name, param in masters.items() if param.split and parameters[name] in reasons]
    changes = [Change(name, "Parameter", f"stays whole fp32: {reasons[parameters[name]]}") for name in kept]
    return {n: replace(param, split=False) if n in kept else param for n, param in masters.items()}, changes


def _whole_because(plan: Plan, name: str) -> str:
    if plan.kind is None or not issubclass(plan.kind, Layer):
        return "it is used as it is held"
    return plan.kind.whole_because(cast(Layer, plan.module), name)


def _widen_statistics(plans: Sequence[Plan]) -> list[str]:
    """Makes running statistics fp32; the names of those that were not."""
    found = list(statistics(plans))
    for _, module, name, buffer in found:
        module._buffers[name] = buffer.float()
    return [qualified for qualified, *_ in found]


@torch.no_grad()
def _hold_all(
    parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Param], policy: Policy, plans: Sequence[Plan]
) -> dict[str, Tensor]:
    """Holds each parameter as its master is; the remainders of those that are split."""
    remainders: dict[str, Tensor] = {}
    halves: dict[Tensor, Tensor] = {}
    for name, parameter in parameters.items():
        held, remainder = hold(parameter.data.float(), masters[name], policy)
        parameter.data = held
        if remainder is not None:
            make_split(parameter, remainder)
            remainders[name] = halves[parameter] = remainder
    for plan in plans:
        for name, held_here in plan.module._parameters.items():
            if held_here is not None and held_here in halves:
                Holder.add_remainder(cast(Holder, plan.module), name, halves[held_here])
    return remainders


def _left_alone(model: nn.Module) -> list[Change]:
    """Parameters that no policy has a format for."""
    odd = [(name, p) for name, p in model.named_parameters() if p.dtype not in FLOATS]
    told = [(name, str(p.dtype).removeprefix("torch.")) for name, p in odd]
    return [Change(name, "Parameter", f"left alone: no policy has a format for {dtype}") for name, dtype in told]
