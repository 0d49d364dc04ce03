"""Tracks the memory of every operation that torch runs on one kind of device, and counts its arithmetic.

A storage counts from the operation that makes it until autograd, modules and optimizers no longer refer to it.
On the meta device operations have shapes and no numbers, so a step of any size is tracked in seconds; on a real
device the same bytes are found.

The `Ledger` lists what a step allocates and frees, in order: what was alive at the peak, and what the allocator
reserves. `reserved` replays the events through the rules of torch's caching allocator: sizes are rounded up to 512
bytes; up to 1 MiB comes out of segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, anything larger has a
segment of its own, rounded to 2 MiB; the smallest free block that is large enough is used, and split.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from halfstep.torch.fp8.linear import CODES
from halfstep.torch.numerics.dtypes import FLOATS, format_of

KIB, MIB = 2**10, 2**20
ROUND, SMALL, MIDDLE = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUND = 2 * MIB, 20 * MIB, 2 * MIB


class Allocation(NamedTuple):
    """A piece of memory."""

    nbytes: int
    phase: str  # forward, backward, update or setup
    shape: tuple[int, ...]


def round_up(nbytes: int) -> int:
    """Returns the size that the allocator accounts for a request of `nbytes`."""
    return -(-nbytes // ROUND) * ROUND


@dataclass
class Ledger:
    """Allocations by key, and events in their order: +key where one is made, -key where it is freed."""

    allocations: dict[int, Allocation] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)

    def allocate(self, nbytes: int, phase: str, shape: tuple[int, ...] = ()) -> int:
        """Notes an allocation; returns its key."""
        key = len(self.allocations) + 1
        self.allocations[key] = Allocation(round_up(nbytes), phase, shape)
        self.events.append(key)
        return key

    def free(self, key: int) -> None:
        """Notes that an allocation is freed."""
        self.events.append(-key)

    def use_briefly(self, nbytes: int, phase: str) -> None:
        """Notes memory that a kernel needs only while it runs."""
        if nbytes:
            self.free(self.allocate(nbytes, phase))

    def at_peak(self) -> list[int]:
        """Returns the keys of what is alive when the most bytes are."""
        sizes = (self.allocations[abs(event)].nbytes * (1 if event > 0 else -1) for event in self.events)
        totals = [*accumulate(sizes)]
        past = self.events[: totals.index(max(totals)) + 1] if totals else []
        freed = {-event for event in past if event < 0}
        return [event for event in past if event > 0 and event not in freed]

    def by_role(self, role: Callable[[int, Allocation], str]) -> dict[str, int]:
        """Returns the bytes of each role at the peak."""
        found: Counter[str] = Counter()
        for key in self.at_peak():
            found[role(key, self.allocations[key])] += self.allocations[key].nbytes
        return dict(found)

    def reserved(self) -> int:
        """Returns what torch's allocator takes from the device for these events."""
        blocks: dict[int, tuple[bool, int, int]] = {}
        pools = {True: _Pool(), False: _Pool()}
        for event in self.events:
            if event > 0:
                size = self.allocations[event].nbytes
                blocks[event] = (size <= SMALL, *pools[size <= SMALL].take(size))
            elif -event in blocks:
                small, start, size = blocks.pop(-event)
                pools[small].give(start, size)
        return sum(pool.total for pool in pools.values())


class _Pool:
    """Segments of memory with free blocks; each segment's addresses are far from those of the next."""

    def __init__(self) -> None:
        self.total, self._next = 0, 0
        self.free: dict[int, int] = {}  # first address of a free block -> its size

    def take(self, size: int) -> tuple[int, int]:
        fitting = [(length, start) for start, length in self.free.items() if length >= size]
        if fitting:
            length, start = min(fitting)
            del self.free[start]
        else:
            length = _segment(size)
            start, self._next = self._next, self._next + 2 * length
            self.total += length
        left = length - size
        if left >= (ROUND if size <= SMALL else SMALL + 1):  # what is smaller stays with the block
            self.free[start + size] = left
            return start, size
        return start, length

    def give(self, start: int, size: int) -> None:
        while (after := self.free.pop(start + size, None)) is not None:
            size += after
        for other, length in self.free.items():
            if other + length == start:
                self.free[other] = length + size
                return
        self.free[start] = size


