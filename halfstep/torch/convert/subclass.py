"""Subclasses made at run time: one of our classes in front of a module's own, whose name and signature they keep.

**Pickling is refused**: unpickling would look the class up by its name and find the module's own. `copy` works.

**Calling the class** builds what the module's own class would: `model[:2]` of a `Sequential`, written by torch as
`self.__class__(layers)`, is a plain `Sequential` of layers that cast, and `type(model)(config)` is a new model.

**`model.dtype`**, which Hugging Face models take from their first parameter and write into their configuration, is
that of the master if the parameter is split: with bf16 in the configuration, loading would round the master.
"""

import copyreg
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from halfstep.core.errors import HalfstepError
from halfstep.torch.numerics.split.operand import is_split


class UnpicklableError(HalfstepError, TypeError):
    """A prepared module cannot be pickled; also a TypeError, like every failed pickle."""


class _ByReference:
    """A subclass as `copy` passes it on. A pickle would look for it by name, in vain."""

    def __init__(self, subclass: Any):
        self.subclass = subclass

    def __deepcopy__(self, _: Any) -> "_ByReference":
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise UnpicklableError(
            f"a {self.subclass.__name__} with a policy cannot be pickled, which torch.save(model) and spawning "
            "processes with it need",
            hint="save model.state_dict(), which has the masters in fp32, or run.state_dict(), which has all that "
            "training needs; run.unprepare() gives the model back, and copy.deepcopy copies it as it is",
        )


def _new_instance(reference: _ByReference) -> Any:
    return object.__new__(reference.subclass)


@cache
def put_in_front(kind: Any, original: Any) -> type:
    """Returns a class with `kind` in front of a module's own class, whose name and signature it keeps."""

    def reduce(self: Any, protocol: Any) -> Any:
        how, args, *state = original.__reduce_ex__(self, max(protocol, 2))
        if how is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new_instance, (_ByReference(type(self)),), *state
        return how, args, *state

    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy is made by `cls.__new__(cls)`; `type(module)(...)` builds a module that no policy was applied to.
        return original(*args, **kwargs) if args or kwargs else object.__new__(cls)

    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    own = {**names, "halfstep_subclass": True, "__reduce_ex__": reduce, "__new__": build}
    dtype = inspect.getattr_static(original, "dtype", None)
    if isinstance(dtype, property) and not hasattr(original, "halfstep_subclass"):
        own["dtype"] = _dtype_of_master(dtype)
    subclass = type(original.__name__, (kind, original), own)
    theirs = _signature(original.forward)
    if theirs is not None and _signature(kind.forward) != theirs:
        subclass.forward = _with_signature(kind.forward, original.forward)  # type: ignore[attr-defined]
    return subclass


def with_forward(module: Any) -> type:
    """Returns the class of a module whose forward was replaced on this one object, with that forward in it."""
    own, original = module.__dict__["forward"], type(module)
    # A method is bound to each copy again; any other callable, as in torch, is the same for all copies.
    forward = own.__func__ if getattr(own, "__self__", None) is module else staticmethod(own)
    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**names, "forward": forward})


def _dtype_of_master(theirs: property) -> property:
    read: Any = theirs.fget  # dynamo traces functions

    def dtype(self: Any) -> Any:
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        return torch.float32 if first is not None and is_split(first) else read(self)

    return property(dtype, theirs.fset, theirs.fdel, theirs.__doc__)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # such as a function that is not written in Python
        return None


def _with_signature(function: FunctionType, like: Callable[..., Any]) -> FunctionType:
    """Returns a copy of a function that shows another signature: some callers read it."""
    parts = (function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy = FunctionType(*parts, function.__closure__)
    copy.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    copy.__doc__ = like.__doc__
    return copy
