"""Identities that report what passes through them, as the gradient of a slot.

`tap(x, slot, what)` returns x. Differentiated, it gives x the gradient that arrives, and the *slot* the numbers of
x, or those of its gradient. So statistics leave a compiled step as gradients do: nothing is mutated, and jit,
scan, remat and shard_map need not know of it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from halfstep.core.formats import FP32, Format
from halfstep.core.observed import AMAX, COLUMNS, limits
from halfstep.core.roles import is_narrow
from halfstep.jax.cast import scale_for

_INF = 0x7F800000


@dataclass(frozen=True)
class What:
    """What a tap reports: columns about a format, or the numbers themselves (`whole`)."""

    size: int  # elements at most, in whole rows if they are reported themselves
    gradient: bool
    format: Format = FP32
    whole: bool = False

    def shape(self, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """Returns the shape of the slot for an array."""
        if not self.whole:
            return (len(COLUMNS),)
        width = x.shape[-1] if x.ndim else 1
        return (min(x.size // max(width, 1), max(1, self.size // max(width, 1))), width)

    def report(self, x: Array) -> Array:
        """Returns what is reported of an array, in fp32."""
        if self.whole:
            rows, width = self.shape(jax.ShapeDtypeStruct(x.shape, x.dtype))
            return x.reshape(-1, width)[:rows].astype(jnp.float32)
        return row_of(x.reshape(-1)[: self.size], self.format)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tap(x: Array, slot: Array, what: What) -> Array:
    """Returns x; the gradient of the slot is what is reported of x, or of the gradient of x."""
    return x


def _forward(x: Array, slot: Array, what: What) -> tuple[Array, Array | None]:
    return x, None if what.gradient else what.report(x)


def _backward(what: What, kept: Array | None, g: Array) -> tuple[Array, Array]:
    return g, what.report(g) if kept is None else kept


tap.defvjp(_forward, _backward)


def row_of(x: Array, fmt: Format) -> Array:
    """Returns core.observed.row_of: a narrow operand is scaled by the power of two of its own amax.

    Patterns are compared, which are in the order of the numbers: XLA flushes subnormals on a CPU.
    """
    pattern = _pattern(lax.stop_gradient(x).astype(jnp.float32))
    largest = lax.bitcast_convert_type(jnp.max(jnp.where(pattern < _INF, pattern, 0), initial=0), jnp.float32)
    scaled = pattern
    if is_narrow(fmt):
        scaled = _pattern(lax.bitcast_convert_type(pattern, jnp.float32) * scale_for(largest, fmt))
    over, under, small = (int(np.float32(limit).view(np.int32)) for limit in limits(fmt))
    counted = (scaled >= over, (pattern > 0) & (scaled <= under), (scaled > under) & (scaled < small))
    sums = [jnp.sum(each, dtype=jnp.float32) for each in counted]
    return jnp.stack([jnp.float32(x.size), largest, *sums])


def _pattern(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def merged(rows: Array, axis: int | tuple[int, ...] = 0) -> Array:
    """Returns the columns, in the last dimension, of several rows together."""
    largest = jnp.arange(len(COLUMNS)) == AMAX
    return jnp.where(largest, jnp.max(rows, axis=axis, initial=0), jnp.sum(rows, axis=axis))
