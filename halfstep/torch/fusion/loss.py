"""Cross-entropy, from the layer that makes its logits, or from logits that stay narrow.

**Of a layer**, if nothing else reads its logits: their gradient is written over them (loss/plain.py, loss/fp8.py).
Between the two may be casts to fp32, views that keep the rows, a slice of rows (labels that are shifted) or of the
first columns (a padded vocabulary), a softcap, and the transposition that puts classes second.

**Of narrow logits**, if something else does: the loss reads them as they are, and fp32 copies are not made for it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from halfstep.torch.fp8.linear import CASTS_BY_NAME, narrow_in_graph
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
from halfstep.torch.fusion.pointwise import functions_at
from halfstep.torch.loss.fp8 import losses_of_narrow_layer
from halfstep.torch.loss.plain import (
    REDUCTIONS,
    Terms,
    linear_losses,
    mean_loss,
    row_cross_entropy,
    why_no_kernel,
)
from halfstep.torch.numerics.matmul import DIRECT, linear_in_graph
from halfstep.torch.numerics.provenance import traced

OF_LAYER, OF_ROWS = "cross-entropy of a layer", "cross-entropy of narrow logits"
_GIVEN = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_TRANSPOSES = frozenset(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"))
_MOVES = _TRANSPOSES | {"getitem", "getattr", "narrow", "select", "expand", "expand_as", "detach", "t"}


class Layer(NamedTuple):
    """A linear layer in the graph, as the functions that dynamo does not open are given it."""

    x: fx.Node
    values: fx.Node
    owner: fx.Node
    bias: fx.Node | None
    narrow: str  # the precision in words; empty if its operands are of 16 bits
    compute: torch.dtype | None
    amaxes: Any = None
    probe: Any = None
    chunks: int = 1


def layer_at(node: fx.Node, *, of_loss: bool = False) -> Layer | None:
    """Returns the layer that a node computes; None if it is none. `of_loss`: in the precision of its loss."""
    given: Any = node.args
    if node.target is narrow_in_graph:
        words, chunks, x, values, owner, bias, amaxes, probe, _ = given
        return Layer(x, values, owner, bias, words, None, amaxes, probe, chunks)
    if node.target is linear_in_graph:
        x, values, owner, _, bias, compute, words, *rest = given
        chunks, amaxes, probe = rest
        return Layer(x, values, owner, bias, words if of_loss else "", compute, amaxes, probe, chunks)
    return None


# --- what replaces them


def layer_loss(
    x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, targets: Tensor, amaxes: Tensor | None,
    probe: Tensor | None, words: str, compute: torch.dtype, width: int, terms: tuple[Any, ...], reduction: str,
    chunks: int,
) -> Tensor:  # fmt: skip
    """Returns the loss of the first `width` columns of x W^T + b."""
    terms, targets = Terms(*terms), targets.reshape(-1)
    with traced(True):
        if words:
            casts = CASTS_BY_NAME[words]
            given = (x, values, owner, bias, targets, casts, (amaxes, probe), terms, chunks)
            total, _ = losses_of_narrow_layer(*given)
        else:
            casts = DIRECT[compute]
            total, _ = linear_losses(x, values, owner, bias, targets, casts, terms, chunks, width=width)
    return total if reduction == "sum" else mean_loss(total, targets, terms.ignore_index)


def row_loss(logits: Tensor, targets: Tensor, terms: tuple[Any, ...], reduction: str, kept: int) -> Tensor:
    """Returns the loss of logits in bf16 or fp16, which are not widened; `kept` as in loss/plain.py."""
    terms, shape = Terms(*terms), targets.shape
    with traced(True):
        rows = row_cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), terms, kept)
    if reduction == "none":
        return rows.view(shape)
    return rows.sum() if reduction == "sum" else mean_loss(rows.sum(), targets.reshape(-1), terms.ignore_index)


# --- where


class Path(NamedTuple):
    """What is between a loss and what made its logits."""

    end: fx.Node  # a layer, or what is neither a view nor a cast
    steps: list[fx.Node]  # from the loss upwards, without the end
    cap: float = 0.0
    rows: tuple[fx.Node, tuple[Any, ...]] | None = None  # the one step that takes some of the rows
    narrow: fx.Node | None = None  # what was widened first, if that is of 16 bits
    why: str = ""


def fuse_losses(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Replaces each cross-entropy that can be; yields which, or the reason why it is not."""
    for node in [n for n in graph.nodes if n.target in (F.cross_entropy, torch._C._nn.cross_entropy_loss)]:
        asked = _asked(node)
        if asked is None:
            yield OF_ROWS, "it has weights of classes, or targets that are shares"
            continue
        path = _path_from(asked["input"])
        why = _fuse_with_layer(graph, node, asked, path)
        if not why:
            yield OF_LAYER, ""
            continue
        yield OF_LAYER, why
        if (why := _fuse_rows(graph, node, asked, path)) is not None:
            yield OF_ROWS, why


