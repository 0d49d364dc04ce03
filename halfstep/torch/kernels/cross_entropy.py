"""Softmax cross-entropy of rows of bf16, fp16 or fp32 logits: one program per row, fp32 inside, no fp32 copy.

    z = x, or cap tanh(x / cap)                  lse = log(sum(exp(z)))
    loss = lse - (1 - smoothing) z[target] - smoothing mean(z) + z_loss lse^2
    dx = factor dz/dx (p (1 + 2 z_loss lse) - smoothing / width - (1 - smoothing) [target]),  p = exp(z - lse)

1. The first loop over a row adds exponentials relative to the target's own: what counts of a row is at most as far
   above it as the loss is large, so the sum stays in fp32, and the warps wait for each other once a row and not
   once a block. A row whose sum left fp32 is added again, relative to its largest number (`_sum_from_largest`).
2. The second reads the row again, from the cache if all rows that are at work fit there (264 programs, two for
   each multiprocessor, of 50,304 bf16 numbers are 27 MB of an H200's 50 MB), and writes the gradient: over the
   logits, or elsewhere. The next block is read before this one is written: a compiler cannot tell them apart.
3. The target is subtracted from its own column alone, after all others were written.

Loops are unrolled, up to eight blocks, so that several blocks are on their way at once; then masks vanish where a
block is whole.

So the logits cross the memory once, and once more as a gradient: 4 bytes a number. `lses` allow the second loop
to run later (`gradients`), when the factor of each row is known.

A gradient may also be written as 8-bit codes (loss/coded.py), 3 bytes a number: rounded to the bits kept, times
a scale, then to the format of the codes. They may begin where their row of logits does:
codes of a block are written after all warps have read it, and end where it does or earlier.

A gradient that keeps fewer bits of mantissa than the logits have (`kept`) is rounded stochastically. What is
drawn follows from the row alone, so that the same row has the same gradient wherever it stands.

The columns between `width` and the end of a row are padding: what they hold does not count, and their gradient is
zero. A row whose target is `ignored` has no loss and a gradient of zeros, whatever its logits are; a target that
is no column makes its loss NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.core.arrays import cast
from halfstep.torch.kernels import launch
from halfstep.torch.kernels.norm import add

# Numbers of a row that a program reads at once, its warps, and the registers of a thread: of 65,536, so that two
# programs share a multiprocessor. Left alone, ptxas takes 64 to 127; at 64 nothing or little is spilled.
BLOCK, WARPS, REGISTERS = 8192, 16, 64
# Mantissa bits, and the exponent of the smallest normal number. Triton's interpreter converts to bf16 and fp8 by
# truncation: there, numbers are rounded before.
ROUNDED = {
    torch.bfloat16: (7, -126),
    torch.float16: (10, -14),
    torch.float8_e5m2: (2, -14),
    torch.float8_e4m3fn: (3, -6),
}


GOLDEN, FIRST, SECOND = (tl.constexpr(number) for number in (cast.GOLDEN, *cast.MIXERS))
Terms = tuple[int, float, float, float]  # the target that is ignored, smoothing, cap (0 for none), z_loss


def losses(logits: Tensor, targets: Tensor, width: int, terms: Terms) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, and the logarithm of its sum of exponentials."""
    return _launch(logits, logits, targets, width, terms, has_grad=False)


def losses_and_gradients(
    logits: Tensor, targets: Tensor, width: int, terms: Terms, factor: float, kept: int = 0
) -> Tensor:
    """Returns the loss of each row, and writes `factor` times its gradient over the logits."""
    return _launch(logits, logits, targets, width, terms, factor, kept=kept)[0]


def losses_and_codes(
    logits: Tensor, codes: Tensor, targets: Tensor, width: int, terms: Terms, factor: float, scale: float
) -> Tensor:
    """Returns the loss of each row, and writes codes of `scale` times what `losses_and_gradients` writes."""
    return _launch(logits, codes, targets, width, terms, factor, scale, ROUNDED[codes.dtype][0])[0]


def gradients(
    logits: Tensor, grads: Tensor, targets: Tensor, lses: Tensor, factors: Tensor, width: int, terms: Terms,
    kept: int = 0,
) -> None:  # fmt: skip
    """Writes the gradient of each row, times its factor, to `grads`, which may be the logits."""
    _launch(logits, grads, targets, width, terms, kept=kept, known=(lses, factors))


