"""Which products of a loss function are worth narrow operands (`compute=e4m3:measured`, core.choice.layers).

Which modules multiply, what, and how, shows when the function is traced. So the first step interprets it once more
on shapes, as `step.coverage` does, and times each product that a rule calls `measured` as it will run: rows by
matrix, forward and backward, compiled, on the device of the parameters. The state carries the answer, and another
answer compiles another step.
"""

import time
from typing import Any

import jax
from jax import Array

from halfstep.config.model import owner as module_of
from halfstep.core.arrays.ladder import Clock
from halfstep.core.choice.layers import NO_LAYERS, Measured, Timer, measure_layers, not_measured
from halfstep.core.errors import AutoPolicyError
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision
from halfstep.jax.convert.apply import Applied
from halfstep.jax.convert.interpret import Interpreter
from halfstep.jax.convert.values import Owner
from halfstep.jax.measure import Product, time_product_once
from halfstep.jax.numerics.lowering import Casts
from halfstep.jax.numerics.memory import is_out_of_memory

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
        raise AutoPolicyError(
            "`measured` layers are timed in each process, and two of them could choose differently",
            hint="omit `measured`, and name by rules the matmuls that one process finds to be faster",
        )
    return measure_layers(found, timer, is_out_of_memory, clock)


class ProductFinder(Interpreter):
    """An interpreter that keeps the shapes of products that rules call `measured`. A loop repeats one product."""

    def __init__(self, applied: Applied):
        super().__init__(applied.policy)
        self.found: Products = {}
        self._halves, self._device = applied.halves, applied.leaves.device

    def _multiply(self, rows: Array, matrix: Array, dims: Any, casts: Casts, owner: Owner) -> Array:
        if casts.precision.narrow and casts.precision.measured:
            split = self._halves.issuperset(owner.names)
            work = Product(rows.shape, matrix.shape, dims, split, self._device)
            for module in dict.fromkeys(map(module_of, owner.names)):
                self.found.setdefault(module, []).append((work, casts.precision))
        return super()._multiply(rows, matrix, dims, casts, owner)
