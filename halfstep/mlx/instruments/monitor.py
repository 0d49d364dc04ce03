"""What a monitor of a run knows: which layers there are, what their numbers have been, what a sample shows.

The numbers of a pass are computed at its end, in one go for all layers: slices are stacked, and compared with the
limits of each one's format (core.observed). Two arrays hold what the passes so far have counted.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from halfstep.core.observed import (
    AMAX,
    COLUMNS,
    ROLES,
    LayerInfo,
    LayerNumbers,
    Observation,
    Sample,
    first_rows,
    format_table,
    limits,
    name_numbers,
    samples,
)
from halfstep.core.precision import Precision
from halfstep.core.roles import is_narrow
from halfstep.mlx.convert.modules import Around, Embedding, LayerNorm, RMSNorm
from halfstep.mlx.convert.places import walk
from halfstep.mlx.convert.scope import set_inside
from halfstep.mlx.instruments.collect.updates import UpdateNumbers
from halfstep.mlx.layers import Layer, Matmul, Norm
from halfstep.mlx.model import Embedding as Table
from halfstep.mlx.numerics.cast import scale_for
from halfstep.mlx.numerics.dtypes import is_floating
from halfstep.mlx.numerics.matmul import with_gradient

# Sees what enters and what leaves each layer, forward and backward, without changing a bit of either.
#
# A watched layer has a class of its own, whose methods show the recorder what enters and send what leaves through
# an identity with a stated gradient, which shows it the gradient. MLX differentiates by calling Python: all of
# that happens while `mx.value_and_grad` runs, under `mx.compile` while it traces, and the arrays that were shown
# belong to the same graph. So they need no slots in the model, and a layer that is used twice is seen twice. A
# block that is computed again in the backward pass (`mx.checkpoint`) shows its activations once, because the
# recorder knows where the forward pass ends.

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


SAMPLE = 65_536  # elements of each tensor that a sample looks at, in whole rows
_ALL = 2**31 - 1  # the most rows that a slice can have
NEVER = 2**62  # updates between two copies, if the caller makes them
_COUNTS = [column for column in range(len(COLUMNS)) if column != AMAX]


@dataclass(frozen=True)
class Unread:
    """Numbers that the device is still computing."""

    amax: mx.array
    counts: mx.array

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns (layers, roles, columns); waits for the passes they are of."""
        numbers = np.zeros((*self.amax.shape, len(COLUMNS)))
        numbers[..., AMAX], numbers[..., _COUNTS] = np.array(self.amax), np.array(self.counts)
        return numbers.reshape(-1, len(ROLES), len(COLUMNS))


