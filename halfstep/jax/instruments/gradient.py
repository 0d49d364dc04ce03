"""The gradient of a loss, with the numbers of all its layers beside it.

They come from taps: identities that report what passes through them, as the gradient of a slot.
`tap(x, slot, what)` returns x. Differentiated, it gives x the gradient that arrives, and the *slot* the numbers of
x, or those of its gradient. So statistics leave a compiled step as gradients do: nothing is mutated, and neither
jit nor scan, remat or shard_map need know of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from halfstep.core.formats import FP32, Format
from halfstep.core.observed import AMAX, COLUMNS, ROLES, SAMPLED_ROLES, LayerInfo, limits
from halfstep.core.precision import Precision, base_precision
from halfstep.core.roles import is_narrow, print_value
from halfstep.jax.convert.apply import Applied
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.instruments.layers import Site, find_layers, run_with_taps
from halfstep.jax.numerics.cast import scale_for

_INF = 0x7F800000


@dataclass(frozen=True)
class Watched:
    """The layers of a loss function: each name once, and which of them each place in the jaxpr is."""

    layers: tuple[LayerInfo, ...]
    weights: tuple[str | None, ...]  # the parameter of each layer; None of a slice of one, or of none
    sites: tuple[Site, ...]
    index: tuple[int, ...]  # the layers of the sites in order, one per turn of their loops
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, sites: Sequence[Site], applied: Applied, modules: Sequence[str]) -> "Watched":
        """Names the layers of a function that runs under a policy."""
        by_module, base = applied.by_module(modules), base_precision(applied.policy)
        layers, parameters = dict[str, LayerInfo](), tuple(applied.masters)
        weights: dict[str, str | None] = {}
        index = []
        for site in sites:
            weight = site.weight or ""
            precision = by_module.get(site.name) or applied.precisions.get(weight, base)
            held = applied.masters[weight].format if weight in applied.masters else precision.compute
            formats = _formats_of(site, precision, held)
            for name in layer_names(site):
                layers.setdefault(name, LayerInfo(name, site.kind, formats))
                weights.setdefault(name, site.weight if name == site.name else None)
                index.append([*layers].index(name))
        return cls(tuple(layers.values()), tuple(weights.values()), tuple(sites), tuple(index), parameters)

    def numbers(self, reported: Sequence[Array]) -> Array:
        """Returns (layers, roles, columns) of what the slots of all sites report."""
        sites = [site for site in self.sites for _ in ROLES]
        rows = [_rows_by_layer(site, x) for site, x in zip(sites, reported, strict=True)]
        roles = [jnp.concatenate(rows[role::2]) for role in range(len(ROLES))]
        each, index = jnp.stack(roles, axis=1), np.array(self.index)
        if len(self.index) == len(self.layers):
            return each
        sums, largest = (f(each, index, len(self.layers)) for f in (jax.ops.segment_sum, jax.ops.segment_max))
        return jnp.where(jnp.arange(len(COLUMNS)) == AMAX, largest, sums)


def watched_gradient(
    objective: Callable[..., Any],
    masters: Mapping[str, Array],
    rest: Sequence[Any],
    applied: Applied,
    modules: Sequence[str],
    size: int,
    *,
    whole: bool = False,
) -> tuple[Any, Any, Watched, list[Array]]:
    """Returns gradients, what the objective returns beside the loss, the layers, and what they report by role.

    `objective(masters, *rest)` returns (loss, others), as for jax.grad with has_aux.
    """
    closed, shape = jax.make_jaxpr(objective, return_shape=True)(masters, *rest)
    names = [None if name.startswith(PREFIX) else name for name in sorted(masters)]
    plan = find_layers(closed, [*names, *[None] * len(jax.tree.leaves(rest))])
    watched = Watched.of(jax.tree.leaves(plan), applied, modules)
    infos = {info.name: info for info in watched.layers}

    def what(site: Site, role: int) -> What:
        return What(size, role == 1, infos[layer_names(site)[0]].format(ROLES[role]), whole)

    def slots_of(site: Site) -> tuple[Array, ...]:
        shapes = (what(site, role).shape(x) for role, x in enumerate((site.entering, site.leaving)))
        return tuple(jnp.zeros((*(length for length, _ in site.turns), *shape)) for shape in shapes)

    def run(masters: Mapping[str, Array], slots: Any) -> Any:
        arrays = jax.tree.leaves((masters, *rest))
        out = run_with_taps(
            closed.jaxpr, closed.consts, plan, slots, lambda s, role, x, slot: tap(x, slot, what(s, role)), arrays
        )
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    slots = jax.tree.map(slots_of, plan)
    (grads, reported), others = jax.grad(run, argnums=(0, 1), has_aux=True)(masters, slots)
    return grads, others, watched, jax.tree.leaves(reported)


def layer_names(site: Site) -> list[str]:
    """Returns the layers of a site: one, or one for each turn of the loops that slice its parameter."""
    lengths = [length for length, stacked in site.turns if stacked]
    return [site.name + "".join(f"[{i}]" for i in turn) for turn in np.ndindex(*lengths)]


def _rows_by_layer(site: Site, rows: Array) -> Array:
    """Returns one row per layer of a site."""
    again = tuple(axis for axis, (_, stacked) in enumerate(site.turns) if not stacked)
    return (merge_rows(rows, again) if again else rows).reshape(-1, len(COLUMNS))


def _formats_of(site: Site, precision: Precision, held: Format) -> dict[str, str]:
    """Returns the format of a layer's input, its gradient and its weight, in words."""
    operands = precision.operands if site.kind == "matmul" else (None, None)
    pairs = zip((precision.compute, precision.grad), operands, strict=True)
    roles = [print_value(own) if own is not None and is_narrow(own.format) else str(fmt) for fmt, own in pairs]
    return dict(zip(SAMPLED_ROLES, (*roles, str(held)), strict=True))


# --- taps


@dataclass(frozen=True)
class What:
    """What a tap reports: columns about a format, or the numbers themselves (`whole`)."""

    size: int  # elements at most, in whole rows if they are reported themselves
    gradient: bool
    format: Format = FP32
    whole: bool = False

    def shape(self, x: Any) -> tuple[int, ...]:
        """Returns the shape of the slot for an array."""
        if not self.whole:
            return (len(COLUMNS),)
        width = x.shape[-1] if x.ndim else 1
        return (min(x.size // max(width, 1), max(1, self.size // max(width, 1))), width)

    def report(self, x: Array) -> Array:
        """Returns what is reported of an array, in fp32."""
        if self.whole:
            rows, width = self.shape(x)
            return x.reshape(-1, width)[:rows].astype(jnp.float32)
        return row_of(x.reshape(-1)[: self.size], self.format)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tap(x: Array, slot: Array, what: What) -> Array:
    """Returns x; the gradient of the slot is what is reported of x, or of the gradient of x."""
    return x


tap.defvjp(
    lambda x, slot, what: (x, None if what.gradient else what.report(x)),
    lambda what, kept, g: (g, what.report(g) if kept is None else kept),
)


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


def merge_rows(rows: Array, axis: int | tuple[int, ...] = 0) -> Array:
    """Returns the columns, in the last dimension, of several rows together."""
    largest = jnp.arange(len(COLUMNS)) == AMAX
    return jnp.where(largest, jnp.max(rows, axis=axis, initial=0), jnp.sum(rows, axis=axis))
