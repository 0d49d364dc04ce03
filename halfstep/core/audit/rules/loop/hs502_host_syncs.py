"""HS502: the host waits for the device several times in each step."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS502",
    name="host waits for the device",
    severity="warning",
    shows="The reads per update, and the backward passes.",
    what="The script reads numbers from the device several times per backward pass.",
    why="Each `.item()`, `float(tensor)` or `if tensor` makes the host wait until the device has finished, and "
    "the device then waits for the host: small models lose a third of their speed.",
    fix="Keep sums on the device (`total += loss.detach()`) and read them every so many steps.",
    needs="a live run",
)
ALLOWED = 1  # per backward pass: reading the loss is what everyone does


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding with all places; on a CPU a note, because nothing waits there."""
    passes = max(1.0, len(record.calls_of("backward")) / max(record.updates, 1))
    total = sum(sync.per_step for sync in record.syncs)
    if total > ALLOWED * passes:
        worst = sorted(record.syncs, key=lambda sync: -sync.per_step)
        device = record.switches.get("device")
        places = ", ".join(f"{sync.what} at {sync.place}" for sync in worst[:4])
        yield RULE.finding(
            f"{total / passes:.3g} reads from the device per backward pass: {places}",
            *[sync.place for sync in worst if sync.place],
            place=worst[0].place,
            evidence={"reads per update": total, "backward passes per update": passes},
            severity="note" if device == "cpu" else None,
            confidence="weak" if device == "cpu" else "certain",
        )
