"""What each module of a model becomes, and why some stay as they are: decided before anything is changed.

A model must come as it was built: torch.compile, DDP, FSDP and the like keep what they find, so they come after.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.core.errors import (
    AlreadyPreparedError,
    ParallelError,
    PolicyFitError,
    UnsupportedModelError,
    type_name,
)
from halfstep.core.formats import FP32
from halfstep.core.precision import Precision
from halfstep.core.roles import Param, is_narrow, print_value
from halfstep.torch.convert import known_packages, modules
from halfstep.torch.convert.attention import MultiheadAttention
from halfstep.torch.convert.functions.custom import reach_custom_functions
from halfstep.torch.convert.functions.mode import mode_of
from halfstep.torch.convert.functions.table import add_hugging_face_operations
from halfstep.torch.convert.hugging_face import CausalRoot, default_loss, reach_losses
from halfstep.torch.convert.modules import (
    ISLANDS,
    KINDS,
    NEUTRAL,
    BatchNorm,
    Code,
    Experts,
    InstanceNorm,
    Island,
    Leaf,
    Neutral,
    Normalization,
    Recipe,
    Root,
)
from halfstep.torch.convert.subclass import put_in_front, with_forward
from halfstep.torch.layers import Layer, Matmul, Norm, casts_of
from halfstep.torch.numerics.lowering import check_autocast
from halfstep.torch.numerics.record import record_of, update_record
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.numerics.split.operand import is_split

# Attributes that make torch use its kernels for inference, and the value that does not.
_FAST_PATHS: dict[type, tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
# Attributes that conversion overwrites; none is a parameter or a buffer.
_KEPT = ("casts", "forward", "_loss_function", *(name for name, _ in _FAST_PATHS.values()))
_OWN_ISLANDS = "halfstep.torch.islands"
_IN_RECIPE = "part of a layer with a recipe of its own"
WHOLE, TABLES, NORMS = Param(FP32), (nn.Embedding, nn.EmbeddingBag), (Norm, Normalization)
Originals = list[tuple[nn.Module, type, dict[str, Any]]]


class Change(NamedTuple):
    """What was done to one module, or to one parameter."""

    name: str
    kind: str
    form: str


@dataclass(frozen=True)
class Plan:
    """What will be done to one module."""

    name: str
    module: nn.Module
    kind: type | None  # the class to put in front, or its own class if it is a layer already; None: no change
    role: str = ""  # of an island
    why: str = ""  # why it is a leaf, or is left alone
    router: bool = False  # it is a router: fp32 inside and out


def plans_of(model: nn.Module) -> list[Plan]:
    """Returns a plan for each module of a model; one that is held twice has its first name."""
    plans: dict[str, Plan] = {}
    router_names = known_packages.routers(model)
    for name, module in model.named_modules():
        above = plans.get(name.rpartition(".")[0])
        if name and above is not None and (above.kind is Recipe or above.why == _IN_RECIPE):
            plans[name] = Plan(name, module, None, why=_IN_RECIPE)
        else:
            plans[name] = replace(_plan(name, module, model), router=name in router_names)
    return [*plans.values()]


def matmuls(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans of modules that multiply by a matrix."""
    return [plan for plan in plans if plan.kind is not None and issubclass(plan.kind, Matmul)]


