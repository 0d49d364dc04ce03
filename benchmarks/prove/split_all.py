"""Splits and joins every fp32 pattern, on every core: minutes on two.

    python benchmarks/prove/split_all.py [--sample 64]

`--sample N` checks one chunk in N, spread evenly over all patterns. Progress goes to stderr, the result to
stdout. Exit code 1 if any pattern fails. What must hold:

    not NaN    join(split(x)) has the bits of x; hi is the nearest-even bf16, or x is an exact tie and hi is
               the neighbor away from zero
    NaN        hi, lo and the join are as promised: a quiet NaN of the same sign, remainder 0
"""

import argparse
import multiprocessing
import sys
import time

import numpy as np

from halfstep.core.split import join, split

CHUNK = 2**16  # what a core's cache holds
TOTAL = 2**32
RAMP = np.arange(CHUNK, dtype=np.uint32)
TIE = 0x8000  # the lower half that is between two bf16 numbers


def check(start: int) -> tuple[int, int, int, int]:
    """Counts one chunk: identical, NaNs that stay NaN, ties that differ from nearest-even, failures."""
    bits = RAMP + np.uint32(start)
    hi, lo = split(bits.view(np.float32))
    back = join(hi, lo).view(np.uint32)
    top = start >> 16  # the upper half of them all, so one of them is a tie
    even = np.uint16(top) + (TIE - (top & 1) < RAMP)
    identical, differs = back == bits, hi != even
    ties, differs[TIE] = int(differs[TIE]), hi[TIE] not in (even[TIE], top + 1)
    wrong, stays = ~identical | differs, 0
    if top & 0x7FFF >= 0x7F80:
        quiet, nan = top & 0x8000 | 0x7FC0, 0x7F800000 - (start & 0x7FFFFFFF) < RAMP
        kept = (hi == quiet) & (lo == 0) & (back == quiet << 16)
        identical, wrong, ties = identical & ~nan, np.where(nan, ~kept, wrong), ties * (not nan[TIE])
        stays = np.count_nonzero(nan & kept)
    return np.count_nonzero(identical), stays, ties, np.count_nonzero(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=1, help="check one chunk in so many")
    starts = range(0, TOTAL, CHUNK * parser.parse_args().sample)
    began = time.monotonic()
    sums = np.zeros(4, np.int64)
    with multiprocessing.Pool() as pool:
        for done, counts in enumerate(pool.imap(check, starts, chunksize=64), 1):
            sums += counts
            if done % max(1, len(starts) // 16) == 0:
                elapsed = time.monotonic() - began
                print(
                    f"{done / len(starts):6.1%}  {elapsed:5.0f} s  {sums[3]} failures", file=sys.stderr, flush=True
                )
    identical, stays, ties, wrong = (int(n) for n in sums)
    print(
        f"{len(starts) * CHUNK:,} patterns: {identical:,} non-NaN identical, {stays:,} NaN stay NaN, "
        f"ties differing from nearest-even: {ties:,}"
    )
    return 1 if wrong or identical + stays != len(starts) * CHUNK else 0


if __name__ == "__main__":
    sys.exit(main())
