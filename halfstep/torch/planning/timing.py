"""Times the kernels of a traced step on this machine, for a machine file."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import TF32, parse
from halfstep.core.measure import BUDGET
from halfstep.torch import memory
from halfstep.torch.dtypes import as_device, dtype_of
from halfstep.torch.measure import measure
from halfstep.torch.planning.tracker import ATTENTION, Work

COPIED = 2**26  # numbers that are copied to time the memory
ROUNDS = 5


class Taken(NamedTuple):
    """A kernel, and the seconds that it takes."""

    kind: str
    format: str
    shape: tuple[int, ...]
    seconds: float
    work: float


def capacity(device: str) -> int:
    """Returns the bytes that a device has."""
    return memory.capacity(as_device(device)) or 0


def time_work(work: Sequence[Work], device: str, *, copied: int = COPIED) -> list[Taken]:
    """Times each different matmul and attention of some work, and how fast memory is copied."""
    place, found = as_device(device), list[Taken]()
    for item in {(w.kind, w.format, w.shape): w for w in work if w.kind != "bytes"}.values():
        if item.kind == "matmul":
            fmt = parse(item.format)
            timings = measure(place, [fmt], budget=BUDGET, shapes=[item.shape])  # type: ignore[list-item]
            seconds = [t.typical for t in timings if t.format == fmt and t.format != TF32]
            found += [Taken("matmul", item.format, item.shape, seconds[0], item.flops)] if seconds else []
        else:
            found.append(Taken("attention", item.format, item.shape, _attention(item, place), item.flops))
    source = torch.empty(copied, device=place)
    target = torch.empty_like(source)
    found.append(Taken("bytes", "", (copied,), _time(lambda: target.copy_(source), place), 8 * copied))
    return found


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
    taken = []
    for _ in range(ROUNDS + 1):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(10 if device.type != "cpu" else 1):
            kept: Tensor | Any = run()
        _wait(device)
        taken.append((time.perf_counter() - begun) / (10 if device.type != "cpu" else 1))
    del kept
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
