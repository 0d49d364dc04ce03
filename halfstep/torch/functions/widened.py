"""What `.float()` of a layer's logits returns inside a model: fp32 to all code, and to cross-entropy the logits.

Most models widen their logits before the loss: 6.6 GB of GPT-2's for 32 x 1024 tokens, which the loss kernel
(torch/losses.py) does not need. So a `Widened` holds the narrow numbers until somebody computes with them: then it
is widened, and what comes out is an ordinary fp32 tensor. Views of it are `Widened`, its dtype is float32, and
`F.cross_entropy` reads the narrow numbers.

Writing to it in place makes it hold an fp32 copy, as `.float()` would have made, and the logits stay as they are.
Once there are views of it, writing is refused: the others would not see it.

**In code that is traced** it is an ordinary fp32 tensor, since dynamo cannot trace all methods of subclasses. The
narrow numbers are an attribute of it, which the function mode hands on from view to view (`follow`) and reads at
the loss (`narrowed`). If nothing else reads the fp32 numbers, the compiler drops them. Writing to one of the views
makes all of them forget. A mode does not see `.T`, `.mT` and `.data`: do not write to logits through those.

Logits also know the layer that made them (tracing.py). Their loss is traced twice, of rows and by the layer
(`either`), and what the model returns says which of the two is taken (`settled`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.errors import HalfstepError
from halfstep.torch.fp8.linear import kept_by_layer
from halfstep.torch.functions.entry import mapped, tensors_of
from halfstep.torch.losses import torch_loss, why_not
from halfstep.torch.tracing import NARROW_LOGITS, hand_on_kept, is_marked, note_rows, rows_of_layer

LARGE = 4096  # columns, as of a vocabulary: below, a copy costs little
_WIDE, _VIEWED = "halfstep_wide", "halfstep_viewed"
_INTACT, _BY_LAYER = "halfstep_intact", "halfstep_by_layer"


def _named(names: str) -> list[Any]:
    return [getattr(place, name) for name in names.split() for place in (torch, Tensor) if hasattr(place, name)]


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
                loss = torch_loss(logits, *args[1:], **kwargs, kept=kept_by_layer(logits))
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
            if func.__name__ in ("__get__", "__set__", "__delete__"):
                y = func(*args, **kwargs)
                return func(_wide(x), *args[1:], **kwargs) if isinstance(y, Tensor) else y
            return func(*_wide(args), **{key: _wide(value) for key, value in kwargs.items()})


def widen(logits: Tensor) -> Tensor:
    """Returns logits.float(), without a copy until somebody needs it."""
    if torch.compiler.is_compiling():
        return _tagged(logits.float(), logits, [True])
    return logits.as_subclass(Widened)


def is_for_loss(x: Tensor) -> bool:
    """Whether a tensor looks like logits, and the kernel of the loss could read it."""
    return x.dim() > 1 and x.shape[-1] >= LARGE and x.requires_grad and not why_not(x, x.dtype)


def wide_of(x: Tensor) -> Tensor:
    """Returns an fp32 tensor of a `Widened`, any other as it is."""
    if torch.compiler.is_compiling() and hasattr(x, NARROW_LOGITS):
        return x.view_as(x)  # without its attributes
    if not isinstance(x, Widened):
        return x
    with torch._C.DisableTorchFunction():
        return _wide(x)  # type: ignore[no-any-return]


# --- in code that is traced


def narrowed(args: Any) -> Any:
    """Returns the arguments of a loss with the narrow logits in place of those that were widened."""
    x = args[0] if args else None
    return (getattr(x, NARROW_LOGITS), *args[1:]) if _is_tagged(x) and getattr(x, _INTACT) else args


def follow(func: Any, args: Any, kwargs: Any, y: Any) -> Any:
    """Returns what a function of a noted tensor returned, with narrow numbers of its own if it is a view.

    Of a linear layer's result it returns a view with the same rows as one that knows the layer (tracing.py).
    """
    x = args[0]
    _follow_rows(func, x, y)
    if not _is_tagged(x):
        return y
    narrow, intact = getattr(x, NARROW_LOGITS), getattr(x, _INTACT)
    if func is _UNFLATTEN or func in _ENDS:
        intact.clear()  # a list that all views share
    elif func is Tensor.float or (func is Tensor.to and _changes_nothing(x, args, kwargs)):
        return _tagged(y, narrow, intact)
    elif func in VIEWS or func in MORE_VIEWS:
        view = func(narrow, *args[1:], **kwargs)
        _follow_rows(func, narrow, view)
        return _tagged(y, view, intact)
    return y


def either(loss: Any, by_layer: Any) -> Any:
    """Returns a loss that knows itself as computed by the layer that made the logits: `settled` takes one."""
    setattr(loss, _BY_LAYER, by_layer)
    return loss


def settled(y: Any) -> Any:
    """Returns what a traced model or block returns, with the loss by the layer, unless it returns its logits too.

    Those would be computed, and their gradient, beside the layer's. The compiler drops the other loss. No mark
    leaves: the next block would be compiled for an input that has one, the first for one that has none.
    """
    has_logits = any(t.dim() and t.requires_grad for t in tensors_of(y))

    def settle(t: Tensor) -> Tensor:
        if hasattr(t, _BY_LAYER) and not has_logits:
            return getattr(t, _BY_LAYER)  # type: ignore[no-any-return]
        return t.view_as(t) if hasattr(t, _BY_LAYER) or is_marked(t) else t  # a view has no attributes

    return mapped(settle, y)


def _follow_rows(func: Any, x: Tensor, y: Any) -> None:
    if func in VIEWS or func in MORE_VIEWS:
        hand_on_kept(y, x)
    origin = rows_of_layer(x)
    if origin is None:
        return
    if func is _UNFLATTEN or func in _ENDS:
        origin.unwritten.clear()
    elif func in SAME_ROWS and y.shape[-1:] == x.shape[-1:]:
        note_rows(y, origin)


def _is_tagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and hasattr(x, NARROW_LOGITS)


def _tagged(y: Any, narrow: Tensor, intact: list[bool]) -> Tensor:
    setattr(y, NARROW_LOGITS, narrow)
    setattr(y, _INTACT, intact)
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
        raise HalfstepError(
            "logits that the model widened with .float() are written to, and there are views of them",
            hint="write to them before they are reshaped, or out of place: logits = logits.masked_fill(...)",
        )
    wide = _wide(x)
    y = func(wide, *_wide(args[1:]), **{key: _wide(value) for key, value in kwargs.items()})
    setattr(x, _WIDE, wide)
    return x if y is wide else y


def _wide(given: Any) -> Any:
    if isinstance(given, Widened):
        return getattr(given, _WIDE) if hasattr(given, _WIDE) else given.float()
    return type(given)([_wide(part) for part in given]) if type(given) in (tuple, list) else given
