"""The gradient of a loss, with the numbers of all its layers beside it.

They come from taps: identities that report what passes through them, as the gradient of a slot.
`tap(x, slot, what)` returns x. Differentiated, it gives x the gradient that arrives, and the *slot* the numbers of
x, or those of its gradient. So statistics leave a compiled step as gradients do: nothing is mutated, and neither
jit nor scan, remat or shard_map need know of it.

The layers of any loss function are found in its jaxpr, which then runs again with taps around each. A
layer is an operation between activations and a parameter:

    matmul       dot_general, convolutions, and functions with their own derivative that multiply
    norm         a product of normalized numbers and a gain, or a norm of halfstep.jax
    embedding    rows of a parameter, looked up by the batch

Its name is that of the halfstep.jax layer around it, or of the module that owns the parameter. A scan that takes
one slice of a parameter per turn has a layer per turn, `blocks.up[3]`; what a loop uses at each turn is one layer.
Loops by `while`, branches, and sharded functions inside a loss run unwatched.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from halfstep.config.model import owner
from halfstep.core.formats import FP32, Format
from halfstep.core.observed import AMAX, COLUMNS, ROLES, LayerInfo, limits
from halfstep.core.precision import base_precision
from halfstep.core.roles import is_narrow
from halfstep.jax import jaxpr as jaxprs
from halfstep.jax.convert.apply import Applied
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.layers import SCOPE
from halfstep.jax.numerics.cast import scale_for

_INF = 0x7F800000
_OURS = re.compile(rf"{SCOPE}([^/)]+)")
_ELEMENTWISE = jaxprs.ARITHMETIC | jaxprs.LAYOUT | jaxprs.PASSED | {"convert_element_type", "reduce_precision"}


# --- finding layers


@dataclass(frozen=True)
class Site:
    """A layer in the jaxpr."""

    name: str
    kind: str  # matmul, norm, embedding
    weight: str | None  # the parameter, if it has one
    input: int | None  # which operand enters it; None of an embedding, where what leaves it counts as that too
    entering: Any  # shape and dtype
    leaving: Any
    turns: tuple[tuple[int, bool], ...]  # of each loop around it: its length, and whether each turn is a layer


Plan = list[Any]
"""For each equation of a jaxpr a layer, the plan of the function inside, or None."""


@dataclass(frozen=True)
class _Fact:
    """What is known of a value."""

    weight: str | None = None  # the parameter that it is, or comes from alone
    fixed: bool = False  # computed from constants alone
    root: bool = False  # a root was taken on the way here: it is being normalized
    stacked: frozenset[int] = frozenset()  # the loops that take a slice of it per turn, by depth


def find_layers(closed: Any, names: Sequence[str | None]) -> Plan:
    """Returns where the layers of a function are; `names` are the parameters among its inputs."""
    return _find(closed.jaxpr, [_Fact(name) for name in names], (), ())[0]


def _find(
    jaxpr: Any, facts: Sequence[_Fact], turns: tuple[int, ...], scopes: tuple[str, ...]
) -> tuple[Plan, list[_Fact]]:
    plan: Plan = []

    def equation(eqn: Any, given: list[_Fact]) -> list[_Fact]:
        name, around = eqn.primitive.name, (*scopes, str(eqn.source_info.name_stack))
        found: Any
        if name not in jaxprs.INLINED | jaxprs.REMAT | {"scan"}:
            found = _site(eqn, given, turns, around)
            results = [_fact_of_result(eqn, given) if found is None else _Fact()] * len(eqn.outvars)
        else:
            [(inner, _)], loops = jaxprs.functions_of(eqn), turns
            if name == "scan":
                first, count = jaxprs.parts_of_scan(eqn)
                along = [replace(fact, stacked=fact.stacked | {len(turns)}) for fact in given[first + count :]]
                given, loops = [*given[:first], *[_Fact()] * count, *along], (*turns, eqn.params["length"])
            found, results = _find(inner, given, loops, around)
            results = results if name in jaxprs.INLINED else [_Fact()] * len(eqn.outvars)
        plan.append(found)
        return results

    env = dict.fromkeys(jaxpr.constvars, _Fact(fixed=True)) | dict(zip(jaxpr.invars, facts, strict=True))
    return plan, jaxprs.walk(jaxpr, env, lambda _: _Fact(fixed=True), equation)


def _site(eqn: Any, facts: Sequence[_Fact], turns: tuple[int, ...], scopes: tuple[str, ...]) -> Site | None:
    kind, entering = _kind_of_layer(eqn, facts)
    if not kind:
        return None
    weight = next((fact for fact in facts if fact.weight is not None), _Fact())
    leaving = eqn.outvars[0].aval
    ours = _OURS.findall("/".join(scopes))  # the innermost layer of halfstep.jax around it
    return Site(
        str(ours[-1]) if ours else owner(weight.weight or ""),
        kind,
        weight.weight,
        entering,
        leaving if entering is None else eqn.invars[entering].aval,
        leaving,
        tuple((length, depth in weight.stacked) for depth, length in enumerate(turns)),
    )


def _kind_of_layer(eqn: Any, facts: Sequence[_Fact]) -> tuple[str, int | None]:
    """Returns the kind of layer that an operation is, empty if it is none, and which input enters it."""
    name = eqn.primitive.name
    floats = [i for i, atom in enumerate(eqn.invars) if jaxprs.is_float(atom)]
    weights = [i for i in floats if facts[i].weight is not None]
    entering = [
        i for i in floats if facts[i].weight is None and not facts[i].fixed and eqn.invars[i].aval.size > 1
    ]
    if name == "gather":
        return "embedding" if weights == [0] and not facts[1].fixed else "", None
    if not entering:
        return "", None
    own_gradient = name.startswith("custom_vjp_call")
    if weights and (name in jaxprs.PRODUCT or (own_gradient and jaxprs.multiplies(eqn))):
        return "matmul", entering[0]
    roots = own_gradient and any(each.primitive.name in ("rsqrt", "sqrt") for each in jaxprs.equations_inside(eqn))
    normalizes = name == "mul" and bool(weights) and any(facts[i].root for i in entering)
    return "norm" if roots or normalizes else "", entering[0]


def _fact_of_result(eqn: Any, facts: Sequence[_Fact]) -> _Fact:
    """Returns what is known of the results of an operation that is no layer."""
    floats = [fact for fact, atom in zip(facts, eqn.invars, strict=True) if jaxprs.is_float(atom)]
    weights = [fact for fact in floats if fact.weight is not None]
    alone = bool(weights) and all(fact.weight is not None or fact.fixed for fact in floats)
    name = eqn.primitive.name
    root = name in ("rsqrt", "sqrt") or (name in _ELEMENTWISE and any(fact.root for fact in facts))
    return _Fact(
        weights[0].weight if alone and name != "gather" else None,
        fixed=all(fact.fixed for fact in facts),
        root=root and not alone,
        stacked=frozenset().union(*(fact.stacked for fact in weights)) if alone else frozenset(),
    )


# --- running with taps


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
    """Returns the columns of core.observed: a narrow operand is scaled by the power of two of its own amax.

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


