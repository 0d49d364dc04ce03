"""Whether the code that runs now is being compiled, or transformed by torch.func.

`torch.compiler.is_compiling()` is true where dynamo interprets the code. What dynamo puts into its graph
unopened (fp8/linear.py) runs later, when autograd traces that graph, and there torch 2.11 returns False and 2.13
True. So the caller, which dynamo interprets, passes the answer on, and it holds for everything called inside.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad


class _Local(threading.local):
    traced = False


_local = _Local()


def compiling() -> bool:
    """Whether this call becomes a part of compiled code."""
    return torch.compiler.is_compiling() or _local.traced


def transforming() -> bool:
    """Whether torch.func (vmap, grad, jvp, ...) or forward-mode differentiation transforms this call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def recording() -> bool:
    """Whether the backward pass that runs now is recorded, to be differentiated again: `create_graph=True`."""
    return torch.is_grad_enabled() and not compiling()


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Makes `compiling` return True inside, if `on`."""
    before, _local.traced = _local.traced, on
    try:
        yield
    finally:
        _local.traced = before
