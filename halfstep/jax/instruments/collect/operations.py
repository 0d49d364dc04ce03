"""Finds norms, softmaxes, routers, losses, sums and matmuls in a graph, by the shape of their arithmetic.

    norm          a root of a sum of squares
    softmax       exp of numbers that are then divided by their sum
    loss          the logarithm of a sum of exp; and every scalar on the way to the result
    router        what top_k chooses from, back to its matmul
    accumulation  a carried value of a loop that only has something added to it
    reduction     a sum over devices
    matmul        with operands of two formats, of which JAX widens one; or in fp32 that the device runs in TF32

The format `inside` is the narrowest on the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.core.audit.record import Operation, OperationKind
from halfstep.core.rules import owner
from halfstep.jax.instruments.collect.graph import Graph, Names, Node, Value, named, search_ahead, search_back
from halfstep.jax.jaxpr import LAYOUT, PRODUCT, frames_of, parts_of_scan

_CHOICES = {"top_k", "approx_top_k"}
_ROOTS = {"rsqrt", "sqrt"}
_SUMS = {"reduce_sum", "reduce_window_sum", "dot_general"}
_REDUCTIONS = {"psum", "psum2", "psum_invariant", "reduce_scatter", "all_reduce"}
MOVES = LAYOUT | {"transpose", "convert_element_type", "stop_gradient", "reduce_precision", "optimization_barrier"}
_SCALINGS = MOVES | {"add", "mul", "div", "sub", "max", "neg", "clamp", "select_n"}
_PROBABILITY = _SCALINGS | {"exp", "reduce_sum", "reduce_max", "logistic", "log", "tanh"}


def operations_of(graph: Graph, names: Names) -> Iterator[Operation]:
    """Yields the operations of a graph whose format matters."""
    gradients = _gradients(graph)
    for node in graph.all_nodes():
        if not node.is_backward:
            yield from _forward(node, names)
        if node.name in _REDUCTIONS and node.inputs and node.inputs[0].is_float:
            yield operation_of(node, "reduction", _narrowest(node.inputs[:1]), names.of(node))
        if node.name == "scan":
            yield from _accumulations(node, names, gradients)
    yield from _scalar_loss(graph.outputs[0])


def _forward(node: Node, names: Names) -> Iterator[Operation]:
    if node.name in _ROOTS:
        squares = search_back(node.inputs[0], lambda node: bool(_squared([node])), past=named(_SCALINGS))
        if squares and node.inputs[0].is_float:
            inside = _narrowest([*node.inputs, *node.outputs, *_squared(squares)])
            yield operation_of(node, "norm", inside, names.of(node, ahead=True))
    elif node.name in ("exp", "exp2"):
        kind = _kind_of_exponential(node)
        if kind is not None:
            yield operation_of(node, kind, _narrowest([*node.inputs, *node.outputs]), names.of(node))
    elif node.name in _CHOICES:
        products = search_back(
            node.inputs[0], lambda node: node.name in PRODUCT and bool(node.weights), past=named(_PROBABILITY)
        )
        for product in products[:1]:
            powers = search_back(node.inputs[0], named({"exp", "logistic"}), past=named(_SCALINGS))
            way = [node.inputs[0], *product.outputs, *(value for power in powers for value in power.outputs)]
            yield operation_of(product, "router", _narrowest(way), names.of(product))
    elif node.name in PRODUCT and all(value.is_float for value in node.inputs[:2]):
        formats = {format_name(value.dtype) for value in node.inputs[:2]}
        inside = formats.pop() if len(formats) == 1 else "fp32"
        yield operation_of(node, "matmul", inside, names.of(node), promoted=_is_promoted(node))


def _squared(sums: Sequence[Node]) -> list[Value]:
    """Returns the squares that nodes sum, and what was squared."""
    values: list[Value] = []
    for node in sums:
        if node.name == "dot_general":
            values += node.inputs[:1] if node.inputs[0] is node.inputs[1] else []
        elif node.name in _SUMS:
            for square in search_back(node.inputs[0], _is_square, past=named(MOVES | {"mul"})):
                values += [value for value in (*square.inputs, *square.outputs) if value.is_float]
    return values


def _is_square(node: Node) -> bool:
    same = node.name == "mul" and node.inputs[0] is node.inputs[1]
    return same or node.name == "square" or (node.name == "integer_pow" and node.eqn.params["y"] == 2)


def _kind_of_exponential(node: Node) -> OperationKind | None:
    sums = search_ahead(node.outputs[0], named({"reduce_sum"}), past=named(MOVES))
    for total in (each for each in sums if not each.is_backward):
        uses = search_ahead(total.outputs[0], named({"log", "div"}), past=named(MOVES))
        names = {use.name for use in uses if not use.is_backward}
        if "log" in names:
            return "loss"
        if "div" in names:
            chosen = search_ahead(node.outputs[0], named(_CHOICES), past=named(_SCALINGS))
            return "router" if chosen else "softmax"
    return None


def _is_promoted(node: Node) -> bool:
    """Whether JAX widened an operand by itself: their dtypes differ, or a library's promotion made them equal."""
    a, b = node.inputs[:2]
    if a.dtype != b.dtype:
        return not all(value.is_narrow for value in node.outputs)
    if a.is_narrow:
        return False
    for maker in (a.made_by, b.made_by):
        if maker is not None and maker.name == "convert_element_type" and maker.inputs[0].is_narrow:
            called = [frame.function_name.rpartition(".")[2] for frame in frames_of(maker.eqn)]
            if any(name.startswith("promote") for name in called) and "astype" not in called:
                return True
    return False


