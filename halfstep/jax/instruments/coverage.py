"""How each operation of a loss function runs: the list of `step.coverage(state, batch)`.

The function is interpreted once more (convert/interpret.py), on shapes alone: nothing is computed. The list has
every product, island and look-up, by the module that owns its parameter, or else by its line. Of the operations
that have no role it lists those that lose precision: sums of narrow numbers. What a loop repeats is counted once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from halfstep.config.model import owner as module_of
from halfstep.core.audit.coverage import IN_COMPUTE, Coverage, Row
from halfstep.core.roles import Operand, print_value
from halfstep.jax.convert.apply import Applied
from halfstep.jax.convert.calls import shown_dtype
from halfstep.jax.convert.interpret import Interpreter
from halfstep.jax.convert.values import Value
from halfstep.jax.jaxpr import ISLANDS, is_float, line_of

_SUMS = ("reduce_sum", "cumsum")


class Recorder(Interpreter):
    """An interpreter that notes how it runs each operation."""

    def __init__(self, applied: Applied):
        super().__init__(applied.policy)
        self._notes = applied.measured.notes
        self._rows: Counter[Row] = Counter()
        self._sums: list[tuple[Any, Row]] = []  # of narrow numbers, by their equation
        self._pauses = False

    def coverage(self) -> Coverage:
        """Returns the list. A sum that an island computed again, in fp32, is part of the island."""
        rows = self._rows.copy()
        rows.update(row for eqn, row in self._sums if id(eqn) not in self.island.recomputed)
        return Coverage(tuple(row._replace(calls=calls) for row, calls in rows.items()))

    def _run_product(self, eqn: Any, values: list[Value]) -> tuple[Any, bool]:
        name, place = eqn.primitive.name, line_of(eqn)
        weight = next((v.owner for v in reversed(values) if v.owner is not None and not v.owner.looked_up), None)
        how: Literal["covered", "unchanged"] = "covered"
        if weight is not None:
            casts, place = weight.casts.precision, module_of(weight.names[0])
            narrow = casts.operand if name == "dot_general" else Operand(casts.compute)
            timed = self._notes.get(place, "")
            narrow = replace(narrow, measured=narrow.measured and not timed)
            why = f"multiplies in {print_value(narrow)}, weight gradients in {casts.grad_weight}"
            why += timed and f" ({timed})"
        elif all(value.free or value.fixed for value in values):
            how, why = "unchanged", "tables, positions and constants alone"
        elif all(atom.aval.dtype == shown_dtype(self.base) for atom in eqn.invars):
            how, why = "unchanged", IN_COMPUTE
        elif any(map(self._is_ruled, values)):
            how, why = "unchanged", "a rule makes an operand wider"
        else:
            why = f"multiplies in {self.base.compute}"
        self._note(Row(name, place, how, why))
        return super()._run_product(eqn, values)

    def _on_masters(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        out = super()._on_masters(jaxpr, eqn, values)
        if out is not None and eqn.primitive.name == "gather" and (owner := values[0].owner) is not None:
            casts = owner.casts.precision
            why = f"looks up its master and casts to {casts.compute}, gradients in {casts.grad_weight}"
            self._note(Row("gather", module_of(owner.names[0]), "covered", why))
        return out

    def _in_island(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        out, name = super()._in_island(jaxpr, eqn, values), eqn.primitive.name
        role = "softmax" if name.startswith("custom_jvp_call") and out is not None else ISLANDS.get(name)
        if role is None or not eqn.invars[0].aval.shape:
            return out
        inside, compute = getattr(self.policy, role), self.base.compute
        if out is None:
            given = "it is given fp32" if eqn.invars[0].aval.dtype.itemsize == 4 else f"{role}={inside}"
            self._note(Row(name, line_of(eqn), "unchanged", given))
        else:
            leaves = "fp32 inside and out" if role == "loss" else f"fp32 inside, {compute} out"
            self._note(Row(name, line_of(eqn), "covered", f"is an island of {role}: {leaves}"))
        return out

    def _bind_cast(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Any]:
        dtype = eqn.outvars[0].aval.dtype
        if eqn.primitive.name in _SUMS and is_float(eqn.outvars[0]) and dtype.itemsize < 4 and not self._pauses:
            why = f"computed in {dtype}, no role reaches it"
            self._sums.append((eqn, Row(eqn.primitive.name, line_of(eqn), "unchanged", why)))
        return super()._bind_cast(jaxpr, eqn, values)

    def _as_function(self, *given: Any) -> tuple[Callable[..., list[Any]], list[Value]]:
        """A branch is run twice, and noted once."""
        fn, returned = super()._as_function(*given)
        calls = 0

        def once(*arrays: Any) -> list[Any]:
            nonlocal calls
            before, self._pauses, calls = self._pauses, self._pauses or calls > 0, calls + 1
            try:
                return fn(*arrays)
            finally:
                self._pauses = before

        return once, returned

    def _note(self, row: Row) -> None:
        if not self._pauses:
            self._rows[row] += 1
