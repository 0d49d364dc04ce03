"""A jaxpr as a graph that can be searched: what made a value, what takes it, which layer an operation belongs to.

Functions inside functions (jit, remat, custom derivatives) are opened, so their operations lie side by side. The
bodies of scan, cond, while and shard_map are graphs of their own, which know the values outside.

A jaxpr has no modules, so the name of a layer comes from what there is:

    a parameter among its inputs      the module that owns it
    name scopes, as Flax opens them   the module whose path they end with
    neither                           the nearest layer: for a norm the one after it, for others the one before
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from halfstep.core.rules import owner
from halfstep.jax.jaxpr import INLINED, LAYOUT, PRODUCT, REMAT, frames_of, function_of, parts_of_scan, walk

_OPENED = INLINED | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat_call"}
_TRANSFORMS = re.compile(r"\w+\(|\)")
_CASTS = frozenset({"convert_element_type", "optimization_barrier", "reduce_precision", "device_put"})
# Third-party code: a place in it says nothing to a user.
_PACKAGES = ("site-packages", "dist-packages", "lib/python", Path(__file__).parents[2].as_posix())


@dataclass(eq=False)
class Value:
    """A value of the graph."""

    aval: Any
    literal: Any = None  # its value, if it is written out
    made_by: "Node | None" = None
    outside: "Value | None" = None  # of an input of a body: what comes in
    inside: "list[Value]" = field(default_factory=list)  # of an output of a node with bodies: what becomes it
    becomes: "list[Value]" = field(default_factory=list)  # of an output of a body: what it is outside
    taken_by: "list[Node]" = field(default_factory=list)
    enters: "list[Value]" = field(default_factory=list)  # what it is inside bodies
    weight: str | None = None  # the parameter that it is, moved or cast at most

    @property
    def dtype(self) -> Any:
        """The dtype of a value; that of keys and tokens is none of numpy's."""
        return getattr(self.aval, "dtype", None)

    @property
    def is_narrow(self) -> bool:
        """Whether it has fewer bits than fp32."""
        return self.is_float and self.dtype.itemsize < 4

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.dtype is not None and jnp.issubdtype(self.dtype, jnp.floating)


@dataclass(eq=False)
class Node:
    """An operation."""

    eqn: Any
    jaxpr: Any
    inputs: list[Value]
    outputs: list[Value]
    around: tuple[Any, ...] = ()  # the equations whose functions it is in, outermost first
    bodies: "list[Graph]" = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return str(self.eqn.primitive.name)

    @property
    def scope(self) -> str:
        """The name scopes around it: `jvp(Model)/blocks_3/norm`."""
        return "/".join(str(eqn.source_info.name_stack) for eqn in (*self.around, self.eqn))

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return "transpose(" in self.scope

    @property
    def weights(self) -> list[str]:
        """The parameters among its inputs."""
        return [value.weight for value in self.inputs if value.weight is not None]

    @property
    def place(self) -> str | None:
        """The file and line of the user's code that it comes from."""
        for eqn in (self.eqn, *reversed(self.around)):
            for frame in frames_of(eqn):
                file = frame.file_name
                if not file.startswith("<") and not any(part in Path(file).as_posix() for part in _PACKAGES):
                    return f"{file}:{frame.line_num}"
        return None


