"""What dynamo's graph says of its values: what they are, what moves them, who uses them and who writes to them."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

# What returns the same numbers in another shape; and what asks for a size alone.
VIEWS = frozenset(
    ["view", "view_as", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous", "clone", "unflatten"]
)
CASTS = frozenset(["float", "to", "type", "bfloat16", "half", "double", "type_as"])
LOOKS = frozenset(["size", "dim", "ndimension", "numel", "getattr", "stride", "is_contiguous", "__len__"])
# Where code on one side runs in another mode than code on the other.
_MODES = (
    "_set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode "
    "_saved_tensors_hooks_disable _saved_tensors_hooks_enable _vmap_increment_nesting _grad_increment_nesting"
)
MODES = frozenset(_MODES.split())
_WRITES = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul setitem __setitem__"
_IN_PLACE = frozenset(_WRITES.split())


def called(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls; empty for others."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def value_of(node: Any) -> Tensor | None:
    """Returns the fake tensor that a node stands for; None if it is none."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Returns the shape of a node's tensor; None if it is none, or some size is not fixed."""
    value = value_of(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def first_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that a function or method is called with first."""
    given = node.args[0] if node.args else node.kwargs.get("input")
    return given if isinstance(given, fx.Node) else None


def other_format(nodes: Iterable[fx.Node], compute: torch.dtype | None) -> str:
    """Returns a format that code casts to and a kernel would not round to; empty if there is none."""
    for node in nodes:
        value = value_of(node)
        if value is not None and value.dtype not in (torch.float32, torch.float64, compute):
            return f"it is cast to {str(value.dtype).removeprefix('torch.')} in between"
    return ""


def used_elsewhere(nodes: Collection[fx.Node], by: fx.Node) -> fx.Node | None:
    """Returns what uses one of these nodes, other than they themselves and one more; None if nothing does."""
    for node in nodes:
        for user in node.users:
            if user is not by and user not in nodes and called(user) not in LOOKS:
                return user
    return None


def describe_use(user: fx.Node, what: str) -> str:
    """Returns why nodes that are used elsewhere are kept."""
    if user.op == "output":
        return f"{what} are returned"
    return f"`{called(user)}` uses {what} too"


def why_not_moved(first: fx.Node, last: fx.Node, read: Iterable[fx.Node]) -> str:
    """Returns why what `first` computes of some nodes may not be computed where `last` is; empty if it may."""
    given = [tensor for node in read if (tensor := value_of(node)) is not None]
    node = first.next
    while node is not last:
        if node.op == "root":  # `last` comes before
            return "the order of its operations is unusual"
        name = called(node)
        if name in MODES:
            return "gradients, autocast or a transform are switched between its operations"
        if any(may_share(tensor, other) for tensor in written_by(node) for other in given):
            return f"`{name}` may write to what it reads"
        node = node.next
    return ""


def written_by(node: fx.Node) -> list[Tensor]:
    """Returns the tensors that a node may write to."""
    name = called(node)
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    schema = getattr(node.target, "_schema", None)
    in_place = name.endswith("_") and not name.endswith("__")
    first_alone = in_place or name in _IN_PLACE or node.kwargs.get("inplace")
    everything = isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module"
    if not (first_alone or everything or "out" in node.kwargs or getattr(schema, "is_mutable", False)):
        return []
    nodes = node.all_input_nodes[:1] if first_alone else node.all_input_nodes
    return [tensor for n in nodes if (tensor := value_of(n)) is not None]


def may_share(a: Tensor, b: Tensor) -> bool:
    """Whether two fake tensors may be of the same memory. Those of views share their storage."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def remove(nodes: Iterable[fx.Node]) -> None:
    """Removes nodes that nothing uses any more, users before what they use."""
    for node in nodes:
        for user in [user for user in node.users if called(user) in LOOKS and not user.users]:
            user.graph.erase_node(user)
        if not node.users:
            node.graph.erase_node(node)


def owner_name(node: Any) -> str:
    """Returns the name of a parameter in the model, as far as the graph knows it."""
    words = str(getattr(node, "target", "")).lower().strip("_").split("_")
    return ".".join(word for word in words if word not in ("l", "self", "modules", "parameters", "", "mod"))
