"""What an elementwise function of one tensor is, however it is written: found by its values.

`x * 0.5 * (1 + tanh(...))`, `F.gelu(x, approximate="tanh")` and a checkpointed call of either are one function. So
the nodes between a tensor and a result are evaluated in fp64, on points that show every part, and compared with
the functions that have a kernel. Casts in between are left out: kernels compute in fp32 throughout.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from halfstep.torch.fusion.graph import CASTS, called, first_of, value_of

_BENDS = frozenset(["tanh", "sigmoid", "relu", "gelu", "erf"])  # every function that is looked for has one of them
_ARITHMETIC = (
    "add sub mul div truediv true_divide multiply subtract divide rsub neg pow square clamp_min "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __pow__ __neg__"
)
ELEMENTWISE = _BENDS | frozenset(_ARITHMETIC.split())
CHECKPOINT = "tag_activation_checkpoint"
CLOSE = 1e-7  # constants that people write have 7 digits or more, and bf16 has 3
LONGEST = 20
_POINTS = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64)
GELU, EXACT, SQUARE = "tanh GELU", "exact GELU", "relu^2"
KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    GELU: lambda x: F.gelu(x, approximate="tanh"),
    EXACT: F.gelu,
    SQUARE: lambda x: F.relu(x).square(),
}


class Pointwise(NamedTuple):
    """A function of one tensor: the nodes from its result upwards, without the one that they are of."""

    source: fx.Node
    nodes: list[fx.Node]

    @property
    def recomputed(self) -> bool:
        """Whether the backward pass computes it again."""
        return any(called(node) == CHECKPOINT for node in self.nodes)

    def name(self) -> str:
        """Returns which known function it is; empty if it is none."""
        y = self._evaluate(_POINTS)
        same = (name for name, f in KNOWN.items() if y is not None and (y - f(_POINTS)).abs().max() < CLOSE)
        return next(same, "")

    def softcap(self) -> float:
        """Returns c, if it is c tanh(x / c) and perhaps a constant, which a softmax does not see; else 0."""
        ends = self._evaluate(torch.tensor([0.0, 1e9], dtype=torch.float64))
        cap = 0.0 if ends is None else float(ends[1] - ends[0])
        y = self._evaluate(_POINTS * cap / 3) if 0 < cap < 1e6 else None
        if ends is None or y is None:
            return 0.0
        return cap if (y - ends[0] - cap * torch.tanh(_POINTS / 3)).abs().max() < CLOSE * cap else 0.0

    def _evaluate(self, x: Tensor) -> Tensor | None:
        try:
            return _run(reversed(self.nodes), {self.source: x})
        except (TypeError, RuntimeError, ValueError):  # it is not a function of numbers after all
            return None


def functions_at(result: fx.Node) -> Iterator[Pointwise]:
    """Yields the elementwise functions of one tensor that end in a node, from the shortest on."""
    nodes: list[fx.Node] = []
    waiting = {result}
    while len(nodes) < LONGEST:
        last = max(waiting)
        above = _inputs_of(last)
        if above is None:
            return
        waiting = (waiting - {last}) | set(above)
        nodes.append(last)
        if len(waiting) == 1 and (_BENDS | {CHECKPOINT}) & set(map(called, nodes)):
            yield Pointwise(next(iter(waiting)), [*nodes])


def known_at(result: fx.Node) -> tuple[str, Pointwise] | None:
    """Returns the known function that ends in a node, with its name; None if none does."""
    found = ((name, function) for function in functions_at(result) if (name := function.name()))
    return next(found, None)


def _inputs_of(node: fx.Node) -> list[fx.Node] | None:
    """Returns the tensors that an elementwise node is of; None if it is not elementwise."""
    if called(node) == "getitem" and (source := first_of(node)) is not None and _body_of(source) is not None:
        return [source]  # dynamo calls a graph, and takes the one result
    if (body := _body_of(node)) is not None:
        return [n for n in node.all_input_nodes if n is not body]
    known = node.op in ("call_function", "call_method") and called(node) in ELEMENTWISE | CASTS
    if not known or node.kwargs.get("inplace") or "out" in node.kwargs:
        return None
    inputs, shape = node.all_input_nodes, getattr(value_of(node), "shape", None)
    same = all((value := value_of(n)) is not None and value.shape == shape for n in inputs)
    return inputs if same and shape is not None and inputs else None


def _body_of(node: fx.Node) -> fx.Node | None:
    """Returns the graph of a function that the backward pass computes again."""
    body = node.args[0] if called(node) == CHECKPOINT else None
    return body if isinstance(body, fx.Node) else None


def _run(nodes: Any, values: dict[fx.Node, Any]) -> Tensor:
    """Returns what the last node is, of values in fp64."""
    made: Any = None
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values.get(n, n))
        if (body := _body_of(node)) is not None:
            graph = getattr(node.graph.owning_module, str(body.target)).graph
            given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), args[1:], strict=True))
            made = _run((n for n in graph.nodes if n.op in ("call_function", "call_method")), given)
        elif called(node) in CASTS or called(node) == "getitem":
            made = args[0]
        elif node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            function: Any = torch.pow if node.target is operator.pow else node.target
            made = function(*args, **kwargs)
        values[node] = made
    if not isinstance(made, Tensor):
        raise TypeError("it is no tensor")
    return made