def _asked(node: fx.Node) -> dict[str, Any] | None:
    """Returns what a loss was asked for; None if it is not for the kernel."""
    asked = {**dict(zip(_GIVEN, node.args, strict=False)), **node.kwargs}
    targets, logits = value_of(asked.get("target")), value_of(asked.get("input"))
    others = any(asked.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if others or targets is None or logits is None or targets.is_floating_point():
        return None
    if asked.get("reduction", "mean") not in REDUCTIONS:
        return None
    if logits.dim() == 2 and targets.dim() == 1:
        return asked
    second, above = asked["input"], []
    while called(second) in CASTS and (source := first_of(second)) is not None:
        above.append(second)
        second = source
    turned = logits.dim() == 3 and targets.dim() == 2 and called(second) in _TRANSPOSES
    source = first_of(second) if turned else None
    if source is None or shape_of(source) != (logits.shape[0], logits.shape[2], logits.shape[1]):
        return None
    return {**asked, "input": source, "above": [*above, second]}


def _terms(asked: dict[str, Any], cap: float) -> tuple[Any, ...]:
    return (asked.get("ignore_index", -100), asked.get("label_smoothing", 0.0), cap, 0.0)


def _path_from(node: fx.Node) -> Path:
    """Walks up from the logits of a loss, over what the kernels do themselves."""
    path = Path(node, [])
    while True:
        node, value = path.end, value_of(path.end)
        if value is None or node.op not in ("call_function", "call_method") or layer_at(node) is not None:
            return path
        source = first_of(node)
        if source is None:
            return path
        name, given = called(node), value_of(source)
        if name == "getitem" and (rows := _rows_of_slice(node, source)) is not None:
            if rows and path.rows is not None:
                return path._replace(why="rows are taken from its logits twice")
            path = path._replace(rows=(node, rows) if rows else path.rows)
        elif name in CASTS and given is not None and value.dtype is torch.float32 and given.is_floating_point():
            path = path._replace(narrow=source if given.dtype is not torch.float32 else path.narrow)
        elif name not in VIEWS or given is None or given.shape[-1:] != value.shape[-1:]:
            found = () if path.cap else ((c, f) for f in functions_at(node) if (c := f.softcap()))
            cap, function = next(iter(found), (0.0, None))
            if function is None:
                return path
            path = path._replace(end=function.source, steps=[*path.steps, *function.nodes], cap=cap)
            continue
        path = path._replace(end=source, steps=[*path.steps, node])


def _rows_of_slice(node: fx.Node, source: fx.Node) -> tuple[Any, ...] | None:
    """Returns the slices of leading dimensions, empty if all are whole; None if columns are taken elsewhere."""
    shape, made = shape_of(source), shape_of(node)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if shape is None or made is None or len(made) != len(shape) or len(shape) < 2:
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(shape) + 1 - len(index)), *index[at + 1 :])
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    if not all(isinstance(part, slice) and _is_fixed(part) for part in index):
        return None
    if index[-1].start not in (None, 0) or index[-1].step not in (None, 1):
        return None
    return tuple(index[:-1]) if made[:-1] != shape[:-1] else ()


def _is_fixed(part: slice) -> bool:
    return all(isinstance(value, int | None) for value in (part.start, part.stop, part.step))


