"""What the audit found in a run: each finding once, the worst first."""

from dataclasses import dataclass

from halfstep.report.history import Event
from halfstep.report.number_format import number, plain, plural

SEVERITIES = ("error", "warning", "note")
NAMED = 8  # how many tensors or modules a row names


@dataclass(frozen=True)
class ShownFinding:
    """A row: the rule, what is wrong, where, how it is known, and what to do."""

    rule: str
    severity: str
    step: int
    message: str
    where: str
    evidence: str
    fix: str
    policy_rule: str


def findings(events: list[Event]) -> list[ShownFinding]:
    """Returns the rows of `finding` events."""
    known: dict[tuple[str, ...], ShownFinding] = {}
    for event in events:
        where = event.get("where")
        names = [str(name) for name in where] if isinstance(where, list) else []
        known[str(event.get("rule")), str(event.get("place")), *names] = _row(event, names)
    return sorted(known.values(), key=lambda row: (_rank(row.severity), row.rule))


def _row(event: Event, names: list[str]) -> ShownFinding:
    more = f" and {plural(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    named = ", ".join(f"`{name.replace('`', '')}`" for name in names[:NAMED]) + more
    place = event.get("place")
    numbers = event.get("evidence")
    evidence = [f"{k} {plain(number(v))}" for k, v in numbers.items()] if isinstance(numbers, dict) else []
    confidence = event.get("confidence")
    if confidence not in (None, "certain"):
        evidence.append(f"{confidence}, not certain")
    return ShownFinding(
        str(event.get("rule")),
        str(event.get("severity") or "warning"),
        int(number(event.get("step") or 0)),
        str(event.get("message")),
        ", at ".join(part for part in (named, f"`{place}`" if place else "") if part),
        ", ".join(evidence),
        str(event.get("fix") or ""),
        str(event.get("policy_rule") or ""),
    )


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
