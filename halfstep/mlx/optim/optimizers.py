"""AdamW and Muon (config.groups) on MLX.

MLX's own AdamW has the same equations with `bias_correction=True`, which is not its default. It takes 1 - b^t in
fp32, where the difference cancels: for b = 0.999 and t = 1 it is off by 1.3e-5. Here it is -expm1(t log b). MLX's
own Muon takes matrices one by one, in the format of the gradient, and its decay passes through the
orthogonalization.

Both take fp32 gradients and fp32 parameters and return new ones; update/step.py does masters, moments in other
formats and skipped steps around any optimizer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten, tree_map_with_path

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.errors import OptimizerParametersError
from halfstep.core.formats import FP32, Format, parse
from halfstep.mlx.numerics.cast import carried
from halfstep.mlx.numerics.dtypes import dtype_of

Optimizer = mlx.optimizers.Optimizer
# A rate, or an MLX schedule: a function of the optimizer's own count of steps.
Rate = float | Callable[[mx.array], mx.array]


class AdamW(mlx.optimizers.AdamW):
    """AdamW with bias correction."""

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(learning_rate, list(betas), eps, weight_decay, bias_correction=True)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Returns one parameter after the update, and puts its new moments into `state`."""
        first, second = self.betas
        state["m"] = first * state["m"] + (1 - first) * gradient
        state["v"] = second * state["v"] + (1 - second) * mx.square(gradient)
        rate = self.learning_rate
        update = state["m"] / (mx.sqrt(state["v"]) * mx.rsqrt(_one_minus_power(second, self.step)) + self.eps)
        decayed = parameter * (1 - rate * self.weight_decay)
        return decayed - (rate / _one_minus_power(first, self.step)) * update


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices; those of one shape are updated in one batch.

    The Newton-Schulz steps run in `iteration`, by default the compute format of the policy that a run has.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iteration: Format | str | None = None,
        emulate: bool = False,
    ):
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.momentum, self.weight_decay = mx.array(momentum), weight_decay
        self.own = parse(iteration) if isinstance(iteration, str) else iteration
        self.iteration, self.emulate = self.own or FP32, emulate

    def bind(self, compute: Format, *, emulate: bool) -> None:
        """Sets the formats of a policy; the iteration runs in `compute` unless it was given its own format."""
        self.iteration, self.emulate = self.own or compute, emulate

    @property
    def momentum(self) -> mx.array:
        """The momentum: part of the state, like the rate, so that a new one compiles nothing again."""
        return self.state["momentum"]

    @momentum.setter
    def momentum(self, momentum: mx.array) -> None:
        self.state["momentum"] = momentum

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Initializes the state of a matrix."""
        if parameter.ndim != 2:
            raise OptimizerParametersError(
                f"Muon updates matrices, but one parameter has the shape {parameter.shape}",
                hint="give the others to AdamW: mlx.optimizers.MultiOptimizer([Muon(...), AdamW(...)], [filter])",
            )
        state["momentum"] = mx.zeros_like(parameter)

    def apply_gradients(self, gradients: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Returns the matrices after one update, as a tree like that of the gradients."""
        flat: dict[str, mx.array] = dict(tree_flatten(gradients))
        held: dict[str, mx.array] = dict(tree_flatten(parameters))
        # MLX's own method does the schedule and the count, and nothing more without leaves.
        self.init(gradients)
        super().apply_gradients({}, {})
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, gradient in flat.items():
            by_shape.setdefault(tuple(gradient.shape), []).append(name)
        updated: dict[str, mx.array] = {}
        for names in by_shape.values():
            new = self._update(names, mx.stack([flat[name] for name in names]), [held[name] for name in names])
            updated |= dict(zip(names, new, strict=True))
        return tree_map_with_path(lambda name, _: updated[name], gradients)

    def _update(self, names: list[str], gradients: mx.array, held: list[mx.array]) -> list[mx.array]:
        states = [state_at(self.state, name) for name in names]
        momentum = self.momentum * mx.stack([state["momentum"] for state in states]) + gradients
        update = orthogonalize(gradients + self.momentum * momentum, self.iteration, emulate=self.emulate)
        rows, columns = held[0].shape
        update = update.astype(mx.float32) * max(1.0, rows / columns) ** 0.5
        decay = 1 - self.learning_rate * self.weight_decay
        for index, state in enumerate(states):
            state["momentum"] = momentum[index]
        return [w * decay - self.learning_rate * update[index] for index, w in enumerate(held)]


def orthogonalize(matrices: mx.array, iteration: Format, *, emulate: bool = False) -> mx.array:
    """Pushes the singular values of each matrix of a batch to about one, by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ

    def cast(x: mx.array) -> mx.array:
        return carried(x, iteration) if emulate else x.astype(dtype_of(iteration))

    tall = matrices.shape[-2] > matrices.shape[-1]
    x = mx.swapaxes(matrices, -1, -2) if tall else matrices
    x = cast(x / (mx.linalg.norm(x, axis=[-2, -1], keepdims=True) + 1e-7))
    for _ in range(5):
        # A copy of X^T: MLX's fp32 matmul on a CPU is 1.6 times slower on a transposed second operand.
        product = cast(x @ mx.contiguous(mx.swapaxes(x, -1, -2)))
        x = cast(a * x + cast(b * product + c * cast(product @ product)) @ x)
    return mx.swapaxes(x, -1, -2) if tall else x


def leaf_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that hold state, of one or of many."""
    if isinstance(optimizer, mlx.optimizers.MultiOptimizer):
        return [leaf for each in optimizer.optimizers for leaf in leaf_optimizers(each)]
    return [optimizer]


def _one_minus_power(base: float, step: mx.array) -> mx.array:
    """Returns 1 - base^step in fp32, without cancellation."""
    return -mx.expm1(step.astype(mx.float32) * math.log(base)) if base else mx.array(1.0)


def state_at(tree: Any, name: str) -> Any:
    """Returns the subtree at a dotted name, None if there is none; segments of lists are numbers."""
    for segment in name.split("."):
        if isinstance(tree, list | tuple):
            tree = tree[int(segment)] if int(segment) < len(tree) else None
        else:
            tree = tree.get(segment) if isinstance(tree, dict) else None
    return tree
