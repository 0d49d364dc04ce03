"""Times the kernels of a traced step on this machine, for a machine file."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from halfstep.config.machines import Timed
from halfstep.core.arrays.measure import BUDGET
from halfstep.core.formats import TF32, parse
from halfstep.torch.instruments.planning.tracker import ATTENTION, Like, Work
from halfstep.torch.measure import device_seconds, measure
from halfstep.torch.numerics.dtypes import as_device, dtype_of

COPIED = 2**26  # elements that are copied to time the memory
ROUNDS, REPEATS = 5, 5
TOKENS = 64  # distinct indexes; no vocabulary is smaller
INDEXED = ("embedding", "nll_loss", "cross_entropy")  # operations that take them


def time_work(work: Sequence[Work], device: str, *, copied: int = COPIED) -> list[Timed]:
    """Times how fast memory is copied, and each different matmul, attention and large operation of some work."""
    place = as_device(device)
    found = [Timed("bytes", "", (copied,), _copy(copied, place), 8 * copied)]
    for item in {(w.kind, w.format, w.shape): w for w in work if w.format}.values():
        if item.call is not None:
            found += _time_again(item, place)
        elif item.kind == "matmul":
            fmt = parse(item.format)
            timings = measure(place, [fmt], budget=BUDGET, shapes=[item.shape])  # type: ignore[list-item]
            seconds = [t.typical for t in timings if t.format == fmt and t.format != TF32]
            found += [Timed("matmul", item.format, item.shape, seconds[0], item.flops)] if seconds else []
        else:
            found.append(Timed("attention", item.format, item.shape, _attention(item, place), item.flops))
    return found


def _copy(numbers: int, device: torch.device) -> float:
    source = torch.empty(numbers, device=device)
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), device)


def _time_again(item: Work, device: torch.device) -> list[Timed]:
    """Times an operation on tensors like those it was called with; returns nothing if it cannot be repeated."""
    function, *given = item.call  # type: ignore[misc]
    leaves, spec = pytree.tree_flatten(given, is_leaf=lambda leaf: isinstance(leaf, Like))
    indexes = [leaf for leaf in leaves if isinstance(leaf, Like) and leaf.dtype in (torch.int32, torch.int64)]
    if indexes and not any(part in item.format for part in INDEXED):
        return []
    made = [_tensor_like(leaf, device) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(made, spec)
    with torch.no_grad():
        try:
            seconds = _time(lambda: function(*args, **kwargs), device)
        except (RuntimeError, TypeError):
            return []
    return [Timed("bytes", item.format, item.shape, seconds, item.nbytes)]


def _tensor_like(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.device):
        return device
    if not isinstance(leaf, Like):
        return leaf
    tensor = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device)
    if leaf.dtype.is_floating_point:
        return tensor.fill_(0.5)
    return tensor.copy_((torch.arange(tensor.numel(), device=device) % TOKENS).view(leaf.shape))


def _attention(item: Work, device: torch.device) -> float:
    q, k, v = (
        torch.randn(item.shape[:4], device=device, dtype=dtype_of(parse(item.format))).requires_grad_()
        for _ in range(3)
    )
    if item.shape[4] == ATTENTION["forward"]:
        with torch.no_grad():
            return _time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    g = torch.ones_like(y)
    return _time(lambda: torch.autograd.grad(y, (q, k, v), g, retain_graph=True), device)


def _time(run: Callable[[], Any], device: torch.device) -> float:
    def repeat(count: int) -> None:
        for _ in range(count):
            run()

    taken = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            with torch.cuda.device(device):  # the events are of its stream
                taken.append(device_seconds(repeat, REPEATS))
        else:
            begun = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begun)
    return median(taken[1:])
