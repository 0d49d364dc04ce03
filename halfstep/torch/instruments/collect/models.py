"""The models behind optimizers, and the names of their parameters."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.torch.instruments.collect.tensors import local

# The one child of a wrapper: torch.compile, DDP, FSDP, Fabric.
WRAPPERS = (["_orig_mod"], ["module"], ["_fsdp_wrapped_module"], ["_forward_module"])


def models_of(params: Iterable[Tensor]) -> dict[str, nn.Module]:
    """Returns the modules that hold the parameters: for each model the outermost, without wrappers such as DDP.

    They are found among all objects of the process, because an optimizer knows tensors only, and a hook on every
    module would become a part of compiled code. One model is named "", several by their class.
    """
    missing = {id(p) for p in params}
    holders = []
    for each in _modules():
        if its := {id(p) for p in each.parameters()} & missing:
            holders.append((len(its), sum(1 for _ in each.modules()), its, each))
    chosen: list[nn.Module] = []
    for _, _, its, module in sorted(holders, key=lambda holder: holder[:2], reverse=True):
        if its & missing:
            chosen.append(_unwrap_module(module))
            missing -= its
    return _name_models(chosen)


def copied_model(params: Sequence[Tensor]) -> nn.Module | None:
    """Returns the model whose trainable weights are as many and of the same shapes: the optimizer steps a copy."""
    shapes, sharded = [p.shape for p in params], any(local(p) is not p for p in params)
    found = [  # while FSDP2 computes, its shards are in no module
        (hasattr(each, "set_requires_gradient_sync") == sharded, sum(1 for _ in each.modules()), each)
        for each in _modules()
        if [p.shape for p in each.parameters() if p.requires_grad] == shapes
    ]
    return _unwrap_module(max(found, key=lambda its: its[:2])[-1]) if found else None


def _modules() -> list[nn.Module]:
    """Returns all modules of the process, which may have millions of objects; isinstance would ask proxies."""
    kinds: set[type] = set()
    new: list[type] = [nn.Module]
    while new:
        if (kind := new.pop()) not in kinds:
            kinds.add(kind)
            new += kind.__subclasses__()
    return [each for each in gc.get_objects() if type(each) in kinds]


def _unwrap_module(module: nn.Module) -> nn.Module:
    while [name for name, _ in module.named_children()] in WRAPPERS:
        module = next(module.children())
    return module


def _name_models(models: list[nn.Module]) -> dict[str, nn.Module]:
    if len(models) == 1:
        return {"": models[0]}
    names: dict[str, nn.Module] = {}
    for module in models:
        name = type(module).__name__
        names[name if name not in names else f"{name}{len(names) + 1}"] = module
    return names


def names_of(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Returns the name of each parameter by its id."""
    return {id(p): full_name(model, n) for model, module in models.items() for n, p in module.named_parameters()}


def full_name(model: str, name: str) -> str:
    """Returns the name of a tensor of one of the models."""
    return f"{model}.{name}" if model else name


def unwrap(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside a wrapper, such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def version_of(optimizer: Optimizer) -> int:
    """Returns a number that grows when the weights of an optimizer change."""
    return params_of(optimizer)[0]._version
