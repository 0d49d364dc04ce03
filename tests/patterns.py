"""Bit patterns that a cast is tried on, and the overflow rules of a format."""

import math

import numpy as np

from halfstep.core import rounding


def rules(fmt):
    return ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan


def boundaries(fmt, codes):
    """The numbers of some codes and the midpoints between them, each with one ulp less and more.

    A cast is monotone: one that is right on both sides of every point where its result changes, and at the points
    themselves, is right on every bit pattern.
    """
    values = rounding.decode(codes, fmt)
    numbers = np.unique(values[np.isfinite(values)]).astype(np.float64)
    step = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa_bits)
    numbers = np.append(numbers, fmt.max + step)  # where overflow begins
    with np.errstate(over="ignore"):
        exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).astype(np.float32)
    near = exact.view(np.uint32).astype(np.int64)[:, None] + [-1, 0, 1]
    return np.unique(near[(near >= 0) & (near <= 0x7F800000)]).astype(np.uint32)
