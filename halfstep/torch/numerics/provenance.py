"""Whether the code that runs now is being compiled, or transformed by torch.func.

`torch.compiler.is_compiling()` is true where dynamo interprets the code. What dynamo puts into its graph
unopened (fp8/linear.py) runs later, when autograd traces that graph, and there torch 2.11 returns False and 2.13
True. So the caller, which dynamo interprets, passes the answer on, and it holds for everything called inside.

**Where a traced tensor comes from.** Two linear layers with a GELU between them are fused (matmul.py), which the
second finds out: in code that dynamo interprets, the result of a linear layer carries what it was made of, and its
GELU hands that on. Both layers are then computed where the second is called, from the input of the first, to which
nothing may have been written since. That is known of tensors that are new (`mark_new`: results of norms and of
layers) and that no function of the model's own code was given (`mark_read`), not even to read: the first layer
would be computed twice. Views share the mark. A square finds the relu before it in the same way.

In the same way the cross-entropy of a layer's logits finds the layer (plain.py), through views that keep the
rows, if nothing was written to them; and through any view, how many bits the layer keeps of their gradient.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

_UNTOUCHED, _ORIGIN = "halfstep_untouched", "halfstep_origin"
_RELU_OF, _KEPT = "halfstep_relu_of", "halfstep_kept"
# Of logits that were widened: the narrow ones, and a list that is empty once one was written to or has a hook
# (functions/narrow_logits.py).
NARROW_LOGITS = "halfstep_narrow"


class _Local(threading.local):
    traced = False


_local = _Local()


def compiling() -> bool:
    """Whether this call becomes a part of compiled code."""
    return torch.compiler.is_compiling() or _local.traced


def transforming() -> bool:
    """Whether torch.func (vmap, grad, jvp, ...) or forward-mode differentiation transforms this call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def recording() -> bool:
    """Whether the backward pass that runs now is recorded, to be differentiated again: `create_graph=True`."""
    return torch.is_grad_enabled() and not compiling()


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Makes `compiling` return True inside, if `on`."""
    before, _local.traced = _local.traced, on
    try:
        yield
    finally:
        _local.traced = before


class Origin(NamedTuple):
    """What the result of a linear layer was made of."""

    x: Tensor
    weight: tuple[Any, ...]  # values, owner, and of the bias the same
    casts: Any
    untouched: list[list[bool]]  # of x, of the result, and of its GELU; each is empty once a function was given it
    unwritten: list[bool]  # of the result and its views; empty once one was written to or has a hook
    history: Any = None  # of delayed operands
    loss_casts: Any = None  # of its cross-entropy, if they differ
    activated: bool = False  # by GELU
    reshaped: bool = False  # the tensor is a view of the result, with its rows
    lean: bool = False


def mark_new(y: Tensor) -> Tensor:
    """Marks a new tensor, in code that is traced: nothing else shares its memory."""
    setattr(y, _UNTOUCHED, [True])
    return y


def is_marked(y: Tensor) -> bool:
    """Whether a tensor is known to be new, or a view of a new one."""
    return hasattr(y, _UNTOUCHED)


def has_provenance(x: Tensor) -> bool:
    """Whether anything is known of a tensor."""
    return hasattr(x, _UNTOUCHED) or hasattr(x, NARROW_LOGITS)


def mark_read(given: Any) -> None:
    """Notes that a function of the model's own code was given these arguments."""
    for x in given:
        if isinstance(x, Tensor) and hasattr(x, _UNTOUCHED):
            getattr(x, _UNTOUCHED).clear()


def mark_view(y: Tensor, x: Tensor) -> Tensor:
    """Marks a view of a tensor that is marked: what is done to one is done to both."""
    if hasattr(x, _UNTOUCHED):
        setattr(y, _UNTOUCHED, getattr(x, _UNTOUCHED))
    return y


def note_linear(
    y: Tensor, x: Tensor, weight: tuple[Any, ...], casts: Any, history: Any = None, loss_casts: Any = None
) -> Tensor:
    """Returns the result of a linear layer with its origin, if its input is known not to change."""
    if hasattr(x, _UNTOUCHED):
        mark_new(y)
        untouched = [getattr(x, _UNTOUCHED), getattr(y, _UNTOUCHED)]
        setattr(y, _ORIGIN, Origin(x, weight, casts, untouched, [True], history, loss_casts))
    return y


def note_gelu(y: Tensor, h: Tensor, lean: bool) -> Tensor:
    """Returns the GELU of a tensor with the origin of that tensor."""
    origin = getattr(h, _ORIGIN) if hasattr(h, _ORIGIN) else None
    if origin is not None and not origin.reshaped:
        mark_new(y)
        untouched = [*origin.untouched, getattr(y, _UNTOUCHED)]
        setattr(y, _ORIGIN, origin._replace(untouched=untouched, activated=True, lean=lean))
    return y


def gelu_of(x: Tensor) -> Origin | None:
    """Returns the origin of a tensor that is the GELU of a linear layer's result, if nothing was touched."""
    origin = getattr(x, _ORIGIN) if hasattr(x, _ORIGIN) else None
    return origin if origin is not None and origin.activated and all(origin.untouched) else None


def note_relu(y: Tensor, x: Tensor) -> Tensor:
    """Returns the relu of a tensor that is marked, with that tensor."""
    mark_new(y)
    setattr(y, _RELU_OF, (x, [getattr(x, _UNTOUCHED), getattr(y, _UNTOUCHED)]))
    return y


def relu_of(y: Tensor) -> Tensor | None:
    """Returns what a tensor is the relu of, if neither was touched."""
    x, untouched = getattr(y, _RELU_OF) if hasattr(y, _RELU_OF) else (None, ())
    return x if x is not None and all(untouched) else None


def note_grad_bits(y: Tensor, bits: int) -> Tensor:
    """Marks the result of a layer with the bits of mantissa that it keeps of its gradient; 0 for all."""
    if bits:
        mark_new(y)
        setattr(y, _KEPT, bits)
    return y


def grad_bits(y: Tensor) -> int:
    """Returns how many bits of mantissa are kept of a tensor's gradient; 0 for all."""
    return getattr(y, _KEPT) if hasattr(y, _KEPT) else 0  # type: ignore[no-any-return]


def copy_grad_bits(y: Tensor, x: Tensor) -> None:
    """Notes of a view what is noted of the tensor."""
    if hasattr(x, _KEPT):
        setattr(y, _KEPT, getattr(x, _KEPT))


def rows_of_layer(y: Tensor) -> Origin | None:
    """Returns the origin of rows that a linear layer made, if neither they nor its input have changed."""
    origin = getattr(y, _ORIGIN) if hasattr(y, _ORIGIN) else None
    same = origin is not None and not origin.activated and origin.untouched[0] and origin.unwritten
    return origin if same else None


def note_rows(y: Tensor, origin: Origin) -> Tensor:
    """Returns a view of a linear layer's result that has the same rows, with their origin."""
    if not hasattr(y, _ORIGIN):  # of a tensor that is contiguous, `contiguous` returns the tensor itself
        setattr(y, _ORIGIN, origin._replace(reshaped=True))
    return y
