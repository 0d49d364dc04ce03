"""Sees what enters and what leaves each layer, forward and backward, without changing a bit of either.

A watched layer has a class of its own, whose methods show the recorder what enters and send what leaves through
an identity with a stated gradient, which shows it the gradient. MLX differentiates by calling Python: all of that
happens while `mx.value_and_grad` runs, under `mx.compile` while it traces, and the arrays that were shown belong
to the same graph. So they need no slots in the model, and a layer that is used twice is seen twice. A block that
is computed again in the backward pass (`mx.checkpoint`) shows its activations once, because the recorder knows
where the forward pass ends.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from halfstep.mlx.convert.scope import set_inside
from halfstep.mlx.numerics.dtypes import is_floating
from halfstep.mlx.numerics.matmul import with_gradient

ACTIVATION, GRADIENT = range(2)  # of core.observed.ROLES


class Seen(NamedTuple):
    """One array that a layer saw."""

    layer: int
    role: int
    array: mx.array


@dataclass
class Recorder:
    """What the layers of one pass have shown."""

    size: int  # elements to keep of each array, in whole rows
    forward: bool = True  # until the loss function has returned
    seen: list[Seen] = field(default_factory=list)

    def watch(self) -> AbstractContextManager[None]:
        """Sees what watched layers see inside."""
        return set_inside(_RECORDER, self)

    def forward_ends(self) -> None:
        """Says that what is computed from now on belongs to the backward pass."""
        self.forward = False

    def add(self, layer: int, role: int, array: mx.array) -> None:
        """Keeps the first rows of an array."""
        if array.size:
            width = array.shape[-1] if array.ndim else 1
            rows = mx.stop_gradient(array).reshape(-1, width)[: math.ceil(self.size / width)]
            self.seen.append(Seen(layer, role, rows))


@dataclass(frozen=True)
class Numbers:
    """Which layers of the monitor a module is: by itself, and as a tied head."""

    layer: int
    head: int | None = None
    embeds: bool = False  # what enters is an index, so what leaves is shown

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        """A copy of a model is not watched."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("halfstep_recorder", default=None)


def show(module: Module, numbers: Numbers) -> None:
    """Gives a module the class that shows what it sees; `apply.restore` gives back its own."""
    module.__class__ = _showing(type(module))
    module.halfstep_watched = numbers


@cache
def _showing(own: type) -> type:
    methods = {name: _shown(getattr(own, name), name) for name in _METHODS if hasattr(own, name)}
    return type(own.__name__, (own,), {"__module__": own.__module__, "__doc__": own.__doc__, **methods})


# The ways to call a layer: all are shown.
_METHODS = ("__call__", "rows", "as_linear")


def _shown(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, numbers = _RECORDER.get(), self.halfstep_watched
        y = method(self, *args, **kwargs)
        if recorder is None or numbers is None or not isinstance(y, mx.array):
            return y
        is_head = name == "as_linear"
        layer = numbers.head if is_head else numbers.layer
        entered = y if numbers.embeds and not is_head else next(filter(is_floating, args), None)
        if recorder.forward and entered is not None:
            recorder.add(layer, ACTIVATION, entered)
        return _noting_gradient(layer)(y)

    return call


@cache
def _noting_gradient(layer: int) -> Any:
    def backward(_: mx.array, g: mx.array, __: mx.array) -> mx.array:
        if (recorder := _RECORDER.get()) is not None:
            recorder.add(layer, GRADIENT, g)
        return g

    return with_gradient(lambda y: y, backward)
