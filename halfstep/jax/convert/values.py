"""What the interpreter knows of a value: whether it is a master, a constant, or a weight that was cast too early.

    master        an fp32 array computed from parameters and constants alone, not yet cast: `owner`
    constant      computed from literals, iota, closed-over arrays; it has neither batch nor gradient: `fixed`
    early cast    computed from parameters and constants too, but by a primitive that does not run on masters, so
                  it was cast before, and its gradient is narrow: `early_cast` says of what, by what and where
    activation    anything else: what depends on a batch, and the result of a matmul

A function of parameters and constants runs in fp32 on the masters, and its result is cast where it meets
activations: `x @ jnp.tril(w)` has the casts and the fp32 weight gradient of `x @ w`. If a weight that was cast too
early is multiplied or looked up, and the policy demands what it can no longer have, it is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.config.model import owner as module_of
from halfstep.core.errors import PolicyReachError
from halfstep.jax.convert.checks import lost_by
from halfstep.jax.jaxpr import ARITHMETIC, COMPARISON, LAYOUT, equations_inside, is_conversion, is_float, line_of
from halfstep.jax.numerics.lowering import Casts


@dataclass(frozen=True)
class Owner:
    """The parameters that a master, or a value computed from masters, comes from; and how it is cast."""

    names: tuple[str, ...]
    casts: Casts
    matrix: bool  # one of them has two axes or more, as weights do
    looked_up: bool = False  # rows by index, as of an embedding: next to another parameter, the activation
    amaxes: Any = field(default=None, compare=False)  # what scales its delayed operands (fp8.py)


@dataclass(frozen=True)
class EarlyCast:
    """A parameter that was cast before it was multiplied, and the equation that needed the cast."""

    owner: Owner
    by: str


@dataclass(frozen=True)
class Value:
    """The value of a variable of the jaxpr."""

    array: Any  # in the variable's dtype; emulated, in fp32 where that is narrow
    owner: Owner | None = None  # the array is an fp32 master of these parameters, not yet cast
    ruled: bool = False  # it may be wider than the compute of the whole model, by a rule
    fixed: bool = False  # computed from constants alone, or by comparing parameters with them
    early_cast: EarlyCast | None = None  # of parameters and constants alone, and not a master
    free: bool = False  # there are neither parameters in it nor floats of the batch: tables, masks, positions
    kind: str = ""  # the array is fp32, not yet cast, and this part of an island (islands.py)
    narrow: bool = False  # the variable is fp32, promoted, and the array is in the compute format (patterns.py)
    explicit_cast: Any = None  # the conversion, written down in the function, that made it fp32
    history: "History | None" = None

    @property
    def follows_compute(self) -> bool:
        """Whether a value that appears in fp32 is cast to compute where it is multiplied."""
        return self.narrow or bool(self.kind) or self.free or self.fixed

    @property
    def is_looked_up(self) -> bool:
        """Whether it is rows of a parameter."""
        return self.owner is not None and self.owner.looked_up


@dataclass(frozen=True, eq=False)
class History:
    """How a value came about: the equation, its inputs, and whether there are sums in it."""

    eqn: Any
    values: tuple[Value, ...]
    sums: bool


def in_function(values: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """Returns values as the body of a loop or branch has them: other arrays, whose history is not seen there."""
    return [replace(value, array=array, history=None) for value, array in zip(values, arrays, strict=True)]


def floats_of(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Returns the inputs of an equation that hold floats."""
    return [value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)]


def common_owner(values: Sequence[Value]) -> Owner | None:
    """Returns the owner of a value computed from masters and constants alone, if all are cast alike."""
    owners = [value.owner for value in values if value.owner is not None]
    if not owners or not all(value.owner is not None or value.fixed for value in values):
        return None
    if any(owner.casts != owners[0].casts for owner in owners):
        return None
    names = tuple(dict.fromkeys(name for owner in owners for name in owner.names))
    return Owner(
        names,
        owners[0].casts,
        matrix=any(owner.matrix for owner in owners),
        looked_up=any(owner.looked_up for owner in owners),
        amaxes=owners[0].amaxes if len(names) == 1 else None,
    )


def owner_on_masters(eqn: Any, values: Sequence[Value]) -> Owner | None:
    """Returns the owner of the result of an equation that runs on masters; None if it does not.

    Looked-up rows, or what a batch selects, are a weight if multiplied at once, an activation after arithmetic.
    """
    name, owner = eqn.primitive.name, common_owner(floats_of(eqn, values))
    if owner is None:
        return None
    works = LAYOUT if owner.looked_up else LAYOUT | ARITHMETIC | COMPARISON
    if name not in works and not is_conversion(eqn):
        return None
    selected = name == "select_n" and not values[0].fixed
    return replace(owner, looked_up=owner.looked_up or name == "gather" or selected)


def owner_in_fp32(eqn: Any, values: Sequence[Value]) -> Owner | None:
    """Returns the owner of the results of any other equation whose floats are all fp32, as masters are."""
    owner = common_owner(floats_of(eqn, values))
    if owner is None or owner.looked_up:
        return None
    atoms = (atom for each in (eqn, *equations_inside(eqn)) for atom in (*each.invars, *each.outvars))
    return owner if all(atom.aval.dtype == jnp.float32 for atom in atoms if is_float(atom)) else None


def find_early_cast(values: Sequence[Value], eqn: Any) -> EarlyCast | None:
    """Returns which weight an equation needs cast, if its inputs depend on parameters and constants alone."""
    if not all(value.owner is not None or value.fixed or value.early_cast is not None for value in values):
        return None
    if any(value.is_looked_up for value in values):
        return None  # an activation
    for value in values:
        if value.owner is not None and value.owner.matrix:
            return EarlyCast(value.owner, place_of(eqn))
        if value.early_cast is not None:
            return value.early_cast
    return None


def check_early_cast(eqn: Any, early: EarlyCast | None) -> None:
    """Refuses a weight whose master was lost before the equation that multiplies it or looks it up."""
    lost = lost_by(early.owner.casts.precision) if early is not None else ""
    if early is not None and lost:
        name = early.owner.names[0]
        raise PolicyReachError(
            f"{place_of(eqn)} takes what {early.by} computed from `{name}`, but {lost} would not reach it",
            hint="widen the parameter before that with `.astype(jnp.float32)`, and cast the result: it then comes "
            f"from the parameter itself, in fp32; or give `{module_of(name)}` a rule with `compute=fp32`; if it "
            "is an activation, mark it: jax.ad_checkpoint.checkpoint_name(array, 'activation')",
        )


def place_of(eqn: Any) -> str:
    """Describes an equation for messages."""
    return f"`{eqn.primitive.name}` at {line_of(eqn)}"


def is_number_within(value: Value, largest: float) -> bool:
    """Returns whether a value is one number, spread or not, and known to be no larger than that."""
    history = value.history
    if history is not None and history.eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
        return is_number_within(history.values[0], largest)
    known = not isinstance(value.array, jax.core.Tracer) and jnp.ndim(value.array) == 0
    return known and abs(float(value.array)) <= largest
