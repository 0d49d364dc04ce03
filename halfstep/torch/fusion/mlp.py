"""The activation functions of an MLP: in the matmuls around them, or in a form that takes less time or memory.

`LinearGeluLinear` (numerics/matmul.py) is two linear layers in one format with the tanh form of GELU between them,
on a GPU whose matmuls compute it as they end. Elsewhere the tanh form is computed by a sigmoid, the exact form by
one exponential, and relu^2 keeps its result alone (kernels/activations.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from halfstep.torch.fusion.graph import (
    CASTS,
    VIEWS,
    called,
    describe_use,
    first_of,
    other_format,
    owner_name,
    remove,
    shape_of,
    used_elsewhere,
    value_of,
    why_not_moved,
)
from halfstep.torch.fusion.pointwise import EXACT, GELU, SQUARE, Pointwise, known_at
from halfstep.torch.kernels.activations import ExactGELU, by_sigmoid, squared_relu
from halfstep.torch.numerics.matmul import DIRECT, LinearGeluLinear, linear_in_graph, why_not_fused
from halfstep.torch.numerics.provenance import traced

BETWEEN = "tanh GELU between two layers"


def mlp_in_graph(*given: object) -> Tensor:
    """Two layers with a GELU between them."""
    with traced(True):
        return LinearGeluLinear.apply(*given)  # type: ignore[no-any-return]


def gelu_in_graph(x: Tensor) -> Tensor:
    """The tanh form of GELU."""
    return by_sigmoid(x)


def squared_relu_in_graph(x: Tensor) -> Tensor:
    """relu(x)^2."""
    with traced(True):
        return squared_relu(x)


def exact_gelu_in_graph(x: Tensor) -> Tensor:
    """The exact form of GELU."""
    return ExactGELU.apply(x)  # type: ignore[no-any-return]


FORMS = {GELU: gelu_in_graph, EXACT: exact_gelu_in_graph, SQUARE: squared_relu_in_graph}


def fuse_layers(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Fuses each pair of layers with a GELU between them; yields the reason where it does not."""
    for down in [n for n in graph.nodes if n.target is linear_in_graph]:
        node, views = _over_views(down.args[0])  # type: ignore[arg-type]
        name, function = known_at(node) or ("", None)
        if function is None or name != GELU:
            continue
        up, more = _over_views(function.source)
        yield BETWEEN, _fuse(graph, up, down, function, [*views, *function.nodes, *more])


def _over_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Returns the first node above that is neither a view nor a cast, and those that are."""
    steps = []
    while called(node) in VIEWS | CASTS and (source := first_of(node)) is not None:
        value, given = value_of(node), value_of(source)
        if value is None or given is None or value.shape[-1:] != given.shape[-1:]:
            break
        steps.append(node)
        node = source
    return node, steps


def _fuse(graph: fx.Graph, up: fx.Node, down: fx.Node, function: Pointwise, between: list[fx.Node]) -> str:
    first, second = up.args, down.args
    if up.target is not linear_in_graph or first[5] is not second[5]:
        return "it is not of a layer in the same format"
    x, up_values, down_values = (value_of(n) for n in (first[0], first[1], second[1]))
    if x is None or up_values is None or down_values is None:
        return "their sizes are not known"
    if why := why_not_fused(x, up_values, down_values, DIRECT[first[5]]):  # type: ignore[index]
        return why
    if why := other_format(between, first[5]):  # type: ignore[arg-type]
        return why
    if (user := used_elsewhere([up, *between], down)) is not None:
        return describe_use(user, f"the results of {owner_name(first[2])}")
    if why := why_not_moved(up, down, [n for n in first if isinstance(n, fx.Node)]):
        return why
    moved, shape = any(called(node) in VIEWS for node in between), shape_of(down)
    if moved and shape is None:
        return "their sizes are not fixed"
    with graph.inserting_before(down):
        given = (*first[:5], *second[1:5], function.recomputed, first[5])
        made = graph.call_function(mlp_in_graph, given)
        made = graph.call_method("reshape", (made, shape)) if moved else made
    made.meta = dict(down.meta)
    down.replace_all_uses_with(made)
    remove([down, *between, up])
    return ""


def replace_functions(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Replaces the activation functions that have a better form alone."""
    for node in [*reversed(graph.nodes)]:
        value = value_of(node)
        found = known_at(node) if value is not None and node.users else None
        if found is None:
            continue
        name, function = found
        x = value_of(function.source)
        if x is None or value is None or x.dtype is not value.dtype or not _has_form(name, x, function):
            continue
        others = used_elsewhere(function.nodes[1:], node) or other_format(function.nodes, x.dtype)
        if others or why_not_moved(function.source, node, [function.source]):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(FORMS[name], (function.source,))
            made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        remove(function.nodes)
        yield name, ""


def _has_form(name: str, x: Tensor, function: Pointwise) -> bool:
    if name in (GELU, EXACT):  # where it is recomputed, it is in a graph of its own
        return x.is_cuda and not function.recomputed and (name == GELU or x.dtype.itemsize == 2)
    return x.dtype is torch.bfloat16
