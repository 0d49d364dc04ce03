"""Layer and root-mean-square normalization of bf16 or fp16 rows with fp32 gains: one pass forward, one backward.

torch's kernels for GPUs want the gain in the dtype of the input. So an fp32 gain takes a widened copy of the
input, of the result and of both gradients: six launches and four times the traffic.

    forward    r = 1 / sqrt(mean((x - m)^2) + eps)       m is the mean of the row, or 0
               h = (x - m) r,  y = h gain + bias
    backward   a = g gain,  dx = r (a - mean(a) - h mean(a h))                 without mean(a) if m is 0
               dgain = sum of g h over rows,  dbias = sum of g over rows

Everything between a load and a store is fp32. A program takes some rows at a time; in the backward pass it takes
others after them and keeps its sums of dgain and dbias, which torch adds up in a fixed order: the bits are the
same each time on the same kind of GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import launch
from halfstep.torch.kernels.norm import add

# Numbers that a program holds at once, if a row is not longer.
HELD = 1024
# Programs of a backward pass: enough to fill a large GPU, and few enough partial sums.
BACKWARD = 512


def normalize(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, width: int, eps: float, out: torch.dtype, centered: bool
) -> tuple[Tensor, Tensor]:
    """Returns normalized rows in `out`, and what the backward pass needs of each row; `x` is contiguous."""
    rows, (columns, held) = x.numel() // width, _sizes(width)
    y = torch.empty_like(x, dtype=out)
    stats = torch.empty(2 if centered else 1, rows, dtype=torch.float32, device=x.device)
    has = (gain is not None, bias is not None, centered)
    key = (x.dtype, x.data_ptr() % 16 == 0, out, width, has)
    given = (x, y, stats, x if gain is None else gain, x if bias is None else bias, rows, float(eps))
    programs = -(-rows // held)
    launch(_forward, key, x, programs, *given, width, columns, held, *has, **_options(columns))
    return y, stats


def gradients(
    g: Tensor, x: Tensor, gain: Tensor | None, stats: Tensor, width: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x, gain and bias; the latter two are None if there is no gain."""
    rows, (columns, held) = x.numel() // width, _sizes(width)
    dx = torch.empty_like(x)
    programs = min(BACKWARD, -(-rows // held))
    has = (gain is not None, stats.shape[0] == 2)
    partial = stats if gain is None else gain.new_empty(programs, 2, *gain.shape)
    key = (x.dtype, x.data_ptr() % 16 == 0, g.dtype, g.data_ptr() % 16 == 0, width, has)
    given = (x, g, dx, stats, x if gain is None else gain, partial, rows)
    launch(_backward, key, x, programs, *given, width, columns, held, *has, **_options(columns))
    if gain is None:
        return dx, None, None
    dgain, dbias = partial.sum(0).unbind()
    return dx, dgain, dbias


def _sizes(width: int) -> tuple[int, int]:
    """Returns the columns and the rows that a program holds at once."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, HELD // columns)


def _options(columns: int) -> dict[str, int | bool]:
    return {"num_warps": min(16, max(4, columns // 512)), "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["gains", "biases"])
def _forward(
    xs, ys, stats, gains, biases, rows, eps, width: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here, inside = row < rows, column < width
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = here[:, None] & inside[None, :]
    x = tl.load(xs + at, mask, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.reduce(x, 1, add) / width
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(stats + rows + row, mean, here)
    scale = 1.0 / tl.sqrt_rn(tl.reduce(x * x, 1, add) / width + eps)
    tl.store(stats + row, scale, here)
    y = x * scale[:, None]
    if GAIN:
        y = y * tl.load(gains + column, inside, other=0.0)[None, :]
    if BIAS:
        y = y + tl.load(biases + column, inside, other=0.0)[None, :]
    tl.store(ys + at, y.to(ys.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["gains"])
def _backward(
    xs, gs, dxs, stats, gains, partial, rows, width: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    GAIN: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    inside = column < width
    dgain = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    dbias = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if GAIN:
        gain = tl.load(gains + column, inside, other=0.0)[None, :]
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        here = row < rows
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        mask = here[:, None] & inside[None, :]
        x = tl.load(xs + at, mask, other=0.0).to(tl.float32)
        g = tl.load(gs + at, mask, other=0.0).to(tl.float32)
        scale = tl.load(stats + row, here, other=0.0)[:, None]
        if CENTERED:
            x = tl.where(mask, x - tl.load(stats + rows + row, here, other=0.0)[:, None], 0.0)
        h = x * scale
        a = g
        if GAIN:
            dgain += g * h
            dbias += g
            a = g * gain
        dx = a - h * (tl.reduce(a * h, 1, add) / width)[:, None]
        if CENTERED:
            dx = dx - (tl.reduce(a, 1, add) / width)[:, None]
        tl.store(dxs + at, (dx * scale).to(dxs.dtype.element_ty), mask)
    if GAIN:
        sums = partial + tl.program_id(0) * 2 * width + column
        tl.store(sums, tl.reduce(dgain, 0, add), inside)
        tl.store(sums + width, tl.reduce(dbias, 0, add), inside)
