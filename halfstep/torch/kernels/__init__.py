"""Kernels of our own, in Triton, where torch and its compiler have none that does the same work in as few passes.

Each is imported when it is first needed: only torch's builds for NVIDIA GPUs come with Triton. Its interpreter
(`TRITON_INTERPRET=1`) runs them on a CPU, which is how the tests check their bits.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def reachable(tensors: Sequence[Tensor]) -> list[bool]:
    """Returns which tensors a kernel may reach by address: dense, contiguous, aligned, on an NVIDIA GPU."""
    return [t.is_cuda and t.is_contiguous() and t.data_ptr() % 16 == 0 and has_triton() for t in tensors]
