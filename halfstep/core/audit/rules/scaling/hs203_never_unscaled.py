"""HS203: an optimizer steps with gradients that are still scaled."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record
from halfstep.core.audit.rules.scaling.scaled import by_place, scaled_calls

RULE = Rule(
    id="HS203",
    name="never unscaled",
    severity="error",
    shows="How many steps took scaled gradients, and the scale.",
    what="An optimizer steps with the gradients of a scaled loss, and nobody has divided them by the scale.",
    why="SGD makes steps that are too large by the scale. Adam hides it until the scale changes, but its epsilon "
    "and a clipping mean nothing, and gradients that are not finite reach the weights.",
    fix="Step with `scaler.step(optimizer)` instead of `optimizer.step()`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps so."""
    for place, calls in by_place(scaled_calls(record, "step")).items():
        call, scale = calls[0]
        yield RULE.finding(
            f"{call.target} steps with gradients of {scale:g} times their size",
            place=place,
            evidence={"steps": len(calls), "scale": scale},
        )
