"""What each module of a model becomes, and why some do not: decided before anything is changed.

    Plan      the class of modules.py that a module is to have in front of its own, or the reason that it has none
    Change    the same in words, for people

A model must come as it was built: torch.compile, DDP, FSDP and the like keep what they find, so they come after.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import FP32
from halfstep.core.precision import Precision
from halfstep.core.roles import Param, is_narrow, print_value
from halfstep.torch.convert.attention import MultiheadAttention
from halfstep.torch.convert.known_packages import (
    ORDER,
    is_experts,
    is_replaced,
    odd_parameter,
    recipe_of,
    refuse_wrapped,
    routers,
)
from halfstep.torch.convert.modules import (
    ISLANDS,
    KINDS,
    NAMED,
    Code,
    Convolution,
    Embedding,
    Experts,
    Island,
    Leaf,
    Recipe,
    Recurrent,
    Setting,
    Whole,
)
from halfstep.torch.convert.norms import BatchNorm, InstanceNorm, Normalization
from halfstep.torch.convert.subclass import mixed
from halfstep.torch.functions.mode import PolicyMode, mode_of
from halfstep.torch.functions.table import learn
from halfstep.torch.layers import Layer, Matmul, casts_of
from halfstep.torch.lowering import Casts, check_autocast
from halfstep.torch.split import is_split

# Attributes by which torch takes its kernels for inference, and the value without them.
_FAST_PATHS: dict[type, tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
# What a module is given, and what of it may have been there before; none of it is a parameter or a buffer.
_GIVEN = ("halfstep", "halfstep_model", "halfstep_remainders", "halfstep_history", "halfstep_prepared")
_KEPT = ("casts", "forward", *(name for name, _ in _FAST_PATHS.values()))
_IN_RECIPE = "part of a layer with a recipe of its own"
WHOLE, TABLES = Param(FP32), (nn.Embedding, nn.EmbeddingBag)
Originals = list[tuple[nn.Module, type, dict[str, Any]]]


class Change(NamedTuple):
    """What became of one module, or of one parameter."""

    name: str
    kind: str
    form: str


@dataclass(frozen=True)
class Plan:
    """What is to become of one module."""

    name: str
    module: nn.Module
    kind: type | None  # the class to put in front, or the module's own if it is a layer already; None leaves it
    role: str = ""  # of an island
    why: str = ""  # it is a leaf, or is left alone
    router: bool = False  # its role is that of a router: fp32 inside and out

    @property
    def layer(self) -> bool:
        """Whether the module is one of halfstep's own layers."""
        return self.kind is type(self.module)


def plans_of(model: nn.Module) -> list[Plan]:
    """What is to become of each module of a model; one that is held twice has its first name."""
    plans: dict[str, Plan] = {}
    deciding = routers(model)
    for name, module in model.named_modules():
        above = plans.get(name.rpartition(".")[0])
        if name and above is not None and (above.kind is Recipe or above.why == _IN_RECIPE):
            plans[name] = Plan(name, module, None, why=_IN_RECIPE)
        else:
            plans[name] = replace(_plan(name, module, model), router=name in deciding)
    return [*plans.values()]


def convert(model: nn.Module, plans: list[Plan], found: Mapping[str, Precision], base: Precision) -> Originals:
    """Gives each module the class that casts. Comes after the parameters are held as they will be."""
    originals: Originals = []
    has_split = any(is_split(p) for p in model.parameters())
    learn()
    for plan in plans:
        module, precision = plan.module, found.get(plan.name, base)
        fast = [pair for kind, pair in _FAST_PATHS.items() if isinstance(module, kind)]
        if plan.kind is None and not fast and module is not model:
            continue
        saved = {key: module.__dict__[key] for key in _KEPT if key in module.__dict__}
        originals.append((module, type(module), saved))
        module.__dict__.update(fast)
        module.__dict__.pop("forward", None)  # that of its class, bound: Accelerate leaves it there
        for front in [] if plan.layer else [plan.kind, Whole if module is model else None]:
            if front is not None:
                module.__class__ = cast(Any, mixed)(front, type(module))
        give(module, precision, base, plan.role, has_split)
    model.__dict__["halfstep_prepared"] = True
    return originals


