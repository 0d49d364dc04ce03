"""Fusions: passes over the graph that dynamo hands to its backend, where all of a model's code is in plain sight.

In eager mode each operation runs before it is known what follows. In compiled code the whole graph is there, so
however a model is written, its layers, casts, views and losses are nodes with arguments and users:

    loss.py    linear -> views, float, softcap -> cross_entropy    the layer's loss, whose logits are not kept
               bf16 -> views, float, softcap -> cross_entropy      the loss of narrow logits, not widened
    casts.py   bf16 -> float, views, bf16                          the views alone
    mlp.py     linear -> tanh GELU -> linear                       matmuls that compute the GELU
               either GELU, relu^2                                 functions that take less time or memory

Each says why where it does not apply. The graph is not functional: views share memory, and operations may write in
place. So what a fusion moves or leaves out must have no other user, and what it reads later must not be written to
in between (graph.py). What an elementwise function is, is found by evaluating it (pointwise.py).

**Where it runs**: in inductor, before autograd (`config.pre_grad_custom_pass`), after passes that the user has
set, and only in graphs that have layers of ours. Other backends compute the same without it.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from halfstep.torch.fp8.linear import narrow_in_graph
from halfstep.torch.fusion import casts, loss, mlp
from halfstep.torch.numerics.compile_cache import allow_in_graph
from halfstep.torch.numerics.matmul import linear_in_graph

REPLACEMENTS: tuple[Callable[..., Any], ...] = (
    loss.layer_loss,
    loss.row_loss,
    mlp.mlp_in_graph,
    *mlp.FORMS.values(),
)

LAYERS = (linear_in_graph, narrow_in_graph)
FUSED: Counter[str] = Counter()
"""How often each fusion was made in this process."""
APART: Counter[tuple[str, str]] = Counter()
"""How often one was not, with the reason."""
BREAK = "operations on both sides of a graph break"


def fuse(graph: fx.Graph) -> None:
    """Replaces what can be fused in a graph that has layers of ours, and notes what was found."""
    if not any(node.target in LAYERS for node in graph.nodes):
        return
    reason = getattr(graph.owning_module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        APART[BREAK, reason.reason.splitlines()[0]] += 1
    for each in [*_graphs_in(graph), graph]:
        if not hasattr(each, "fused"):
            each.fused = True  # type: ignore[attr-defined]  # torch calls this for what a graph calls, too
            _fuse(each)


def _graphs_in(graph: fx.Graph) -> list[fx.Graph]:
    """Returns the graphs that a graph calls, as that of a function that the backward pass computes again."""
    called = (getattr(graph.owning_module, str(n.target), None) for n in graph.nodes if n.op == "get_attr")
    return [part.graph for part in called if isinstance(part, fx.GraphModule)]


def _fuse(graph: fx.Graph) -> None:
    casts.drop_round_trips(graph)
    for make in (mlp.fuse_layers, loss.fuse_losses, mlp.replace_functions):
        for name, why in make(graph):
            if why:
                APART[name, why] += 1
            else:
                FUSED[name] += 1


def fuse_all(module: fx.GraphModule) -> None:
    """Does the same in a module that dynamo made and in those that it calls, in the order of inductor."""
    for part in [*module.modules()][::-1]:
        if isinstance(part, fx.GraphModule):
            fuse(part.graph)
            for each in part.modules():
                if isinstance(each, fx.GraphModule):
                    each.recompile()


class Chain:
    """A pass of the user's, and ours after it. A class, because torch pickles it into the key of its cache."""

    def __init__(self, first: Any):
        self.first = first

    def __call__(self, graph: fx.Graph) -> None:
        """Runs both."""
        self.first(graph)
        fuse(graph)


def install() -> None:
    """Makes inductor run the fusions from now on, in this process."""
    config: Any = importlib.import_module("torch._inductor.config")  # dynamo's import takes seconds
    there = config.pre_grad_custom_pass
    if there is fuse or isinstance(there, Chain) or (isinstance(there, list | tuple) and fuse in there):
        return
    allow_in_graph(*REPLACEMENTS)
    if isinstance(there, list | tuple):
        config.pre_grad_custom_pass = [*there, fuse]
    else:
        config.pre_grad_custom_pass = fuse if there is None else Chain(there)
    if hasattr(config, "pre_grad_pass_timing"):
        config.pre_grad_pass_timing = "early"  # to count what is in torch's cache as well
