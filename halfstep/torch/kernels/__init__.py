"""Kernels of our own, in Triton, where torch and its compiler have none that do the same work in as few passes.

Each is imported where it is first needed: Triton comes with torch's builds for NVIDIA GPUs and not with others.
Its interpreter (`TRITON_INTERPRET=1`) runs them on a CPU, which is how the tests hold them to their bits.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def reaches(tensor: Tensor) -> bool:
    """Whether a kernel may be handed the address of this tensor: dense, contiguous, aligned, on an NVIDIA GPU."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and has_triton()
