"""How each operation of a loss function runs: the list of `step.reach(state, batch)`.

The function is interpreted once more (functions/interpret.py), on shapes alone: nothing is computed. The list has
every product, island and look-up, by the module that owns its parameter, or else by its line; of the operations
that no role reaches it has those that lose precision: sums of narrow numbers. What a loop repeats is counted once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax

from halfstep.config.model import owner as module_of
from halfstep.core.audit.reached import IN_COMPUTE, Reached, Row
from halfstep.core.policy import Policy
from halfstep.core.roles import Operand, print_value
from halfstep.jax.apply import Applied, Leaves
from halfstep.jax.functions.interpret import Interpreter, appears, cast_inside
from halfstep.jax.functions.islands import Island
from halfstep.jax.functions.lazy import Value
from halfstep.jax.functions.primitives import ISLANDS, is_float, line_of

_SUMS = ("reduce_sum", "cumsum")


def record(
    loss_fn: Callable[..., Any],
    leaves: Leaves,
    applied: Applied,
    masters: Mapping[str, Any],
    rest: Sequence[Any],
    *,
    cast_batch: bool,
) -> Reached:
    """Interprets a loss function on shapes, and lists its operations."""
    recorder = Recorder(applied.policy, applied.measured.notes)

    def run(masters: Mapping[str, Any], rest: Sequence[Any]) -> None:
        cast_inside(loss_fn, leaves, applied, masters, rest, cast_batch=cast_batch, interpreter=recorder)

    jax.eval_shape(run, masters, rest)
    return recorder.reached()


class Recorder(Interpreter):
    """An interpreter that notes how it runs each operation."""

    def __init__(self, policy: Policy, notes: Mapping[str, str]):
        super().__init__(policy)
        self._notes = notes  # of layers that were measured
        self.island = self._recomputed = _Island(self._widened)
        self._rows: Counter[Row] = Counter()
        self._sums: list[tuple[Any, Row]] = []  # of narrow numbers, by their equation
        self._pauses = False

    def reached(self) -> Reached:
        """Returns the list. A sum that an island computed again, in fp32, is part of the island."""
        rows = self._rows.copy()
        rows.update(row for eqn, row in self._sums if id(eqn) not in self._recomputed.again)
        return Reached(tuple(row._replace(calls=calls) for row, calls in rows.items()))

    def _dot(self, eqn: Any, values: list[Value]) -> tuple[Any, bool]:
        out = super()._dot(eqn, values)
        self._note_product(eqn, values)
        return out

    def _conv(self, eqn: Any, values: list[Value]) -> tuple[Any, bool]:
        out = super()._conv(eqn, values)
        self._note_product(eqn, values)
        return out

    def _on_masters(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        out = super()._on_masters(jaxpr, eqn, values)
        owner = values[0].owner
        if out is not None and eqn.primitive.name == "gather" and owner is not None:
            casts = owner.casts.precision
            why = f"looks up its master and casts to {casts.compute}, gradients in {casts.grad_weight}"
            self._note(Row("gather", module_of(owner.names[0]), "reached", why))
        return out

    def _in_island(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        out, name = super()._in_island(jaxpr, eqn, values), eqn.primitive.name
        role = "softmax" if name.startswith("custom_jvp_call") and out is not None else ISLANDS.get(name)
        if role is None or not eqn.invars[0].aval.shape:
            return out
        inside, compute = getattr(self.policy, role), self.base.compute
        if out is None:
            given = "it is given fp32" if eqn.invars[0].aval.dtype.itemsize == 4 else f"{role}={inside}"
            self._note(Row(name, line_of(eqn), "as it is", given))
        else:
            leaves = "fp32 inside and out" if role == "loss" else f"fp32 inside, {compute} out"
            self._note(Row(name, line_of(eqn), "reached", f"is an island of {role}: {leaves}"))
        return out

    def _bound(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Any]:
        dtype = eqn.outvars[0].aval.dtype
        if eqn.primitive.name in _SUMS and is_float(eqn.outvars[0]) and dtype.itemsize < 4 and not self._pauses:
            why = f"computed in {dtype}, no role reaches it"
            self._sums.append((eqn, Row(eqn.primitive.name, line_of(eqn), "as it is", why)))
        return super()._bound(jaxpr, eqn, values)

    def _enclosed(self, *given: Any) -> tuple[Callable[..., list[Any]], list[Value]]:
        """A branch is run twice, and noted once."""
        fn, kept = super()._enclosed(*given)
        calls = 0

        def once(*arrays: Any) -> list[Any]:
            nonlocal calls
            before, self._pauses, calls = self._pauses, self._pauses or calls > 0, calls + 1
            try:
                return fn(*arrays)
            finally:
                self._pauses = before

        return once, kept

    def _note(self, row: Row) -> None:
        if not self._pauses:
            self._rows[row] += 1

    def _note_product(self, eqn: Any, values: Sequence[Value]) -> None:
        name, place = eqn.primitive.name, line_of(eqn)
        weight = next((v.owner for v in reversed(values) if v.owner is not None and not v.owner.looked_up), None)
        how: Literal["reached", "as it is"] = "reached"
        if weight is not None:
            casts, place = weight.casts.precision, module_of(weight.names[0])
            narrow = casts.operand if name == "dot_general" else Operand(casts.compute)
            timed = self._notes.get(place, "")
            narrow = replace(narrow, measured=narrow.measured and not timed)
            why = f"multiplies in {print_value(narrow)}, weight gradients in {casts.grad_weight}"
            why += timed and f" ({timed})"
        elif all(value.free or value.fixed for value in values):
            how, why = "as it is", "tables, positions and constants alone"
        elif all(atom.aval.dtype == appears(self.base) for atom in eqn.invars):
            how, why = "as it is", IN_COMPUTE
        elif any(map(self._is_ruled, values)):
            how, why = "as it is", "a rule makes an operand wider"
        else:
            why = f"multiplies in {self.base.compute}"
        self._note(Row(name, place, how, why))


class _Island(Island):
    """Knows the equations that it computed again."""

    def __init__(self, widen: Callable[[Value], Any]):
        super().__init__(widen)
        self.again: set[int] = set()

    def _again(self, form: str, value: Value, pull: Callable[[Value], Any]) -> Any:
        assert value.made is not None
        self.again.add(id(value.made.eqn))
        return super()._again(form, value, pull)
