"""Softmax cross-entropy of rows of bf16, fp16 or fp32 logits: one program per row, fp32 inside, no fp32 copy.

    z = x, or cap tanh(x / cap)                  lse = log(sum(exp(z)))
    loss = lse - (1 - smoothing) z[target] - smoothing mean(z) + z_loss lse^2
    dx = factor dz/dx (p (1 + 2 z_loss lse) - smoothing / width - (1 - smoothing) [target]),  p = exp(z - lse)

1. The first loop over a row keeps its largest number so far, and the sum of exponentials relative to it.
2. The second reads the row again, from the cache if all rows that are at work fit there (132 programs of 50,304
   bf16 numbers are 13 MB of an H200's 50 MB), and writes the gradient: over the logits, or elsewhere.

So the logits cross the memory once, and once more as a gradient: 4 bytes a number. `lses` allow the second loop
to run later (`gradients`), when the factor of each row is known.

The columns between `width` and the end of a row are padding: nothing reads them, and their gradient is zero. A row
whose target is `ignored` has no loss and a gradient of zeros, whatever its logits are; a target that is no column
makes its loss NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels.launch import launch
from halfstep.torch.kernels.norm import add

# Numbers of a row that a program holds at once, and its warps.
BLOCK, WARPS = 8192, 16


Terms = tuple[int, float, float, float]  # the target that is ignored, smoothing, cap (0 for none), z_loss


def losses(logits: Tensor, targets: Tensor, width: int, terms: Terms) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, and the logarithm of its sum of exponentials."""
    out, lses = _numbers(logits), _numbers(logits)
    _launch(logits, logits, targets, out, lses, out, width, terms, 0.0, has_loss=True, has_grad=False)
    return out, lses


def losses_and_gradients(logits: Tensor, targets: Tensor, width: int, terms: Terms, factor: float) -> Tensor:
    """Returns the loss of each row, and writes `factor` times its gradient over the logits."""
    out, lses = _numbers(logits), _numbers(logits)
    _launch(logits, logits, targets, out, lses, out, width, terms, factor, has_loss=True, has_grad=True)
    return out


def gradients(
    logits: Tensor, grads: Tensor, targets: Tensor, lses: Tensor, factors: Tensor, width: int, terms: Terms
) -> None:
    """Writes the gradient of each row, times its factor, to `grads`, which may be the logits."""
    _launch(logits, grads, targets, lses, lses, factors, width, terms, 0.0, has_loss=False, has_grad=True)


def _numbers(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)


