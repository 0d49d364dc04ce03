"""Logits that stay narrow though they are used as fp32: inside a model (`Widened`), and as its output (`Output`).

**Inside a model**, `.float()` of a layer's logits is fp32 to all code, and to cross-entropy the logits.

Most models widen their logits before the loss: 6.6 GB of GPT-2's for 32 x 1024 tokens, which the loss kernel
(loss/plain.py) does not need. So a `Widened` holds the narrow numbers until something is computed with them: then
it is widened, and what comes out is an ordinary fp32 tensor. Views of it are `Widened`, its dtype is float32, and
`F.cross_entropy` reads the narrow numbers.

Writing to it in place makes it hold an fp32 copy, as `.float()` would have made, and the logits stay as they are.
Once there are views of it, writing is refused: the others would not see it.

**In code that is traced** it is an ordinary fp32 tensor, since dynamo cannot trace all methods of subclasses. The
narrow numbers are an attribute of it, which the function mode passes from view to view (`hand_on_logits`) and
reads at the loss (`with_narrow_logits`). If nothing else reads the fp32 numbers, the compiler drops them. Writing
to one of the views makes all of them forget. A mode does not see `.T`, `.mT` and `.data`: do not write to logits
through those.

Logits also know the layer that made them (provenance.py). Their loss is traced twice, of rows and by the layer
(`with_layer_loss`), and what the model returns says which of the two is taken (`choose_losses`).

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
from halfstep.torch.convert.functions.entry import map_tensors, tensors_of
from halfstep.torch.fp8.linear import layer_grad_bits
from halfstep.torch.loss.plain import torch_loss, why_no_kernel
from halfstep.torch.numerics.dtypes import NARROW
from halfstep.torch.numerics.provenance import NARROW_LOGITS, copy_grad_bits, is_marked, note_rows, rows_of_layer

LARGE = 4096  # columns, as of a vocabulary: below, a copy costs little
_WIDE, _VIEWED = "halfstep_wide", "halfstep_viewed"
_BY_LAYER = "halfstep_by_layer"


def _named(names: str) -> list[Any]:
    # torch.cpu and torch.cuda are modules, which dynamo of torch 2.11 does not look up in a set.
    return [function for function in named(names, torch, Tensor) if callable(function)]


SAME_ROWS = frozenset(_named("view view_as reshape flatten unsqueeze squeeze contiguous"))
VIEWS = SAME_ROWS | frozenset(_named("__getitem__"))
MORE_VIEWS = frozenset(
    _named("transpose swapaxes swapdims movedim moveaxis permute t narrow select expand expand_as detach")
)
# Several views, which dynamo sets no attributes of. To those of split, chunk and unbind torch refuses writes.
_PARTS = frozenset(_named("tensor_split hsplit vsplit dsplit"))
_UNFLATTEN = Tensor.unflatten  # Python code, which dynamo of torch 2.13 does not find in a set
# What sees a gradient that a loss of the narrow numbers, or of the layer, would not give to this tensor.
_HOOKS = frozenset(_named("register_hook retain_grad"))
LOOKS = _HOOKS | frozenset(
    _named(
        "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex get_device __len__ "
        "element_size requires_grad_"
    )
)
_WRITES = frozenset(
    [
        *(getattr(Tensor, name) for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")),
        *_named("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__"),
    ]
)
_ENDS = _WRITES | _PARTS | _HOOKS  # after which the narrow numbers, or the layer, do not make the loss
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
    if torch.compiler.is_compiling():
        return _tag(logits.float(), logits, [True])
    return logits.as_subclass(Widened)


def is_for_loss(x: Tensor) -> bool:
    """Whether a tensor looks like logits, and the kernel of the loss could read it."""
    return x.dim() > 1 and x.shape[-1] >= LARGE and x.requires_grad and not why_no_kernel(x, x.dtype)


def to_fp32(x: Tensor) -> Tensor:
    """Returns an fp32 tensor of a `Widened`, any other as it is."""
    if torch.compiler.is_compiling() and hasattr(x, NARROW_LOGITS):
        return x.view_as(x)  # without its attributes
    if not isinstance(x, Widened):
        return x
    with torch._C.DisableTorchFunction():
        return _wide(x)  # type: ignore[no-any-return]


# --- in code that is traced


def with_narrow_logits(args: Any) -> Any:
    """Returns the arguments of a loss with the narrow logits instead of the widened ones."""
    x = args[0] if args else None
    narrow, intact = getattr(x, NARROW_LOGITS) if _is_tagged(x) else (x, False)
    return (narrow, *args[1:]) if intact else args


def hand_on_logits(func: Any, args: Any, kwargs: Any, y: Any) -> Any:
    """Returns what a function of a noted tensor returned, with narrow numbers of its own if it is a view.

    Of a linear layer's result it returns a view with the same rows as one that knows the layer (provenance.py).
    """
    x = args[0]
    _follow_rows(func, x, y)
    if not _is_tagged(x):
        return y
    narrow, intact = getattr(x, NARROW_LOGITS)
    if func is _UNFLATTEN or func in _ENDS:
        intact.clear()  # a list that all views share
    elif func is Tensor.float or (func is Tensor.to and _changes_nothing(x, args, kwargs)):
        return _tag(y, narrow, intact)
    elif func in VIEWS or func in MORE_VIEWS:
        view = func(narrow, *args[1:], **kwargs)
        _follow_rows(func, narrow, view)
        return _tag(y, view, intact)
    return y


def with_layer_loss(loss: Any, by_layer: Any) -> Any:
    """Attaches to a loss the same loss computed by the layer that made the logits; `choose_losses` takes one."""
    setattr(loss, _BY_LAYER, by_layer)
    return loss


def choose_losses(y: Any) -> Any:
    """Returns what a traced model or block returns, with the loss by the layer, unless it returns its logits too.

    Those would be computed, and their gradient, beside the layer's. The compiler drops the other loss. No mark
    leaves: the next block would be compiled for an input that has one, the first for one that has none.
    """
    has_logits = any(t.dim() and t.requires_grad for t in tensors_of(y))

    def settle(t: Tensor) -> Tensor:
        if hasattr(t, _BY_LAYER) and not has_logits:
            return getattr(t, _BY_LAYER)  # type: ignore[no-any-return]
        return t.view_as(t) if hasattr(t, _BY_LAYER) or is_marked(t) else t  # a view has no attributes

    return map_tensors(settle, y)


def _follow_rows(func: Any, x: Tensor, y: Any) -> None:
    if func in VIEWS or func in MORE_VIEWS:
        copy_grad_bits(y, x)
    origin = rows_of_layer(x)
    if origin is None:
        return
    if func is _UNFLATTEN or func in _ENDS:
        origin.unwritten.clear()
    elif func in SAME_ROWS and y.shape[-1:] == x.shape[-1:]:
        note_rows(y, origin)


def _is_tagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and hasattr(x, NARROW_LOGITS)


def _tag(y: Any, narrow: Tensor, intact: list[bool]) -> Tensor:
    setattr(y, NARROW_LOGITS, (narrow, intact))
    return y


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
