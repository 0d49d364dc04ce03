"""The transpose of a matrix of 8-bit codes: an fp8 matmul takes both operands with the summed dimension last.

Four rows of four bytes are transposed in registers, so that threads exchange words of four bytes: byte by byte,
the exchange through shared memory would take longer than reading and writing each byte once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import launch

BLOCK = 32  # words: 128 bytes, a line of the cache, in each direction


def transpose(x: Tensor, out: Tensor) -> None:
    """Writes x^T to `out`: both of one byte per element, rows contiguous, sizes and strides multiples of four."""
    xs, ys = x.view(torch.int32), out.view(torch.int32)
    groups, words = x.shape[0] // 4, xs.shape[1]
    sizes = (words, xs.stride(0), ys.stride(0), BLOCK)
    aligned = (xs.data_ptr() % 16 == 0, ys.data_ptr() % 16 == 0, groups % 16 == 0, groups == 1)
    programs = triton.cdiv(groups, BLOCK) * triton.cdiv(words, BLOCK)
    launch(_transpose, (aligned, sizes), x, programs, xs, ys, groups, *sizes, num_warps=4)


@triton.jit
def _transpose(
    xs, ys, groups, WORDS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    TILES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    tile = tl.program_id(0)
    group = tile // TILES * BLOCK + tl.arange(0, BLOCK)  # of four rows
    word = tile % TILES * BLOCK + tl.arange(0, BLOCK)  # of four columns
    inside = (group[:, None] < groups) & (word[None, :] < WORDS)
    source = xs + group.to(tl.int64)[:, None] * (4 * STRIDE) + word[None, :]
    a = tl.load(source, inside, other=0)
    b = tl.load(source + STRIDE, inside, other=0)
    c = tl.load(source + 2 * STRIDE, inside, other=0)
    d = tl.load(source + 3 * STRIDE, inside, other=0)
    inside = (word[:, None] < WORDS) & (group[None, :] < groups)
    target = ys + word.to(tl.int64)[:, None] * (4 * OUT_STRIDE) + group[None, :]
    tl.store(target, tl.trans(_column(a, b, c, d, 0)), inside)
    tl.store(target + OUT_STRIDE, tl.trans(_column(a, b, c, d, 8)), inside)
    tl.store(target + 2 * OUT_STRIDE, tl.trans(_column(a, b, c, d, 16)), inside)
    tl.store(target + 3 * OUT_STRIDE, tl.trans(_column(a, b, c, d, 24)), inside)


@triton.jit
def _column(a, b, c, d, SHIFT: tl.constexpr):
    """Returns a byte of each of four words as one word; the first byte in memory is the lowest."""
    low = ((a >> SHIFT) & 255) | (((b >> SHIFT) & 255) << 8)
    return low | (((c >> SHIFT) & 255) << 16) | ((d >> SHIFT) << 24)