def _segment(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIDDLE else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


# --- the tracker

_ATEN = torch.ops.aten
# Ours, of several matmuls (loss/): a linear layer with its loss in chunks, and
# the gradients of one; what is multiplied, if not what is given.
GRADIENTS = "coded_gradients"
FUSED = {
    "linear_cross_entropy": "",
    **dict.fromkeys(("narrow_cross_entropy", "coded_cross_entropy", GRADIENTS), "e4m3"),
}
# Operations that launch nothing.
_FREE = {"detach", "alias", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh"}


class Like(NamedTuple):
    """What a tensor looked like."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Work:
    """One kernel, or several that are the same."""

    kind: str  # matmul, attention or bytes
    format: str  # dtype of the operands; of large other operations, after their name
    shape: tuple[int, ...]  # of a matmul: rows, summed, columns; of other operations, of their largest tensor
    flops: int
    nbytes: int  # that it reads and writes; of a compiled cast to fp8, those that a copy moves in its time
    phase: str
    call: tuple[Any, Any, Any] | None = None  # function and arguments, tensors as `Like`


class Tracker(TorchDispatchMode):
    """What a step does on a kind of device, while it is entered."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.phase = device, "setup"
        self.ledger, self.work = Ledger(), list[Work]()
        self.keys: dict[int, int] = {}  # address of a storage -> its allocation
        self._refs: dict[int, Any] = {}
        self._gone: set[int] = set()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, what happens belongs to a phase."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code is traced below this mode."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and notes what it made. torch's fused optimizers have no kernel for meta."""
        if self.device == "meta" and function._schema.name.startswith("aten::_fused_"):
            return None
        if function is _ATEN._local_scalar_dense.default and args[0].device.type == "meta":
            # Code that reads a number to decide: models ask whether all of a mask is plain, which is usual, and
            # drivers of optimizers whether the step is to be skipped, which is not.
            usual = self.phase != "update"
            return usual if args[0].dtype is torch.bool else int(usual)
        out = function(*args, **(kwargs or {}))
        self.note(function, args, kwargs or {}, out)
        return out

    def note(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes an operation that was run."""
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.device.type == self.device]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = function._schema.name.partition("::")[2]
        view = bool(made) and all(self.follow(t) is False for t in made)
        if not made or (view and not function._schema.is_mutable) or name in _FREE:
            return
        self.work += works_of(function, name, given, made, args, kwargs, out, self.phase)
        self.ledger.use_briefly(memory_inside(name, args), self.phase)

    def launch(self, kernel: Any, key: Any, beside: Tensor, programs: int, *args: Any, **options: Any) -> None:
        """Notes a kernel of halfstep's own. Those of updates are counted by their parameters."""
        if self.phase != "update":
            nbytes = sum(t.numel() * t.element_size() for t in args if isinstance(t, Tensor))
            self.work.append(Work("bytes", "", (), 0, nbytes, self.phase))

    def follow(self, tensor: Tensor) -> bool:
        """Notes the memory of a tensor; whether it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.keys:
            return False
        shape = tuple(tensor.shape)
        key = self.keys[address] = self.ledger.allocate(storage.nbytes(), self.phase, shape)
        self._refs[address] = weakref.ref(storage, lambda _: self._forget(address, key))
        return True

    def key_of(self, tensor: Tensor) -> int | None:
        """Returns the allocation that a tensor is in."""
        return self.keys.get(tensor.untyped_storage()._cdata)

    def drop(self, key: int) -> None:
        """Notes that memory is freed, now or before the tensor that is in it is gone."""
        if key not in self._gone:
            self._gone.add(key)
            self.ledger.free(key)

    def _forget(self, address: int, key: int) -> None:
        self.keys.pop(address, None)
        self._refs.pop(address, None)
        self.drop(key)


def _works_of_fused(name: str, args: Any, phase: str) -> list[Work]:
    """Describes what an operation of `FUSED` does: matmuls, and passes over the logits or their codes."""
    rows, w = args[1:3] if name == GRADIENTS else args[:2]
    (tokens, width), vocabulary, dtype = rows.shape, w.shape[0], FUSED[name] or _format(rows.dtype)
    numbers, flops = tokens * vocabulary, 2 * tokens * width * vocabulary
    shapes = ((tokens, width, vocabulary), (tokens, vocabulary, width), (vocabulary, tokens, width))
    if name == GRADIENTS:
        wanted = [shape for shape, needed in zip(shapes[1:], args[6], strict=True) if needed]
        products = [Work("matmul", dtype, shape, flops, numbers, phase) for shape in wanted]
        return [*products, Work("bytes", "", (), 0, 2 * numbers * args[6][1], phase)]
    logits = numbers * max(2, rows.element_size())  # also of codes
    return [
        *(Work("matmul", dtype, shape, flops, logits, phase) for shape in shapes),
        Work("bytes", "", (), 0, 2 * logits, phase),
    ]


def memory_inside(name: str, args: Any) -> int:
    """Returns the bytes that an operation holds while it runs: of `FUSED`, logits of a chunk, and codes."""
    if "attention" in name and "backward" in name:
        return 4 * int(args[1].numel())  # the gradient of the queries, which is summed in fp32
    if name not in FUSED:
        return 0
    rows, w = args[1:3] if name == GRADIENTS else args[:2]
    tokens = rows.shape[0] if name == GRADIENTS else -(-rows.shape[0] // args[4])
    numbers = tokens * w.shape[0]
    logits = 0 if name == GRADIENTS else numbers * max(2, rows.element_size())
    if name == "narrow_cross_entropy":
        return logits + min(2 * numbers, CODES)
    if not FUSED[name]:
        return logits
    # Transposed codes of weight and input; of the gradient, where its tokens do not fit beside its own.
    return logits + w.numel() + tokens * rows.shape[1] + (min(numbers, CODES) if tokens > w.shape[0] else 0)


def works_of(
    function: Any, name: str, given: list[Tensor], made: list[Tensor], args: Any, kwargs: Any, out: Any, phase: str
) -> list[Work]:
    """Describes an operation, which may stand for several kernels."""
    if name in FUSED:
        return _works_of_fused(name, args, phase)
    nbytes = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*given, *made)}.values())
    count = flop_registry.get(function._overloadpacket)
    if count is None and nbytes < LARGE:
        return [Work("bytes", "", (), 0, nbytes, phase)]
    if count is None:
        return [_large(function, name, [*given, *made], args, kwargs, nbytes, phase)]
    if "attention" in name:
        # Kernels skip what a causal mask hides; as if it did not, in config/model.py and torch's counter, which
        # in torch 2.11 takes no grouped heads. The backward pass multiplies five times, the scores again.
        first, products, backward = (1, 5, "backward") if "backward" in name else (0, 2, "forward")
        queries, keys = args[first], args[first + 1]
        dtype = _format(queries.dtype)  # others, such as sums of rows, are fp32
        flops = products * 2 * queries.numel() * keys.shape[-2]
        return [Work("attention", dtype, (*queries.shape, ATTENTION[backward]), flops, nbytes, phase)]
    matrices = [t for t in given if t.ndim >= 2]
    flops = int(count(*args, **kwargs, out_val=out))
    a, b = [t for t in matrices if "scaled" not in name or t.element_size() == 1 or t is matrices[0]][-2:]
    lead = a.shape[0] if a.ndim == 3 else 1
    shape = (lead * a.shape[-2], a.shape[-1], b.shape[-1])
    # The two formats of fp8 are equally fast.
    return [Work("matmul", "e4m3" if a.element_size() == 1 else _format(a.dtype), shape, flops, nbytes, phase)]


def _large(
    function: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any, nbytes: int, phase: str
) -> Work:
    largest = max(tensors, key=Tensor.numel)
    dtypes = " ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    strided = "" if all(t.is_contiguous() for t in tensors) else " strided"
    looks = pytree.tree_map_only(Tensor, lambda t: Like(tuple(t.shape), t.stride(), t.dtype), (args, kwargs))
    return Work("bytes", f"{name} {dtypes}{strided}", tuple(largest.shape), 0, nbytes, phase, (function, *looks))


LARGE = 2**20  # bytes; smaller operations are not timed one by one
ATTENTION = {"forward": 1, "backward": 2}  # the last number of a shape of attention


def _format(dtype: torch.dtype) -> str:
    known = dtype in FLOATS or (dtype.itemsize == 1 and dtype.is_floating_point)
    return str(format_of(dtype)) if known else str(dtype)
