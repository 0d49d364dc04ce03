"""Which modules of a model are watched: those with a matmul, norms, embeddings, and other leaves with weights."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from halfstep.core.formats import FP32
from halfstep.core.observed import LayerInfo
from halfstep.core.precision import Precision
from halfstep.torch.instruments.replay import casts_of
from halfstep.torch.layers import Matmul
from halfstep.torch.numerics.dtypes import DTYPES
from halfstep.torch.numerics.split.operand import is_split

_TORCH = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_MATMULS = (Matmul, *_TORCH)
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}


def watched_layers(model: nn.Module) -> dict[str, tuple[nn.Module, LayerInfo]]:
    """Returns the layers of a model by name; a module with several names counts once."""
    layers = dict(_layers(model, "", set())) or ({type(model).__name__: model} if _kind(model) else {})
    return {name: (module, _describe(name, module)) for name, module in layers.items()}


def spec_of_role(info: LayerInfo, role: str) -> str:
    """Returns the format of a role, and how it is scaled, as a spec of core.stats.what_if."""
    words = info.formats[role].split(":")
    return words[0] + (":row" if "row" in words else "")


def _layers(model: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if child in seen:
            continue
        seen.add(child)
        if isinstance(child, _MATMULS) or not any(True for _ in child.children()):
            if _kind(child):
                yield prefix + name, child
        else:
            yield from _layers(child, f"{prefix}{name}.", seen)


def _kind(module: nn.Module) -> str:
    """Returns the kind of a leaf module; empty if it has no weights."""
    if isinstance(module, _MATMULS):
        return "matmul"
    names = [base.__name__ for base in type(module).__mro__]
    if any("Embedding" in name for name in names):
        return "embedding"
    if any("Norm" in name for name in names):
        return "norm"
    return "other" if any(p.is_floating_point() for p in module.parameters()) else ""


def _describe(name: str, module: nn.Module) -> LayerInfo:
    precision = _precision(module)
    weight = next((p for p in module.parameters() if p.dim() > 1), next(module.parameters(), None))
    held = FP32 if weight is None or is_split(weight) else _FORMATS.get(weight.dtype, FP32)
    return LayerInfo.of(name, _kind(module), precision, held)


def _precision(module: nn.Module) -> Precision:
    casts = casts_of(module)
    if casts is not None:
        return cast(Precision, casts.precision)
    held = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return Precision.in_format(_FORMATS.get(held, FP32))
