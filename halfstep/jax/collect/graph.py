"""A jaxpr as a graph that can be searched: what made a value, what takes it, and which parameter it is.

Functions inside functions (jit, remat, custom derivatives) are opened, so their operations lie side by side. The
bodies of scan, cond, while and shard_map are graphs of their own, which know the values outside.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from halfstep.jax.functions.primitives import INLINED, LAYOUT, REMAT, parts_of_scan

_OPENED = INLINED | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat_call"}
_CASTS = frozenset({"convert_element_type", "optimization_barrier", "reduce_precision", "device_put"})
# Code of others: a place in it says nothing to a user.
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


def frames_of(eqn: Any) -> Sequence[Any]:
    """Returns the stack of calls that made an equation, innermost first."""
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback else ()


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
    env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(var.aval)
        graph.consts.append((env[var], const))

    def read(atom: Any) -> Value:
        return Value(atom.aval, literal=atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        taken = [read(atom) for atom in eqn.invars]
        inner = next(iter(jaxprs_in_params(eqn.params)), None) if eqn.primitive.name in _OPENED else None
        if inner is not None and len(inner.invars) == len(taken):
            env.update(zip(eqn.outvars, _opened(graph, inner, _consts(eqn), taken, (*around, eqn)), strict=True))
            continue
        node = Node(eqn, jaxpr, taken, [Value(var.aval) for var in eqn.outvars], around)
        for value in node.outputs:
            value.made_by = node
        for value in taken:
            value.taken_by.append(node)
        _name_weight(node)
        _add_bodies(node)
        graph.nodes.append(node)
        env.update(zip(eqn.outvars, node.outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _consts(eqn: Any) -> Sequence[Any]:
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return getattr(closed, "consts", ())


def _name_weight(node: Node) -> None:
    """A parameter that is moved or cast is still that parameter."""
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


def search_back(value: Value, stop: Callable[[Node], bool], *, past: Callable[[Node], bool]) -> list[Node]:
    """Returns the nearest nodes before a value at which to stop, looking past nodes of one kind only."""
    found: list[Node] = []
    seen, queue = {id(value)}, [value]
    while queue:
        value = queue.pop(0)
        node = None if value.inside or value.outside is not None else value.made_by
        if node is not None and stop(node):
            found.append(node)
        elif node is None or past(node):
            queue += [each for each in before(value) if id(each) not in seen]
            seen |= {id(each) for each in before(value)}
    return found


def search_ahead(value: Value, stop: Callable[[Node], bool], *, past: Callable[[Node], bool]) -> list[Node]:
    """Returns the nearest nodes after a value at which to stop, looking past nodes of one kind only."""
    found: list[Node] = []
    seen, queue = {id(value)}, [value]
    while queue:
        value = queue.pop(0)
        following = [*value.enters, *value.becomes]
        for node in value.taken_by:
            if stop(node):
                found.append(node)
            elif not node.bodies and past(node):
                following += node.outputs
        queue += [each for each in following if id(each) not in seen]
        seen |= {id(each) for each in following}
    return found
