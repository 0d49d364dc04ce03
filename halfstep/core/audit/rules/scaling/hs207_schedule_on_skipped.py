"""HS207: the schedule steps although the update was skipped."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Call, Record

RULE = Rule(
    id="HS207",
    name="schedule steps on skipped updates",
    severity="warning",
    shows="The skipped updates that the schedule counted.",
    what="A learning-rate schedule advances on updates that the loss scaler skipped.",
    why="Warmup and decay run ahead of the weights; a scaler that looks for its first scale skips most of a short "
    "warmup.",
    fix="Step the schedule only if the scale did not fall: `before = scaler.get_scale(); scaler.update(); "
    "if scaler.get_scale() >= before: schedule.step()`. `run.scheduler_step(schedule)` of halfstep does it.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps a schedule."""
    skipped: dict[str | None, bool] = {}
    found: dict[str | None, list[Call]] = {}
    for call in record.calls:
        if call.what == "step":
            skipped[call.target] = call.skipped
        elif call.what == "schedule" and skipped.pop(call.target, False):
            found.setdefault(call.place, []).append(call)
    for place, calls in found.items():
        yield RULE.finding(
            f"the schedule of {calls[0].target} advances on {len(calls)} skipped updates",
            place=place,
            evidence={"skipped": len(calls), "updates": record.updates},
        )
