"""Whether what runs now is being compiled.

`torch.compiler.is_compiling()` says so where dynamo interprets the code. What dynamo puts into its graph as it is
(linear.py) runs later, when autograd traces that graph, and there torch 2.11 says no and 2.13 yes. So the caller,
whom dynamo interprets, says it, and it holds for what is called inside.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Here(threading.local):
    traced = False


_here = _Here()


def compiling() -> bool:
    """Whether this call becomes a part of compiled code."""
    return torch.compiler.is_compiling() or _here.traced


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Inside, what runs is being compiled if `on`."""
    before, _here.traced = _here.traced, on
    try:
        yield
    finally:
        _here.traced = before
