"""A precision in MLX's terms, and how a policy or a precision becomes one."""

from functools import cache

import mlx.core as mx

from halfstep.core.arrays import lowering
from halfstep.core.policy import Policy, as_policy
from halfstep.core.precision import Precision, base_precision
from halfstep.mlx.numerics.dtypes import DTYPES, dtype_of

Casts = lowering.Casts[mx.Dtype]

NATIVE = tuple(DTYPES)
"""The formats that matmuls run in natively, where the device does; any other format is emulated."""


@cache
def casts_of(precision: Precision) -> Casts:
    """Returns the dtypes of a precision."""
    return Casts.lower(precision, dtype_of)


def casts_for(policy: Policy | str) -> Casts:
    """Returns the dtypes of a policy where no rule applies."""
    return casts_of(base_precision(as_policy(policy)))
