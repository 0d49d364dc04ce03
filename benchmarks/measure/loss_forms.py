"""Times other forms of the loss kernel (halfstep/torch/kernels/cross_entropy.py), without its terms.

    python benchmarks/measure/loss_forms.py [--rounds 5]

The kernel takes 2.7 ms for 32,768 rows of 50,304 bf16 logits, which a copy moves in 1.6. It looks for the largest
number of each block before it adds the block's exponentials, so all warps wait for each other once a block; and a
gradient that is written over the logits keeps the compiler from reading ahead.

    present       halfstep's own
    base          exponentials are relative to the largest number of the first block: one wait a row. They may be
                  60 above it; a row with larger numbers is added again, relative to its largest
    base, ahead   and the next block is read before the gradient of this one is written
    ... unrolled  loops without jumps

Each is timed for several blocks and warps, and compared with halfstep's own: `off` is the largest difference of a
loss, and of a gradient in units of bf16 at 1. Needs an NVIDIA GPU; `--tiny` shows that it runs, with
TRITON_INTERPRET=1 on a CPU.
"""

import argparse
import statistics
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.torch.kernels import cross_entropy
from halfstep.torch.kernels.norm import add

MARGIN = 60.0  # below the largest exponent of fp32, 88, by more than the logarithm of a row's length
FORMS = {"base": (False, False), "base, ahead": (True, False), "base, ahead, unrolled": (True, True)}


@triton.jit
def _exponentials(xs, base, WIDTH: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, FULL, BLOCK):
        sums += tl.exp(tl.load(xs + start + tl.arange(0, BLOCK)).to(tl.float32) - base)
    if FULL < WIDTH:
        column = FULL + tl.arange(0, BLOCK)
        x = tl.load(xs + column, column < WIDTH, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - base)
    return tl.reduce(sums, 0, add)


@triton.jit
def _gradient(x, column, target, lse, dtype: tl.constexpr):
    return (tl.exp(x.to(tl.float32) - lse) - tl.where(column == target, 1.0, 0.0)).to(dtype)


@triton.jit
def _row(
    logits, targets, losses, margin, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    xs = logits + row * STRIDE
    FULL: tl.constexpr = WIDTH // BLOCK * BLOCK
    picked = tl.load(xs + target).to(tl.float32)
    column = tl.arange(0, BLOCK)
    if FULL > 0:
        x = tl.load(xs + column, eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(xs + column, column < WIDTH, other=float("-inf")).to(tl.float32)
    base = tl.reduce(x, 0, cross_entropy.larger)
    base = tl.where(base == float("-inf"), 0.0, base)
    sums, peaks = tl.exp(x - base), x
    if UNROLLED:
        for start in tl.static_range(BLOCK, FULL, BLOCK):
            x = tl.load(xs + start + column, eviction_policy="evict_last").to(tl.float32)
            sums += tl.exp(x - base)
            peaks = tl.maximum(peaks, x)
    else:
        for start in range(BLOCK, FULL, BLOCK):
            x = tl.load(xs + start + column, eviction_policy="evict_last").to(tl.float32)
            sums += tl.exp(x - base)
            peaks = tl.maximum(peaks, x)
    if (FULL > 0) and (FULL < WIDTH):
        x = tl.load(xs + FULL + column, FULL + column < WIDTH, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - base)
        peaks = tl.maximum(peaks, x)
    top = tl.reduce(peaks, 0, cross_entropy.larger)
    total = tl.reduce(sums, 0, add)
    if (top - base > margin) | (top < base):
        base = tl.where(top == float("-inf"), 0.0, top)
        total = _exponentials(xs, base, WIDTH, FULL, BLOCK)
    lse = tl.log(total) + base
    tl.store(losses + row, lse - picked)
    dtype: tl.constexpr = logits.dtype.element_ty
    if AHEAD and FULL > 0:
        now = tl.load(xs + column)
        if UNROLLED:
            for start in tl.static_range(BLOCK, FULL, BLOCK):
                after = tl.load(xs + start + column)
                tl.store(xs + start - BLOCK + column, _gradient(now, start - BLOCK + column, target, lse, dtype))
                now = after
        else:
            for start in range(BLOCK, FULL, BLOCK):
                after = tl.load(xs + start + column)
                tl.store(xs + start - BLOCK + column, _gradient(now, start - BLOCK + column, target, lse, dtype))
                now = after
        tl.store(xs + FULL - BLOCK + column, _gradient(now, FULL - BLOCK + column, target, lse, dtype))
    else:
        for start in range(0, FULL, BLOCK):
            now = tl.load(xs + start + column)
            tl.store(xs + start + column, _gradient(now, start + column, target, lse, dtype))
    if FULL < WIDTH:
        at = FULL + column
        rest = tl.load(xs + at, at < WIDTH, other=0.0)
        tl.store(xs + at, _gradient(rest, at, target, lse, dtype), at < WIDTH)


def run(form: str, logits: Tensor, targets: Tensor, block: int, warps: int) -> Tensor:
    """Returns the losses, and writes their gradient over the logits."""
    if form == "present":
        cross_entropy.BLOCK, cross_entropy.WARPS = block, warps
        return cross_entropy.losses_and_gradients(logits, targets, logits.shape[1], (-100, 0.0, 0.0, 0.0), 1.0)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ahead, unrolled = FORMS[form]
    given = (logits, targets, losses, MARGIN, logits.shape[1], logits.stride(0), block, ahead, unrolled)
    _row[(logits.shape[0],)](*given, num_warps=warps)
    return losses


def timed(form: str, logits: Tensor, targets: Tensor, block: int, warps: int) -> float:
    """Returns the milliseconds of a launch: of four in a row, over what the one before left."""
    if not logits.is_cuda:
        begun = time.perf_counter()
        run(form, logits.clone(), targets, block, warps)
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(4):
        run(form, logits, targets, block, warps)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 4


def main() -> None:
    """Prints a line for each form, and then the ten fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, rows, width = ("cpu", 5, 300) if options.tiny else ("cuda", 32768, 50304)
    shapes = [(64, 1), (512, 1)] if options.tiny else [(4096, 4), (4096, 8), (8192, 4), (8192, 8), (8192, 16)]
    torch.manual_seed(0)
    logits = torch.randn(rows, width, device=device).bfloat16()
    if options.tiny:
        logits[1, 70] = 300.0  # far above the first block
        logits[2, :64] = -torch.inf
    targets = torch.randint(width, (rows,), device=device)
    right = logits.clone()
    wanted = run("present", right, targets, *shapes[0])
    taken: dict[tuple[str, int, int], list[float]] = {}
    for form in ("present", *FORMS):
        for block, warps in shapes:
            found = logits.clone()
            losses = run(form, found, targets, block, warps)
            apart = (found.float() - right.float()).abs().max() * 2**8
            taken[form, block, warps] = []
            print(
                f"{form}, block {block}, {warps} warps: off {(losses - wanted).abs().max():.1e}, {apart:.2f}",
                flush=True,
            )
    for each in range(options.rounds):
        for key in list(taken)[:: 1 if each % 2 else -1]:
            taken[key].append(timed(key[0], found, targets, *key[1:]))
    best = sorted(taken, key=lambda key: statistics.median(taken[key]))
    for form, block, warps in [*best[:10], *(key for key in best[10:] if key[0] == "present")]:
        times = taken[form, block, warps]
        print(
            f"{statistics.median(times):8.3f} ms, fastest {min(times):.3f}  {form}, block {block}, {warps} warps"
        )


if __name__ == "__main__":
    main()
