"""HS208: an optimizer steps inside an autocast region that is never left."""

from collections.abc import Iterator
from itertools import pairwise

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS208",
    name="updates inside one autocast region",
    severity="error",
    shows="The steps inside one region.",
    what="An optimizer makes several steps inside one autocast region.",
    why="Autocast casts each weight once per region and keeps the result: after the first step the forward passes "
    "still use the old weights.",
    fix="Enter the region for the forward pass and the loss only, anew in each iteration; step outside.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per optimizer."""
    steps = [call for call in record.calls_of("step") if not call.skipped]
    for optimizer in dict.fromkeys(call.target for call in steps):
        regions = [call.numbers.get("region", 0.0) for call in steps if call.target == optimizer]
        stale = sum(a == b != 0 for a, b in pairwise(regions))
        if stale:
            call = next(call for call in steps if call.target == optimizer)
            yield RULE.finding(
                f"{optimizer} makes {stale + 1} steps inside one autocast region",
                place=call.place,
                evidence={"steps": stale + 1},
            )
