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
    given, made, targets = (x, values, owner, bias), Terms(*terms), targets.reshape(-1)
    with traced(True):
        if words:
            past = (amaxes, probe)
            total, _ = losses_of_narrow_layer(*given, targets, CASTS_BY_NAME[words], past, made, chunks)
        else:
            total, _ = linear_losses(*given, targets, DIRECT[compute], made, chunks, width=width)
    return total if reduction == "sum" else mean_loss(total, targets, made.ignore_index)


def row_loss(logits: Tensor, targets: Tensor, terms: tuple[Any, ...], reduction: str, kept: int) -> Tensor:
    """Returns the loss of logits in bf16 or fp16, which are not widened; `kept` as in loss/plain.py."""
    made, flat = Terms(*terms), targets.reshape(-1)
    with traced(True):
        rows = row_cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, made, kept)
    if reduction == "none":
        return rows.view(targets.shape)
    return rows.sum() if reduction == "sum" else mean_loss(rows.sum(), flat, made.ignore_index)


# --- where


class Asked(NamedTuple):
    """A cross-entropy in the graph: of logits whose classes come last."""

    node: fx.Node
    logits: fx.Node
    targets: Any
    ignored: int
    smoothing: float
    reduction: str
    turned: list[fx.Node]  # what put the classes second, and casts after it

    def terms(self, cap: float) -> tuple[Any, ...]:
        """Returns the arguments of `Terms`, of logits that are capped."""
        return (self.ignored, self.smoothing, cap, 0.0)


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
            yield OF_ROWS, "it has weights of classes, targets that are shares, or another dtype than fp32"
            continue
        path = _path_from(asked.logits)
        why = _fuse_with_layer(graph, asked, path)
        yield OF_LAYER, why
        if why and path.narrow is not None:
            yield OF_ROWS, _fuse_rows(graph, asked, path, path.narrow)


def _asked(node: fx.Node) -> Asked | None:
    """Returns what a loss was asked for; None if it is not for the kernel."""
    given: dict[str, Any] = {**dict(zip(_GIVEN, node.args, strict=False)), **node.kwargs}
    logits, targets = given.get("input"), given.get("target")
    z, t, loss = value_of(logits), value_of(targets), value_of(node)
    others = any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if others or z is None or t is None or loss is None or not isinstance(logits, fx.Node):
        return None
    reduction = given.get("reduction", "mean")
    if t.is_floating_point() or reduction not in REDUCTIONS or loss.dtype is not torch.float32:
        return None
    turned: list[fx.Node] = []
    if z.dim() == 3 and t.dim() == 2:
        while called(logits) in CASTS and (source := first_of(logits)) is not None:
            turned.append(logits)
            logits = source
        source = first_of(logits) if called(logits) in _TRANSPOSES else None
        if source is None or shape_of(source) != (z.shape[0], z.shape[2], z.shape[1]):
            return None
        turned.append(logits)
        logits = source
    elif z.dim() != 2 or t.dim() != 1:
        return None
    settings = (given.get("ignore_index", -100), given.get("label_smoothing", 0.0), reduction)
    return Asked(node, logits, targets, *settings, turned)


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
    shape, made, index = shape_of(source), shape_of(node), node.args[1]
    parts: list[Any] = [*index] if isinstance(index, tuple) else [index]
    if shape is None or made is None or len(made) != len(shape) or len(shape) < 2:
        return None
    whole = [slice(None)] * (len(shape) - len(parts) + (Ellipsis in parts))
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = whole
    fixed = all(isinstance(p, slice) and _are_numbers(p.start, p.stop, p.step) for p in parts)
    if not fixed or parts[-1].start not in (None, 0) or parts[-1].step not in (None, 1):
        return None
    return tuple(parts[:-1]) if made[:-1] != shape[:-1] else ()


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | None) for value in values)


def _fuse_with_layer(graph: fx.Graph, asked: Asked, path: Path) -> str:
    """Makes the loss that of its layer, or returns why not."""
    node, layer = asked.node, layer_at(path.end, of_loss=True)
    if layer is None or path.why:
        return path.why or f"its logits are from `{called(path.end) or path.end.op}`, not from a layer in compute"
    compute, logits = layer.compute or CASTS_BY_NAME[layer.narrow].compute, value_of(path.end)
    width, inputs = shape_of(asked.logits), shape_of(layer.x)
    if logits is None or width is None or inputs is None:
        return "their sizes are not fixed"
    if asked.reduction == "none":
        return "it returns the loss of each row"
    if width[-1] != logits.shape[-1] and layer.narrow:
        return "the vocabulary is padded, and the head is in fp8"
    between = [*asked.turned, *path.steps, path.end]
    if why := why_no_kernel(logits, compute) or other_format(path.steps, compute):
        return why
    if (user := used_elsewhere(between, node)) is not None:
        return describe_use(user, f"the logits of {owner_name(layer.owner)}")
    read = [n for n in (layer.x, layer.values, layer.owner, layer.bias, layer.amaxes) if n is not None]
    if why := why_not_moved(path.end, node, read):
        return why
    with graph.inserting_before(node):
        rows = layer.x
        if path.rows is not None:
            step, slices = path.rows
            shape = (*(shape_of(first_of(step)) or ())[:-1], inputs[-1])
            rows = graph.call_function(
                torch.Tensor.__getitem__, (graph.call_method("reshape", (rows, shape)), slices)
            )
        arguments = (
            rows, layer.values, layer.owner, layer.bias, asked.targets, layer.amaxes, layer.probe, layer.narrow,
            compute, width[-1], asked.terms(path.cap), asked.reduction, layer.chunks,
        )  # fmt: skip
        _replace(graph, node, layer_loss, arguments, between)
    return ""


def _fuse_rows(graph: fx.Graph, asked: Asked, path: Path, narrow: fx.Node) -> str:
    """Makes a loss read narrow logits, or returns why not."""
    node, value = asked.node, value_of(narrow)
    places = [place for place, step in enumerate(path.steps) if narrow in step.all_input_nodes]
    above = path.steps[places[-1] :: -1]  # from what widened them to the loss
    if value is None:
        return "their sizes are not known"
    if why := why_no_kernel(value, value.dtype) or why_not_moved(above[0], node, [narrow, *above]):
        return why
    capped = any(called(step) in ("tanh", "sigmoid") for step in above)  # or before, in the compute format
    rows = narrow
    with graph.inserting_before(node):
        for step in above:
            if called(step) in VIEWS or called(step) == "getitem":
                moved = {first_of(step): rows}
                rows = graph.node_copy(step, lambda n, moved=moved: moved.get(n, n))  # type: ignore[misc]
        terms = asked.terms(path.cap if capped else 0.0)
        arguments = (rows, asked.targets, terms, asked.reduction, _kept(path.end))
        _replace(graph, node, row_loss, arguments, [*asked.turned, *path.steps])
    return ""


def _kept(node: fx.Node | None) -> int:
    """Returns how many bits of mantissa the layer that made logits keeps of their gradient; 0 for all."""
    while node is not None and called(node) in VIEWS | _MOVES:
        node = first_of(node)
    layer = None if node is None else layer_at(node)
    return CASTS_BY_NAME[layer.narrow].precision.kept_bits if layer is not None and layer.narrow else 0


def _replace(graph: fx.Graph, node: fx.Node, function: Any, arguments: Any, between: list[fx.Node]) -> None:
    made = graph.call_function(function, arguments)
    made.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val", "stack_trace")}
    node.replace_all_uses_with(made)
    remove([node, *between])
