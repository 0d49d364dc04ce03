"""The memory and the work of compiled code: torch.compile's graphs, and the kernels that inductor makes of them.

**Which buffers there are.** dynamo, AOTAutograd and the partitioner run as they do for inductor, so the forward
pass keeps for the backward pass what it keeps under inductor. Of each graph, these have memory (as inductor's
lowering decides):

1.  results of matmuls, attention and other kernels that are called, and of reductions;
2.  pointwise results that such a kernel reads, or that the graph returns;
3.  pointwise results that several operations read, if they are made of more than READS buffers or OPERATIONS
    operations and if no one kernel can hold them and all that reads them.

Other pointwise results are computed where they are read.

**Which kernels there are.** One kernel makes all results that loop over the same numbers and read a common buffer,
and reads each buffer once.

**When a buffer is freed.** After the last kernel that reads it. A pointwise kernel writes over a buffer of the
same size that nothing reads any more, unless it is so long that inductor cuts it: its last part then writes over
the result of the first part, which has memory of its own.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from halfstep.torch.fusion import fuse_all
from halfstep.torch.instruments.planning.tracker import Tracker, Work, memory_inside, round_up, works_of

# inductor's realize_reads_threshold, realize_acc_reads_threshold and realize_opcount_threshold
READS, ALL_READS, OPERATIONS = 4, 8, 30
# A kernel that makes fp8 codes, or the amax that scales them, takes as long as a copy of CASTS times its bytes:
# on an H200 four such kernels took 626 us for what a copy moves in 448 (docs/measurements/kernels.md).
CASTS = 1.4
_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "t", "transpose", "expand", "slice", "select", "squeeze",
    "unsqueeze", "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "diagonal",
    "lift_fresh_copy", "broadcast_in_dim",
}  # fmt: skip
# Kernels that are called, besides those that have arithmetic in torch's table.
_CALLED = (
    "scatter_add", "scatter_reduce", "index_put", "index_add", "embedding_dense", "sort", "topk", "cumsum",
    "convolution",
)  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "var_mean", "var", "prod", "argmax", "argmin", "any", "all",
}  # fmt: skip


def backend(tracker: Tracker) -> Callable[..., Any]:
    """Returns a backend for torch.compile whose code allocates what inductor's would, and computes nothing."""
    from torch._inductor.decomposition import select_decomp_table

    def partition(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _remove_aliases(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        return partial(_play, Kernels(graph), tracker)

    def compile(graph: fx.GraphModule, inputs: Any) -> Any:
        fuse_all(graph)
        with torch._functorch.config.patch(donated_buffer=False):
            made = aot_autograd(
                fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, partition_fn=partition,
                decompositions=select_decomp_table(),
            )  # fmt: skip
            return made(graph, inputs)

    return compile


def _remove_aliases(module: fx.GraphModule) -> None:
    """Removes operations that do nothing, as inductor does before the partitioner, which would keep both."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _name(node) in ("alias", "detach"):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


class Kernels:
    """The buffers of a graph, where each is made, and by which kernels each is read."""

    def __init__(self, module: fx.GraphModule):
        self.nodes = list(module.graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.output = list(next(node for node in self.nodes if node.op == "output").args[0])
        self.levels: dict[fx.Node, int] = {}
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}  # buffers that a node reads, itself if it is one
        self.operations: dict[fx.Node, int] = {}  # to compute a node where it is read: 1 to load a buffer
        self.cuts: dict[fx.Node, frozenset[int]] = {}  # bytes of the parts that inductor cuts a long kernel into
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # what the kernel that makes a buffer reads
        self.buffers: list[fx.Node] = []
        self.several: list[fx.Node] = []  # kernels with several results, which are buffers
        returned = {_root(node) for node in self.output if isinstance(node, fx.Node)}
        self.narrow = any(map(_is_narrow, self.nodes))
        computing = [node for node in self.nodes if node.op != "output"]
        for node in computing:
            below = max((self.levels[_root(n)] for n in node.all_input_nodes), default=0)
            self.levels[node] = below + (is_called(node) or is_barrier(node))
        for node in computing:
            self._place(node, node in returned)
        last = {read: place for place, buffer in enumerate(self.buffers) for read in self.sources[buffer]}
        self.ends: dict[int, list[fx.Node]] = {}  # buffers whose last reader is the one at a place
        for node, at in last.items():
            if node not in returned:
                self.ends.setdefault(at, []).append(node)
        self.unread = {b for b in self.buffers if b not in last and b not in returned}

    def casts(self, buffer: fx.Node) -> bool:
        """Whether a buffer holds fp8 codes, or the amax that scales them."""
        return _is_narrow(buffer) or (self.narrow and _name(buffer) == "amax")

    def _place(self, node: fx.Node, returned: bool) -> None:
        given = [_root(n) for n in node.all_input_nodes]
        if node.op != "call_function":
            self.reads[node] = frozenset([node])
            return
        if _root(node) is not node:
            return
        if node.target is operator.getitem:  # one of several results, each with memory of its own
            self.sources[node], self.reads[node] = self.reads[given[0]], frozenset([node])
            self.buffers.append(node)
            return
        sources = frozenset().union(*(self.reads[n] for n in given)) if given else frozenset()
        scalars = sum(isinstance(arg, (int, float)) for arg in node.args)
        self.operations[node] = 1 + scalars + sum(self.operations.get(n, 1) for n in given)
        held = [n for n in given if n in self.cuts and n not in self.sources]
        self.cuts[node] = frozenset().union(*(self.cuts[n] for n in held))
        if isinstance(node.meta.get("val"), (tuple, list)):
            self.reads[node] = sources
            self.several.append(node)
        elif is_called(node) or _is_reduction(node) or returned or self._is_realized(node, sources):
            self.sources[node] = sources
            self.buffers.append(node)
            self.reads[node] = frozenset([node])
            del self.operations[node]
        else:
            self.reads[node] = sources
            if len(sources) > ALL_READS or self.operations[node] > OPERATIONS:
                self.cuts[node] |= {round_up(nbytes_of(node))}
                del self.operations[node]

    def _is_realized(self, node: fx.Node, sources: frozenset[fx.Node]) -> bool:
        users = _users(node)
        if any(is_called(user) and not _is_base(node, user) for user in users):
            return True
        if len(users) < 2 or not (len(sources) > READS or self.operations[node] > OPERATIONS):
            return False
        # It has memory if kernels at several levels read or reduce it; else one kernel has it and its readers.
        return any(is_barrier(user) for user in users) or len({self.levels[user] for user in users}) > 1


def _play(kernels: Kernels, tracker: Tracker, *inputs: Any) -> Any:
    """Records what the kernels of a graph allocate and free; returns results of the right sizes.

    1.  Buffers are allocated in order, each after what its kernel may write over has been freed.
    2.  The work of kernels that are called is added, then that of each fused kernel.
    3.  Results are freed here and made again as tensors, which own the memory from then on.
    """
    ledger, phase = tracker.ledger, tracker.phase
    keys = dict(zip(kernels.inputs, map(partial(_freed_with, tracker), kernels.inputs, inputs), strict=True))
    live: dict[fx.Node, int] = {node: key for node, key in keys.items() if key is not None}
    for place, buffer in enumerate(kernels.buffers):
        dying = [node for node in kernels.ends.get(place, ()) if node in live]
        size, is_one = nbytes_of(buffer), buffer.target is operator.getitem  # of several results
        maker = buffer.all_input_nodes[0] if is_one else buffer
        if not is_called(maker):
            same = [node for node in dying if ledger.allocations[live[node]].nbytes == round_up(size)]
            same = [] if round_up(size) in kernels.cuts[maker] else same
            for node in same[:1]:
                tracker.drop(live.pop(node))
        live[buffer] = ledger.allocate(size, phase, _shape(buffer))
        if not is_one or buffer.args[1] == 0:
            ledger.use_briefly(memory_inside(_name(maker), _values(maker.args)), phase)
        for node in [*dying, *([buffer] if buffer in kernels.unread else [])]:
            if node in live:
                tracker.drop(live.pop(node))
    made = [*(buffer for buffer in kernels.buffers if buffer.target is not operator.getitem), *kernels.several]
    for node in filter(is_called, made):
        tracker.work += _works(kernels, node, phase)
    for group in _group_fused([node for node in made if not is_called(node)], kernels):
        read = frozenset().union(*(_read_by(kernels, node) for node in group)).difference(group)
        moved = sum(map(nbytes_of, read)) + sum(map(nbytes_of, group))
        moved = int(CASTS * moved) if any(map(kernels.casts, group)) else moved
        tracker.work.append(Work("bytes", "", (), 0, moved, phase))
    for node, key in live.items():
        if node not in keys:
            ledger.free(key)  # its tensor is made next
    return _results(kernels, tracker, inputs)


def _group_fused(nodes: Sequence[fx.Node], kernels: Kernels) -> list[list[fx.Node]]:
    """Returns groups of results that inductor makes in one kernel: equal loops that share a buffer."""
    with_another = {node: node for node in nodes}

    def first(node: fx.Node) -> fx.Node:
        while with_another[node] is not node:
            node = with_another[node]
        return node

    readers: dict[Any, fx.Node] = {}
    for node in nodes:
        length = math.prod(_shape(node.all_input_nodes[0] if _is_reduction(node) else node))
        loops = (kernels.levels[node], is_barrier(node), length)
        for buffer in (node, *_read_by(kernels, node)):
            with_another[first(node)] = first(readers.setdefault((loops, buffer), node))
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(first(node), []).append(node)
    return list(groups.values())


def _read_by(kernels: Kernels, node: fx.Node) -> frozenset[fx.Node]:
    return kernels.sources.get(node, kernels.reads[node])


def _results(kernels: Kernels, tracker: Tracker, inputs: Sequence[Any]) -> list[Any]:
    bases: dict[fx.Node, Tensor] = dict(zip(kernels.inputs, inputs, strict=True))
    results: list[Any] = []
    with _disable_current_modes():
        for node in kernels.output:
            value = node.meta["val"] if isinstance(node, fx.Node) else node
            if not isinstance(value, Tensor):
                results.append(value)
                continue
            root = _root(node)
            if root not in bases:
                whole = root.meta["val"]
                bases[root] = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
                tracker.follow(bases[root])
            base = bases[root]
            if node is not root and base.dtype == value.dtype:
                base = base.as_strided(value.shape, value.stride(), value.storage_offset())
            results.append(base)
    return results


def _freed_with(tracker: Tracker, node: fx.Node, given: Any) -> int | None:
    """Returns the allocation of an input that only this graph still needs, as the forward pass kept it."""
    if not isinstance(given, Tensor) or str(node.target).startswith(("primals_", "tangents_")):
        return None
    key = tracker.key_of(given)
    return key if key is not None and tracker.ledger.allocations[key].phase == "forward" else None


def _works(kernels: Kernels, buffer: fx.Node, phase: str) -> list[Work]:
    function: Any = buffer.args[0] if buffer.target is auto_functionalized_v2 else buffer.target
    if not hasattr(function, "_schema"):
        moved = nbytes_of(buffer) + sum(map(nbytes_of, _read_by(kernels, buffer)))
        return [Work("bytes", "", (), 0, moved, phase)]
    name = str(function._schema.name).partition("::")[2]
    args, kwargs = _values((buffer.args, buffer.kwargs))
    values = [n.meta["val"] for n in buffer.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    out = buffer.meta["val"]
    made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
    if function is not buffer.target:
        made = made[: _results_of(buffer)]
    return works_of(function, name, values, made, args, kwargs, out, phase)


def _values(args: Any) -> Any:
    """Returns arguments with the tensors that their nodes stand for."""
    return fx.map_arg(args, lambda node: node.meta["val"])


def _name(node: fx.Node) -> str:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return "" if schema is None else str(schema.name).partition("::")[2]


def is_called(node: fx.Node) -> bool:
    """Whether an operation is a kernel of its own, which inductor calls or fuses with nothing."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    packet = getattr(node.target, "_overloadpacket", None)
    if packet in flop_registry:
        return True
    schema, name = getattr(node.target, "_schema", None), _name(node)
    own = schema is None or str(schema.name).partition("::")[0] not in ("aten", "prims")
    return own or any(part in name for part in _CALLED)


def is_barrier(node: fx.Node) -> bool:
    """Whether a kernel cannot continue with the result: a sum over other numbers than those of a row."""
    if not _is_reduction(node):
        return False
    given = node.all_input_nodes[0].meta["val"]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (list, tuple)) or not dims:
        return True
    return any(dim % max(1, given.ndim) != given.ndim - 1 for dim in dims)


def _is_reduction(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node) in _REDUCTIONS


def _is_base(node: fx.Node, user: fx.Node) -> bool:
    """Whether a scatter starts from this node, which is then computed into the scatter's result."""
    return "index_put" in _name(user) or ("scatter" in _name(user) and user.args[0] is node)


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function":
        written = _written_base(node)
        if written is not None:
            node = written
            continue
        of = node.args[0] if node.args else None
        if _name(node) not in _VIEWS and not (node.target is operator.getitem and _name(of) in _VIEWS):  # type: ignore[arg-type]
            break
        node = of  # type: ignore[assignment]
    return node


def _written_base(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a node is a written version of: inductor lets operations write in place."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    of, place = node.args[0], int(node.args[1])  # type: ignore[arg-type]
    if of.target is not auto_functionalized_v2 or place < _results_of(of):
        return None
    bases: Any = of.kwargs["_all_bases"]
    return bases[place - _results_of(of)]  # type: ignore[no-any-return]


def _results_of(node: fx.Node) -> int:
    """Returns how many results an in-place operation has before the tensors that it writes to."""
    operation: Any = node.args[0]
    return max(1, len(operation._schema.returns))


def _users(node: fx.Node) -> list[fx.Node]:
    """Returns what reads a node, itself or a view of it."""
    found = []
    for user in node.users:
        found += _users(user) if user.op == "call_function" and _root(user) is not user else [user]
    return found


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def nbytes_of(node: fx.Node) -> int:
    """Returns the bytes of a node's results."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(t.untyped_storage().nbytes() for t in values if isinstance(t, Tensor))