def give(
    module: nn.Module,
    precision: Precision,
    base: Precision,
    role: str | None = None,
    has_split: bool | None = None,
) -> bool:
    """Gives a module that casts its precision; returns whether it is one. What is None stays as it was.

    `has_split`: some parameters of the model are split masters.
    """
    if isinstance(module, Whole):
        casts, before = casts_of(base), module.__dict__.get("halfstep_model")
        module.halfstep_model = Setting(casts, "", False, _mode(casts, before, has_split))
    if isinstance(module, Layer):
        module.precision = precision
    elif isinstance(module, Island | Leaf | Code):
        before, casts = module.__dict__.get("halfstep"), casts_of(precision)
        held = [*module.parameters(recurse=False)]
        wide = not isinstance(module, Experts) and any(p.dtype == torch.float32 for p in held)
        mode = _mode(casts, before, has_split, wide)
        small = wide and all(p.dim() < 2 for p in held) and not any(module.children())
        unreached = isinstance(module, Recipe | Island) or small
        role = before.role if role is None and before is not None else role or ""
        module.halfstep = Setting(casts, role, wide, None if unreached else mode)
    return isinstance(module, Layer | Island | Leaf)


def _mode(casts: Casts, before: Setting | None, has_split: bool | None, leaf: bool = False) -> PolicyMode:
    if has_split is None:
        has_split = before is not None and before.mode is not None and before.mode.scope.has_split
    return mode_of(casts, leaf=leaf, has_split=has_split)


def restore_all(originals: Originals) -> None:
    """Gives every module its own class and attributes back."""
    for module, original, saved in reversed(originals):
        module.__class__ = original
        for name in (*_GIVEN, *_KEPT):
            module.__dict__.pop(name, None)
        module.__dict__.update(saved)


def check_model(model: nn.Module) -> None:
    """Refuses a model that is not as it was built, or that no policy can be given."""
    if not isinstance(model, nn.Module):
        raise HalfstepError(f"the model is a {type(model).__name__}, not an nn.Module")
    check_autocast()
    for name, module in model.named_modules():
        told = f"`{name}`" if name else f"the model, a {type(module).__name__},"
        if hasattr(type(module), "halfstep_made") or "halfstep_prepared" in module.__dict__:
            raise HalfstepError(
                f"{told} has a policy already", hint="run.unprepare() gives the model back as it was built"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise HalfstepError(
                f"{told} is a script, and has no forward in Python that could cast",
                hint="prepare the module that the script was made of",
            )
    refuse_wrapped(model)
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)


def check_kernels(plans: list[Plan], found: Mapping[str, Precision], base: Precision) -> None:
    """Refuses, by name, a format that a kernel does not take or a role that cannot reach a module."""
    for plan in plans:
        precision = found.get(plan.name, base)
        if plan.kind is not None and issubclass(plan.kind, Recurrent) and not precision.emulate:
            device = next(plan.module.parameters()).device
            failure = _try_recurrent(_base_of(plan.module), casts_of(precision).compute, device)
            if failure:
                raise PolicyError(
                    f"`{plan.name}`: torch has no {type(plan.module).__name__} in {precision.compute} on {device} "
                    f"({failure})",
                    hint=f"keep it in fp32 with a rule, `{plan.name}: compute=fp32`",
                )


