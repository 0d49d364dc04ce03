"""Reads the formats of compiled code from the graphs that dynamo traces, before anything is compiled.

A node has the function as the model's code calls it, the module and the line, and stand-ins of its tensors with
dtype and shape. Nothing runs, and nothing is added to a graph: values inside compiled code cannot be seen.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from halfstep.torch.instruments.collect.operations import KINDS, Operations, Where, where_of
from halfstep.torch.instruments.collect.patches import Patches, is_watched
from halfstep.torch.instruments.collect.tensors import format_name, is_library

_ROOT = re.compile(r"^[LG]\['\w+'\]")
_INDEX = re.compile(r"\._modules\['(\w+)'\]|\['?(\w+)'?\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def install(patches: Patches, see: Callable[[fx.GraphModule], None], on_compile: Callable[[], None]) -> None:
    """Calls `see` with each graph compiled from now on; imports dynamo, which is slow, only if the script does.

    Calls `on_compile` if a module is compiled: if a fitting graph exists already, there is none to see.
    """

    def hook_graphs() -> None:
        from torch._dynamo.output_graph import OutputGraph

        before = OutputGraph.call_user_compiler
        if not is_watched(before):

            def call_user_compiler(graph: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
                see(module)
                return before(graph, module, *args, **kwargs)

            call_user_compiler.__halfstep_watched__ = True  # type: ignore[attr-defined]
            patches.put(OutputGraph, "call_user_compiler", call_user_compiler)

    def compile(original: Any, *args: Any, **kwargs: Any) -> Any:
        hook_graphs()
        given = args[0] if args else kwargs.get("model")
        if isinstance(getattr(given, "__self__", given), nn.Module):
            on_compile()
        return original(*args, **kwargs)

    if "torch._dynamo.output_graph" in sys.modules:
        hook_graphs()
    patches.wrap(torch, "compile", compile)


def graphs_compiled() -> int:
    """Returns how many graphs dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0


def read(operations: Operations, module: fx.GraphModule) -> None:
    """Adds every call of a graph to the operations."""
    around = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
    # What the backward pass of compiled code casts to: as autocast around the call does, unless set.
    asked = getattr(sys.modules.get("torch._functorch.config"), "backward_pass_autocast", "")
    same = around if asked == "same_as_forward" else None
    backward = None if same is None else format_name(torch.get_autocast_dtype(same))
    autocast = around is not None
    for node in _calls(module):
        autocast = autocast or "enter_autocast" in str(node.target)
        function = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
        given = ([*node.args], {**node.kwargs}, node)
        args, kwargs, result = tree_map_only(fx.Node, lambda each: each.meta.get("example_value"), given)
        where, place = _where(node), partial(_place, node)
        operations.see(function, (args, kwargs), result, where, place, autocast=autocast, values=False)
        wide = isinstance(result, Tensor) and result.dtype == torch.float32 and result.requires_grad
        if wide and backward is not None and KINDS.get(function) == "matmul":
            operations.see_backward(where, backward, place)


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            yield from (node for node in each.graph.nodes if node.op in ("call_function", "call_method"))


def _where(node: fx.Node) -> Where:
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    if not stack:
        return Where()
    path, kind = stack[-1]
    name = _INDEX.sub(lambda m: f".{m[1] or m[2]}", _ROOT.sub("", path)).strip(".")
    name = ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_modules"))
    return where_of(name, kind if isinstance(kind, str) else kind.__name__)


def _place(node: fx.Node) -> str | None:
    lines = [(file, line) for file, line in _LINE.findall(node.stack_trace or "") if not is_library(file)]
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else None
