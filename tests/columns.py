"""The columns of the monitor by their definition, in numpy: what every backend must compute in its graph."""

import numpy as np

from halfstep.core.observed import limits
from halfstep.core.stats.what_if import scales_of


def row_of(x, format, *, scaled=False):
    """The columns of one tensor; `scaled` by the power of two that its amax gives, as a narrow operand is."""
    magnitude = np.abs(np.asarray(x, np.float32)).reshape(-1)
    amax = magnitude[np.isfinite(magnitude)].max(initial=0)
    nonzero = magnitude != 0
    if scaled:
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = magnitude * scales_of(np.array([amax], np.float32), format)
    over, under, subnormal = limits(format)
    lost = nonzero & (magnitude <= under)
    small = (magnitude > under) & (magnitude < subnormal)
    beyond = ~np.isfinite(magnitude) | (magnitude >= over)
    return np.array([magnitude.size, amax, beyond.sum(), lost.sum(), small.sum()], np.float64)