def fp32_matmul() -> str | None:
    """Returns what the device multiplies fp32 in where no precision is named: TF32 on some GPUs, bf16 on a TPU."""
    config: Any = jax.config
    named = config.jax_default_matmul_precision
    if named is not None:
        return {"tensorfloat32": "tf32", "high": "tf32", "bfloat16": "bf16"}.get(str(named))
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        return "bf16"
    tensor_cores = device.platform in ("gpu", "cuda") and float(getattr(device, "compute_capability", 0)) >= 8
    return "tf32" if tensor_cores else None


def _gradients(graph: Graph) -> dict[Value, str]:
    """Returns the parameter of each value that becomes its gradient, moved, cast or added to at most."""
    found: dict[Value, str] = {}
    for weight, last in zip(graph.inputs, graph.outputs[-len(graph.inputs) :], strict=True):
        queue = [last]
        for value in queue:  # which grows meanwhile
            found[value] = owner(weight.weight or "")
            if value.made_by is not None and value.made_by.name in MOVES | {"add_any"}:
                queue += value.made_by.inputs
    return found


def _accumulations(scan: Node, names: Names, gradients: Mapping[Value, str]) -> Iterator[Operation]:
    """Yields the carried values of a loop that only have something added, such as gradients of micro-batches."""
    first, count = parts_of_scan(scan.eqn)
    body = scan.bodies[0]
    states = zip(body.inputs[first : first + count], body.outputs[:count], scan.outputs[:count], strict=True)
    for carried, total, result in states:
        node = total.made_by
        if node is None or node.name not in ("add", "add_any") or carried.taken_by != [node]:
            continue
        if carried.is_float and carried.aval.ndim:
            module, count = gradients.get(result, names.of(node)), scan.eqn.params["length"]
            yield operation_of(node, "accumulation", _narrowest([carried]), module, count=count)


def _scalar_loss(loss: Value) -> Iterator[Operation]:
    """Yields the loss itself, in the narrowest format that it has as one number."""
    scalars, value = [loss], loss
    while len(floats := [each for each in value.before if each.is_float and each.literal is None]) == 1:
        value = floats[0]
        if value.aval.ndim:
            break
        scalars.append(value)
    place = None if loss.made_by is None else loss.made_by.place
    yield Operation("", "loss", [], [format_name(loss.dtype)], _narrowest(scalars), count=1, place=place)


def operation_of(node: Node, kind: OperationKind, inside: str, module: str, **more: Any) -> Operation:
    """Returns what a record has of a node; `more` are fields that only some kinds have."""
    inputs, outputs = (
        [format_name(value.dtype) for value in values if value.is_float] for values in (node.inputs, node.outputs)
    )
    facts: dict[str, Any] = {"count": 1, "place": node.place, "backward": node.is_backward, **more}
    return Operation(module, kind, inputs, outputs, inside, **facts)


def _narrowest(values: Sequence[Value]) -> str:
    dtypes = [value.dtype for value in values if value.is_float]
    return format_name(min(dtypes, key=lambda dtype: dtype.itemsize))


def format_name(dtype: Any) -> str:
    """Returns the name of a dtype as records have it."""
    name = jnp.dtype(dtype).name
    return {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)