@dataclass(eq=False)
class Graph:
    """A jaxpr."""

    inputs: list[Value]
    outputs: list[Value]
    nodes: list[Node]
    consts: list[tuple[Value, Any]]

    def all_nodes(self) -> Iterator[Node]:
        """Yields every node, those of bodies after their owner."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.all_nodes()


def graph_of(closed: Any, names: Sequence[str | None]) -> Graph:
    """Returns the graph of a closed jaxpr; `names` are those of the parameters among its inputs."""
    inputs = [Value(var.aval, weight=name) for var, name in zip(closed.jaxpr.invars, names, strict=True)]
    return _graph(closed.jaxpr, closed.consts, inputs)


def _graph(jaxpr: Any, consts: Sequence[Any], inputs: list[Value], around: tuple[Any, ...] = ()) -> Graph:
    graph = Graph(inputs, [], [], [])
    graph.outputs = _opened(graph, jaxpr, consts, inputs, around)
    return graph


def _opened(
    graph: Graph, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], around: tuple[Any, ...]
) -> list[Value]:
    """Adds the equations of a jaxpr to a graph; returns its outputs."""
    constants = [Value(var.aval) for var in jaxpr.constvars]
    graph.consts += zip(constants, consts, strict=True)

    def equation(eqn: Any, taken: list[Value]) -> list[Value]:
        inner = next(iter(jaxprs_in_params(eqn.params)), None) if eqn.primitive.name in _OPENED else None
        if inner is not None and len(inner.invars) == len(taken):
            return _opened(graph, inner, getattr(function_of(eqn), "consts", ()), taken, (*around, eqn))
        node = Node(eqn, jaxpr, taken, [Value(var.aval) for var in eqn.outvars], around)
        for value in node.outputs:
            value.made_by = node
        for value in taken:
            value.taken_by.append(node)
        _name_weight(node)
        _add_bodies(node)
        graph.nodes.append(node)
        return node.outputs

    known = zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *constants], strict=True)
    return walk(jaxpr, known, lambda atom: Value(atom.aval, literal=atom.val), equation)


def _name_weight(node: Node) -> None:
    """Marks what a node moves or casts as the parameter that it was."""
    floats = [value for value in node.inputs if value.is_float and value.literal is None]
    if node.name in LAYOUT | _CASTS and len(floats) == 1 and len(node.outputs) == 1 and node.name != "gather":
        node.outputs[0].weight = floats[0].weight


def _add_bodies(node: Node) -> None:
    name, params = node.name, node.eqn.params
    if name == "scan":
        first, count = parts_of_scan(node.eqn)
        body = _body(node, params["jaxpr"].jaxpr, params["jaxpr"].consts, node.inputs)
        for value in body.inputs[first : first + count]:
            value.weight = None  # it changes from one turn to the next
    elif name == "cond":
        for branch in params["branches"]:
            _body(node, branch.jaxpr, branch.consts, node.inputs[1:])
    elif name == "shard_map":
        _body(node, params["jaxpr"], (), node.inputs)
    elif name == "while":
        closed, skipped, own = params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
        taken = node.inputs[skipped : skipped + own] + node.inputs[skipped + own :]
        _body(node, closed.jaxpr, closed.consts, taken)


def _body(node: Node, jaxpr: Any, consts: Sequence[Any], outside: Sequence[Value]) -> Graph:
    inputs = []
    for var, value in zip(jaxpr.invars, outside, strict=True):
        inputs.append(Value(var.aval, outside=value, weight=value.weight))
        value.enters.append(inputs[-1])
    body = _graph(jaxpr, consts, inputs, (*node.around, node.eqn))
    for within, value in zip(body.outputs, node.outputs, strict=True):
        value.inside.append(within)
        within.becomes.append(value)
    node.bodies.append(body)
    return body


# --- searching


def before(value: Value) -> list[Value]:
    """Returns what a value is made from."""
    if value.outside is not None:
        return [value.outside]
    if value.inside:
        return value.inside
    return value.made_by.inputs if value.made_by is not None else []


Stop = Callable[[Node], bool]


def named(names: Collection[str]) -> Stop:
    """Returns whether a node is an operation of one of these names."""
    return lambda node: node.name in names


def takes_weight(node: Node) -> bool:
    """Returns whether a node takes a parameter."""
    return bool(node.weights)


def anything(node: Node) -> bool:
    """Returns True: a search looks past every node."""
    return True


def search_back(value: Value, stop: Stop, *, past: Stop) -> list[Node]:
    """Returns the nearest nodes before a value at which to stop, looking past nodes of one kind only."""

    def look(value: Value, found: list[Node]) -> list[Value]:
        node = None if value.inside or value.outside is not None else value.made_by
        if node is not None and stop(node):
            found.append(node)
            return []
        return before(value) if node is None or past(node) else []

    return _search(value, look)


def search_ahead(value: Value, stop: Stop, *, past: Stop) -> list[Node]:
    """Returns the nearest nodes after a value at which to stop, looking past nodes of one kind only."""

    def look(value: Value, found: list[Node]) -> list[Value]:
        following = [*value.enters, *value.becomes]
        for node in value.taken_by:
            if stop(node):
                found.append(node)
            elif not node.bodies and past(node):
                following += node.outputs
        return following

    return _search(value, look)


def _search(value: Value, look: Callable[[Value, list[Node]], list[Value]]) -> list[Node]:
    """Looks at values breadth-first: `look` adds the nodes it finds and returns the values to look at next."""
    found: list[Node] = []
    seen, queue = {id(value)}, [value]
    while queue:
        following = look(queue.pop(0), found)
        queue += [each for each in following if id(each) not in seen]
        seen |= {id(each) for each in following}
    return found


# --- naming


class Names:
    """Names the layer of any node, given the names of all parameters."""

    def __init__(self, parameters: Iterable[str]):
        self.modules = {owner(name) for name in parameters}
        parents = {module.rpartition(".")[0] for module in self.modules}
        self.known = self.modules | parents - {""}

    def of(self, node: Node, *, ahead: bool = False) -> str:
        """Returns the name of the layer, or an empty one."""
        if node.weights:
            return owner(node.weights[0])
        return self._by_scope(node.scope) or (self._ahead(node) if ahead else "") or self._back(node)

    def _by_scope(self, scope: str) -> str:
        path = [part for part in re.split(r"[/.]", _TRANSFORMS.sub("", scope)) if part]
        for start in range(len(path)):
            end = ".".join(path[start:])
            alike = [name for name in self.known if name == end or name.endswith(f".{end}")]
            if len(alike) == 1:
                return alike[0]
        return ""

    def _ahead(self, node: Node) -> str:
        """Returns the layer that takes the result: of a norm its own gain, or else the matmul after it."""
        for value in node.outputs:
            for found in search_ahead(value, takes_weight, past=lambda node: node.name not in PRODUCT):
                if not found.is_backward:
                    name = owner(found.weights[0])
                    return name if found.name not in PRODUCT else f"norm before {name}"
        return ""

    def _back(self, node: Node) -> str:
        """Returns the layer that the inputs come from; of several, what they share."""
        owners: list[str] = []
        values: Sequence[Value] = node.inputs
        for value in values:
            found = search_back(value, takes_weight, past=anything)
            nearest = [owner(each.weights[0]) for each in found[:4]]
            owners += [name for name in nearest if name not in owners]
        return common_module(owners)


def common_module(names: Sequence[str]) -> str:
    """Returns the innermost module that holds all of these; the first of them, if there is none."""
    if len(names) < 2:
        return names[0] if names else ""
    columns = zip(*(name.split(".") for name in names), strict=False)
    parts = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    return ".".join(parts) or names[0]
