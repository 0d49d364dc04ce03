"""What happens to an update: what an optimizer intended for each weight, and what was stored.

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
from numpy.typing import NDArray

from halfstep.core.observed import WEIGHT_COLUMNS
from halfstep.mlx.optim.optimizers import Optimizer, state_at

ELEMENTWISE = (
    mlx_optimizers.SGD,
    mlx_optimizers.RMSprop,
    mlx_optimizers.Adagrad,
    mlx_optimizers.AdaDelta,
    mlx_optimizers.Adam,  # and AdamW, Adamax, which are Adams
    mlx_optimizers.Lion,
)


def owner_of(optimizers: Sequence[Optimizer], name: str) -> Optimizer | None:
    """Returns the optimizer that owns a parameter."""
    return next((each for each in optimizers if state_at(each.state, name) is not None), None)


def moments_of(optimizer: Optimizer, name: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """Returns what an optimizer keeps of a parameter, in the parameter's shape."""
    state = state_at(optimizer.state, name) or {}
    return {k: v for k, v in state.items() if isinstance(v, mx.array) and tuple(v.shape) == tuple(shape)}


def intended(
    optimizer: Optimizer, gradient: mx.array, before: mx.array, moments: Mapping[str, mx.array]
) -> mx.array | None:
    """Returns the update in fp64, by an optimizer that has just made it; None if its elements are not independent.

    `moments` and `before` are from before the step; rate and count are those of the optimizer now.
    """
    if not isinstance(optimizer, ELEMENTWISE):
        return None
    with mx.stream(mx.cpu):  # type: ignore[arg-type]
        wide = {name: array.astype(mx.float64) for name, array in moments.items()}
        start = before.astype(mx.float64)
        return optimizer.apply_single(gradient.astype(mx.float64), start, wide) - start


class _Parameter(NamedTuple):
    before: mx.array
    moments: dict[str, mx.array]
    optimizer: Optimizer | None


class UpdateNumbers:
    """The numbers of one update: of slices of the weights of each layer."""

    def __init__(self, parameters: Sequence[Sequence[str]], slice: int):
        self._parameters, self._slice = parameters, slice
        self._started: dict[str, _Parameter] = {}
        self._ended: dict[str, tuple[mx.array, ...]] = {}
        self._finite = mx.array(True)

    def start(self, weights: Callable[[str, int], mx.array], optimizers: Sequence[Optimizer]) -> None:
        """Keeps slices of weights, as fp32 numbers, and of moments, before the update."""
        for name in {name for names in self._parameters for name in names}:
            owner = owner_of(optimizers, name)
            state = {} if owner is None else state_at(owner.state, name)
            moments = {k: self._cut(v) for k, v in state.items() if isinstance(v, mx.array)}
            self._started[name] = _Parameter(weights(name, self._slice), moments, owner)

    def end(
        self,
        weights: Callable[[str, int], mx.array],
        gradients: Mapping[str, mx.array],
        unscale: mx.array,
        clip: mx.array,
        finite: mx.array,
    ) -> None:
        """Keeps them after it; `unscale` makes gradients those of the loss, `clip` those the optimizer saw."""
        for name, (before, moments, owner) in self._started.items():
            gradient = self._cut(gradients[name]).astype(mx.float32) * unscale
            meant = None if owner is None else intended(owner, gradient * clip, before, moments)
            self._ended[name] = (
                before,
                weights(name, self._slice),
                gradient,
                gradient if meant is None else meant,
            )
        self._finite = finite
        self._started = {}
        mx.async_eval(self._ended, finite)

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns (layers, WEIGHT_COLUMNS); NaN where there is nothing to say."""
        return np.array([self._row(names) for names in self._parameters]).reshape(-1, len(WEIGHT_COLUMNS))

    def _row(self, names: Sequence[str]) -> list[float]:
        if not names or not self._ended:
            return [np.nan] * len(WEIGHT_COLUMNS)
        parts = [[np.array(each, np.float64) for each in self._ended[name]] for name in names]
        before, after, gradient, meant = (np.concatenate(column) for column in zip(*parts, strict=True))
        num_meant = np.count_nonzero(meant)
        lost = np.count_nonzero((meant != 0) & (before == after))
        share = lost / num_meant if num_meant and self._finite.item() else np.nan
        return [*(float(np.linalg.norm(each)) for each in (after, gradient, after - before)), share]

    def _cut(self, array: mx.array) -> mx.array:
        return array.reshape(-1)[: self._slice]
