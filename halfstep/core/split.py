"""fp32 masters held as bf16 and a 16-bit remainder: the reference.

A weight that is used in bf16 and updated in fp32 needs 4 bytes, not 6: the matmul uses the bf16 half directly, and
the other half holds what rounding removed. With bits(x) the fp32 pattern read as an integer,

    bits(x) = (hi << 16) + lo        hi: a bf16 code, 16 bits        lo: signed, -32768 <= lo <= 32767

so `join` is one shift and one addition; all of this holds for magnitudes, and the sign bit is carried along.

**Which bf16?** Each must own at most 65,536 patterns, as many as there are values of lo.

    nearest, ties away from zero    h owns h<<16 - 32768 ... h<<16 + 32767: 65,536 patterns, lo fits
    nearest, ties to even           an even h owns both of its ties, h<<16 - 32768 ... h<<16 + 32768:
                                    65,537 patterns, one too many: +32768 reads as -32768, one bf16 ulp off
    truncation                      h owns h<<16 ... h<<16 + 65535: 65,536 patterns, lo fits unsigned

Truncation is exact too, but the weight in use has twice the error, and all weights shrink (0.28 % on average). So
hi is the nearest, ties away: (bits + 0x8000) >> 16. It differs from the native nearest-even cast on exact ties
whose lower neighbor is even, one pattern in 131,072. The finite patterns from 0x7F7F8000 up round to hi = 0x7F80,
infinity, as with the native cast, and join exactly like all others.

**NaN** must be set apart. The rule above, applied blindly, adds 0x8000 to 0x7FFFFFFF, carries into the sign,
and hi is 0x8000: -0.0, so a diverged weight looks like a zero. It rounds 0x7F800001 to 0x7F80: infinity. So a
NaN gets hi = the quiet NaN 0x7FC0 with its own sign, and lo = 0. It loses its payload and stays NaN.

benchmarks/prove/split_all.py tries all 2^32 patterns.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import CastInputError


def split(x: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """Returns the nearest bf16 code, ties away from zero, and the remainder that makes it exact."""
    x = _expect(x, np.float32, "x", "split takes the fp32 master; widen others with x.astype(np.float32)")
    bits = x.view(np.uint32)
    # (bits + 0x8000) >> 16, halved first so that the sum stays within 32 bits.
    hi = (((bits >> 15) + np.uint32(1)) >> 1).astype(np.uint16)
    # The low half read as signed is the remainder: above 0x7FFF hi went up, and it counts from there.
    lo = bits.astype(np.uint16).view(np.int16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = ((bits >> 16) & np.uint32(0x8000) | np.uint32(0x7FC0)).astype(np.uint16)
    return np.where(nan, quiet, hi), np.where(nan, np.int16(0), lo)


def join(hi: NDArray[np.uint16], lo: NDArray[np.int16]) -> NDArray[np.float32]:
    """Returns the fp32 number that `split` took apart.

    A negative remainder of a zero was left by a number that was set to zero, and would make it NaN: it is ignored.
    """
    hi = _expect(hi, np.uint16, "hi", "hi holds bf16 codes; view a bf16 array as uint16")
    lo = _expect(lo, np.int16, "lo", "lo is the signed remainder; view it as int16")
    if hi.shape != lo.shape:
        raise CastInputError(
            f"hi has shape {hi.shape} and lo {lo.shape}; they are two halves of one tensor",
            hint="pass both results of the same split",
        )
    lo = np.where((hi & 0x7FFF) == 0, np.maximum(lo, 0), lo)
    bits = (hi.astype(np.uint32) << 16) + lo.astype(np.uint32)  # both wrap around alike
    return np.asarray(bits).view(np.float32)


def _expect(array: NDArray[Any], dtype: type[np.generic], name: str, hint: str) -> NDArray[Any]:
    array = np.asarray(array)
    if array.dtype != dtype:
        raise CastInputError(f"`{name}` is {array.dtype}, not {np.dtype(dtype)}", hint=hint)
    return array
