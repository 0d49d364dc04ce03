"""Products of matrices that are symmetric, computed once for both sides of the diagonal.

    square(x)               x x^T
    quadratic(p, b, c)      b p + c p p, of a p that is symmetric: p p = p p^T

A program multiplies one block of rows by another, with sums in fp32, and stores the result and its mirror image;
blocks below the diagonal are left to their images. That is about half the arithmetic, and what is added is added
before the one rounding. A block is summed in the same order whatever the batch: the bits of a matrix do not depend
on those beside it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import launch

BLOCK, DEPTH = 128, 64  # rows and columns of a program's block, and how much of a sum it loads at a time
WARPS, STAGES = 8, 3


def square(x: Tensor) -> Tensor:
    """Returns x x^T of each matrix of a contiguous batch."""
    return _launch(x, 0.0, 1.0, adds=False)


def quadratic(p: Tensor, b: float, c: float) -> Tensor:
    """Returns b p + c p p of each matrix of a contiguous batch, all of them symmetric."""
    return _launch(p, b, c, adds=True)


def _launch(x: Tensor, b: float, c: float, *, adds: bool) -> Tensor:
    count, size, inner = x.shape
    out = torch.empty((count, size, size), dtype=x.dtype, device=x.device)
    programs = count * triton.cdiv(size, BLOCK) ** 2
    # Triton compiles anew for sizes that are multiples of 16, and for 1.
    kinds = [(number % 16 == 0, number == 1) for number in (size, inner)]
    key = (x.dtype, *kinds, adds, BLOCK, DEPTH, WARPS, STAGES)
    options: dict[str, Any] = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": True}
    if programs:
        launch(_symmetric, key, x, programs, x, out, size, inner, b, c, adds, BLOCK, DEPTH, **options)
    return out


@triton.jit
def _symmetric(
    xs, outs, size, inner, b, c, ADDS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = (size + BLOCK - 1) // BLOCK  # tl.cdiv is compiled, also where this is interpreted
    program = tl.program_id(0)
    matrix = (program // (blocks * blocks)).to(tl.int64)
    down, across = program // blocks % blocks, program % blocks
    if down <= across:
        row, column = down * BLOCK + tl.arange(0, BLOCK), across * BLOCK + tl.arange(0, BLOCK)
        x = xs + matrix * size * inner
        total = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
        for start in range(0, inner, DEPTH):
            k = start + tl.arange(0, DEPTH)
            left = tl.load(
                x + row[:, None] * inner + k[None, :], (row < size)[:, None] & (k < inner)[None, :], other=0.0
            )
            right = tl.load(
                x + column[None, :] * inner + k[:, None],
                (column < size)[None, :] & (k < inner)[:, None],
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision="ieee")
        mask = (row < size)[:, None] & (column < size)[None, :]
        if ADDS:
            added = tl.load(x + row[:, None] * inner + column[None, :], mask, other=0.0)
            total = b * added.to(tl.float32) + c * total
        out = outs + matrix * size * size
        found = total.to(outs.dtype.element_ty)
        tl.store(out + row[:, None] * size + column[None, :], found, mask)
        if down < across:
            tl.store(out + column[None, :] * size + row[:, None], found, mask)
