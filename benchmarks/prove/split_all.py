"""Splits and joins every fp32 pattern there is: `python benchmarks/prove/split_all.py`, some minutes on one core.

Progress goes to stderr, the result to stdout; the exit code is 1 if any pattern fails. What must hold:

    not NaN    join(split(x)) has the bits of x; hi is the nearest-even bf16, or x is an exact tie and hi is
               the neighbor away from zero
    NaN        hi, lo and the join are as promised: a quiet NaN of the same sign, remainder 0
"""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from halfstep.core.split import join, split

CHUNK = 2**20
TOTAL = 2**32


def check(bits: NDArray[np.uint32]) -> tuple[int, int, int, int]:
    """Counts of one chunk: identical, NaN that stay NaN, ties that differ from nearest-even, failures."""
    hi, lo = split(bits.view(np.float32))
    back = join(hi, lo).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    identical = (back == bits) & ~nan
    quiet = ((bits >> 16) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    stays = nan & (hi == quiet) & (lo == 0) & (back == quiet << 16)
    even = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    differs = (hi != even) & ~nan
    tie_away = (bits & np.uint32(0xFFFF) == 0x8000) & (hi == even + 1)
    wrong = ~(identical | stays) | (differs & ~tie_away)
    return int(identical.sum()), int(stays.sum()), int(differs.sum()), int(wrong.sum())


def main() -> int:
    started = time.monotonic()
    sums = np.zeros(4, np.int64)
    ramp = np.arange(CHUNK, dtype=np.uint32)
    for start in range(0, TOTAL, CHUNK):
        sums += check(ramp + np.uint32(start))
        done = start + CHUNK
        if done % 2**28 == 0:
            elapsed = time.monotonic() - started
            print(f"{done / TOTAL:6.1%}  {elapsed:5.0f} s  {sums[3]} failures", file=sys.stderr, flush=True)
    identical, stays, ties, wrong = (int(n) for n in sums)
    print(
        f"{TOTAL:,} patterns: {identical:,} non-NaN identical, {stays:,} NaN stay NaN, "
        f"ties differing from nearest-even: {ties:,}"
    )
    return 1 if wrong or identical + stays != TOTAL else 0


if __name__ == "__main__":
    sys.exit(main())
