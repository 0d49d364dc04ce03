"""Weights that FSDP2 gathers in the compute format, and whose gradients it reduces in fp32.

FSDP's own mixed precision casts a weight to bf16 before the layer sees it, so autograd makes its gradient bf16,
and a reduction in fp32 sums numbers that were rounded already. Here a shard is the fp32 master. What travels is
its cast; what a layer gets is a `Gathered`, which autograd takes for an fp32 tensor and a matmul for the narrow
numbers it holds. So the gradient is fp32 from the matmul's sum to the optimizer.

A layer saves the gathered numbers themselves for its backward pass. FSDP frees their memory after the forward
pass and fills it again before the backward pass: no unsharded weight outlives its layer.

FSDP asks a local shard for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. They are attributes of the plain
tensor here, so that checkpoints, optimizers and copies find no class of ours.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from halfstep.torch.layers import Layer

_ATEN = torch.ops.aten
# What gives the same numbers in another shape.
_VIEWS = {
    _ATEN.alias.default,
    _ATEN.as_strided.default,
    _ATEN.detach.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.view.default,
}


class Gathered(Tensor):
    """A weight in fp32 to autograd, whose numbers are in a narrower format."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Gathered":
        """Takes the numbers."""
        options: dict[str, Any] = {"strides": values.stride(), "dtype": torch.float32, "device": values.device}
        return Tensor._make_wrapper_subclass(cls, values.shape, **options)  # type: ignore[return-value]

    def __init__(self, values: Tensor):
        self.values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Views stay narrow, a cast to the format of the numbers takes them as they are, all else widens them."""
        kwargs = kwargs or {}
        if function in _VIEWS:
            return Gathered(function(args[0].values, *args[1:], **kwargs))
        if function is _ATEN._to_copy.default and kwargs.get("dtype") is args[0].values.dtype:
            return args[0].values
        return function(*pytree.tree_map(_widened, args), **pytree.tree_map(_widened, kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> "Gathered":
        return Gathered(inner["values"])

    def __repr__(self, **_: Any) -> str:
        return f"Gathered({tuple(self.shape)}, {self.values.dtype})"


def _widened(given: Any) -> Any:
    return given.values.float() if isinstance(given, Gathered) else given


def gather_in_compute(model: nn.Module) -> dict[str, torch.dtype]:
    """Makes FSDP gather weights in the format that their layers multiply in; returns that format by name."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    formats = {}
    for sharded in fsdp_parameters(model):
        info = sharded._module_info
        places = [(info.module, info.param_name)]
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
        compute = _compute(places) if sharded.sharded_param.ndim > 1 else None
        if compute is not None:
            _extend(sharded, compute)
            formats[names[sharded.sharded_param]] = compute
    return formats


def exchange(model: nn.Module) -> Callable[[bool], None]:
    """Returns a function that is told before each backward pass whether ranks exchange gradients in it."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def set_exchange(now: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(now, recurse=False)

    return set_exchange


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Yields what FSDP keeps of each parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one per module before torch 2.12
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _compute(places: Sequence[tuple[nn.Module, str]]) -> torch.dtype | None:
    """Returns the narrow format that all layers with a weight multiply it in, or None."""
    formats = set()
    for module, name in places:
        if not isinstance(module, Layer) or type(module).whole_because(module, name) or module.casts.emulate:
            return None
        formats.add(module.casts.compute)
    (one, *others) = formats
    return None if others or one.itemsize >= 4 else one


def _extend(sharded: Any, compute: torch.dtype) -> None:
    local = sharded._sharded_local_tensor
    padded = sharded._sharded_param_data.view(sharded.padded_sharded_param_size)
    local.fsdp_pre_all_gather = partial(_before, padded, compute)
    local.fsdp_post_all_gather = _after
    sharded._init_extensions()


def _before(
    padded: Tensor, compute: torch.dtype, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any
) -> tuple[tuple[Tensor], None]:
    return (padded.to(compute),), None


def _after(
    gathered: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Gathered, tuple[Tensor]] | None:
    return (Gathered(gathered[0]), gathered) if out is None else None  # later ones fill the same memory
