"""One pass of AdamW over all tensors of a group: unscale, clip, update, store.

torch has no kernel that updates a split master, and a compiled one over hundreds of tensors costs milliseconds of
the host. A number moves 28 bytes, with whole and split masters alike, and unscaling and clipping cost no extra
pass. A shard whose bf16 cast travels gets it written in the same pass, for 2 bytes instead of the 6 of a cast.

    g <- factor g
    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
    w <- w (1 - rate decay) - (rate / (1 - b1^t)) m / (sqrt(v) (1 / sqrt(1 - b2^t)) + eps)

Rounding: every operation is rounded to fp32 on its own, in this order, with exact square root and division, so the
bits are those of the formula on any device; the kernel is bound by memory and loses nothing by it. The corrections
of the moments are computed in fp64, powers by repeated squaring, and rounded once.

Two launches: `_count` counts the step of each tensor and computes its corrections, which would take torch some
thirty kernels; `_adamw` updates. Both read `found_inf` on the device and do nothing if it is set.

Tables: every tensor is reached by its address. A program takes one chunk of one tensor; which one is in two tables
that depend only on the sizes. Those of gradients are sent again when one has changed, from pinned memory: nothing
waits.
"""

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import CAPTURED, launch

# Numbers that a program updates, and its warps: docs/measurements/race.md has a sweep on an H200.
CHUNK, WARPS = 512, 4
# Tensors that a program counts.
COUNTED = 128
# The rows of the table of addresses. A kernel reads a global only if it is a constexpr of Triton.
PARAMETER, REMAINDER, GRAD, FIRST, SECOND, STEP, CAST, BETAS = (tl.constexpr(row) for row in range(8))


