"""Routers, experts, recipes and wrappers of other packages, by the names of their classes: none is imported.

Classes that are replaced by one of ours are in modules.py (`NAMED`).

routers     decide which expert of a mixture sees a token: fp32 inside and out. A router is a module whose class is
            called one, or a Linear named `gate` or `router` next to `experts`
experts     the matrices of all experts in one module, as Hugging Face has them since transformers 5
recipes     layers of torchao and Transformer Engine, which bring their own casts
wrappers    must come off before a model is prepared: they cast as well, or keep what they found
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep.core.errors import AlreadyPreparedError, AutocastError
from halfstep.core.formats import FP32
from halfstep.core.precision import Precision
from halfstep.core.roles import Operand

ORDER = "the order is prepare, then compile, then wrap: prepare(model, ...), torch.compile(model), DDP(model)"
SHARD_ORDER = (
    "the order is run = prepare(model, policy), then fully_shard (of each block, and of the model), then "
    "run.attach(optimizers)"
)
# Classes that hold a model and keep what they found in it: what they did, and how to get the model back.
WRAPPERS = {
    "OptimizedModule": ("compiled", ORDER),
    "DistributedDataParallel": ("wrapped by DDP", ORDER),
    "DataParallel": ("wrapped by DataParallel", ORDER),
    "FullyShardedDataParallel": ("wrapped by FSDP1, which flattens parameters,", f"use FSDP2: {SHARD_ORDER}"),
    "FSDPModule": (
        "wrapped by FSDP",
        f"{SHARD_ORDER}. In Accelerate, Trainer and Lightning import theirs from halfstep.integrations, which "
        "shard after the policy (docs/integrations.md)",
    ),
    "DeepSpeedEngine": ("wrapped by DeepSpeed", "prepare(engine.module, ...) takes the model itself"),
    "_FabricModule": (
        "set up by Fabric",
        "the Fabric of halfstep.integrations.lightning takes policy=; prepare(model.module, ...) takes the model "
        "itself (docs/migration.md)",
    ),
}
_OPTIMIZERS = {"AcceleratedOptimizer": "Accelerate", "_FabricOptimizer": "Fabric"}
_UNWRAP = (
    "prepare the model, and do not hand it to Accelerate (docs/migration.md); "
    "accelerator.unwrap_model(model, keep_fp32_wrapper=False) gives it back"
)
_ROUTER, _EXPERTS = re.compile(r"(Router|Gating|MoEGate)$"), re.compile(r"Experts$")
# Packages whose layers bring their own recipes, by the modules of their classes.
_RECIPES = {"torchao": "torchao", "transformer_engine": "Transformer Engine"}


def routers(model: nn.Module) -> set[str]:
    """Returns the names of routers, and of everything in them."""
    names: set[str] = set()
    for name, module in model.named_modules():
        if _ROUTER.search(type(module).__name__) or name.rpartition(".")[0] in names:
            names.add(name)
        children = dict(module.named_children())
        if "experts" in children:
            gates = [key for key in ("gate", "router") if isinstance(children.get(key), nn.Linear)]
            names |= {f"{name}.{key}" if name else key for key in gates}
    return names - {""}


def with_routers(ruled: Mapping[str, Precision], base: Precision, names: set[str]) -> dict[str, Precision]:
    """Returns the precisions of modules, with routers in fp32 whatever their input and use."""
    fp32: dict[str, Any] = dict.fromkeys(("compute", "grad", "norm", "softmax"), FP32)
    fp32 |= {"operand": Operand(FP32), "grad_operand": Operand(FP32)}
    return {**ruled, **{name: replace(ruled.get(name, base), **fp32) for name in names}}


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the matrices of all experts of a mixture itself."""
    named = _EXPERTS.search(type(module).__name__) is not None
    return named and any(p.dim() == 3 for p in module.parameters(recurse=False))