def _launch(
    logits: Tensor, grads: Tensor, targets: Tensor, losses: Tensor, lses: Tensor, factors: Tensor, width: int,
    terms: Terms, factor: float, *, has_loss: bool, has_grad: bool,
) -> None:  # fmt: skip
    if not logits.shape[0]:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    sizes = (width, grads.shape[1], logits.stride(0), grads.stride(0), block)
    ignored, smoothing, cap, z_loss = terms
    has = (has_loss, has_grad, cap != 0, smoothing != 0, z_loss != 0)
    aligned = (logits.data_ptr() % 16 == 0, grads.data_ptr() % 16 == 0)
    key = (logits.dtype, targets.dtype, aligned, sizes, has)
    numbers = (ignored, *map(float, (smoothing, cap, z_loss, factor)))
    given = (logits, grads, targets, losses, lses, factors, *numbers, *sizes, *has)
    options = {"num_warps": max(1, min(WARPS, block // 256)), "enable_fp_fusion": True}
    launch(_row, key, logits, logits.shape[0], *given, **options)


@triton.jit(do_not_specialize=["ignored"], do_not_specialize_on_alignment=["targets", "losses", "lses", "factors"])
def _row(
    logits, grads, targets, losses, lses, factors, ignored, smoothing, cap, z_loss, factor, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    LOSS: tl.constexpr, GRAD: tl.constexpr, CAP: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    xs, dxs = logits + row * STRIDE, grads + row * GRAD_STRIDE
    FULL: tl.constexpr = WIDTH // BLOCK * BLOCK  # loads without a mask are as wide as they can be
    if target == ignored:
        if LOSS:
            tl.store(losses + row, 0.0)
            tl.store(lses + row, 0.0)
        if GRAD:
            for start in range(0, PADDED, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(dxs + column, tl.full((BLOCK,), 0.0, dxs.dtype.element_ty), column < PADDED)
    else:
        if LOSS:
            # Before a gradient is written over it: the reductions below have barriers.
            known = (target >= 0) & (target < WIDTH)
            picked = tl.load(xs + target, known, other=0.0).to(tl.float32)
            picked = tl.where(known, picked, float("nan"))
            if CAP:
                picked = _capped(picked, cap)[0]
            top = float("-inf")
            sums = tl.full((BLOCK,), 0.0, tl.float32)
            linear = tl.full((BLOCK,), 0.0, tl.float32)
            for start in range(0, FULL, BLOCK):
                x = tl.load(xs + start + tl.arange(0, BLOCK), eviction_policy="evict_last").to(tl.float32)
                if CAP:
                    x = _capped(x, cap)[0]
                if SMOOTHING:
                    linear += x
                top, sums = _more(x, top, sums)
            if FULL < WIDTH:
                column = FULL + tl.arange(0, BLOCK)
                inside = column < WIDTH
                x = tl.load(xs + column, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
                if CAP:
                    x = _capped(x, cap)[0]
                if SMOOTHING:
                    linear += tl.where(inside, x, 0.0)
                top, sums = _more(tl.where(inside, x, float("-inf")), top, sums)
            lse = tl.log(tl.reduce(sums, 0, add)) + tl.where(top == float("-inf"), 0.0, top)
            loss = lse - picked
            if SMOOTHING:
                loss += smoothing * (picked - tl.reduce(linear, 0, add) / WIDTH)
            if Z_LOSS:
                loss += z_loss * lse * lse
            tl.store(losses + row, loss)
            tl.store(lses + row, lse)
        else:
            lse = tl.load(lses + row)
            factor = tl.load(factors + row)
        if GRAD:
            share = 1.0
            if Z_LOSS:
                share = 1.0 + 2.0 * z_loss * lse
            for start in range(0, FULL, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(xs + column, eviction_policy="evict_first").to(tl.float32)
                dx = _gradient(x, column, target, lse, share, smoothing, cap, WIDTH, CAP, SMOOTHING)
                tl.store(dxs + column, (dx * factor).to(dxs.dtype.element_ty))
            if FULL < PADDED:
                column = FULL + tl.arange(0, BLOCK)
                x = tl.load(xs + column, column < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)
                dx = _gradient(x, column, target, lse, share, smoothing, cap, WIDTH, CAP, SMOOTHING)
                dx = tl.where(column < WIDTH, dx * factor, 0.0)
                tl.store(dxs + column, dx.to(dxs.dtype.element_ty), column < PADDED)


@triton.jit
def _more(x, top, sums):
    """Returns the largest number and the sums of exponentials relative to it, of what was read so far and x."""
    new = tl.maximum(top, tl.reduce(x, 0, larger))
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, sums * tl.exp(top - base) + tl.exp(x - base)


@triton.jit
def _gradient(
    x, column, target, lse, share, smoothing, cap, WIDTH: tl.constexpr, CAP: tl.constexpr, SMOOTHING: tl.constexpr
):
    slope = 1.0
    if CAP:
        x, slope = _capped(x, cap)
    dz = tl.exp(x - lse) * share
    if SMOOTHING:
        dz -= smoothing / WIDTH
        dz -= tl.where(column == target, 1.0 - smoothing, 0.0)
    else:
        dz -= tl.where(column == target, 1.0, 0.0)
    return dz * slope


@triton.jit
def _capped(x, cap):
    """Returns cap tanh(x / cap) and its slope, each accurate where tanh is near 1."""
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    share = 1.0 / (1.0 + e)
    tanh = (1.0 - e) * share
    return cap * tl.where(x < 0, -tanh, tanh), 4.0 * e * share * share


@triton.jit
def larger(a, b):
    """For tl.reduce, as `add`."""
    return tl.maximum(a, b)