def _launch(
    logits: Tensor, grads: Tensor, targets: Tensor, width: int, terms: Terms, factor: float = 0.0,
    scale: float = 1.0, kept: int = 0, *, known: tuple[Tensor, Tensor] | None = None, has_grad: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns losses, and logarithms of sums of exponentials, unless these and the factors of rows are `known`."""
    rows = logits.shape[0]
    if known is None:
        losses, lses = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
        factors = losses
    else:
        lses, factors = known
        losses = lses
    if not rows:
        return losses, lses
    targets = targets.contiguous()
    block = min(BLOCK, triton.next_power_of_2(width))
    sizes = (width, grads.shape[1], logits.stride(0), grads.stride(0), block)
    ignored, smoothing, cap, z_loss = terms
    has = (known is None, has_grad, cap != 0, smoothing != 0, z_loss != 0, grads.dtype != logits.dtype, kept)
    dtypes = (logits.dtype, grads.dtype)
    rounded = {} if logits.is_cuda else ROUNDED
    by_hand = [number for dtype in dtypes for number in rounded.get(dtype, (0, 0))]
    aligned = (logits.data_ptr() % 16 == 0, grads.data_ptr() % 16 == 0)
    warps = max(1, min(WARPS, block // 256))
    key = (*dtypes, targets.dtype, aligned, sizes, has, warps)
    numbers = (ignored, *map(float, (smoothing, cap, z_loss, factor, scale)))
    given = (logits, grads, targets, losses, lses, factors, *numbers, *sizes, *has, *by_hand)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if torch.version.hip is None:
        options["maxnreg"] = REGISTERS  # which AMD's compiler does not know
    launch(_row, key, logits, rows, *given, **options)
    return losses, lses


@triton.jit(do_not_specialize=["ignored"], do_not_specialize_on_alignment=["targets", "losses", "lses", "factors"])
def _row(
    logits, grads, targets, losses, lses, factors, ignored, smoothing, cap, z_loss, factor, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, LOSS: tl.constexpr, GRAD: tl.constexpr, CAP: tl.constexpr, SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr, CODES: tl.constexpr, KEPT: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    CODE_MANTISSA: tl.constexpr, CODE_LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    xs, dxs = logits + row * STRIDE, grads + row * GRAD_STRIDE
    UNROLLED: tl.constexpr = min(8, (PADDED + BLOCK - 1) // BLOCK)
    if target == ignored:
        if LOSS:
            tl.store(losses + row, 0.0)
            tl.store(lses + row, 0.0)
        if GRAD:
            for start in range(0, PADDED, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zeros = tl.full((BLOCK,), 0.0, tl.float32).to(dxs.dtype.element_ty)
                tl.store(dxs + column, zeros, column < PADDED)
    else:
        known = (target >= 0) & (target < WIDTH)
        picked = tl.load(xs + target, known, other=0.0).to(tl.float32)
        seed = 0
        if KEPT:
            beside = tl.load(xs + (target ^ 1), known & ((target ^ 1) < WIDTH), other=0.0).to(tl.float32)
            seed = _seed(target, picked, beside)
        if LOSS:
            base = _capped(picked, cap)[0] if CAP else picked
            of_target = tl.where(known, base, float("nan"))
            sums = tl.full((BLOCK,), 0.0, tl.float32)
            linear = tl.full((BLOCK,), 0.0, tl.float32)
            for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=UNROLLED):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(xs + column, column < PADDED, other=0.0, eviction_policy="evict_last").to(tl.float32)
                if CAP:
                    x = _capped(x, cap)[0]
                sums += tl.where(column < WIDTH, _exp(x, base), 0.0)
                if SMOOTHING:
                    linear += tl.where(column < WIDTH, x, 0.0)
            above = tl.log(tl.reduce(sums, 0, add))
            if not (tl.abs(above) < 80.0):  # fp32 ends at exp(88); a NaN is not below 80 either
                base, above = _sum_from_largest(xs, cap, WIDTH, BLOCK, CAP)
            lse, loss = base + above, base - of_target + above
            if SMOOTHING:
                loss += smoothing * (of_target - tl.reduce(linear, 0, add) / WIDTH)
            if Z_LOSS:
                loss += z_loss * lse * lse
            tl.store(losses + row, loss)
            tl.store(lses + row, lse)
        else:
            lse = tl.load(lses + row)
            factor = tl.load(factors + row)
            tl.debug_barrier()  # all warps have read the target's logit; above, the reduction waits for them
        if GRAD:
            share, less = 1.0, 0.0
            if Z_LOSS:
                share = 1.0 + 2.0 * z_loss * lse
            if SMOOTHING:
                less = smoothing / WIDTH
            if CODES:
                # As in `_exp`; a NaN is not below infinity either.
                scale = tl.where(tl.abs(1.4426950408889634 * lse) < float("inf"), scale, float("nan"))
            column = tl.arange(0, BLOCK)
            after = tl.load(xs + column, column < PADDED, other=0.0)
            for start in tl.range(0, PADDED, BLOCK, loop_unroll_factor=UNROLLED):
                column = start + tl.arange(0, BLOCK)
                x, after = after, tl.load(xs + BLOCK + column, BLOCK + column < PADDED, other=0.0)
                dx = _gradient(x.to(tl.float32), lse, share, less, cap, CAP) * factor
                dx = tl.where(column < WIDTH, dx, 0.0)
                dx = _narrow(
                    dx, xs, dxs, scale, seed, column, CODES, KEPT, MANTISSA, LOWEST, CODE_MANTISSA, CODE_LOWEST
                )
                if CODES:
                    tl.debug_barrier()  # all warps have read this block and the next, where codes may be written
                tl.store(dxs + column, dx, column < PADDED)
            dx = _gradient(picked, lse, share, less + (1.0 - smoothing), cap, CAP) * factor
            dx = _narrow(
                dx, xs, dxs, scale, seed, target, CODES, KEPT, MANTISSA, LOWEST, CODE_MANTISSA, CODE_LOWEST
            )
            tl.debug_barrier()  # the target's block was written
            tl.store(dxs + target, dx, known)


@triton.jit
def _sum_from_largest(xs, cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):
    """Returns the largest number of a row, and the logarithm of the sum of exponentials relative to it."""
    top, base = float("-inf"), 0.0
    sums = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(xs + column, column < WIDTH, other=0.0).to(tl.float32)
        if CAP:
            x = _capped(x, cap)[0]
        x = tl.where(column < WIDTH, x, float("-inf"))
        new = tl.maximum(top, tl.reduce(x, 0, larger))
        base = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(top - base) + tl.exp(x - base)
        top = new
    return base, tl.log(tl.reduce(sums, 0, add))


@triton.jit
def _exp(x, base):
    """Returns exp(x - base) in two instructions, a fused one and one that flushes to zero; `tl.exp` takes six."""
    return tl.exp2(tl.fma(x, 1.4426950408889634, -1.4426950408889634 * base))


@triton.jit
def _gradient(x, lse, share, less, cap, CAP: tl.constexpr):
    """Returns the gradient of a loss with respect to x; `less` is what the targets give it."""
    slope = 1.0
    if CAP:
        x, slope = _capped(x, cap)
    return (_exp(x, lse) * share - less) * slope


@triton.jit
def _narrow(
    dx, xs, dxs, scale, seed, column, CODES: tl.constexpr, KEPT: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, CODE_MANTISSA: tl.constexpr, CODE_LOWEST: tl.constexpr,
):  # fmt: skip
    """Rounds stochastically to the bits that are kept, if any, then to codes or to the format of the logits."""
    if KEPT:
        drawn = _stochastic(dx, seed, column, KEPT)
        # Codes of a row that is not finite have a scale that is NaN.
        dx = drawn if CODES else tl.where(dx == dx, drawn, dx)
    if CODES:
        # Not by way of the logits' format: that changes nothing, and a conversion takes as long as an exponential.
        dx = _rounded(dx * scale, dxs.dtype.element_ty, CODE_MANTISSA, CODE_LOWEST)
    else:
        dx = _rounded(dx, xs.dtype.element_ty, MANTISSA, LOWEST)
    return dx


@triton.jit
def _seed(target, picked, beside):
    """Mixes the target of a row with the bits of two of its logits (plain.round_stochastically)."""
    bits = picked.to(tl.uint32, bitcast=True) ^ (beside.to(tl.uint32, bitcast=True) >> 16)
    h = bits + target.to(tl.uint32) * GOLDEN
    h = (h ^ (h >> 16)) * FIRST
    h = (h ^ (h >> 15)) * SECOND
    return h ^ (h >> 16)


@triton.jit
def _stochastic(x, seed, column, KEPT: tl.constexpr):
    """Rounds to KEPT bits of mantissa, up or down, so that it is x on average (plain.round_stochastically).

    To add the complement of a word makes a carry where the word is below the fraction (core.rounding).
    """
    noise = (seed + column.to(tl.uint32) * GOLDEN) >> (9 + KEPT)
    bits = (x.to(tl.uint32, bitcast=True) + noise) & (0xFFFFFFFF << (23 - KEPT) & 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, dtype: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Converts to the nearest number, ties to even; if there is a mantissa, by hand, and then exactly."""
    if MANTISSA:
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 255, LOWEST + 127)
        # The unit of fp32 at this number is that of the format at x, so the sum is rounded there.
        large = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
        magnitude = (tl.abs(x) + large - large).to(tl.int32, bitcast=True)
        x = (magnitude | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _capped(x, cap):
    """Returns cap tanh(x / cap) = cap (2 s - 1) and its slope 4 s (1 - s), of s = 1 / (1 + exp(-2 x / cap)).

    An error of cap 2^-23 in the first is like any other of an exponent; the slope is accurate where it is small.
    """
    e = tl.exp2(tl.minimum(x * (-2.885390081777927 / cap), 60.0, propagate_nan=tl.PropagateNan.ALL))
    root = tl.rsqrt(1.0 + e)  # a division would be eight instructions
    s = root * root
    return tl.fma(2.0 * cap, s, -cap), 4.0 * e * s * s


@triton.jit
def larger(a, b):
    """For tl.reduce, as `add`."""
    return tl.maximum(a, b)
