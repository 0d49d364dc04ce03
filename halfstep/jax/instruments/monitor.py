"""The monitor of a step: sums what its results report, and looks closely at a part of a batch.

monitor = Monitor()
step = make_step(loss_fn, optimizer, monitor=monitor)
state, result = step(state, batch)          as without it, bit for bit
monitor.layer_numbers().read()              (layers, roles, columns) of core.observed, for monitor.layers
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from halfstep.config.model import owner
from halfstep.core.errors import ArgumentError
from halfstep.core.observed import COLUMNS, ROLES, SLICE, WEIGHT_COLUMNS, LayerInfo, Observation, Sample, samples
from halfstep.jax.instruments.gradient import Watched, layer_names, merge_rows

SAMPLE = 16_384  # elements of each tensor that a sample looks at, in whole rows


@dataclass
class Unread:
    """Numbers that the device is still computing, and what makes numbers of layers of them."""

    on_device: Any
    by_layer: Callable[[Any], NDArray[np.floating[Any]]]

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns the numbers; waits for the steps they are of."""
        return self.by_layer(jax.device_get(self.on_device))


class Monitor:
    """Watches the layers of one step: the first `slice` elements of what enters them, and of its gradient."""

    def __init__(self, slice: int = SLICE):
        if slice < 1:
            raise ArgumentError(
                f"slice={slice}: a monitor looks at one element at least", hint=f"{SLICE} is usual"
            )
        self.slice = slice
        self.watched: Watched | None = None
        self._sum: Array | None = None
        self._pending: Unread | None = None

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """The layers, in the order of the numbers; known once the step has been traced, by its first call."""
        return self.watched.layers if self.watched is not None else ()

    def add(self, layers: Array, updates: Mapping[str, Array]) -> None:
        """Takes in what one step reports, without waiting for it."""
        self._sum = layers if self._sum is None else _merge(self._sum, layers)
        if self._pending is not None:
            self._pending.on_device, self._pending = updates, None

    def layer_numbers(self) -> Unread:
        """Returns what the steps since the last call have counted, unread."""
        counted, self._sum = self._sum, None
        none = np.zeros((len(self.layers), len(ROLES), len(COLUMNS)))
        return Unread(none if counted is None else counted, partial(np.asarray, dtype=np.float64))

    def weight_numbers(self) -> Unread:
        """Returns norms of weights, gradients and updates, and the share lost, of the next step: read it after."""
        self._pending = Unread({}, self._weight_numbers)
        return self._pending

    def _weight_numbers(self, sums: Mapping[str, Array]) -> NDArray[np.floating[Any]]:
        """Returns (layers, WEIGHT_COLUMNS) of sums by parameter. A slice of one parameter has none of its own."""
        numbers = np.full((len(self.layers), len(WEIGHT_COLUMNS)), np.nan)
        for row, layer in zip(numbers, self.layers, strict=True):
            own = [np.asarray(each) for name, each in sums.items() if owner(name) == layer.name]
            if own:
                *squares, intended, lost = np.stack(own).sum(axis=0, dtype=np.float64).tolist()
                row[:] = *map(math.sqrt, squares), lost / intended if intended else math.nan
        return numbers

    def describe(
        self, reported: Sequence[Array], masters: Mapping[str, Array], size: int = SAMPLE
    ) -> dict[str, dict[str, Sample]]:
        """Returns {layer: {role: sample}} of whole tensors, which the slots of all sites report."""
        assert self.watched is not None
        observed: list[tuple[str, str, Observation]] = []
        indices, slots = iter(self.watched.index), iter(reported)
        for site in self.watched.sites:
            infos = [self.watched.layers[next(indices)] for _ in layer_names(site)]
            for role in ROLES:
                # Of a loop that gives the layer nothing of its own, the first turn.
                first = tuple(slice(None) if stacked else 0 for _, stacked in site.turns)
                x = jax.device_get(next(slots))[first]
                for info, rows in zip(infos, x.reshape(-1, *x.shape[-2:]), strict=True):
                    observed.append((info.name, role, Observation.of(rows, info.format(role))))
        for info, weight in zip(self.watched.layers, self.watched.weights, strict=True):
            if weight is not None and weight in masters:
                rows = _sample_rows(masters[weight], size)
                observed.append((info.name, "weight", Observation.of(rows, info.format("weight"))))
        return samples(self.watched.layers, observed)


def update_sums(
    old: Mapping[str, Array],
    new: Mapping[str, Array],
    intended: Mapping[str, Array],
    grads: Mapping[str, Array],
    factor: Array,
    finite: Array,
    size: int,
) -> dict[str, Array]:
    """Returns sums over a slice of each parameter; NaN for what a skipped step lost.

    The columns: squares of the weight, its gradient and its update, updates that are intended, and that were lost.
    """

    def part(x: Array) -> Array:
        return x.reshape(-1)[:size].astype(jnp.float32)

    rows = {}
    for name, before in old.items():
        start, end, moved = part(before), part(new[name]), part(intended[name]) != 0
        squares = (start, part(grads[name]) * factor, jnp.where(finite, end - start, 0.0))
        lost = jnp.where(finite, jnp.sum(moved & (end == start), dtype=jnp.float32), jnp.nan)
        sums = [jnp.sum(jnp.square(x)) for x in squares]
        rows[name] = jnp.stack([*sums, jnp.sum(moved, dtype=jnp.float32), lost])
    return rows


_merge = jax.jit(lambda one, other: merge_rows(jnp.stack([one, other])))


def _sample_rows(array: Array, size: int) -> NDArray[np.float32]:
    width = array.shape[-1] if array.ndim else 1
    rows = max(1, min(array.size, size) // width)
    return np.asarray(jax.device_get(array.reshape(-1, width)[:rows].astype(jnp.float32)))