def reachable_names(plans: Sequence[Plan], owners: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names at which a rule's role changes something; `owners` hold a parameter.

    What a module's own code calls is unknown before it runs: norms and softmax may be in it.
    """
    held, converted = list(owners), [plan for plan in plans if plan.kind is not None]
    compute = [*(plan.name for plan in converted), *held]
    return {
        "operand": [plan.name for plan in matmuls(plans) if not plan.router],
        "compute": compute,
        "grad": compute,
        "grad_weight": compute,
        "param": held,
        "moments": held,
        "norm": [plan.name for plan in converted if _may_hold(plan, "norm", Matmul, *TABLES)],
        "softmax": [plan.name for plan in converted if _may_hold(plan, "softmax", Matmul, *NORMS, *TABLES)],
    }


def _may_hold(plan: Plan, role: str, *others: type) -> bool:
    """Whether an island of a role may be in a module, which none of the others has."""
    kind = cast(type, plan.kind)
    return plan.role in ("", role) and not issubclass(kind, others) and not isinstance(plan.module, others)


def convert(
    model: nn.Module,
    plans: list[Plan],
    ruled: Mapping[str, Precision],
    base: Precision,
    *,
    causal: bool = False,
    lean: bool = False,
) -> Originals:
    """Gives each module the class that casts; its parameters must be held in their final form already.

    `causal` says that some of its attention has the implementation of hugging_face.py. `lean` code computes cheap
    results again.
    """
    originals: Originals = []
    root = CausalRoot if causal else Root
    has_split = any(is_split(p) for p in model.parameters())
    add_hugging_face_operations()
    reach_custom_functions()
    reach_losses(model)
    for plan in plans:
        module, precision = plan.module, ruled.get(plan.name, base)
        kind = Neutral if type(module) in NEUTRAL else plan.kind
        fast = [pair for kind, pair in _FAST_PATHS.items() if isinstance(module, kind)]
        if kind is None and not fast and module is not model:
            continue
        saved = {key: module.__dict__[key] for key in _KEPT if key in module.__dict__}
        originals.append((module, type(module), saved))
        module.__dict__.update(fast)
        if (loss := default_loss(module)) is not None:
            module.__dict__["_loss_function"] = loss
        if module is model and known_packages.is_replaced(module):
            module.__class__ = with_forward(module)
        module.__dict__.pop("forward", None)  # of its class now; or a method of it, which Accelerate leaves there
        ours = kind is type(module)
        for front in [] if ours else [kind, root if module is model else None]:
            if front is not None:
                module.__class__ = cast(Any, put_in_front)(front, type(module))
        if isinstance(module, Root) or not isinstance(module, Layer | Neutral):  # a record is a guard for dynamo
            update_record(module, role=plan.role, has_split=has_split, lean=lean)
        set_module_precision(module, precision, base)
    update_record(model, prepared=True)
    return originals


def set_module_precision(module: nn.Module, precision: Precision, base: Precision) -> bool:
    """Gives a module that casts its precision; returns whether it has one."""
    record = record_of(module)
    if isinstance(module, Root):
        casts = casts_of(base)
        update_record(module, model_casts=casts, model_mode=mode_of(casts, False, record.has_split, record.lean))
    if isinstance(module, Layer):
        module.precision = precision
        if module.halfstep.loss_casts is not None:
            update_record(module, loss_casts=None)  # until fp8_choice.set_loss_casts
    elif isinstance(module, Island | Leaf | Code):
        casts = casts_of(precision)
        held = [*module.parameters(recurse=False)]
        wide = not isinstance(module, Experts) and any(p.dtype == torch.float32 for p in held)
        small = wide and all(p.dim() < 2 for p in held) and not any(module.children())
        unreached = isinstance(module, Recipe | Island) or small
        mode = None if unreached else mode_of(casts, wide, record.has_split, record.lean)
        update_record(module, casts=casts, widen=wide, mode=mode)
    return isinstance(module, Layer | Island | Leaf)


def restore_all(originals: Originals) -> None:
    """Gives every module its own class and attributes back."""
    for module, original, saved in reversed(originals):
        module.__class__ = original
        for name in ("halfstep", *_KEPT):
            module.__dict__.pop(name, None)
        module.__dict__.update(saved)


def check_type(model: object) -> None:
    """Refuses what is not a model."""
    if not isinstance(model, nn.Module):
        hint = "prepare(model, optimizer, policy) takes the model itself, not its forward or its parameters"
        raise UnsupportedModelError(f"{type_name(model)} was given as the model, not an nn.Module", hint=hint)


def check_model(model: nn.Module, *, empty: bool = False) -> None:
    """Refuses a model that is not as it was built, or that no policy fits; one without numbers unless `empty`."""
    check_type(model)
    check_autocast()
    for name, module in model.named_modules():
        what = f"`{name}`" if name else f"the model, a {type(module).__name__},"
        if hasattr(type(module), "halfstep_subclass") or record_of(module).prepared:
            raise AlreadyPreparedError(
                f"{what} has a policy already", hint="run.unprepare() gives the model back as it was built"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{what} is a TorchScript module, which has no Python forward that could cast",
                hint="prepare the module that was scripted",
            )
    known_packages.refuse_wrapped(model)
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, empty=empty)


def check_kernels(plans: list[Plan], ruled: Mapping[str, Precision], base: Precision) -> None:
    """Refuses, by name, a format that a recurrent kernel does not take."""
    for plan in plans:
        precision = ruled.get(plan.name, base)
        if plan.kind is not None and issubclass(plan.kind, modules.Recurrent) and not precision.emulate:
            device = next(plan.module.parameters()).device
            failure = _try_recurrent(_torch_base(plan.module), casts_of(precision).compute, device)
            if failure:
                raise PolicyFitError(
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
            why = "torch has it for fp32 parameters only"
        elif getattr(plan.module, "max_norm", None) is not None and isinstance(plan.module, TABLES):
            why = "max_norm renormalizes its rows in place, which would round them at each use"
        if names and why:
            param = print_value(held[plan.module.get_parameter(names[0])])
            raise PolicyFitError(
                f"`{plan.name}`, a {type(plan.module).__name__}, cannot have param={param}: {why}",
                hint=f"keep it whole with a rule, `{plan.name}: param=fp32,grad_weight=fp32`",
            )


def describe_change(plan: Plan, precision: Precision, note: str = "") -> Change | None:
    """Describes what is done to a module, with a note if there is one; None if nothing is."""
    if plan.kind in (None, Code) and (not plan.why or plan.why == _IN_RECIPE):
        if not isinstance(plan.module, tuple(_FAST_PATHS)):
            return None
        form = "runs as written, its kernels for inference are off"
    else:
        form = _form(plan, precision) + (f" ({note})" if note else "")
    return Change(plan.name, type(plan.module).__name__, form)


def _plan(name: str, module: nn.Module, model: nn.Module) -> Plan:
    if isinstance(module, Layer):
        return Plan(name, module, type(module))
    base = _torch_base(module)
    held = [n for n, p in module.named_parameters(recurse=False) if p.is_floating_point()]
    forward = getattr(type(module), "forward", None)
    ours = getattr(forward, "__module__", "") == _OWN_ISLANDS  # the class in front does the same
    own_forward = base is not None and forward is not base.forward and not ours
    if known_packages.is_replaced(module):
        # That of the model itself runs in the policy's mode (`with_forward`).
        why = "" if module is model else "left alone: its forward was replaced on this one module"
        return Plan(name, module, None, why=why)
    named = modules.NAMED.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if named is not None:
        return Plan(name, module, named)
    recipe = known_packages.recipe_of(module)
    if recipe:
        return Plan(name, module, Recipe, why=recipe)
    odd = "" if module is model else known_packages.odd_parameter(module)
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
        effect = "" if module is model else ", and what they meet is widened to their dtype"
        return Plan(name, module, None, why=f"left alone: {holds}{effect}")
    if forward is nn.Module.forward:
        return Plan(name, module, None, why=f"left alone: {holds}, and has no forward")
    if known_packages.is_experts(module):
        return Plan(name, module, Experts, why=holds)
    return Plan(name, module, Leaf, why=why or holds)


def _form(plan: Plan, precision: Precision) -> str:
    kind, fmt, emulated = plan.kind, precision.compute, " (emulated)" if precision.emulate else ""
    missed = f"; {precision.operand.format} is for matmuls" if is_narrow(precision.operand.format) else ""
    if kind is None:
        return plan.why
    if issubclass(kind, Recipe):
        return f"is {plan.why}: runs as written, its parameters whole, {fmt} out{emulated}"
    if plan.router:
        return "is a router: fp32 inside and out"
    if issubclass(kind, Code):
        return f"runs as written, it {plan.why}: its functions are reached"
    if issubclass(kind, Experts):
        product = f"multiplies in {fmt}{emulated}, weight gradients in {precision.grad_weight}"
        return f"is a leaf of experts, it {plan.why}: {product}{missed}"
    if issubclass(kind, Leaf):
        return f"is a leaf, it {plan.why}: runs as written in the dtype of its parameters, {fmt} out{emulated}"
    if issubclass(kind, MultiheadAttention):
        projects = f"projects in {precision.operand.format}{emulated}"
        return f"{projects}, {precision.softmax} scores and softmax, {fmt} out"
    if issubclass(kind, Matmul):
        return f"multiplies in {_operands(precision)}{emulated}, weight gradients in {precision.grad_weight}"
    if issubclass(kind, modules.Convolution | modules.Recurrent):
        rounding = "" if fmt == FP32 else f"; its weight gradients leave the kernel in {fmt} and are then widened"
        return f"computes in {fmt}{emulated}{rounding}{missed}"
    if issubclass(kind, modules.Embedding):
        return f"looks up its master and casts to {fmt}{emulated}, gradients in {precision.grad_weight}"
    if plan.role == "loss":
        return f"is an island: {precision.loss} inside and out{emulated}"
    if plan.role or issubclass(kind, Normalization):
        return f"is an island: {getattr(precision, plan.role or 'norm')} inside, {fmt} out{emulated}{missed}"
    return f"computes in {fmt}{emulated}"


def _operands(precision: Precision) -> str:
    """Returns the operands of a matmul, as a policy writes them, and those of the backward pass if they differ."""
    if not precision.narrow:
        return str(precision.operand.format)
    forward, backward = (print_value(replace(operand, measured=False)) for operand in precision.operands)
    forward += " (fast accumulation)" if precision.matmul.fast and is_narrow(precision.operand.format) else ""
    return forward if backward == forward else f"{forward} forward and {backward} backward"


def _torch_base(module: nn.Module) -> Any:
    return next((base for base in type(module).__mro__ if base in KINDS or base in ISLANDS), None)


def _clashes(module: nn.Module) -> bool:
    names = ("casts", "precision", "remainders")
    return any(name in module.__dict__ or hasattr(type(module), name) for name in names)


def widen_statistics(plans: Sequence[Plan]) -> list[str]:
    """Makes running statistics fp32; returns the names of those that were not."""
    widened = []
    for plan in plans:
        if plan.kind is not None and (issubclass(plan.kind, BatchNorm | InstanceNorm) or plan.role == "norm"):
            for name, buffer in plan.module.named_buffers(recurse=False):
                if buffer.dtype in (torch.bfloat16, torch.float16):
                    plan.module._buffers[name] = buffer.float()
                    widened.append(f"{plan.name}.{name}" if plan.name else name)
    return widened


def _check_parameter(name: str, parameter: Tensor, *, empty: bool) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise UnsupportedModelError(
            f"`{name}` has no shape yet", hint="run the model once, which lazy modules need, then prepare it"
        )
    if is_shard(parameter.data):
        raise ParallelError(
            f"`{name}` is a DTensor already, as of parallelize_module: tensor parallelism is not implemented",
            hint=f"shard by fully_shard alone; {known_packages.SHARD_ORDER}",
        )
    if parameter.is_meta and not empty:
        raise UnsupportedModelError(
            f"`{name}` is on the meta device and has no numbers",
            hint="load the weights first, then prepare; or prepare(model, policy), shard it, model.to_empty(...), "
            "load the weights, and run.attach(optimizers)",
        )
    if parameter.requires_grad and type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        raise UnsupportedModelError(
            f"`{name}` is trained, and its class {kind} rounds by its own rules",
            hint="freeze it with requires_grad_(False) and train adapters, or prepare the model before it is "
            "quantized",
        )
    if parameter.requires_grad and parameter.dtype == torch.float64:
        raise UnsupportedModelError(
            f"`{name}` is float64, and no policy has a format for that",
            hint="make it float32 with model.float(), or freeze it with requires_grad_(False)",
        )


@cache
def _try_recurrent(kind: Any, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the first line of the error that a small module of this kind raises; empty if it trains."""
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            cell = kind(2, 2, device=device, dtype=dtype)
            cell(torch.zeros(1, 1, 2, device=device, dtype=dtype))[0].sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""
