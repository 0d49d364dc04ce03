"""HS205: a scaler whose scale is never updated."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS205",
    name="scale never updated",
    severity="error",
    shows="The updates, and the scale that stayed.",
    what="A loss is scaled in update after update, and `scaler.update()` is never called.",
    why="The scale stays at its first value: too large, and every step overflows; too small, and gradients "
    "vanish. `scaler.step` refuses its second call.",
    fix="Call `scaler.update()` at the end of each update.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler."""
    updated = {call.target for call in record.calls_of("update")}
    scales = record.calls_of("scale")
    for scaler in dict.fromkeys(call.target for call in scales if call.target not in updated):
        calls = [call for call in scales if call.target == scaler]
        updates = len({call.update for call in calls})
        if updates > 1:
            yield RULE.finding(
                f"{scaler} has scaled the losses of {updates} updates and was never updated",
                place=calls[0].place,
                evidence={"updates": updates, "scale": calls[-1].numbers.get("scale", 0.0)},
            )
