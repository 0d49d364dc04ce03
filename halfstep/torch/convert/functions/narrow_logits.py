"""Logits that stay narrow though they are used as fp32: inside a model (`Widened`), and as its output (`Output`).

**Inside a model**, `.float()` of a layer's logits is fp32 to all code, and to cross-entropy the logits.

Most models widen their logits before the loss: 6.6 GB of GPT-2's for 32 x 1024 tokens, which the loss kernel
(loss/plain.py) does not need. So a `Widened` holds the narrow numbers until something is computed with them: then
it is widened, and what comes out is an ordinary fp32 tensor. Views of it are `Widened`, its dtype is float32, and
`F.cross_entropy` reads the narrow numbers.

Writing to it in place makes it hold an fp32 copy, as `.float()` would have made, and the logits stay as they are.
Once there are views of it, writing is refused: the others would not see it.

In compiled code it is an ordinary fp32 tensor: a pass over the graph makes the loss read the narrow numbers, or
computes it with the layer that made them (fusion/loss.py).

**What a model returns beside its loss** (`Output`). A model that computes its own loss returns logits too, which
hardly anyone reads. They stay in the compute format, and say so (`logits.dtype`). Computing with them, in a loss,
a softmax or a sum, is in fp32, as if they had been widened at once. What only looks at them or moves them (shape,
a slice, a copy to the CPU, argmax) leaves them unchanged. Writing to one in place is as for any tensor of its
dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.errors import UnsupportedTransformError
from halfstep.core.torch_functions import named
from halfstep.torch.convert.functions.entry import map_tensors
from halfstep.torch.fp8.linear import layer_grad_bits
from halfstep.torch.loss.plain import torch_loss, why_no_kernel
from halfstep.torch.numerics.dtypes import NARROW

LARGE = 4096  # columns, as of a vocabulary: below, a copy costs little
_WIDE, _VIEWED = "halfstep_wide", "halfstep_viewed"


def _named(names: str) -> list[Any]:
    # torch.cpu and torch.cuda are modules, which dynamo of torch 2.11 does not look up in a set.
    return [function for function in named(names, torch, Tensor) if callable(function)]


VIEWS = frozenset(_named("view view_as reshape flatten unsqueeze squeeze contiguous __getitem__"))
LOOKS = frozenset(
    _named(
        "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex get_device __len__ "
        "element_size requires_grad_ register_hook retain_grad"
    )
)
_WRITES = frozenset(
    [
        *(getattr(Tensor, name) for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")),
        *_named("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__"),
    ]
)
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


class Widened(Tensor):
    """Narrow numbers that become fp32 where something is computed with them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of such tensors."""
        kwargs = kwargs or {}
        # Modes too, which are off here in eager code: while one is on, dynamo hands attributes to this again.
        with torch._C.DisableTorchFunction():
            x = args[0] if args else None
            narrow = isinstance(x, Widened) and not hasattr(x, _WIDE)
            if func == _DTYPE:
                return torch.float32
            if narrow and func is F.cross_entropy:
                # As they are: what the backward pass keeps must not be widened there.
                logits = args[0].as_subclass(Tensor)
                loss = torch_loss(logits, *args[1:], **kwargs, kept=layer_grad_bits(logits))
                if loss is not None:
                    return loss
            if narrow and func in VIEWS:
                return _view(func(*args, **kwargs), args[0])
            if narrow and (func is Tensor.float or (func is Tensor.to and _changes_nothing(x, args, kwargs))):
                return x
            if func in LOOKS:
                return func(*args, **kwargs)
            if func in _WRITES and isinstance(x, Widened):
                return _write(func, x, args, kwargs)
            if func.__name__ in _ATTRIBUTE:
                y = func(*args, **kwargs)
                return func(_wide(x), *args[1:], **kwargs) if isinstance(y, Tensor) else y
            args, kwargs = map_tensors(_wide, (args, kwargs))
            return func(*args, **kwargs)


def widen(logits: Tensor) -> Tensor:
    """Returns logits.float(), without a copy until one is needed."""
    return logits.float() if torch.compiler.is_compiling() else logits.as_subclass(Widened)


def is_for_loss(x: Tensor) -> bool:
    """Whether a tensor looks like logits, and the kernel of the loss could read it."""
    return x.dim() > 1 and x.shape[-1] >= LARGE and x.requires_grad and not why_no_kernel(x, x.dtype)


def to_fp32(x: Tensor) -> Tensor:
    """Returns an fp32 tensor of a `Widened`, any other as it is."""
    if not isinstance(x, Widened):
        return x
    with torch._C.DisableTorchFunction():
        return _wide(x)  # type: ignore[no-any-return]


# --- in eager code


def _changes_nothing(x: Any, args: Any, kwargs: Any) -> bool:
    """Whether .to() asks an fp32 tensor for what it is."""
    asked = [*args[1:], *kwargs.values()]
    return all(option is torch.float32 or option == x.device for option in asked if option is not False)


def _view(y: Tensor, x: Tensor) -> Tensor:
    y = y.as_subclass(Widened)
    setattr(x, _VIEWED, True)
    setattr(y, _VIEWED, True)
    return y


def _write(func: Any, x: Widened, args: Any, kwargs: Any) -> Any:
    if hasattr(x, _VIEWED):
        raise UnsupportedTransformError(
            "logits that the model widened with .float() are written to, and there are views of them",
            hint="write to them before they are reshaped, or out of place: logits = logits.masked_fill(...)",
        )
    wide = _wide(x)
    others, kwargs = map_tensors(_wide, (args[1:], kwargs))
    y = func(wide, *others, **kwargs)
    setattr(x, _WIDE, wide)
    return x if y is wide else y


def _wide(x: Any) -> Any:
    if not isinstance(x, Widened):
        return x
    return getattr(x, _WIDE) if hasattr(x, _WIDE) else x.float()


# --- what a model returns beside its loss

_OUTPUT_MOVES = (
    "view view_as reshape flatten unflatten unsqueeze squeeze transpose swapaxes movedim permute t narrow select "
    "expand expand_as chunk split unbind index_select gather __getitem__ contiguous clone detach cpu cuda to type "
    "float double half bfloat16 pin_memory"
)
_OUTPUT_LOOKS = (
    "size dim ndimension numel nelement stride storage_offset element_size data_ptr untyped_storage is_contiguous "
    "is_floating_point is_complex is_pinned get_device argmax argmin isnan isinf isfinite __len__ backward "
    "register_hook retain_grad record_stream"
)
# Functions that compute nothing, or write to a tensor that is given; and those that read or set an attribute.
KEPT = _WRITES.union(_named(f"{_OUTPUT_MOVES} {_OUTPUT_LOOKS}"))
_ATTRIBUTE = ("__get__", "__set__", "__delete__")


class Output(Tensor):
    """A tensor in compute that becomes fp32 where something is computed with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of such tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _ATTRIBUTE or func in KEPT:
                return map_tensors(_wrap, func(*args, **kwargs))
            args, kwargs = map_tensors(lambda x: x.float() if isinstance(x, Output) else x, (args, kwargs))
            return func(*args, **kwargs)


def keep_narrow(y: Tensor) -> Tensor:
    """Returns a bf16 or fp16 tensor with which all code computes in fp32; any other as it is."""
    return _wrap(y) if y.dim() else y


def _wrap(y: Tensor) -> Tensor:
    return y if isinstance(y, Output) or y.dtype not in NARROW else y.as_subclass(Output)
