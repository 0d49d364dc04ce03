"""A precision in JAX's terms, and how a policy or a precision becomes one."""

from functools import cache

import jax.numpy as jnp

from halfstep.core.arrays import lowering
from halfstep.core.formats import TF32, Format
from halfstep.core.policy import Policy, as_policy
from halfstep.core.precision import Precision, base_precision
from halfstep.jax.numerics.dtypes import DTYPES, DType, dtype_of

Casts = lowering.Casts[DType]

NATIVE = (*DTYPES, TF32)
"""The formats that matmuls run in natively, where the device does; any other format is emulated."""


@cache
def casts_of(precision: Precision) -> Casts:
    """Returns the dtypes of a precision."""
    return Casts.lower(precision, carrier_of)


def casts_for(policy: Policy | str) -> Casts:
    """Returns the dtypes of a policy where no rule applies."""
    return casts_of(base_precision(as_policy(policy)))


def carrier_of(fmt: Format) -> DType:
    """Returns the dtype that holds a format; TF32 is a way to multiply fp32 arrays."""
    return jnp.dtype(jnp.float32) if fmt == TF32 else dtype_of(fmt)
