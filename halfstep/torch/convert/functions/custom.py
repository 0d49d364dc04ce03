"""Third-party autograd functions (`torch.autograd.Function`) under a policy.

A function mode does not see `Function.apply`. It sees what a `forward` calls, but the `backward` runs later, when
no mode is on: there the product of a bf16 gradient and an fp32 parameter would fail. So a `forward` remembers the
mode that it ran in, and its `backward` runs in the same. dynamo traces both at once, in the mode.

`torch.amp.custom_fwd(cast_inputs=...)` casts under autocast only. In a mode its inputs are cast as it says, split
masters whole, and everything inside runs as written.

`reach_custom_functions` wraps the classes that exist when a model is prepared. Outside of a mode the wrapper does
nothing.
"""

from collections.abc import Callable
from functools import wraps
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from halfstep.torch.convert.functions.entry import Entry, join_if_split, map_tensors
from halfstep.torch.convert.functions.mode import WATCHERS, PolicyMode, current_mode, run_in_mode
from halfstep.torch.numerics.provenance import compiling

_OURS = ("torch", "halfstep")
_WRAPPED = "halfstep_wrapped"
_DECORATED = torch.amp.custom_fwd(lambda ctx: None, device_type="cpu").__code__


def _entry(description: str) -> Entry:
    return Entry(lambda *_: "", lambda *_: None, description)


CAST, AS_WRITTEN = _entry("inputs cast as custom_fwd says"), _entry("as written, the functions in it are reached")


def reach_custom_functions() -> None:
    """Wraps the forward and backward of every autograd function but torch's and ours, once."""
    kinds: list[type] = [Function]
    while kinds:
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        if kind.__module__.partition(".")[0] in _OURS or _WRAPPED in kind.__dict__:
            continue
        setattr(kind, _WRAPPED, True)
        for name, wrap in _WRAPPERS.items():
            if name in kind.__dict__:
                setattr(kind, name, staticmethod(wrap(kind, getattr(kind, name))))


def _forward(kind: Any, forward: Any) -> Callable[..., Any]:
    cast, has_context = _cast_of(forward), kind.setup_context is Function.setup_context

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = current_mode()
        if mode is None:
            return forward(*args, **kwargs)
        if WATCHERS:
            WATCHERS[-1](mode.scope, kind, args, kwargs, CAST if cast else AS_WRITTEN, "")
        if cast is not None:
            args, kwargs = map_tensors(cast, (args, kwargs))
            with torch._C.DisableTorchFunction():
                return forward(*args, **kwargs)
        if has_context:
            _remember(args[0], mode)
        return forward(*args, **kwargs)

    return run


def _setup_context(kind: Any, setup_context: Any) -> Callable[..., Any]:
    @wraps(setup_context)
    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        _remember(ctx, current_mode())
        return setup_context(ctx, *args, **kwargs)

    return run


def _backward(kind: Any, backward: Any) -> Callable[..., Any]:
    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        mode = None if compiling() else getattr(ctx, "halfstep_mode", None)
        return backward(ctx, *grads) if mode is None else run_in_mode(mode, backward, (ctx, *grads), {})

    return run


def _remember(ctx: Any, mode: PolicyMode | None) -> None:
    if not compiling():
        ctx.halfstep_mode = mode


def _cast_of(forward: Any) -> Callable[[Tensor], Tensor] | None:
    """Returns the cast that `custom_fwd(cast_inputs=...)` asks for: of inputs on one kind of device."""
    names = getclosurevars(forward).nonlocals if getattr(forward, "__code__", None) is _DECORATED else {}
    device, dtype = names.get("device_type"), names.get("cast_inputs")
    return dtype and (lambda t: join_if_split(t).to(dtype) if t.device.type == device else t)


_WRAPPERS = {"forward": _forward, "setup_context": _setup_context, "backward": _backward, "vjp": _backward}
