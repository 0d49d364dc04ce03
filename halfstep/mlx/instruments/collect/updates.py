"""Weights, moments and buffers of a model, and what happens to each update of a weight.

An optimizer of MLX is a Python function of arrays, so what it intended is that function in fp64, on the CPU: its
own formula with its own state, of any optimizer whose elements do not depend on each other. An update is lost if
the intended one is not zero, the step was not skipped, and the stored number is the one from before. For an
optimizer that mixes elements (Muon, Adafactor) every element with a nonzero gradient counts as intended.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as mlx_optimizers
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from halfstep.core.audit.record import Buffer, UpdateCounts, Weight, buffer_kind, weight_kind
from halfstep.core.audit.updates import Intended, count, count_unknown
from halfstep.core.observed import WEIGHT_COLUMNS
from halfstep.mlx.convert.places import arrays
from halfstep.mlx.instruments.collect.operations import format_name
from halfstep.mlx.numerics.dtypes import is_floating
from halfstep.mlx.optim.optimizers import Optimizer, state_at

ELEMENTWISE = (
    mlx_optimizers.SGD,
    mlx_optimizers.RMSprop,
    mlx_optimizers.Adagrad,
    mlx_optimizers.AdaDelta,
    mlx_optimizers.Adam,  # and AdamW, Adamax, which are Adams
    mlx_optimizers.Lion,
)
# Whose decay is apart from the gradient: w (1 - rate decay).
_DECOUPLED = (mlx_optimizers.AdamW, mlx_optimizers.Lion)
PART = 65_536  # elements of a tensor that stand for all


def cut(array: mx.array) -> mx.array:
    """Returns the part of an array that stands for it."""
    return array.reshape(-1)[:PART]


def describe_weights(model: Module, optimizers: Sequence[Optimizer]) -> tuple[list[Weight], list[Buffer]]:
    """Returns what a model holds, as its optimizers see it after their first step."""
    trained: dict[str, mx.array] = dict(tree_flatten(model.filter_and_map(Module.trainable_parameter_filter)))
    known: dict[str, mx.array] = dict(tree_flatten(model.filter_and_map(Module.valid_parameter_filter)))
    weights, buffers = [], []
    for name, place in arrays(model).items():
        array = place.array
        if not is_floating(array):
            continue
        kind = buffer_kind(name)
        if name not in known or (name not in trained and kind == "running"):
            buffers.append(Buffer(name, format_name(array.dtype), kind))
            continue
        owner = find_owner(optimizers, name) if name in trained else None
        state = {} if owner is None else state_at(owner.state, name)
        kept = {key: each for key, each in state.items() if isinstance(each, mx.array)}
        weights.append(
            Weight(
                name,
                format_name(array.dtype),
                trainable=name in trained,
                kind=weight_kind(name, array.shape, type(place.module).__name__),
                optimizer=None if owner is None else type(owner).__name__,
                moments={key: format_name(x.dtype) for key, x in kept.items() if x.shape == array.shape},
            )
        )
    return weights, buffers


def find_owner(optimizers: Sequence[Optimizer], name: str) -> Optimizer | None:
    """Returns the optimizer that owns a parameter."""
    return next((each for each in optimizers if state_at(each.state, name) is not None), None)


class Before(NamedTuple):
    """A part of a weight and of its moments, before a step."""

    weight: mx.array
    moments: dict[str, mx.array]
    optimizer: Optimizer | None


class Update(NamedTuple):
    """One step of a part of one weight."""

    before: mx.array
    after: mx.array
    gradient: mx.array  # of the loss: without scale and clip
    intended: mx.array | None  # in fp64, decay included; None if the optimizer mixes elements
    decay: mx.array | None  # the share of the weight that decay takes


def before_step(
    parts: Mapping[str, mx.array], cut: Callable[[mx.array], mx.array], optimizers: Sequence[Optimizer]
) -> dict[str, Before]:
    """Keeps parts of weights, and the same parts of their moments."""
    kept = {}
    for name, part in parts.items():
        owner = find_owner(optimizers, name)
        state = {} if owner is None else state_at(owner.state, name)
        moments = {key: cut(each) for key, each in state.items() if isinstance(each, mx.array)}
        kept[name] = Before(part, moments, owner)
    return kept


def after_step(before: Before, after: mx.array, gradient: mx.array, clip: mx.array | float = 1.0) -> Update:
    """Returns the step that the optimizers have just made; they saw the gradient times `clip`.

    Moments and weight are from before it; rate and count are those of the optimizer now.
    """
    start, moments, owner = before
    meant = decay = None
    if isinstance(owner, ELEMENTWISE):
        with mx.stream(mx.cpu):  # type: ignore[arg-type]
            state = {name: array.astype(mx.float64) for name, array in moments.items()}
            wide = start.astype(mx.float64)
            meant = owner.apply_single((gradient * clip).astype(mx.float64), wide, state) - wide
    if isinstance(owner, _DECOUPLED) and owner.weight_decay:
        decay = owner.learning_rate * owner.weight_decay
    return Update(start, after, gradient, meant, decay)


class UpdateNumbers:
    """The numbers of one update: of slices of the weights of each layer."""

    def __init__(self, parameters: Sequence[Sequence[str]], slice: int):
        self._parameters, self._slice = parameters, slice
        self._started: dict[str, Before] = {}
        self.updates: dict[str, Update] = {}
        self.finite = mx.array(True)

    def start(self, run: Any) -> None:
        """Keeps slices of weights, as fp32 numbers, and of moments, before the update."""
        parts = {n: run.masters.part(n, self._slice) for names in self._parameters for n in names}
        self._started = before_step(parts, self._cut, run.optimizers)

    def end(self, run: Any, total: Any, norm: mx.array, finite: mx.array) -> None:
        """Keeps them after it, with the gradients (update.step.Gradients) that the optimizers saw clipped."""
        unscale = mx.array(1.0) if total.finite is not None else 1.0 / (total.scale * total.weights)
        clip = mx.minimum(run.clip_norm / norm, 1.0) if run.clip_norm else mx.array(1.0)
        for name, before in self._started.items():
            gradient = self._cut(total.arrays[name]).astype(mx.float32) * unscale
            self.updates[name] = after_step(before, run.masters.part(name, self._slice), gradient, clip)
        self.finite, self._started = finite, {}
        mx.async_eval([each for update in self.updates.values() for each in update if each is not None], finite)

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns (layers, WEIGHT_COLUMNS); NaN where there is nothing to say."""
        return np.array([self._row(names) for names in self._parameters]).reshape(-1, len(WEIGHT_COLUMNS))

    def _row(self, names: Sequence[str]) -> list[float]:
        if not names or not self.updates:
            return [np.nan] * len(WEIGHT_COLUMNS)
        seen = [self.updates[name] for name in names]
        meant = np.concatenate([np.array(u.gradient if u.intended is None else u.intended) for u in seen]) != 0
        before, after, gradient = (
            np.concatenate([np.array(update[i], np.float64) for update in seen]) for i in range(3)
        )
        lost = np.count_nonzero(meant & (before == after))
        share = lost / meant.sum() if meant.any() and self.finite.item() else np.nan
        return [*(float(np.linalg.norm(each)) for each in (after, gradient, after - before)), share]

    def _cut(self, array: mx.array) -> mx.array:
        return array.reshape(-1)[: self._slice]


def count_update(update: Update, format: str) -> UpdateCounts:
    """Returns the counts of one step of one weight, stored in `format`."""
    before, after, gradient = (np.array(each.astype(mx.float32)).astype(np.float64) for each in update[:3])
    if update.intended is None:
        return count_unknown(before, after, gradient)
    meant, decay = np.array(update.intended), None
    if update.decay is not None:
        decay = -float(update.decay) * before
        meant = meant - decay
        meant[np.abs(meant) < 2.0**-50 * np.abs(before)] = 0  # what fp64 leaves of w (1 - rate decay) - w
    return count(before, after, Intended(meant, decay), format, gradient)
