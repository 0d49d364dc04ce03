"""The meta device as a stand-in for a GPU: code takes the branches that it takes there, kernels compute nothing.

A tensor on the meta device has a shape, a dtype and a storage without memory. Inside `stand_in`, it says that it
is on an NVIDIA GPU, halfstep's own kernels are launched as nothing, fused attention is chosen where a GPU has it,
and what a device supports is what the hardware of a machine file does.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.library import Library
from torch.optim import adadelta, adam, adamax, asgd, nadam, optimizer, radam, rmsprop, rprop

from halfstep.core.devices import Device
from halfstep.core.errors import PolicyError, UnsupportedRoleError
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.kernels import INSTEAD
from halfstep.torch.numerics.dtypes import ROWS_INTO_FP32, STANDS_FOR

_ATEN = torch.ops.aten
_CAPTURABLE = (adadelta, adam, adamax, asgd, nadam, radam, rmsprop, rprop)


@contextmanager
def stand_in(hardware: Device, launched: Callable[..., None], *, compiled: bool = False) -> Iterator[None]:
    """Inside, the meta device is this hardware; `compiled` if graphs are made of what runs there.

    `launched` is called instead of the launch of a kernel of halfstep's own.
    """
    gpu = hardware.kind in ("nvidia", "amd")
    with ExitStack() as stack:
        tables: list[tuple[dict[str, Any], Any]]
        tables = [(STANDS_FOR, hardware), (ROWS_INTO_FP32, True), (INSTEAD, launched)]
        for table, value in tables:
            table["meta"] = value
            stack.callback(table.pop, "meta")
        patches = Patches()
        stack.callback(patches.undo)
        # Of torch itself: what code asks a tensor about its device.
        patches.put(Tensor, "is_cuda", property(lambda t: gpu and t.device.type == "meta"))
        patches.put(Tensor, "is_meta", property(lambda t: False))
        patches.put(Tensor, "pin_memory", lambda t, *_: t)
        # Optimizers ask whether they have kernels for the device.
        for kind in ("fused", *(("foreach",) if gpu else ())):
            name = f"_get_{kind}_kernels_supported_devices"
            patches.put(optimizer, name, _with_meta(getattr(optimizer, name)))
        if gpu:
            for module in _CAPTURABLE:
                name = "_get_capturable_supported_devices"
                patches.put(module, name, _with_meta(getattr(module, name)))
        library = Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta", allow_override=True)
        if compiled:
            library.impl("nll_loss_nd", _negative_log_likelihood, "AutogradMeta", allow_override=True)
            library.impl("where.ScalarOther", lambda c, x, y: torch.where(c, x, _as_tensor(y, x)), "AutogradMeta")
            library.impl("where.ScalarSelf", lambda c, x, y: torch.where(c, _as_tensor(x, y), y), "AutogradMeta")
            patches.put(TensorVariable, "method_attr_is_cuda", lambda *_: ConstantVariable.create(gpu))
            patches.put(TensorVariable, "method_attr_is_meta", lambda *_: ConstantVariable.create(False))
        stack.callback(library._destroy)
        try:
            yield
        except PolicyError as error:
            named = error.message.replace(" on meta", f" on {hardware.name}")
            raise UnsupportedRoleError(named, hint=error.hint) from None


def _with_meta(supported: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *args, **kwargs: [*supported(*args, **kwargs), "meta"]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if q.dtype in (torch.bfloat16, torch.float16) and attn_mask is None and q.ndim == 4:
        fused = _ATEN._scaled_dot_product_flash_attention
        return fused(q, k, v, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if q.ndim == 4 and not enable_gqa:
        bias = attn_mask  # as numbers that are added, which torch makes of booleans
        if bias is not None:
            bias = torch.zeros_like(bias, dtype=q.dtype) if bias.dtype is torch.bool else bias
            bias = bias.expand(*q.shape[:3], bias.shape[-1])
        fused = _ATEN._scaled_dot_product_efficient_attention
        return fused(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    unfused = _ATEN._scaled_dot_product_attention_math
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return unfused(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]  # type: ignore[no-any-return]


def _negative_log_likelihood(
    x: Tensor, target: Tensor, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    """The negative log-likelihood: autograd of torch's own finds no gradient in a graph of the meta device.

    Its gradient is pointwise, as inductor makes it of the scatter in torch's own.
    """
    dim, here = min(1, x.ndim - 1), target != ignore_index
    classes = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    picked = -(x * (classes == target.unsqueeze(dim))).sum(dim) * here
    if reduction == 0:
        return picked
    return picked.sum() / here.sum() if reduction == 1 else picked.sum()


def _as_tensor(value: Any, beside: Tensor) -> Tensor:
    """A number as a tensor on the meta device: autograd finds no gradient beside one on the CPU."""
    return torch.full((), value, dtype=beside.dtype, device=beside.device)