class Update:
    """The launches for one list of parameters, in place; without a remainder, a parameter is the master.

    A whole master's new number is also written to its bf16 cast, if it has one.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        casts: Sequence[Tensor | None] = (),
    ):
        self.device, self._narrow = parameters[0].device, first[0].dtype == torch.bfloat16
        sizes = [parameter.numel() for parameter in parameters]
        self._owners, self._chunks = chunks_of(sizes, CHUNK, self.device)
        self._counts = to_device(torch.tensor(sizes), self.device)
        self._paces, self._roots = (torch.empty(len(sizes), device=self.device) for _ in range(2))
        # Kept: they must not move.
        none = [None] * len(sizes)
        self._rows = [parameters, remainders, none, first, second, steps, casts or none]
        addresses = [0 if tensor is None else tensor.data_ptr() for row in self._rows for tensor in row]
        self._table = to_device(torch.tensor([*addresses, 0, 0]), self.device)
        self._tensors, self._programs = len(sizes), self._owners.numel()
        # What is in the table: the addresses of gradients, and betas; each with the epoch of CUDA graphs.
        self._grads: tuple[int, list[int]] = (0, [])
        self._betas: tuple[int, tuple[float, float]] | None = None

    def __call__(
        self,
        grads: Sequence[Tensor],
        *,
        rate: Tensor,
        factor: Tensor,
        found_inf: Tensor,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        """Updates everything unless `found_inf` is 1."""
        if not self._programs:
            return
        tensors = self._tensors
        addresses = [grad.data_ptr() for grad in grads]
        if self._grads != (CAPTURED.epoch, addresses):
            fill(self._table, GRAD.value * tensors, addresses)
            self._grads = CAPTURED.epoch, addresses
        if self._betas != (CAPTURED.epoch, betas):
            # In fp64, as bits: a number that is passed to a kernel becomes fp32.
            fill(self._table, BETAS.value * tensors, struct.unpack("<2q", struct.pack("<2d", *betas)))
            self._betas = CAPTURED.epoch, betas
        counted = (self._table, self._paces, self._roots, rate, found_inf, tensors, COUNTED)
        launch(_count, COUNTED, rate, triton.cdiv(tensors, COUNTED), *counted, enable_fp_fusion=False)
        tables = (self._table, self._counts, self._owners, self._chunks, self._paces, self._roots)
        averages = (betas[0], 1 - betas[0], betas[1], 1 - betas[1])
        given = (*tables, rate, factor, found_inf, *averages, float(eps), float(decay), tensors)
        key = (self._narrow, CHUNK)
        launch(_adamw, key, rate, self._programs, *given, *key, num_warps=WARPS, enable_fp_fusion=False)


def chunks_of(sizes: Sequence[int], most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns, for each program, the tensor that it works on, and which chunk of it."""
    counts = [-(-size // most) for size in sizes]
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(counts))
    within = torch.cat([torch.arange(count) for count in counts])
    return to_device(owners.int(), device), to_device(within.int(), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device, without waiting."""
    return _pin(tensor, device).to(device, non_blocking=True)


def fill(table: Tensor, start: int, values: Sequence[int]) -> None:
    """Writes numbers to a table on the device, without waiting."""
    table[start : start + len(values)].copy_(_pin(torch.tensor(values), table.device), non_blocking=True)


def _pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns host memory that a device reads by itself; a graph that is being captured keeps it."""
    given = tensor.pin_memory() if device.type == "cuda" else tensor
    if CAPTURED.held is not None:
        CAPTURED.held.append(given)
    return given


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["rate", "found_inf"])
def _count(table, paces, roots, rate, found_inf, tensors, COUNTED: tl.constexpr):
    """Counts one more step of each tensor, and computes the corrections of its moments."""
    if tl.load(found_inf) == 0:
        at = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
        mask = at < tensors
        steps = tl.load(table + STEP * tensors + at, mask).to(tl.pointer_type(tl.float32))
        count = tl.load(steps, mask, other=0.0) + 1.0
        tl.store(steps, count, mask)
        rest1 = (1.0 - _power(table + BETAS * tensors, count)).to(tl.float32)
        rest2 = 1.0 - _power(table + BETAS * tensors + 1, count)
        tl.store(paces + at, tl.div_rn(tl.load(rate), rest1), mask)
        tl.store(roots + at, (1.0 / tl.sqrt(rest2)).to(tl.float32), mask)


@triton.jit
def _power(base, count):
    """Returns base^count in fp64, of a base stored as its bits; count < 2^24, where fp32 stops counting."""
    square = tl.load(base).to(tl.float64, bitcast=True)
    left = count.to(tl.int32)
    power = tl.full(count.shape, 1.0, tl.float64)
    for _ in range(25):
        power = tl.where((left & 1) != 0, power * square, power)
        square = square * square
        left = left >> 1
    return power


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["rate", "factor", "found_inf"])
def _adamw(
    table, sizes, owners, chunks, paces, roots, rate, factor, found_inf, b1, rest1, b2, rest2, eps, decay,
    tensors, NARROW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        mine = tl.load(owners + program)
        start = tl.load(chunks + program).to(tl.int64) * CHUNK
        size = tl.load(sizes + mine)
        shrink = 1.0 - tl.load(rate) * decay
        pace = tl.load(paces + mine)
        root = tl.load(roots + mine)
        scale = tl.load(factor)
        # Loads without a mask are as wide as they can be.
        if tl.load(table + REMAINDER * tensors + mine) != 0:
            if start + CHUNK <= size:
                _chunk(table, mine, start, size, shrink, pace, root, scale, b1, rest1, b2, rest2, eps, tensors,
                       True, NARROW, CHUNK, False)  # fmt: skip
            else:
                _chunk(table, mine, start, size, shrink, pace, root, scale, b1, rest1, b2, rest2, eps, tensors,
                       True, NARROW, CHUNK, True)  # fmt: skip
        elif start + CHUNK <= size:
            _chunk(table, mine, start, size, shrink, pace, root, scale, b1, rest1, b2, rest2, eps, tensors,
                   False, NARROW, CHUNK, False)  # fmt: skip
        else:
            _chunk(table, mine, start, size, shrink, pace, root, scale, b1, rest1, b2, rest2, eps, tensors,
                   False, NARROW, CHUNK, True)  # fmt: skip


@triton.jit
def _chunk(
    table, mine, start, size, shrink, pace, root, scale, b1, rest1, b2, rest2, eps, tensors,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    moment = tl.bfloat16 if NARROW else tl.float32
    # Addresses of this chunk.
    at = start + tl.arange(0, CHUNK)
    mask = (at < size) if MASKED else None
    grads = _pointer(table, GRAD, mine, tensors, tl.float32) + at
    firsts = _pointer(table, FIRST, mine, tensors, moment) + at
    seconds = _pointer(table, SECOND, mine, tensors, moment) + at
    if SPLIT:
        his = _pointer(table, PARAMETER, mine, tensors, tl.int16) + at
        los = _pointer(table, REMAINDER, mine, tensors, tl.int16) + at
        # The master, joined as by halfstep.torch.numerics.cast.join.
        upper = tl.load(his, mask).to(tl.int32) << 16
        lower = tl.load(los, mask).to(tl.int32)
        lower = tl.where((upper & 0x7FFFFFFF) == 0, tl.maximum(lower, 0), lower)
        w = (upper + lower).to(tl.float32, bitcast=True)
    else:
        wides = _pointer(table, PARAMETER, mine, tensors, tl.float32) + at
        w = tl.load(wides, mask)
    # The update: g, then m and v, then w.
    g = tl.load(grads, mask) * scale
    m = b1 * tl.load(firsts, mask).to(tl.float32) + rest1 * g
    v = b2 * tl.load(seconds, mask).to(tl.float32) + rest2 * (g * g)
    w = w * shrink - tl.div_rn(pace * m, tl.sqrt_rn(v) * root + eps)
    tl.store(firsts, m.to(moment), mask)
    tl.store(seconds, v.to(moment), mask)
    if SPLIT:
        # Split again as by halfstep.torch.numerics.cast.split.
        bits = w.to(tl.int32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        hi = ((bits >> 15) + 1) >> 1
        hi = tl.where(nan, ((bits >> 16) & 0x8000) | 0x7FC0, hi)
        tl.store(his, hi.to(tl.int16), mask)
        tl.store(los, tl.where(nan, 0, bits).to(tl.int16), mask)
    else:
        tl.store(wides, w, mask)
        if tl.load(table + CAST * tensors + mine) != 0:
            # To nearest, ties to even, in integers: Triton's interpreter truncates.
            bits = w.to(tl.int32, bitcast=True)
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where(nan, ((bits >> 16) & 0x8000) | 0x7FC0, rounded)
            tl.store(_pointer(table, CAST, mine, tensors, tl.int16) + at, rounded.to(tl.int16), mask)


@triton.jit
def _pointer(table, ROW: tl.constexpr, mine, tensors, dtype: tl.constexpr):
    """Returns a pointer from the table of addresses; `kernels.reachable` checked its alignment."""
    address = tl.load(table + ROW * tensors + mine).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)