def check_held(plans: Sequence[Plan], held: Mapping[Tensor, Param]) -> None:
    """Refuses a module that cannot use its parameters as they would be held."""
    for plan in plans:
        names = [name for name, p in plan.module.named_parameters(recurse=False) if held.get(p, WHOLE) != WHOLE]
        why = ""
        if isinstance(plan.module, nn.SyncBatchNorm):
            why = "torch has it for fp32 parameters alone"
        elif getattr(plan.module, "max_norm", None) is not None and isinstance(plan.module, TABLES):
            why = "max_norm renormalizes its rows in place, which would round them at each use"
        if names and why:
            told = print_value(held[plan.module.get_parameter(names[0])])
            raise PolicyError(
                f"`{plan.name}`, a {type(plan.module).__name__}, cannot have param={told}: {why}",
                hint=f"keep it whole with a rule, `{plan.name}: param=fp32,grad_weight=fp32`",
            )


def change_of(plan: Plan, precision: Precision, note: str = "") -> Change | None:
    """What becomes of a module, in words, with a note if there is one; None where there is nothing to say."""
    if plan.kind in (None, Code) and (not plan.why or plan.why == _IN_RECIPE):
        if isinstance(plan.module, tuple(_FAST_PATHS)):
            return Change(
                plan.name, type(plan.module).__name__, "runs as written, its kernels for inference are off"
            )
        return None
    told = _form(plan, precision) + (f" ({note})" if note else "")
    return Change(plan.name, type(plan.module).__name__, told)


def _plan(name: str, module: nn.Module, model: nn.Module) -> Plan:
    if isinstance(module, Layer):
        return Plan(name, module, type(module))
    base, held = _base_of(module), [n for n, p in module.named_parameters(recurse=False) if p.is_floating_point()]
    forward = getattr(type(module), "forward", None)
    ours = getattr(type(module), "halfstep_island", False)  # of islands.py: the class in front does the same
    own_forward = base is not None and forward is not base.forward and not ours
    if is_replaced(module):
        return Plan(name, module, None, why="left alone: its forward was replaced on this one module")
    named = NAMED.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if named is not None:
        return Plan(name, module, named)
    recipe = recipe_of(module)
    if recipe:
        return Plan(name, module, Recipe, why=recipe)
    odd = "" if module is model else odd_parameter(module)
    if odd:
        return Plan(name, module, Leaf, why=f"holds {odd}, which multiplies by itself")
    if base is not None and not own_forward and not _clashes(module):
        return Plan(name, module, KINDS.get(base, Island), ISLANDS.get(base, ""))
    why = f"has a forward of its own, not that of nn.{base.__name__}" if own_forward else ""
    if not held:
        mine = type(module).__module__.startswith("torch.") or forward is nn.Module.forward
        return Plan(name, module, None if mine or module is model else Code, why=why)
    holds = f"holds {', '.join(f'`{n}`' for n in held[:3])}{', ...' if len(held) > 3 else ''} itself"
    if module is model or isinstance(module, ParametrizationList) or ".parametrizations." in f".{name}.":
        told = "" if module is model else ", and what they meet is widened to their dtype"
        return Plan(name, module, None, why=f"left alone: {holds}{told}")
    if forward is nn.Module.forward:
        return Plan(name, module, None, why=f"left alone: {holds}, and has no forward")
    if is_experts(module):
        return Plan(name, module, Experts, why=holds)
    return Plan(name, module, Leaf, why=why or holds)


