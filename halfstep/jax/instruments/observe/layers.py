"""Finds the layers of any loss function in its jaxpr, and runs it again with taps around each.

A layer is an operation between activations and a parameter:

    matmul       dot_general, convolutions, and functions with their own derivative that multiply
    norm         a product of normalized numbers and a gain, or a norm of halfstep.jax
    embedding    rows of a parameter, looked up by the batch

Its name is that of the halfstep.jax layer around it, or of the module that owns the parameter. A scan that takes
one slice of a parameter per turn has a layer per turn, `blocks.up[3]`; what a loop uses at each turn is one layer.
Loops by `while`, branches, and sharded functions inside a loss run unwatched.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from halfstep.config.model import owner
from halfstep.jax.jaxpr import (
    ARITHMETIC,
    INLINED,
    LAYOUT,
    PASSED,
    PRODUCT,
    REMAT,
    bind,
    equations_inside,
    function_of,
    is_float,
    multiplies,
    parts_of_scan,
    remat_again,
    scan_again,
    walk,
)
from halfstep.jax.layers import SCOPE

_OURS = re.compile(rf"{SCOPE}([^/)]+)")
_MOVES = LAYOUT | PASSED | {"convert_element_type", "reduce_precision"}
_ELEMENTWISE = ARITHMETIC | _MOVES | {"stop_gradient"}


class Site(NamedTuple):
    """A layer in the jaxpr."""

    name: str
    kind: str  # matmul, norm, embedding
    weight: str | None  # the parameter, if it has one
    entering: jax.ShapeDtypeStruct  # of an embedding: what leaves
    leaving: jax.ShapeDtypeStruct
    turns: tuple[
        tuple[int, bool], ...
    ] = ()  # of each loop around it: its length, and whether each turn is a layer


# (x, the slot) -> x, for what enters a layer and for what leaves it
Tap = Callable[[Site, Array, Array], Array]


class Taps(NamedTuple):
    """What to do at each layer."""

    entering: Tap
    leaving: Tap


@dataclass(frozen=True)
class _Value:
    array: Any
    weight: str | None = None  # the parameter that it is, or comes from alone
    fixed: bool = False  # computed from constants alone
    root: bool = False  # a root was taken on the way here: it is being normalized
    stacked: frozenset[int] = frozenset()  # the loops that take a slice of it per turn, by depth


# The layers of a jaxpr in order; those of a loop, or of a function that runs again, are a list of their own.
Tree = list[Any]


def find_layers(closed: Any, names: Sequence[str | None]) -> Tree:
    """Returns the layers of a function; `names` are the parameters among its inputs."""
    found: Tree = []
    walker = _Walker(names, into=found)
    jax.eval_shape(lambda *args: walker.run(closed, args), *(_shape_of(var.aval) for var in closed.jaxpr.invars))
    return found


def flat(layers: Tree) -> list[Site]:
    """Returns the layers without their nesting."""
    return [site for each in layers for site in (flat(each) if isinstance(each, list) else [each])]


def slots_for(layers: Tree, shapes: Callable[[Site], tuple[tuple[int, ...], tuple[int, ...]]]) -> Tree:
    """Returns a pair of slots for each layer, nested as the layers are, with the lengths of loops in front."""

    def pair(site: Site) -> tuple[Array, ...]:
        return tuple(jnp.zeros((*(length for length, _ in site.turns), *shape)) for shape in shapes(site))

    return [slots_for(each, shapes) if isinstance(each, list) else pair(each) for each in layers]


def run_with_taps(
    closed: Any, names: Sequence[str | None], layers: Tree, taps: Taps, slots: Tree, args: Sequence[Any]
) -> list[Any]:
    """Evaluates a jaxpr with taps at its layers."""
    return _Walker(names, taps=taps, slots=zip(layers, slots, strict=True)).run(closed, args)


class _Walker:
    """Runs a jaxpr: finds its layers (`into`), or taps those that were found."""

    def __init__(
        self,
        names: Sequence[str | None],
        *,
        into: Tree | None = None,
        taps: Taps | None = None,
        slots: Iterable[tuple[Any, Any]] = (),
    ):
        self.names, self.taps = names, taps
        self.into: Tree = [] if into is None else into
        self.slots = iter(slots)
        self.turns: tuple[int, ...] = ()
        self.scopes: tuple[str, ...] = ()

    def run(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a closed jaxpr."""
        given = [_Value(array, name) for array, name in zip(args, self.names, strict=True)]
        return [value.array for value in self._evaluate(closed.jaxpr, closed.consts, given)]

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[_Value]) -> list[_Value]:
        known = [*zip(jaxpr.invars, args, strict=True)]
        known += zip(jaxpr.constvars, (_Value(x, fixed=True) for x in consts), strict=True)
        return walk(
            jaxpr,
            known,
            lambda atom: _Value(atom.val, fixed=True),
            lambda eqn, values: self._equation(jaxpr, eqn, values),
        )

    def _equation(self, jaxpr: Any, eqn: Any, values: list[_Value]) -> list[_Value]:
        name, outer = eqn.primitive.name, self.scopes
        self.scopes = (*outer, str(eqn.source_info.name_stack))
        try:
            if name in INLINED:
                inner = function_of(eqn)
                return self._evaluate(inner.jaxpr, inner.consts, values)
            if name == "scan":
                return self._scan(eqn, values)
            if name in REMAT:
                return self._remat(eqn, values)
            layer = self._layer(eqn, values)
            if layer is not None:
                return self._run_tapped(jaxpr, eqn, values, *layer)
            out = bind(jaxpr, eqn, [value.array for value in values])
            return [replace(self._describe_result(eqn, values), array=array) for array in out]
        finally:
            self.scopes = outer

    def _describe_result(self, eqn: Any, values: Sequence[_Value]) -> _Value:
        """Returns what is known of the results of an operation that is no layer."""
        floats = [v for v, atom in zip(values, eqn.invars, strict=True) if is_float(atom)]
        weights = [v for v in floats if v.weight is not None]
        alone = bool(weights) and all(v.weight is not None or v.fixed for v in floats)
        name = eqn.primitive.name
        root = name in ("rsqrt", "sqrt") or (name in _ELEMENTWISE and any(v.root for v in values))
        return _Value(
            None,
            weights[0].weight if alone and name != "gather" else None,
            fixed=all(v.fixed for v in values),
            root=root and not alone,
            stacked=frozenset().union(*(v.stacked for v in weights)) if alone else frozenset(),
        )

    def _layer(self, eqn: Any, values: Sequence[_Value]) -> tuple[str, int | None] | None:
        """Returns the kind of layer that an operation is, and which input enters it; None if it is none."""
        name = eqn.primitive.name
        floats = [i for i, atom in enumerate(eqn.invars) if is_float(atom)]
        weights = [i for i in floats if values[i].weight is not None]
        entering = [
            i for i in floats if values[i].weight is None and not values[i].fixed and jnp.size(values[i].array) > 1
        ]
        if name == "gather":
            looked_up = weights == [0] and not values[1].fixed
            return ("embedding", None) if looked_up else None
        if not entering:
            return None
        if weights and (name in PRODUCT or (name.startswith("custom_vjp_call") and multiplies(eqn))):
            return "matmul", entering[0]
        if name.startswith("custom_vjp_call") and any(
            each.primitive.name in ("rsqrt", "sqrt") for each in equations_inside(eqn)
        ):
            return "norm", entering[0]
        normalizes = name == "mul" and any(values[i].root for i in entering)
        return ("norm", entering[0]) if weights and normalizes else None

    def _run_tapped(
        self, jaxpr: Any, eqn: Any, values: Sequence[_Value], kind: str, entering: int | None
    ) -> list[_Value]:
        arrays = [value.array for value in values]
        weight = next((value for value in values if value.weight is not None), _Value(None))
        if self.taps is None:
            leaving = _shape_of(eqn.outvars[0].aval)
            given = leaving if entering is None else _shape_of(eqn.invars[entering].aval)
            turns = tuple((length, depth in weight.stacked) for depth, length in enumerate(self.turns))
            named = self._scope() or owner(weight.weight or "")
            self.into.append(Site(named, kind, weight.weight, given, leaving, turns))
            return [_Value(array) for array in bind(jaxpr, eqn, arrays)]
        site, (first, second) = next(self.slots)
        if entering is not None:
            arrays[entering] = self.taps.entering(site, arrays[entering], first)
        y, *rest = bind(jaxpr, eqn, arrays)
        if entering is None:
            y = self.taps.entering(site, y, first)
        return [_Value(array) for array in (self.taps.leaving(site, y, second), *rest)]

    def _scope(self) -> str:
        """Returns the name of the innermost halfstep.jax layer around an operation."""
        found = _OURS.findall("/".join(self.scopes))
        return str(found[-1]) if found else ""

    def _nested(self) -> tuple[Tree, Tree]:
        """Returns the layers of a function inside, and their slots; none yet, while they are being found."""
        if self.taps is not None:
            layers, slots = next(self.slots)
            return layers, slots
        self.into.append([])
        return self.into[-1], []

    def _evaluate_nested(
        self, layers: Tree, slots: Tree, jaxpr: Any, consts: Sequence[Any], values: list[_Value]
    ) -> Any:
        """Evaluates a function inside, with its own layers."""
        outer = self.into, self.slots
        self.into, self.slots = layers, iter(zip(layers, slots, strict=True) if self.taps is not None else ())
        if self.taps is None:
            layers.clear()  # JAX may trace a function twice
        try:
            return self._evaluate(jaxpr, consts, values)
        finally:
            self.into, self.slots = outer

    def _scan(self, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        params, closed = eqn.params, eqn.params["jaxpr"]
        first, count = parts_of_scan(eqn)
        last, depth = first + count, len(self.turns)
        layers, slots = self._nested()

        def body(carry: list[Any], parts: tuple[list[Any], Tree]) -> tuple[list[Any], list[Any]]:
            rows, inside = parts
            along = zip(values[last:], rows, strict=True)
            given = [*values[:first], *map(_Value, carry)]
            given += [replace(value, array=x, stacked=value.stacked | {depth}) for value, x in along]
            out = self._evaluate_nested(layers, inside, closed.jaxpr, closed.consts, given)
            arrays = [_cast(value, var) for value, var in zip(out, closed.jaxpr.outvars, strict=True)]
            return arrays[:count], arrays[count:]

        carry = [_cast(value, var) for value, var in zip(values[first:last], eqn.invars[first:last], strict=True)]
        rows = [value.array for value in values[last:]]
        self.turns, kept = (*self.turns, params["length"]), self.turns
        ends, ys = scan_again(eqn, body, carry, (rows, slots))
        self.turns = kept
        return [_Value(x) for x in (*ends, *ys)]

    def _remat(self, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        layers, slots = self._nested()

        def fn(arrays: list[Any], slots: Tree) -> list[Any]:
            given = [replace(value, array=array) for value, array in zip(values, arrays, strict=True)]
            return [value.array for value in self._evaluate_nested(layers, slots, eqn.params["jaxpr"], (), given)]

        out = remat_again(eqn, fn)([value.array for value in values], slots)
        return [_Value(array) for array in out]


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _cast(value: _Value, var: Any) -> Any:
    return jnp.asarray(value.array, var.aval.dtype)
