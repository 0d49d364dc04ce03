"""What a model returns beside its loss: tensors in compute, which are fp32 where somebody computes with them.

A model that computes its own loss returns logits too, which hardly anyone reads: in fp32 those of GPT-2, for 32 x
1024 tokens, are 6.6 GB. So they stay in the compute format, and say so (`logits.dtype`). Computing with
them, in a loss, a softmax or a sum, is in fp32, as if they had been widened at once. What only looks at them or
moves them (shape, a slice, a copy to the CPU, argmax) leaves them as they are.

Writing to one in place is as for any other tensor of its dtype.
"""

from typing import Any

import torch
from torch import Tensor

from halfstep.torch.dtypes import NARROW

_MOVES = (
    "view view_as reshape flatten unflatten unsqueeze squeeze transpose swapaxes movedim permute t narrow select "
    "expand expand_as chunk split unbind index_select gather __getitem__ contiguous clone detach cpu cuda to type "
    "float double half bfloat16 pin_memory"
)
_LOOKS = (
    "size dim ndimension numel nelement stride storage_offset element_size data_ptr untyped_storage is_contiguous "
    "is_floating_point is_complex is_pinned get_device argmax argmin isnan isinf isfinite __len__ backward "
    "register_hook retain_grad record_stream"
)
_WRITES = "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__"


def _kept() -> frozenset[Any]:
    places = [(place, name) for name in f"{_MOVES} {_LOOKS} {_WRITES}".split() for place in (torch, Tensor)]
    # torch.cpu and torch.cuda are modules, which dynamo of torch 2.11 does not look up in a set.
    functions = [getattr(place, name) for place, name in places if callable(getattr(place, name, None))]
    names = [name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")]
    return frozenset([*functions, *(getattr(Tensor, name) for name in names)])


# Functions that compute nothing, or write to a tensor that is given; and those that read or set an attribute.
KEPT, _ATTRIBUTE = _kept(), ("__get__", "__set__", "__delete__")


class Output(Tensor):
    """A tensor in compute that becomes fp32 where something is computed with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of such tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _ATTRIBUTE or func in KEPT:
                return _wrapped(func(*args, **kwargs))
            return func(*_widened(args), **{key: _widened(value) for key, value in kwargs.items()})


def keep_narrow(y: Tensor) -> Tensor:
    """Returns a bf16 or fp16 tensor with which everybody computes in fp32; any other as it is."""
    return y.as_subclass(Output) if y.dtype in NARROW and y.dim() else y


def _wrapped(y: Any) -> Any:
    if isinstance(y, Tensor):
        return y if isinstance(y, Output) or y.dtype not in NARROW else y.as_subclass(Output)
    return type(y)([_wrapped(part) for part in y]) if type(y) in (tuple, list) else y


def _widened(given: Any) -> Any:
    if isinstance(given, Output):
        return given.float()
    return type(given)([_widened(part) for part in given]) if type(given) in (tuple, list) else given
