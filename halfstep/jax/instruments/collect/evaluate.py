"""Runs a graph and looks at the numbers of its fp16 operations: where infinities begin, and what became zero.

An operation *overflows* if its inputs are finite and its result is not. It *underflows* by the elements of its
result that are zero or have less than 4 bits, and would not be zero in fp32, from the same inputs. Both are
counted in one compiled function. Of a chain of operations only the first is named: the others got bad numbers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from halfstep.core.audit.record import Operation
from halfstep.core.audit.rules.formats import UNDERFLOW_SHARE
from halfstep.jax.instruments.collect.graph import (
    Graph,
    Names,
    Node,
    Stop,
    Value,
    is_no_product,
    search_ahead,
    search_back,
    takes_weight,
)
from halfstep.jax.instruments.collect.operations import MOVES, format_name, operation_of
from halfstep.jax.jaxpr import ARITHMETIC, PRODUCT, bind, bind_wide, scan_with

_WIDENED = ARITHMETIC | PRODUCT | {"convert_element_type", "add_any"}
_FEW_BITS = 2.0**-20  # fp16 has less than 4 bits below
_SMALLEST_NORMAL = 2.0**-14
_OVERFLOW, _BEFORE, _UNDERFLOW, _AMAX, _COUNT = range(5)


def evaluate(graph: Graph, arrays: Sequence[Any], _: None = None) -> tuple[list[Any], list[Any]]:
    """Returns the outputs of a graph, and numbers of each narrow operation."""
    env = dict(zip(graph.inputs, arrays, strict=True)) | dict(graph.consts)
    numbers: list[Any] = []
    for node in graph.nodes:
        taken = [env.get(value, value.literal) for value in node.inputs]
        if node.name == "scan":
            out, more = scan_with(node.eqn, taken, partial(evaluate, node.bodies[0]))
            numbers.append(more)
        else:
            out = bind(node.jaxpr, node.eqn, taken)
            if _is_counted(node):
                numbers.append(_numbers(node, taken, out))
        env.update(zip(node.outputs, out, strict=True))
    return [env.get(value, value.literal) for value in graph.outputs], numbers


def _is_counted(node: Node) -> bool:
    """Returns whether a node's numbers are counted: only fp16 has less range than fp32."""
    return node.name in _WIDENED and node.outputs[0].dtype == jnp.float16


def _numbers(node: Node, taken: Sequence[Any], out: Sequence[Any]) -> Array:
    result = out[0].astype(jnp.float32)
    finite = jnp.isfinite(result)
    floats = [x for x, value in zip(taken, node.inputs, strict=True) if value.is_float]
    before: Any = sum((jnp.sum(~jnp.isfinite(x)) for x in floats), jnp.zeros((), int))
    lost: Any = 0
    if node.is_backward:
        wide = bind_wide(node.eqn, taken)[0]
        lost = jnp.sum((wide != 0) & (jnp.abs(result) < _FEW_BITS))
    amax = jnp.max(jnp.where(finite, jnp.abs(result), 0), initial=0)
    return jnp.stack([jnp.float32(x) for x in (jnp.sum(~finite), before, lost, amax, result.size)])


def incidents(graph: Graph, names: Names, numbers: Sequence[Any]) -> Iterator[Operation]:
    """Yields the operations whose numbers left their format, by the names of their layers."""
    # Gradients of weights are none of activations.
    small = {*_makers(graph.outputs, lambda node: node.name not in MOVES)}
    for node, rows, looped in _with_numbers(graph, numbers):
        began = (rows[:, _OVERFLOW] > 0) & (rows[:, _BEFORE] == 0)
        lost = rows[:, _UNDERFLOW]
        if began.any():
            beyond = int(rows[began, _OVERFLOW].sum())
            turn = int(began.argmax()) if looped else None
            yield _operation(node, names, rows, turn, overflow=beyond)
        elif node.is_backward and node not in small:
            follows = not small.isdisjoint(_makers(node.inputs, _is_counted))
            much = lost.sum() >= UNDERFLOW_SHARE * rows[:, _COUNT].sum()
            if much and not follows:
                turn = int(lost.argmax()) if looped else None
                yield _operation(node, names, rows, turn, underflow=int(lost.sum()))
            if much or (follows and rows[:, _AMAX].max() < _SMALLEST_NORMAL):
                small.add(node)


def _makers(values: Sequence[Value], stop: Stop) -> list[Node]:
    """Returns the nearest operations of a kind before values."""
    return [node for value in values for node in search_back(value, stop)]


def _with_numbers(graph: Graph, numbers: Sequence[Any]) -> Iterator[tuple[Node, NDArray[np.float32], bool]]:
    """Yields each counted node, its numbers by turn, and whether it is in a loop."""
    given = iter(numbers)
    for node in graph.nodes:
        if node.name == "scan":
            for inner, rows, _ in _with_numbers(node.bodies[0], next(given)):
                yield inner, rows, True
        elif _is_counted(node):
            yield node, np.asarray(next(given), np.float32).reshape(-1, 5), False


def _operation(
    node: Node, names: Names, rows: NDArray[np.float32], turn: int | None, *, overflow: int = 0, underflow: int = 0
) -> Operation:
    name = _layer_of_gradient(node, names) if node.is_backward else names.of(node)
    stacked = any(  # the loop gives it one slice of a parameter at each turn
        value.made_by or not value.before or value.aval.shape != value.before[0].aval.shape
        for value in node.inputs
        if value.weight is not None
    )
    return operation_of(
        node,
        "matmul" if node.name in PRODUCT else "other",
        format_name(node.outputs[0].dtype),
        f"{name}[{turn}]" if turn is not None and stacked else name,
        amax=float(rows[:, _AMAX].max()),
        overflow=overflow,
        underflow=underflow,
        elements=int(rows[:, _COUNT].sum()),
        function=node.name,
    )


def _layer_of_gradient(node: Node, names: Names) -> str:
    """Returns the layer whose gradient this is: the one that multiplies it by its weight next."""
    following = (search_ahead(value, takes_weight, past=is_no_product) for value in node.outputs)
    found = [] if node.weights else [each for nodes in following for each in nodes[:1]]
    return names.of(found[0] if found else node)
