"""Which products of a loss function are worth narrow operands (`compute=e4m3:measured`, core.choice.layers).

Which modules multiply, what, and how, shows when the function is traced. So the first step interprets it once more
on shapes, as `step.reach` does, and times each product that a rule calls `measured` as it will run: rows by
matrix, forward and backward, compiled, on the device of the parameters. The state carries the answer, and another
answer compiles another step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from halfstep.config.model import owner as module_of
from halfstep.core.choice.layers import NO_LAYERS, Measured, Timer, measure_layers, not_measured
from halfstep.core.errors import PolicyError
from halfstep.core.ladder import Clock
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision
from halfstep.jax.apply import Applied, Leaves
from halfstep.jax.functions.interpret import Interpreter, cast_inside
from halfstep.jax.functions.lazy import Owner
from halfstep.jax.lowering import Casts
from halfstep.jax.measure import Product, time_product_once
from halfstep.jax.memory import ran_out

Products = dict[str, list[tuple[Product, Precision]]]
"""By module: what it multiplies, and in which narrow precision."""


def first_choice(policy: Policy) -> Measured | None:
    """Returns the measured layers of a new state: none, or if emulated all narrow; None if they must be timed."""
    if not policy.is_measured:
        return NO_LAYERS
    return not_measured() if policy.emulate else None


def measure_products(
    found: Products, *, timer: Timer[Product] = time_product_once, clock: Clock = time.perf_counter
) -> Measured:
    """Times the products of each module."""
    if jax.process_count() > 1:
        raise PolicyError(
            "`measured` layers are timed in each process, and two of them could choose differently",
            hint="omit `measured`, and name by rules the matmuls that one process finds to be faster",
        )
    return measure_layers(found, timer, ran_out, clock)


def find_products(
    loss_fn: Callable[..., Any],
    leaves: Leaves,
    applied: Applied,
    masters: Mapping[str, Any],
    rest: Sequence[Any],
    *,
    cast_batch: bool,
) -> Products:
    """Interprets a loss function on shapes, and returns its products that rules call `measured`."""
    finder = _Finder(applied, leaves.device)

    def run(masters: Mapping[str, Any], rest: Sequence[Any]) -> None:
        cast_inside(loss_fn, leaves, applied, masters, rest, cast_batch=cast_batch, interpreter=finder)

    jax.eval_shape(run, masters, rest)
    return finder.found


class _Finder(Interpreter):
    """An interpreter that keeps the shapes of what it multiplies. What a loop repeats is one product."""

    def __init__(self, applied: Applied, device: jax.Device):
        super().__init__(applied.policy)
        self.found: Products = {}
        self._halves, self._device = applied.halves, device

    def _multiply(
        self, rows: Array, matrix: Array, dims: Any, casts: Casts, weight_first: bool, owner: Owner
    ) -> Array:
        if casts.precision.narrow and casts.precision.measured:
            split = self._halves.issuperset(owner.names)
            work = Product(rows.shape, matrix.shape, dims, weight_first, split, self._device)
            for module in dict.fromkeys(map(module_of, owner.names)):
                self.found.setdefault(module, []).append((work, casts.precision))
        return super()._multiply(rows, matrix, dims, casts, weight_first, owner)