Role = Callable[[Site, int], What]
"""(layer, 0 for what enters it or 1 for what leaves it) -> what its tap reports"""


def run_with_taps(
    jaxpr: Any, consts: Sequence[Any], plan: Plan, what: Role, slots: Plan, arrays: Sequence[Any]
) -> list[Any]:
    """Evaluates a jaxpr with taps at its layers; `slots` has a pair of them in the place of each layer."""
    steps = zip(plan, slots, strict=True)

    def equation(eqn: Any, arrays: list[Any]) -> list[Any]:
        (found, slot), name = next(steps), eqn.primitive.name
        if isinstance(found, Site):
            if found.input is not None:
                arrays[found.input] = tap(arrays[found.input], slot[0], what(found, 0))
            y, *rest = jaxprs.bind(jaxpr, eqn, arrays)
            if found.input is None:
                y = tap(y, slot[0], what(found, 0))
            return [tap(y, slot[1], what(found, 1)), *rest]
        if name not in jaxprs.INLINED | jaxprs.REMAT | {"scan"}:
            return jaxprs.bind(jaxpr, eqn, arrays)
        [(inner, own)] = jaxprs.functions_of(eqn)
        run = partial(run_with_taps, inner, own, found, what)
        if name == "scan":
            return jaxprs.scan_with(eqn, arrays, lambda inputs, slots: (run(slots, inputs), None), slot)[0]
        return list((jaxprs.remat_again(eqn, run) if name in jaxprs.REMAT else run)(slot, arrays))

    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))
    return jaxprs.walk(jaxpr, env, lambda atom: atom.val, equation)