def recipe_of(module: nn.Module) -> str:
    """Returns whose layer a module is if it brings its own recipe, and which recipe; empty otherwise."""
    where = type(module).__module__
    package = next((name for start, name in _RECIPES.items() if f"{where}.".startswith(f"{start}.")), "")
    if not package:
        return ""
    meta = getattr(module, "fp8_meta", None)
    recipe = meta.get("recipe") if isinstance(meta, dict) else getattr(module, "config", None)
    unknown = "the recipe of its own context" if isinstance(meta, dict) else "a recipe of its own"
    return f"{package}'s, with {unknown if recipe is None else _describe(recipe)}"


def _describe(recipe: Any) -> str:
    """Describes a recipe in a line; torchao's own repr, of nested dataclasses, has 1500 characters."""
    casts = {key.removeprefix("cast_config_"): value for key, value in getattr(recipe, "__dict__", {}).items()}
    names = [name for name in ("input", "weight", "grad_output") if hasattr(casts.get(name), "target_dtype")]
    if len(names) < 3:
        return str(recipe)
    words = {name: _cast(casts[name]) for name in casts if hasattr(casts[name], "target_dtype")}
    others = [n for n in words if n not in names and words[n] != words[n.partition("_for_")[0]]]
    parts = [f"{name.replace('_for_', ' for ')} {words[name]}" for name in (*names, *others)]
    return ", ".join([*parts, *(["emulated"] if getattr(recipe, "emulate", False) else [])])


def _cast(config: Any) -> str:
    scaling = [str(getattr(config, key).value) for key in ("scaling_type", "scaling_granularity")]
    dtype = str(config.target_dtype).removeprefix("torch.float8_").removesuffix("fn")
    return "wide" if scaling[0] == "disabled" else " ".join([dtype, *scaling])


def odd_parameter(module: nn.Module) -> str:
    """Names a parameter whose tensor class has its own operations, such as a quantized one; empty if none."""
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter.data) is not torch.Tensor:
            return f"`{name}`, of the class {type(parameter.data).__name__}"
    return ""


def kept_wide(model: nn.Module) -> list[str]:
    """Lists modules that a Hugging Face model's authors keep in fp32, such as `wo` of T5, which overflows fp16."""
    parts = {part for module in model.modules() for part in getattr(module, "_keep_in_fp32_modules", None) or ()}
    return [n for n, m in model.named_modules() if n.rpartition(".")[2] in parts and [*m.parameters()]]


def refuse_wrapped(model: nn.Module) -> None:
    """Refuses a model, or a part of one, that is wrapped already."""
    for name, module in model.named_modules():
        which = f"`{name}`" if name else f"the model, a {type(module).__name__},"
        for base in type(module).__mro__:
            if base.__name__ in WRAPPERS:
                what, hint = WRAPPERS[base.__name__]
                raise AlreadyPreparedError(
                    f"{which} is {what} already, and keeps the modules as they were", hint=hint
                )
        if module._compiled_call_impl is not None:
            raise AlreadyPreparedError(
                f"{which} is compiled already, and keeps the modules as they were", hint=ORDER
            )
        if "_original_forward" in module.__dict__:
            raise AlreadyPreparedError(
                f"{which} was prepared by Accelerate already: it runs under torch.autocast", hint=_UNWRAP
            )
        if autocast_around(getattr(module, "forward", None)):
            raise AutocastError(
                f"the forward of {which.rstrip(',')} is decorated by torch.autocast, which would cast as well",
                hint="take the decorator off: the modules cast by themselves",
            )


def refuse_wrapped_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that another package steps."""
    for base in type(optimizer).__mro__:
        if base.__name__ in _OPTIMIZERS:
            whose = _OPTIMIZERS[base.__name__]
            raise AlreadyPreparedError(
                f"the optimizer was prepared by {whose} already, which decides when it steps",
                hint=f"pass the one that was given to {whose}, `optimizer.optimizer`, and hide it from {whose}",
            )


def is_replaced(module: nn.Module) -> bool:
    """Whether the forward of this one module object was replaced."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def autocast_around(forward: Callable[..., Any] | None) -> bool:
    """Whether a function is decorated by an enabled autocast."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if getattr(getattr(function, "__code__", None), "co_name", "") == "decorate_autocast":
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            if any(isinstance(value, torch.autocast) and value._enabled for value in cells):
                return True
        forward = getattr(forward, "__wrapped__", None)
    return False