def _fuse_with_layer(graph: fx.Graph, node: fx.Node, asked: dict[str, Any], path: Path) -> str:
    """Makes the loss that of its layer, or returns why not."""
    layer = layer_at(path.end, of_loss=True)
    if layer is None:
        name = called(path.end) or path.end.op
        return path.why or f"its logits are from `{name}`, not from a layer in compute"
    owner, logits, x = owner_name(layer.owner), value_of(path.end), value_of(layer.x)
    compute = layer.compute or CASTS_BY_NAME[layer.narrow].compute
    if logits is None or x is None:
        return "their sizes are not known"
    if asked.get("reduction") == "none":
        return "it returns the loss of each row"
    width = shape_of(asked["input"])
    if path.why or width is None:
        return path.why or "their sizes are not fixed"
    if width[-1] != logits.shape[-1] and layer.narrow:
        return "the vocabulary is padded, and the head is in fp8"
    if why := why_no_kernel(logits, compute):
        return why
    between = [*asked.get("above", ()), *path.steps, path.end]
    if why := other_format(path.steps, compute):
        return why
    if (user := used_elsewhere(between, node)) is not None:
        return describe_use(user, f"the logits of {owner}")
    given = [layer.x, layer.values, layer.owner, layer.bias, layer.amaxes]
    if why := why_not_moved(path.end, node, [n for n in given if isinstance(n, fx.Node)]):
        return why
    with graph.inserting_before(node):
        rows = layer.x
        if path.rows is not None:
            step, slices = path.rows
            shape = shape_of(first_of(step))
            if shape is None:
                return "their sizes are not fixed"
            rows = graph.call_method("reshape", (rows, (*shape[:-1], x.shape[-1])))
            rows = graph.call_function(torch.Tensor.__getitem__, (rows, slices))
        arguments = (
            rows, layer.values, layer.owner, layer.bias, asked["target"], layer.amaxes, layer.probe, layer.narrow,
            compute, width[-1], _terms(asked, path.cap), asked.get("reduction") or "mean", layer.chunks,
        )  # fmt: skip
        _replace(graph, node, layer_loss, arguments, between)
    return ""


def _fuse_rows(graph: fx.Graph, node: fx.Node, asked: dict[str, Any], path: Path) -> str | None:
    """Makes a loss read narrow logits, or returns why not; None if its logits are fp32."""
    narrow = path.narrow
    if narrow is None:
        return None
    value = value_of(narrow)
    assert value is not None
    if why := why_no_kernel(value, value.dtype):
        return why
    above = [*reversed(path.steps[: _place_after(path, narrow)])]
    if why := why_not_moved(above[0], node, [narrow, *above]) or other_format(above, value.dtype):
        return why
    if (cap := path.cap) and not any(called(step) in ("tanh", "sigmoid") for step in above):
        cap = 0.0  # the softcap came before, in the compute format
    rows, copies = narrow, []
    with graph.inserting_before(node):
        for step in above:
            if called(step) in VIEWS or called(step) == "getitem":
                rows = graph.node_copy(step, lambda n, rows=rows, step=step: rows if n is first_of(step) else n)
                copies.append(rows)
        arguments = (rows, asked["target"], _terms(asked, cap), asked.get("reduction") or "mean", _kept(path.end))
        _replace(graph, node, row_loss, arguments, path.steps)
    return ""


def _kept(node: fx.Node | None) -> int:
    """Returns how many bits of mantissa the layer that made logits keeps of their gradient; 0 for all."""
    while node is not None and called(node) in VIEWS | _MOVES:
        node = first_of(node)
    layer = None if node is None else layer_at(node)
    return CASTS_BY_NAME[layer.narrow].precision.kept_bits if layer is not None and layer.narrow else 0


def _place_after(path: Path, narrow: fx.Node) -> int:
    """Returns how many steps are between a loss and what it is to read."""
    places = [place for place, step in enumerate(path.steps) if narrow in step.all_input_nodes]
    return places[-1] + 1 if places else 0


def _replace(graph: fx.Graph, node: fx.Node, function: Any, arguments: Any, between: list[fx.Node]) -> None:
    made = graph.call_function(function, arguments)
    made.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val", "stack_trace")}
    node.replace_all_uses_with(made)
    remove([node, *between])
