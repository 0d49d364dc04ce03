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
from pathlib import Path
from posixpath import commonpath
from typing import Any

import jax.numpy as jnp

from halfstep.core.rules import owner
from halfstep.jax.jaxpr import CALLS, LAYOUT, PRODUCT, frames_of, functions_of, inputs_of, parts_of_scan, walk

_BODIES = {"scan", "cond", "while", "shard_map"}
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
    before: "list[Value]" = field(default_factory=list)  # what it is made from, or what comes into a body
    taken_by: "list[Node]" = field(default_factory=list)
    after: "list[Value]" = field(default_factory=list)  # what it is inside bodies, or outside of its own
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
    outputs: list[Value] = field(default_factory=list)
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
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    consts: list[tuple[Value, Any]] = field(default_factory=list)

    def all_nodes(self) -> Iterator[Node]:
        """Yields every node, those of bodies after their owner."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.all_nodes()


def graph_of(closed: Any, names: Sequence[str | None]) -> Graph:
    """Returns the graph of a closed jaxpr; `names` are those of the parameters among its inputs."""
    inputs = [Value(var.aval, weight=name) for var, name in zip(closed.jaxpr.invars, names, strict=True)]
    return _graph(closed.jaxpr, closed.consts, inputs, ())


def _graph(jaxpr: Any, consts: Sequence[Any], inputs: list[Value], around: tuple[Any, ...]) -> Graph:
    graph = Graph(inputs)
    graph.outputs = _add_equations(graph, jaxpr, consts, inputs, around)
    return graph


def _add_equations(
    graph: Graph, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], around: tuple[Any, ...]
) -> list[Value]:
    """Adds the equations of a jaxpr to a graph; returns its outputs."""
    constants = [Value(var.aval) for var in jaxpr.constvars]
    graph.consts += zip(constants, consts, strict=True)

    def equation(eqn: Any, taken: list[Value]) -> list[Value]:
        if eqn.primitive.name in CALLS:
            [(inner, own)] = functions_of(eqn)
            return _add_equations(graph, inner, own, taken, (*around, eqn))
        node = Node(eqn, jaxpr, taken, around=around)
        node.outputs = [Value(var.aval, made_by=node, before=taken) for var in eqn.outvars]
        for value in taken:
            value.taken_by.append(node)
        _name_weight(node)
        if node.name in _BODIES:
            node.bodies = [_body(node, *each) for each in functions_of(eqn)]
            for value, *inside in zip(node.outputs, *(body.outputs for body in node.bodies), strict=True):
                value.before = inside
                for each in inside:
                    each.after.append(value)
        graph.nodes.append(node)
        return node.outputs

    env = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *constants], strict=True))
    return walk(jaxpr, env, lambda atom: Value(atom.aval, literal=atom.val), equation)


def _name_weight(node: Node) -> None:
    """Marks what a node moves or casts as the parameter that it was."""
    floats = [value for value in node.inputs if value.is_float and value.literal is None]
    if node.name in LAYOUT | _CASTS and len(floats) == 1 and len(node.outputs) == 1 and node.name != "gather":
        node.outputs[0].weight = floats[0].weight


def _body(node: Node, jaxpr: Any, consts: Sequence[Any]) -> Graph:
    inputs = []
    for var, value in zip(jaxpr.invars, inputs_of(node.eqn, jaxpr, node.inputs), strict=True):
        inputs.append(Value(var.aval, before=[value], weight=value.weight))
        value.after.append(inputs[-1])
    if node.name == "scan":
        first, count = parts_of_scan(node.eqn)
        for value in inputs[first : first + count]:
            value.weight = None  # it changes from one turn to the next
    return _graph(jaxpr, consts, inputs, (*node.around, node.eqn))


# --- searching


Stop = Callable[[Node], bool]


def named(names: Collection[str]) -> Stop:
    """Returns whether a node is an operation of one of these names."""
    return lambda node: node.name in names


def takes_weight(node: Node) -> bool:
    """Returns whether a node takes a parameter."""
    return bool(node.weights)


def is_no_product(node: Node) -> bool:
    """Returns whether a node is anything but a matmul or a convolution."""
    return node.name not in PRODUCT


def search_back(value: Value, stop: Stop, *, past: Stop = lambda node: True) -> list[Node]:
    """Returns the nearest nodes before a value at which to stop, looking past nodes of one kind only."""

    def look(value: Value, found: list[Node]) -> list[Value]:
        node = value.made_by
        if node is None or node.bodies:
            return value.before
        if stop(node):
            found.append(node)
            return []
        return value.before if past(node) else []

    return _search(value, look)


def search_ahead(value: Value, stop: Stop, *, past: Stop) -> list[Node]:
    """Returns the nearest nodes after a value at which to stop, looking past nodes of one kind only."""

    def look(value: Value, found: list[Node]) -> list[Value]:
        following = [*value.after]
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
    seen, queue = {value}, [value]
    for each in queue:  # which grows meanwhile
        following = look(each, found)
        queue += [value for value in following if value not in seen]
        seen.update(following)
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
            for found in search_ahead(value, takes_weight, past=is_no_product):
                if not found.is_backward:
                    name = owner(found.weights[0])
                    return name if found.name not in PRODUCT else f"norm before {name}"
        return ""

    def _back(self, node: Node) -> str:
        """Returns the layer that the inputs come from; of several, what they share, or else the first."""
        nearest = [search_back(value, takes_weight)[:4] for value in node.inputs]
        names = [owner(each.weights[0]) for found in nearest for each in found] or [""]
        return commonpath([name.replace(".", "/") for name in names]).replace("/", ".") or names[0]
