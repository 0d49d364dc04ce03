"""HS206: a scale that falls without an end."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS206",
    name="scale falls towards 0",
    severity="error",
    shows="The first scale, the last, and how often it fell.",
    what="The loss scale falls update after update, and the scaler has no floor.",
    why="A scale below 1 cannot be meant: what overflows does so in the forward pass, and no scale cures that. "
    "Each of these updates is skipped; after some hundred the scale is exactly 0, without an error.",
    fix="Find what is not finite (`halfstep train` names it; so does HS503): often activations beyond 65504, "
    "which bf16 can hold. `prepare(model, optimizer, 'fp16-mixed')` has a floor and stops there.",
    needs="a live run",
)
IN_A_ROW = 8  # a scaler that looks for its first scale, from 65536, seldom needs more


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler whose scale is below 1 and fell, or has fallen many times in a row."""
    updates = record.calls_of("update")
    for scaler in dict.fromkeys(call.target for call in updates):
        its = [call for call in updates if call.target == scaler and "after" in call.numbers]
        fell = [call.numbers["after"] < call.numbers["before"] for call in its]
        run = next((i for i, each in enumerate(reversed(fell)) if not each), len(fell))
        last = its[-1].numbers["after"] if its else 1.0
        if (last < 1 and any(fell)) or run >= IN_A_ROW:
            yield RULE.finding(
                f"the scale of {scaler} fell {sum(fell)} times in {len(its)} updates, to {last:g}",
                place=its[-1].place,
                evidence={"scale": last, "first": its[0].numbers["before"], "falls": sum(fell)},
                confidence="certain" if last < 1 else "likely",
            )
