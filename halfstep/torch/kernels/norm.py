"""The norm of many tensors in one pass over them: torch makes a scalar for each, and stacks them.

A program adds the squares of one chunk of one tensor, in fp32; what it takes, and from where, is in tables as in
adamw.py. The partial sums are added by torch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import CAPTURED, launch
from halfstep.torch.kernels.adamw import chunks_of, fill, to_device

CHUNK, WARPS = 4096, 8


class Norm:
    """The norm of fp32 tensors of given sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._owners, self._chunks = chunks_of(sizes, CHUNK, device)
        self._sizes = to_device(torch.tensor(sizes), device)
        self._table = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        self._addresses: tuple[int, list[int]] = (0, [])  # in the table, and the epoch of CUDA graphs then

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the norm of all tensors together."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._addresses != (CAPTURED.epoch, addresses):
            fill(self._table, 0, addresses)
            self._addresses = CAPTURED.epoch, addresses
        programs = self._owners.numel()
        partial = torch.empty(programs, device=self._table.device)
        given = (self._table, self._sizes, self._owners, self._chunks, partial, CHUNK)
        launch(_squares, CHUNK, partial, programs, *given, num_warps=WARPS, enable_fp_fusion=True)
        return partial.sum().sqrt()


@triton.jit
def _squares(table, sizes, owners, chunks, partial, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    mine = tl.load(owners + program)
    at = tl.load(chunks + program).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    values = tl.multiple_of(tl.load(table + mine).to(tl.pointer_type(tl.float32)), 16)
    x = tl.load(values + at, at < tl.load(sizes + mine), other=0.0)
    tl.store(partial + program, tl.reduce(x * x, 0, add))


@triton.jit
def add(a, b):
    """For tl.reduce: tl.sum is interpreted only if Triton was imported after the interpreter was asked for."""
    return a + b