# --- the gradient


@dataclass(frozen=True)
class Watched:
    """The layers of a loss function: each name once, and which of them each place in the jaxpr is."""

    layers: tuple[LayerInfo, ...]
    weights: tuple[str | None, ...]  # the parameter of each layer; None of a slice of one, or of none
    sites: tuple[Site, ...]
    index: tuple[int, ...]  # the layers of the sites in order, one per turn of their loops

    @classmethod
    def of(cls, sites: Sequence[Site], applied: Applied) -> "Watched":
        """Names the layers of a function that runs under a policy."""
        by_module, base = applied.by_module(applied.modules), base_precision(applied.policy)
        layers = dict[str, LayerInfo]()
        weights: dict[str, str | None] = {}
        index = []
        for site in sites:
            weight = site.weight or ""
            precision = by_module.get(site.name) or applied.precisions.get(weight, base)
            held = applied.masters[weight].format if weight in applied.masters else precision.compute
            for name in layer_names(site):
                layers.setdefault(name, LayerInfo.of(name, site.kind, precision, held))
                weights.setdefault(name, site.weight if name == site.name else None)
                index.append([*layers].index(name))
        return cls(tuple(layers.values()), tuple(weights.values()), tuple(sites), tuple(index))

    def numbers(self, reported: Sequence[Array]) -> Array:
        """Returns (layers, roles, columns) of what the slots of all sites report."""
        sites = [site for site in self.sites for _ in ROLES]
        rows = []
        for site, x in zip(sites, reported, strict=True):
            again = tuple(axis for axis, (_, stacked) in enumerate(site.turns) if not stacked)
            rows.append((merge_rows(x, again) if again else x).reshape(-1, len(COLUMNS)))  # one of each layer
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
    watched = Watched.of(jax.tree.leaves(plan), applied)
    infos = {info.name: info for info in watched.layers}

    def what(site: Site, role: int) -> What:
        return What(size, role == 1, infos[layer_names(site)[0]].format(ROLES[role]), whole)

    def slots_of(site: Site) -> tuple[Array, ...]:
        shapes = (what(site, role).shape(x) for role, x in enumerate((site.entering, site.leaving)))
        return tuple(jnp.zeros((*(length for length, _ in site.turns), *shape)) for shape in shapes)

    def run(masters: Mapping[str, Array], slots: Any) -> Any:
        arrays = jax.tree.leaves((masters, *rest))
        out = run_with_taps(closed.jaxpr, closed.consts, plan, what, slots, arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    slots = jax.tree.map(slots_of, plan)
    (grads, reported), others = jax.grad(run, argnums=(0, 1), has_aux=True)(masters, slots)
    return grads, others, watched, jax.tree.leaves(reported)


def layer_names(site: Site) -> list[str]:
    """Returns the layers of a site: one, or one for each turn of the loops that slice its parameter."""
    lengths = [length for length, stacked in site.turns if stacked]
    return [site.name + "".join(f"[{i}]" for i in turn) for turn in np.ndindex(*lengths)]
