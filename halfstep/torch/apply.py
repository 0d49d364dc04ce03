"""Policy to model: gives every module its precision and every parameter its storage format.

`apply` checks that the device can run what is asked for before it changes anything, and refuses with the reason if
it cannot. Any `nn.Module` will do. A module changes its class (convert/modules.py); `restore` puts it back.

    halfstep's own layers                    get their precision
    Linear, MultiheadAttention, Embedding    multiply and look up in their own precision; weight gradients are fp32
    Conv*, RNN, LSTM, GRU                    the same, with weight gradients that leave the kernel in compute
    LayerNorm, BatchNorm, Softmax, ...       are islands: fp32 inside, compute out
    CrossEntropyLoss, MSELoss, ...           are islands: fp32 inside and out
    other modules that hold parameters       are leaves: they run as written, in fp32, and return compute
    routers of mixtures                      fp32 inside and out; their experts multiply in compute
    the model itself                         returns the loss format; beside a loss, compute (functions/output.py)
    attention of transformers' models        has no mask where it is plainly causal (convert/causal.py)

A subclass that somebody else wrote is treated like its base class, unless it has a forward of its own: then it is
a leaf. Functions of the model's own code, such as `F.softmax(x)`, are reached as well (functions/mode.py).

A parameter is held as the policy says (`hold`) and keeps its identity: its data are replaced. A matrix is split
only if every module that holds it can use its bf16 half. Frozen parameters, and those of other dtypes, stay as
they are.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from halfstep.config.model import owner
from halfstep.core.choice.layers import Measured, Timer
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import FP32, Format
from halfstep.core.measure import TOKENS
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import EMULATE, check_formats, check_named, check_reach
from halfstep.core.roles import Param, Value, print_value
from halfstep.core.rules import Resolved
from halfstep.torch.cast import carried, split
from halfstep.torch.compile_cache import keep_compiled, put_in_graph
from halfstep.torch.convert import causal, fp8_choice, lean, plan
from halfstep.torch.convert.causal import Attention
from halfstep.torch.convert.known_packages import routers, with_routers
from halfstep.torch.convert.modules import Island, Leaf
from halfstep.torch.convert.plan import Change, Originals, Plan, change_of, give, plans_of, reach_of
from halfstep.torch.dtypes import DTYPES, FLOATS, dtype_of, home, supported
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.layers import Layer
from halfstep.torch.losses import LEAN_CHUNKS
from halfstep.torch.matmul import gelu_in_graph, linear_in_graph
from halfstep.torch.measure import LayerWork, time_layer_once
from halfstep.torch.split.holder import Holder
from halfstep.torch.split.parameter import make_split, make_whole

__all__ = ["Applied", "Change", "adopt", "apply", "check_supported", "hold", "restore", "set_precision", "whole"]


@dataclass(frozen=True)
class Applied:
    """What was done to a model: its modules, and how trained parameters and moments are held, by first name."""

    policy: Policy
    modules: int  # how many have a precision
    masters: dict[str, Param]
    moments: dict[str, Format]
    remainders: dict[str, Tensor]  # of split masters: what the bf16 leaves out; updated in place
    widened: tuple[str, ...]  # parameters and statistics that came narrower than they are held
    changes: tuple[Change, ...]
    originals: Originals = field(repr=False)
    attention: tuple[Attention, ...] = ()  # of models of transformers
    measured: Measured | None = None  # if rules say `measured`
    amaxes: Amaxes | None = None  # if operands are delayed
    split_later: tuple[str, ...] = ()  # masters that are whole until optimizers come
    recomputed: tuple[str, ...] | None = None  # modules whose results are computed again, if memory is lean

    def summed_here(self) -> list[str]:
        """Names the parameters whose gradients are summed beside them, where DDP does not see them."""
        wide = self.policy.accumulate == FP32
        held = [name for name, param in self.masters.items() if param.split or param.format != FP32 or not wide]
        return [*held, *self.split_later]

    def __str__(self) -> str:
        counts = Counter(print_value(param) for param in self.masters.values())
        held = ", ".join(f"{count} parameters in {fmt}" for fmt, count in counts.items())
        return f"{self.policy}: {self.modules} modules, {held}"


def put_layers_in_graph() -> None:
    """Spares dynamo the code of linear layers, if it is loaded: it is once there are optimizers."""
    if "torch._dynamo" in sys.modules:  # to import it takes seconds
        put_in_graph(linear_in_graph, gelu_in_graph)


def apply(
    model: nn.Module,
    policy: Policy,
    names: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    compiled: bool = True,
    timer: Timer[LayerWork] = time_layer_once,
    split: bool = True,
    memory: str = "fast",
) -> Applied:
    """Gives a model a policy, whose rules may match `names`; `timer` times the layers of rules with `measured`.

    Without `split`, masters that the policy splits stay whole until `split_now`: they may be sharded first. With
    the memory `lean`, cheap results are computed again in the backward pass (convert/lean.py).
    """
    plan.check_model(model, empty=not split)
    lean.check_memory(memory, model)
    keep_compiled()
    put_layers_in_graph()
    parameters, plans = trainable(model), plans_of(model)
    ruled, roles, masters, kept_whole = check_policy(model, policy, names, plans, empty=not split)
    base = base_precision(policy)
    later = () if split else tuple(name for name, param in masters.items() if param.split)
    masters |= {name: replace(masters[name], split=False) for name in later}
    held: dict[Tensor, Param] = {parameters[name]: param for name, param in masters.items()}
    plan.check_held(plans, held)
    chunks = LEAN_CHUNKS if memory == "lean" else 1
    measured = fp8_choice.measure_all(plans, ruled, held, tokens, compiled=compiled, chunks=chunks, timer=timer)
    chosen = ruled if measured is None else measured.widen(ruled)
    widened = [name for name, p in parameters.items() if p.dtype != torch.float32 and masters[name].format == FP32]
    widened += plan.widen_statistics(plans)
    remainders = _hold_all(parameters, masters, policy, [p.module for p in plans])
    amaxes = fp8_choice.add_histories(plans, ruled, next(iter(parameters.values())).device)
    attention = causal.choose(model)
    originals = plan.convert(model, plans, chosen, base, causal=any(not row.why_not for row in attention))
    recomputed = lean.save_memory(model, originals) if memory == "lean" else None
    fp8_choice.give_losses(model, ruled, measured)
    notes = fp8_choice.notes_of(measured, ruled)
    changes = [c for p in plans if (c := change_of(p, chosen.get(p.name, base), notes.get(p.name, "")))]
    return Applied(
        policy=policy,
        modules=sum(isinstance(module, Layer | Island | Leaf) for module in model.modules()),
        masters=masters,
        moments={name: cast(Format, roles[name]["moments"]) for name in parameters},
        remainders=remainders,
        widened=tuple(widened),
        changes=(*changes, *kept_whole, *_left_alone(model)),
        originals=originals,
        attention=tuple(attention),
        measured=measured,
        amaxes=amaxes,
        split_later=later,
        recomputed=recomputed,
    )


def check_policy(
    model: nn.Module,
    policy: Policy,
    names: Sequence[str] | None = None,
    plans: list[Plan] | None = None,
    *,
    empty: bool = False,
) -> tuple[dict[str, Precision], dict[str, Mapping[str, Value]], dict[str, Param], list[Change]]:
    """Refuses a policy that a model, or its device, cannot run. Changes nothing.

    Returns what rules say of each module; of each parameter, by first name, its roles and how its master is held;
    and the masters that stay whole although the policy splits them.
    """
    plan.check_model(model, empty=empty)
    plans, parameters, names = plans or plans_of(model), trainable(model), names_of(model, names)
    aliases, values = _aliases(model, parameters), policy.resolve(names)
    check_reach(policy, reach_of(plans, {owner(name) for held in aliases.values() for name in held}))
    base, ruled = base_precision(policy), _precisions(model, policy, names)
    check_named({p.name: p.module.named for p in plans if isinstance(p.module, Layer)}, ruled, base)
    _check_precisions(model, plans, _precisions(model, policy.evaluation(), names), policy.evaluation())
    _check_precisions(model, plans, ruled, policy)
    for device in _devices(model):
        fp8_choice.check_fast(plans, ruled, base, device)
    roles = {name: _roles(held, values) for name, held in aliases.items()}
    masters = {name: _checked(name, parameters[name], roles[name], policy) for name in parameters}
    return ruled, roles, *_split_where_used(masters, parameters, plans)


def split_now(model: nn.Module, applied: Applied) -> Applied:
    """Splits masters that `apply` left whole."""
    parameters = {name: p for name, p in model.named_parameters() if name in applied.split_later}
    masters = {name: replace(applied.masters[name], split=True) for name in parameters}
    remainders = _hold_all(parameters, masters, applied.policy, [*model.modules()])
    return replace(applied, masters=applied.masters | masters, remainders=remainders, split_later=())


def _precisions(model: nn.Module, policy: Policy, names: Sequence[str] | None) -> dict[str, Precision]:
    """Returns what rules say about each module, routers in fp32."""
    return with_routers(precisions(policy, names_of(model, names)), base_precision(policy), routers(model))


def _devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}


def _check_precisions(model: nn.Module, plans: list[Plan], ruled: Mapping[str, Precision], policy: Policy) -> None:
    base = base_precision(policy)
    for device in _devices(model):
        check_supported([base, *ruled.values()], device)
        fp8_choice.check_narrow(plans, ruled, base, device)
    plan.check_kernels(plans, ruled, base)


def hold(wide: Tensor, param: Param, policy: Policy) -> tuple[Tensor, Tensor | None]:
    """Returns an fp32 tensor as its master is held, rounded to nearest, and the remainder if it is split."""
    if param.split:
        return split(wide)
    if policy.emulate:
        return carried(wide, param.format), None
    return wide.to(dtype_of(param.format)), None


def whole(param: Param, tensor: Tensor) -> Param:
    """Returns how a tensor is held: gains, biases and scalars are never split."""
    return replace(param, split=False) if tensor.ndim < 2 else param


def set_precision(
    model: nn.Module, policy: Policy, names: Sequence[str] | None = None, measured: Measured | None = None
) -> int:
    """Sets what modules compute in, those that `apply` measured as it did; returns how many modules that are."""
    base, ruled = base_precision(policy), _precisions(model, policy, names)
    chosen = ruled if measured is None else measured.widen(ruled)
    for device in _devices(model):
        check_supported([base, *chosen.values()], device)
    count = sum([give(module, chosen.get(name, base), base) for name, module in model.named_modules()])
    fp8_choice.give_losses(model, ruled, measured)
    return count


def adopt(model: nn.Module, applied: Applied, narrow: Mapping[str, bool]) -> Applied:
    """Takes over which of the measured layers are narrow, from a run that is resumed here."""
    assert applied.measured is not None
    changed = {name.removesuffix(fp8_choice.OF_LOSS) for name in applied.measured.changed_by(narrow)}
    measured, ruled = applied.measured.adopt(narrow), _precisions(model, applied.policy, None)
    chosen, notes = measured.widen(ruled), fp8_choice.notes_of(measured, ruled)
    for name in changed:
        give(model.get_submodule(name), chosen[name], base_precision(applied.policy))
    fp8_choice.give_losses(model, ruled, measured)
    plans = {p.name: p for p in plans_of(model) if p.name in changed}
    rows = {n: change_of(p, chosen[n], notes[n]) for n, p in plans.items()}
    changes = tuple(rows.get(c.name) or c for c in applied.changes)
    return replace(applied, changes=changes, measured=measured)


def restore(applied: Applied) -> None:
    """Gives every module its own class and attributes back, without touching the numbers of parameters."""
    for module, _, _ in applied.originals:
        for name in module.remainders if isinstance(module, Holder) else ():
            make_whole(cast(nn.Parameter, module._parameters[name]))
    plan.restore_all(applied.originals)
    causal.undo(applied.attention)


def check_supported(wanted: Sequence[Precision], device: torch.device) -> None:
    """Refuses what the device cannot run, with the reason and an alternative that runs."""
    check_formats(wanted, "torch", str(device), lambda fmt: supported(fmt, home(device)), tuple(DTYPES))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters that a policy has a format for, by their first names."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in FLOATS}
    if not parameters:
        raise HalfstepError(
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
                raise PolicyError(
                    f"`{names[0]}` is held by `{one}`, where {role}={print_value(ours[role])}, and by `{other}`, "
                    f"where {role}={print_value(theirs[role])}: it is one tensor",
                    hint=f"give both the same `{role}`",
                )
    return ours


def _checked(name: str, parameter: Tensor, roles: Mapping[str, Value], policy: Policy) -> Param:
    param, grad_weight = cast(Param, roles["param"]), roles["grad_weight"]
    if parameter.dtype == torch.float16 and param.format != FP32:
        raise PolicyError(
            f"`{name}` is fp16 and trainable, and param={print_value(param)} would round it",
            hint="write `param=fp32`, which widens it, or round it yourself with model.bfloat16() before",
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


@torch.no_grad()
def _hold_all(
    parameters: Mapping[str, nn.Parameter],
    masters: Mapping[str, Param],
    policy: Policy,
    modules: Sequence[nn.Module],
) -> dict[str, Tensor]:
    """Holds each parameter as its master is; returns the remainders of those that are split."""
    remainders: dict[str, Tensor] = {}
    split_parameters: dict[Tensor, Tensor] = {}
    for name, parameter in parameters.items():
        held, remainder = hold(parameter.data.float(), masters[name], policy)
        parameter.data = held
        if remainder is not None:
            make_split(parameter, remainder, name)
            remainders[name] = split_parameters[parameter] = remainder
    for module in modules:
        for name, held_here in module._parameters.items():
            if held_here is not None and held_here in split_parameters:
                Holder.add_remainder(cast(Holder, module), name, split_parameters[held_here])
    return remainders


def _left_alone(model: nn.Module) -> list[Change]:
    form = "left alone: no policy has a format for"
    odd = [(name, p) for name, p in model.named_parameters() if p.dtype not in FLOATS]
    return [Change(name, "Parameter", f"{form} {str(p.dtype).removeprefix('torch.')}") for name, p in odd]
