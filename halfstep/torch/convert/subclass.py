"""Classes that are made: one of ours in front of a module's own class, so that the module stays what it was.

A made class has the name, the signature and the documentation of the module's own. It is in no file, so

**a pickle is refused**, which would look the class up by its name and find the module's own. `copy` is not: it is
handed the class itself. And

**`model.dtype`**, which models of Hugging Face say by their first parameter and write into their configuration, is
that of the master where the parameter is a half (split.py). A state dict has the master in fp32; with bf16 in the
configuration, whoever loads it would round it.
"""

import copyreg
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from halfstep.core.errors import HalfstepError
from halfstep.torch.split import is_split


class UnpicklableError(HalfstepError, TypeError):
    """A module whose class was made here; a TypeError, as everything that has no pickle raises."""


class _Made:
    """A class that was made here, as `copy` hands it over. A pickle would look for it by its name, in vain."""

    def __init__(self, made: Any):
        self.made = made

    def __deepcopy__(self, _: Any) -> "_Made":
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise UnpicklableError(
            f"a {self.made.__name__} that has a policy has no pickle: torch.save(model) and processes that are "
            "spawned with it need one",
            hint="save model.state_dict(), which has the masters in fp32, or run.state_dict(), which has all that "
            "training needs; run.unprepare() gives the model back, and copy.deepcopy copies it as it is",
        )


def _remade(kind: _Made) -> Any:
    return kind.made.__new__(kind.made)


@cache
def mixed(kind: Any, original: Any) -> type:
    """A class with `kind` in front of a module's own class; it keeps the name and the signature of that."""

    def reduced(self: Any, protocol: Any) -> Any:
        how, args, *state = original.__reduce_ex__(self, max(protocol, 2))
        return (_remade, (_Made(type(self)),), *state) if how is copyreg.__newobj__ else (how, args, *state)  # type: ignore[attr-defined]

    told = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    own = {**told, "halfstep_made": True, "__reduce_ex__": reduced}
    dtype = inspect.getattr_static(original, "dtype", None)
    if isinstance(dtype, property) and not hasattr(original, "halfstep_made"):
        own["dtype"] = _dtype_of_master(dtype)
    made = type(original.__name__, (kind, original), own)
    theirs = _signature(original.forward)
    if theirs is not None and _signature(kind.forward) != theirs:
        made.forward = _with_signature(kind.forward, original.forward)  # type: ignore[attr-defined]
    return made


def _dtype_of_master(theirs: property) -> property:
    """A property `dtype` of a module that says fp32 where the first parameter is the half of an fp32 master."""

    def dtype(self: Any) -> Any:
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        return torch.float32 if first is not None and is_split(first) else theirs.__get__(self)

    return property(dtype, theirs.fset, theirs.fdel, theirs.__doc__)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """What a function says that it takes; None where it does not say."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # as functions that are not written in Python
        return None


def _with_signature(function: FunctionType, like: Callable[..., Any]) -> FunctionType:
    """The same function as another object, which says that it has another signature: some callers read it."""
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    made.__doc__ = like.__doc__
    return made
