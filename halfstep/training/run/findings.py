"""What the rules of the audit say of a run's own numbers, each layer once, and what a shadow says.

    HS101   updates that a narrow weight without a master lost
    HS409   what enters a layer is beyond the range of its format; only the first layer, others are given the rest
    HS410   half of the gradients of what leaves a layer are below the range of their format. What was computed in
            fp16 is zero by then, so all are too small if even the largest has less than 4 bits, or if all are zero
            for STEPS steps while others are not (weights that begin at zero move sooner)

bf16 has the range of fp32: what is not finite there is no matter of the format, and has a `cause` event.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.audit.engine import check, registry
from halfstep.core.audit.finding import Finding, rule_for
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Operation, Record
from halfstep.core.compare.shadow import Shadow
from halfstep.core.formats import FP32
from halfstep.core.observed import AMAX, COUNT, OVERFLOW, ROLES, UNDERFLOW, WEIGHT_COLUMNS, LayerInfo
from halfstep.core.policy import Policy
from halfstep.core.roles import is_narrow as is_scaled

PAGE = "docs/shadow.md"
LOST = 0.01  # a share of lost updates that is no accident
STEPS = 20
GRADIENT = ROLES.index("gradient")
_LOST = WEIGHT_COLUMNS.index("lost")


class Findings:
    """What was found in a session so far."""

    def __init__(self, layers: Sequence[LayerInfo], policy: Policy):
        self._layers = layers
        self._rounds_at_random = "stochastic" in str(policy)  # then no update is lost on average
        self._known: set[tuple[str, str]] = set()

    def new(self, counts: NDArray[Any], weights: NDArray[Any], steps: int) -> list[Finding]:
        """Returns what is found in the numbers of all layers of so many steps and was not before, one per rule."""
        found = [*check(self._record(counts, steps), select=["HS409", "HS410"]), *self._lost(weights)]
        fresh = [each for each in found if (each.rule, each.where[0]) not in self._known]
        self._known |= {(each.rule, each.where[0]) for each in fresh}
        rules = dict.fromkeys(each.rule for each in fresh)
        return [_together([each for each in fresh if each.rule == rule]) for rule in rules]

    def _record(self, counts: NDArray[Any], steps: int) -> Record:
        smallest = 0.0 if steps >= STEPS and counts[:, GRADIENT, AMAX].any() else np.finfo(np.float32).tiny
        forward: list[Operation] = []
        backward: list[Operation] = []
        for layer, (entered, gradient) in zip(self._layers, counts, strict=True):
            if _is_short(layer, "activation") and entered[OVERFLOW] and not forward:
                forward.append(_operation(layer, "activation", entered))
            if _is_short(layer, "gradient"):
                operation = _operation(layer, "gradient", gradient)
                format = layer.format("gradient")
                if not is_scaled(format) and smallest <= gradient[AMAX] < 16 * format.smallest_subnormal:
                    operation.underflow = operation.elements
                backward.append(operation)
        return Record("run", operations=forward + backward)

    def _lost(self, weights: NDArray[Any]) -> Iterator[Finding]:
        rule = registry()["HS101"][0]
        for layer, row in zip(self._layers, weights, strict=True):
            stepped, lost = layer.formats["weight"], float(row[_LOST])
            if is_narrow(stepped) and not self._rounds_at_random and lost > LOST:
                yield rule.finding(
                    f"weights of `{layer.name}` are stepped in {stepped} without an fp32 master: {lost:.1%} of "
                    "their updates were lost",
                    layer.name,
                    evidence={"lost_share": lost},
                    policy_rule=rule_for(f"{layer.name}.weight", "param=fp32"),
                )


def _is_short(layer: LayerInfo, role: str) -> bool:
    """Whether numbers of a role have less range than fp32."""
    return layer.format(role).max_exponent < FP32.max_exponent


def _operation(layer: LayerInfo, role: str, row: NDArray[Any]) -> Operation:
    backward, format = role == "gradient", layer.formats[role]
    counts = {"overflow": int(row[OVERFLOW]), "underflow": int(row[UNDERFLOW]), "elements": int(row[COUNT])}
    about = {"backward": backward, "function": "" if backward else "cast of what enters"}
    return Operation(layer.name, "other", outputs=[format], amax=float(row[AMAX]), **counts, **about)  # type: ignore[arg-type]


def _together(findings: list[Finding]) -> Finding:
    """Returns one finding for several of a rule: that of the first layer, with the names of all."""
    first, *others = findings
    if not others:
        return first
    names = [name for each in findings for name in each.where]
    shown = ", ".join(names[1:4]) + (", ..." if len(names) > 4 else "")
    more = f"; the same in {len(others)} other layer{'s' if len(others) > 1 else ''}: {shown}"
    return replace(first, message=first.message + more, where=names)


def shadow_finding(shadow: Shadow) -> Finding | None:
    """Returns what a shadow found outside of its band; None if nothing."""
    message = shadow.describe()
    if not message:
        return None
    where = list(shadow.causes or shadow.outside)
    rule = f'"{shadow.causes[0]}" = "compute=fp32"' if shadow.causes and shadow.causes[0] else None
    fix = "give it a wider format, or find out what else it does to its numbers"
    evidence = {"loss": shadow.loss, "loss in fp32": shadow.reference, "layers outside": len(shadow.outside)}
    return Finding("shadow", message, "warning", "certain", fix, PAGE, None, where, evidence, rule)
