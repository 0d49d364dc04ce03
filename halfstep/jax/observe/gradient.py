"""The gradient of a loss, with the numbers of all its layers beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from halfstep.core.formats import Format
from halfstep.core.observed import AMAX, COLUMNS, ROLES, SAMPLED_ROLES, LayerInfo
from halfstep.core.precision import Precision, base_precision
from halfstep.core.roles import is_narrow, print_value
from halfstep.jax.apply import Applied
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.observe.layers import Site, Taps, find_layers, flat, run_with_taps, slots_for
from halfstep.jax.observe.taps import What, merged, tap

PrecisionOf = Callable[[str, str | None], Precision]
"""Returns the formats of a layer, by its name and its parameter."""


@dataclass(frozen=True)
class Watched:
    """The layers of a loss function: each name once, and which of them each place in the jaxpr is."""

    layers: tuple[LayerInfo, ...]
    weights: tuple[str | None, ...]  # the parameter of each layer; None of a slice of one, or of none
    sites: tuple[Site, ...]
    index: tuple[int, ...]  # the layers of the sites in order, one per turn of their loops

    @classmethod
    def of(cls, sites: Sequence[Site], precision_of: PrecisionOf, held: Mapping[str, Format]) -> "Watched":
        """Names the layers of a jaxpr."""
        layers: dict[str, LayerInfo] = {}
        weights: dict[str, str | None] = {}
        index = []
        for site in sites:
            info = _info(site, precision_of(site.name, site.weight), held)
            for name in _names(site):
                layers.setdefault(name, LayerInfo(name, info.kind, info.formats))
                weights.setdefault(name, site.weight if name == site.name else None)
                index.append([*layers].index(name))
        return cls(tuple(layers.values()), tuple(weights.values()), tuple(sites), tuple(index))

    def numbers(self, reported: Sequence[Array]) -> Array:
        """Returns (layers, roles, columns) of what the slots of all sites report."""
        rows = [
            _by_turn(site, x) for pair, site in enumerate(self.sites) for x in reported[2 * pair : 2 * pair + 2]
        ]
        roles = [jnp.concatenate(rows[role::2]) for role in range(len(ROLES))]
        each, index = jnp.stack(roles, axis=1), np.array(self.index)
        if len(self.index) == len(self.layers):
            return each
        sums, largest = (f(each, index, len(self.layers)) for f in (jax.ops.segment_sum, jax.ops.segment_max))
        return jnp.where(jnp.arange(len(COLUMNS)) == AMAX, largest, sums)


def describer(applied: Applied, modules: Sequence[str]) -> Callable[[Sequence[Site]], Watched]:
    """Returns what names the layers of a function that runs under a policy."""
    by_module, base = applied.by_module(modules), base_precision(applied.policy)
    held = {name: param.format for name, param in applied.masters.items()}

    def precision_of(name: str, weight: str | None) -> Precision:
        return by_module.get(name) or applied.precisions.get(weight or "", base)

    return lambda sites: Watched.of(sites, precision_of, held)


def watched_gradient(
    objective: Callable[..., Any],
    masters: Mapping[str, Array],
    rest: Sequence[Any],
    describe: Callable[[Sequence[Site]], Watched],
    size: int,
    *,
    whole: bool = False,
) -> tuple[Any, Any, Watched, list[Array]]:
    """Returns gradients, what the objective returns besides, the layers, and what each reports for each role.

    `objective(masters, *rest)` returns (loss, besides), as for jax.grad with has_aux.
    """
    closed, shape = jax.make_jaxpr(objective, return_shape=True)(masters, *rest)
    names = [
        *(None if name.startswith(PREFIX) else name for name in sorted(masters)),
        *[None] * len(jax.tree.leaves(rest)),
    ]
    layers = find_layers(closed, names)
    watched = describe(flat(layers))
    infos = {info.name: info for info in watched.layers}

    def what(site: Site, role: int) -> What:
        return What(size, role == 1, infos[_names(site)[0]].format(ROLES[role]), whole)

    taps = Taps(
        lambda site, x, slot: tap(x, slot, what(site, 0)), lambda site, x, slot: tap(x, slot, what(site, 1))
    )
    slots = slots_for(layers, lambda site: (what(site, 0).shape(site.entering), what(site, 1).shape(site.leaving)))

    def run(masters: Mapping[str, Array], slots: Any) -> Any:
        out = run_with_taps(closed, names, layers, taps, slots, jax.tree.leaves((masters, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    (grads, reported), besides = jax.grad(run, argnums=(0, 1), has_aux=True)(masters, slots)
    return grads, besides, watched, jax.tree.leaves(reported)


def _names(site: Site) -> list[str]:
    """Returns the layers of a site: one, or one for each turn of the loops that slice its parameter."""
    lengths = [length for length, stacked in site.turns if stacked]
    return [site.name + "".join(f"[{i}]" for i in turn) for turn in np.ndindex(*lengths)]


def _by_turn(site: Site, rows: Array) -> Array:
    """Returns one row per layer of a site."""
    again = tuple(axis for axis, (_, stacked) in enumerate(site.turns) if not stacked)
    return (merged(rows, again) if again else rows).reshape(-1, len(COLUMNS))


def _info(site: Site, precision: Precision, held: Mapping[str, Format]) -> LayerInfo:
    operands = precision.operands if site.kind == "matmul" else ()
    narrow = [operand if is_narrow(operand.format) else None for operand in operands] or [None, None]
    given = (precision.compute, precision.grad)
    roles = [str(fmt) if each is None else print_value(each) for fmt, each in zip(given, narrow, strict=True)]
    weight = str(held.get(site.weight or "", precision.compute))
    return LayerInfo(site.name, site.kind, dict(zip(SAMPLED_ROLES, (*roles, weight), strict=True)))
