"""The mathematics of what formats do to tensors, in sums that merge.

tensors       one tensor as one format sees it, and updates that a weight's format loses
what_if       what another format would have lost, with a scale per tensor, row or block
"""

from halfstep.core.stats.tensors import FIRST_EXPONENT, NUM_EXPONENTS, TensorStats, UpdateStats, headroom_bits
from halfstep.core.stats.what_if import SPECS, SignalLost, signal_lost

__all__ = [
    "FIRST_EXPONENT",
    "NUM_EXPONENTS",
    "SPECS",
    "SignalLost",
    "TensorStats",
    "UpdateStats",
    "headroom_bits",
    "signal_lost",
]