def _form(plan: Plan, precision: Precision) -> str:
    """What a module does from now on."""
    kind, fmt, emulated = plan.kind, precision.compute, " (emulated)" if precision.emulate else ""
    if kind is None:
        return plan.why
    if issubclass(kind, Recipe):
        return f"is {plan.why}: runs as written, its parameters whole, {fmt} out{emulated}"
    if plan.router:
        return "is a router: fp32 inside and out"
    if issubclass(kind, Code):
        return f"runs as written, it {plan.why}: its functions are reached"
    if issubclass(kind, Experts):
        told = f"multiplies in {fmt}{emulated}, weight gradients in {precision.grad_weight}"
        return f"is a leaf of experts, it {plan.why}: {told}{_missed(precision)}"
    if issubclass(kind, Leaf):
        return f"is a leaf, it {plan.why}: runs as written in the dtype of its parameters, {fmt} out{emulated}"
    missed = _missed(precision)
    if issubclass(kind, MultiheadAttention):
        return (
            f"projects in {precision.operand.format}{emulated}, {precision.softmax} scores and softmax, {fmt} out"
        )
    if issubclass(kind, Matmul):
        return f"multiplies in {_operands(precision)}{emulated}, weight gradients in {precision.grad_weight}"
    if issubclass(kind, Convolution | Recurrent):
        rounding = "" if fmt == FP32 else f"; its weight gradients leave the kernel in {fmt} and are then widened"
        return f"computes in {fmt}{emulated}{rounding}{missed}"
    if issubclass(kind, Embedding):
        return f"looks up its master and casts to {fmt}{emulated}, gradients in {precision.grad_weight}"
    if plan.role == "loss":
        return f"is an island: {precision.loss} inside and out{emulated}"
    if plan.role or issubclass(kind, Normalization):
        return f"is an island: {getattr(precision, plan.role or 'norm')} inside, {fmt} out{emulated}{missed}"
    return f"computes in {fmt}{emulated}"


def _missed(precision: Precision) -> str:
    return f"; {precision.operand.format} is for matmuls" if is_narrow(precision.operand.format) else ""


def _operands(precision: Precision) -> str:
    """The operands of a matmul, as a policy writes them; those of the backward pass where they differ."""
    if not precision.narrow:
        return str(precision.operand.format)
    forward, backward = (print_value(replace(operand, measured=False)) for operand in precision.operands)
    fast = precision.matmul.fast and is_narrow(precision.operand.format)
    told = forward + (" (fast accumulation)" if fast else "")
    return told if backward == told else f"{told} forward and {backward} backward"


def _base_of(module: nn.Module) -> Any:
    """The class of torch.nn that a module is one of, if there is a class here for it."""
    return next((base for base in type(module).__mro__ if base in KINDS or base in ISLANDS), None)


def _clashes(module: nn.Module) -> bool:
    """Whether a subclass has attributes of its own by the names that a layer uses."""
    return any(
        name in module.__dict__ or hasattr(type(module), name) for name in ("casts", "precision", "remainders")
    )


def statistics(plans: Sequence[Plan]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The running statistics of norms that are narrower than fp32: their names, where they are, and they."""
    for plan in plans:
        if plan.kind is not None and (issubclass(plan.kind, BatchNorm | InstanceNorm) or plan.role == "norm"):
            for name, buffer in plan.module.named_buffers(recurse=False):
                if buffer.dtype in (torch.bfloat16, torch.float16):
                    yield f"{plan.name}.{name}" if plan.name else name, plan.module, name, buffer


def _check_parameter(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise HalfstepError(
            f"`{name}` has no shape yet", hint="run the model once, as lazy modules ask for, then prepare it"
        )
    if parameter.is_meta:
        raise HalfstepError(
            f"`{name}` is on the meta device and has no numbers", hint="load the weights first, then prepare"
        )
    if any(base.__name__ == "DTensor" for base in type(parameter.data).__mro__):
        raise HalfstepError(f"`{name}` is sharded already", hint=ORDER)
    if parameter.requires_grad and type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        raise HalfstepError(
            f"`{name}` is trained, and of the class {kind}, which rounds by rules of its own",
            hint="freeze it with requires_grad_(False) and train adapters, or prepare the model before it is "
            "quantized",
        )
    if parameter.requires_grad and parameter.dtype == torch.float64:
        raise HalfstepError(
            f"`{name}` is float64, and no policy has a format for that",
            hint="make it float32 with model.float(), or freeze it with requires_grad_(False)",
        )


@cache
def _try_recurrent(kind: Any, dtype: torch.dtype, device: torch.device) -> str:
    """The first line of what a small one of its kind raises, forward and backward; empty where it runs."""
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            cell = kind(2, 2, device=device, dtype=dtype)
            cell(torch.zeros(1, 1, 2, device=device, dtype=dtype))[0].sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""