class Monitor:
    """Watches the layers of a prepared model. `Run.monitor` makes one."""

    def __init__(self, run: Any, every: int, slice: int):
        self.every, self.slice, self.masters = every, slice, run.masters
        self._run, self._updates = run, 0
        self._copy: tuple[Unread, UpdateNumbers] | None = None  # the last
        self._next: UpdateNumbers | None = None  # of the update that is made now, if a copy is due after it
        self.layers: list[LayerInfo] = []
        self.parameters: list[list[str]] = []  # of each layer, by name
        by_module: dict[int, list[str]] = {}
        for name, place in run.conversion.places.items():
            by_module.setdefault(id(place.module), []).append(name)
        for name, module in walk(run.model):
            if kind := layer_kind(module):
                self._watch(name or type(module).__name__, module, kind, by_module.get(id(module), []))
        self.counted = self._zeros()  # to be evaluated with each pass, so that no graph grows from step to step

    def layer_numbers(self) -> Unread:
        """Returns what the passes since the last call have counted, unread."""
        unread, self.counted = Unread(*self.counted), self._zeros()
        return unread

    def weight_numbers(self) -> UpdateNumbers:
        """Measures the next update; read the numbers after it."""
        numbers = UpdateNumbers(self.parameters, self.slice)
        self._run.watch_update(numbers)
        return numbers

    def numbers(self) -> list[LayerNumbers]:
        """Returns the numbers of the last copy, waiting for its update; empty before the first."""
        return [] if self._copy is None else name_numbers(self.layers, *(each.read() for each in self._copy))

    def __str__(self) -> str:
        return "\n".join(format_table(self.numbers())) or f"no numbers yet: they come every {self.every} updates"

    # --- what the run calls

    def recorder(self) -> Recorder:
        """Returns what sees a slice of each array of the next pass."""
        return Recorder(self.slice)

    def before_update(self) -> None:
        """Measures this update if a copy is due after it."""
        self._updates += 1
        self._next = self.weight_numbers() if self._updates % self.every == 0 else None

    def after_update(self) -> None:
        """Makes the copy that is due."""
        if self._next is not None:
            self._copy = self.layer_numbers(), self._next

    def merge(self, counted: tuple[mx.array, mx.array]) -> None:
        """Adds the numbers of a pass."""
        amax, counts = self.counted
        self.counted = mx.maximum(amax, counted[0]), counts + counted[1]

    def count(self, recorder: Recorder) -> tuple[mx.array, mx.array]:
        """Returns the numbers of a pass: amax of each layer and role, and their counts."""
        amax, counts = self._zeros()
        if not recorder.seen:
            return amax, counts
        flat = [seen.array.reshape(-1)[: self.slice].astype(mx.float32) for seen in recorder.seen]
        # Zeros fill up what is shorter: they count as nothing.
        x = mx.abs(mx.stack([mx.pad(each, (0, self.slice - each.size)) for each in flat]))
        formats = [self.layers[seen.layer].format(ROLES[seen.role]) for seen in recorder.seen]
        nonzero, largest = x != 0, mx.where(x < np.inf, x, 0.0).max(axis=1)
        for fmt in {fmt for fmt in formats if is_narrow(fmt)}:
            chosen = mx.array([each == fmt for each in formats])
            x = x * mx.where(chosen, scale_for(largest, fmt), 1.0)[:, None]
        over, under, small = (mx.array(column)[:, None] for column in zip(*map(limits, formats), strict=True))
        inside = [mx.logical_not(x < over), nonzero & (x <= under), (x > under) & (x < small)]
        sizes = mx.array([each.size for each in flat], mx.int32)
        rows = mx.stack([sizes, *(each.sum(axis=1).astype(mx.int32) for each in inside)], axis=1)
        index = mx.array([seen.layer * len(ROLES) + seen.role for seen in recorder.seen])
        return amax.at[index].maximum(largest), counts.at[index].add(rows)

    def arrays_of_pass(self, loss_fn: Any, batch: Any) -> list[tuple[str, str, mx.array]]:
        """Runs a batch again and returns what each layer sees, whole and in order: (layer, role, array)."""
        seen = self._replay(loss_fn, batch, _ALL)
        return [(self.layers[each.layer].name, ROLES[each.role], each.array) for each in seen]

    def sample(self, loss_fn: Any, batch: Any, share: float = 1 / 16) -> dict[str, dict[str, Sample]]:
        """Runs at most a `share` of a batch again, at least one row, and describes {layer: {role: what it saw}}.

        Rows are those of the first dimension of the arrays in the batch. Random state, gradients and running
        statistics are as before. Of each tensor, and of the weights, the first 65,536 elements are looked at.
        """
        leaves: Any = tree_flatten(batch)
        rows, _ = first_rows(batch, share, [leaf for _, leaf in leaves], tree_map)
        seen = self._replay(loss_fn, rows, SAMPLE)
        tensors = [(each.layer, ROLES[each.role], each.array) for each in seen]
        for layer, names in enumerate(self.parameters):
            for name in names[:1]:  # the weight: a bias is another matter
                array = self.masters.places[name].array
                width = array.shape[-1] if array.ndim else 1
                rows = max(1, min(array.size, SAMPLE) // width)
                tensors.append((layer, "weight", self.masters.part(name, rows * width).reshape(-1, width)))
        read = ((self.layers[layer], role, np.array(x.astype(mx.float32))) for layer, role, x in tensors)
        observed = ((info.name, role, Observation.of(x, info.format(role))) for info, role, x in read)
        return samples(self.layers, observed)

    def _replay(self, loss_fn: Any, batch: Any, size: int) -> list[Seen]:
        recorder = Recorder(size)
        self._run.replay(loss_fn, batch, recorder)
        mx.eval([seen.array for seen in recorder.seen])
        return recorder.seen

    def _watch(self, name: str, module: Any, kind: str, parameters: list[str]) -> None:
        precision, layer = layer_precision(module), len(self.layers)
        held = self.masters.held[parameters[0]].format if parameters else precision.compute
        self.layers.append(LayerInfo.of(name, kind, precision, held))
        self.parameters.append(parameters)
        is_head = isinstance(module, Embedding)
        if is_head:
            self.layers.append(LayerInfo.of(f"{name}.as_linear", "matmul", precision, held))
            self.parameters.append([])
        show(module, Numbers(layer, layer + 1 if is_head else None, kind == "embedding"))

    def _zeros(self) -> tuple[mx.array, mx.array]:
        rows = len(self.layers) * len(ROLES)
        return mx.zeros(rows), mx.zeros((rows, len(_COUNTS)), mx.int32)


def layer_kind(module: Module) -> str:
    """Returns what a layer is; empty for what is not watched: blocks, and what has neither weights nor a role."""
    if isinstance(module, Matmul):
        return "matmul"
    if isinstance(module, Norm | RMSNorm | LayerNorm):
        return "norm"
    if isinstance(module, Embedding | Table):
        return "embedding"
    if isinstance(module, Around) and not module.children():
        return {"": "other", "norm": "norm"}.get(module.halfstep_role, "")
    return ""


def layer_precision(module: Any) -> Precision:
    """Returns the formats of a layer that a policy was given to."""
    return (module.casts if isinstance(module, Layer) else module.halfstep.casts).precision  # type: ignore[no-any-return]
