"""Incidents: what happened to a run besides its steps, such as skips, spikes, failed saves, stops and resumes.

Beside them stands what the audit found: each finding once, the worst first.

The events report incidents one by one; here they become rows, in the order of time. What belongs together is one
row: skips and spikes of consecutive steps, saves that fail until one succeeds, warnings with the same words.

No row is dropped, unlike steps that a later session repeats (history.py): it did happen. Two things are not
rows. An overflow under a loss scale is how the scale is found, and its chart marks it. A warning from before the
first step is about what was asked for, and is shown with the precision.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from halfstep.core.audit.finding import SEVERITIES
from halfstep.report.history import Event, History
from halfstep.report.number_format import number, plain, plural

# What the rows are called, by the event they come from; `saved` and `resume` come from a checkpoint and a start.
NAMES = {
    "skip": "update skipped",
    "not_finite": "loss not finite",
    "spike": "loss spike",
    "low_scale": "loss scale low",
    "cause": "cause of a NaN or infinity",
    "rollback": "rolled back",
    "policy": "precision changed",
    "save_failed": "save failed",
    "saved": "saved again",
    "warning": "warning",
    "stop": "stopped",
    "resume": "resumed",
}

SHOWN = 50  # the last rows; events.jsonl has the rest
OFFSETS = 4  # how many places in the data a row names
NAMED = 8  # how many tensors or modules a finding names; the others unfold


@dataclass
class Incident:
    """One row; `details` are those of the first time if there were several."""

    kind: str
    first: int
    last: int
    time: float
    details: str
    times: int = 1
    message: str = ""  # of a warning

    @property
    def name(self) -> str:
        """What the row is called."""
        return NAMES[self.kind]

    @property
    def span(self) -> str:
        """The step, or the first and the last."""
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


@dataclass
class Incidents:
    """All incidents of a run."""

    rows: list[Incident] = field(default_factory=list)
    overflows: int = 0  # skips by which a loss scale was found

    @property
    def marks(self) -> dict[int, str]:
        """The steps at which something happened, and what; a warning has no step of its own."""
        names: dict[int, list[str]] = {}
        for row in self.rows:
            if row.kind != "warning" and row.name not in names.setdefault(row.first, []):
                names[row.first].append(row.name)
        return {step: ", ".join(names[step]) for step in sorted(names)}

    @property
    def shown(self) -> list[Incident]:
        """The rows that fit the page."""
        return self.rows[-SHOWN:]

    @property
    def caption(self) -> str:
        """What the table is called."""
        cut = f": the last {SHOWN} of {len(self.rows):,}" if len(self.rows) > SHOWN else ""
        return f"In order of time{cut}"

    @property
    def summary(self) -> str:
        """A few words before the table, or in its place."""
        sentences = [] if self.rows else ["Nothing out of the ordinary."]
        if len(self.rows) > SHOWN:
            totals: Counter[str] = Counter()
            for row in self.rows:
                totals[row.name] += row.times
            sentences.append(f"In total: {', '.join(f'{name} {total:,}' for name, total in totals.items())}.")
        if self.overflows:
            sentences.append(
                f"{plural(self.overflows, 'update')} overflowed under the loss scale and had no effect: this is "
                "how the scale is found, and its chart marks them."
            )
        return " ".join(sentences)


@final
class IncidentReader:
    """Takes the events of a run one by one, so that they need not be in memory together."""

    def __init__(self) -> None:
        self._started = False
        self._reset()

    def _reset(self) -> None:
        self._incidents = Incidents()
        self._open: dict[tuple[str, str], Incident] = {}  # rows that may grow, by kind and message
        self._step = 0  # the last recorded
        self._newest = 0  # step of the newest checkpoint
        self._running = False  # whether a session has started and recorded no end

    def incidents(self, history: History) -> Incidents:
        """Returns the incidents, without the warnings that the history has: they are shown elsewhere."""
        elsewhere = {str(event.get("message")) for event in history.warnings}
        rows = [row for row in self._incidents.rows if row.kind != "warning" or row.message not in elsewhere]
        return Incidents(rows, self._incidents.overflows)

    def take(self, event: Event) -> None:
        """Adds an event; a start that resumes nothing begins anew."""
        if event.get("event") == "start" and (event.get("resumed_from") is None or not self._started):
            self._started = True
            self._reset()
        if self._started:
            self._take(event)

    def _take(self, event: Event) -> None:
        step, message = _whole(event.get("step"), self._step), str(event.get("message"))
        match event.get("event"):
            case "start":
                self._start(event)
            case "step":
                self._step = step
            case "checkpoint":
                self._newest = step
                if failed := self._open.pop(("save_failed", ""), None):
                    details = f"`{event.get('path')}` is complete; failed saves before it: {failed.times:,}"
                    self._row("saved", step, event, details)
            case "skip":
                self._skip(step, event)
            case "not_finite":
                self._streak("not_finite", step, event, _add_places("the gradients were finite", event))
            case "spike":
                loss, median = (plain(number(event.get(name))) for name in ("loss", "median"))
                details = f"the loss was {loss}, the median of those before it {median}"
                self._streak("spike", step, event, _add_places(details, event))
            case "low_scale" | "cause" as kind:
                self._row(kind, step, event, _add_places(message, event))
            case "rollback":
                self._row("rollback", step, event, message)
                self._step = _whole(event.get("to"), self._step)
                self._newest = min(self._newest, self._step)
            case "policy":
                self._row("policy", step, event, f"the steps after it have the policy `{event.get('policy')}`")
            case "save_failed":
                self._grow("save_failed", step, event, message)
            case "warning":
                self._grow("warning", self._step, event, message, message)
            case "stop" | "end" as kind:
                self._running = False
                if kind == "stop":
                    self._row("stop", step, event, _stop(step, event))

    def _start(self, event: Event) -> None:
        if event.get("resumed_from") is not None:
            at = _whole(event["resumed_from"], 0)
            parts = [f"from the checkpoint of step {at:,}"]
            if self._running:
                parts.append("the session before it ended abruptly")
            if self._step > at:
                parts.append(f"lost: {plural(self._step - at, 'step')}")
            if self._newest > at:
                parts.append(f"ignored: the newer checkpoint of step {self._newest:,}")
            self._row("resume", at, event, "; ".join(parts))
            self._step = self._newest = at
        self._open = {key: row for key, row in self._open.items() if row.kind == "warning"}
        self._running = True

    def _skip(self, step: int, event: Event) -> None:
        loss = number(event.get("loss"))
        # The loop does not report these, by the same rule (halfstep.training.run.response).
        if number(event.get("scale")) > 1 and math.isfinite(loss):
            self._incidents.overflows += 1
            return
        norm = plain(number(event.get("grad_norm")))
        self._streak(
            "skip", step, event, _add_places(f"the loss was {plain(loss)}, the gradient norm {norm}", event)
        )

    def _streak(self, kind: str, step: int, event: Event, details: str) -> None:
        if not number(event.get("in_a_row")) > 1:
            self._open.pop((kind, ""), None)
        self._grow(kind, step, event, details)

    def _grow(self, kind: str, step: int, event: Event, details: str, message: str = "") -> None:
        """Adds to the open row of this kind and message, or opens one."""
        if (row := self._open.get((kind, message))) is None:
            self._open[kind, message] = row = self._row(kind, step, event, details)
            row.message = message
        else:
            row.last, row.times = max(row.last, step), row.times + 1

    def _row(self, kind: str, step: int, event: Event, details: str) -> Incident:
        self._incidents.rows.append(Incident(kind, step, step, number(event.get("time")), details))
        return self._incidents.rows[-1]


def _stop(step: int, event: Event) -> str:
    reason = str(event.get("reason"))
    if "saved" not in event:
        return reason
    saved = _whole(event["saved"], 0)
    if saved == 0:
        return f"{reason}; nothing was saved"
    if saved >= step:
        return f"{reason}; step {saved:,} was saved"
    return f"{reason}; not saved: {plural(step - saved, 'step')} after the checkpoint of step {saved:,}"


def _add_places(details: str, event: Event) -> str:
    """Adds where the data of an update begins: the places in the first file, and how many more there are."""
    if not (places := list(_places(event.get("where")))):
        return details
    file = places[0][0]
    named = [offset for name, offset in places if name == file][:OFFSETS]
    more = len(places) - len(named)
    others = f" and {plural(more, 'more place')}, in events.jsonl" if more else ""
    tokens = "token" if len(named) == 1 else "tokens"
    return f"{details}; data: `{file.strip('`')}` at {tokens} {', '.join(named)}{others}"


def _places(where: Any) -> Iterable[tuple[str, str]]:
    """Yields (file, offset) of each window of an update."""
    for one in where if isinstance(where, list) else ():
        offsets = one.get("offsets") if isinstance(one, Mapping) else None
        for offset in offsets if isinstance(offsets, list) else ():
            yield str(one.get("file")), str(offset)


def _whole(value: Any, otherwise: int) -> int:
    read = number(value)
    return int(read) if math.isfinite(read) else otherwise


def findings(events: list[Event]) -> list[dict[str, Any]]:
    """Returns a row for each finding: the rule, what is wrong, where, how it is known, and what to do."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in events:
        where = event.get("where")
        names = [str(name) for name in where] if isinstance(where, list) else []
        known[str(event.get("rule")), str(event.get("place")), *names] = _finding(event, names)
    order: dict[str, int] = {severity: place for place, severity in enumerate(SEVERITIES)}
    return sorted(known.values(), key=lambda row: (order.get(row["severity"], len(order)), row["rule"]))


def _finding(event: Event, names: list[str]) -> dict[str, Any]:
    more = f" and {plural(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    quoted = [f"`{name.replace('`', '')}`" for name in names]
    named = ", ".join(quoted[:NAMED]) + more
    place, numbers, confidence = (event.get(name) for name in ("place", "evidence", "confidence"))
    evidence = [f"{k} {plain(number(v))}" for k, v in numbers.items()] if isinstance(numbers, dict) else []
    if confidence not in (None, "certain"):
        evidence.append(f"{confidence}, not certain")
    return {
        "rule": str(event.get("rule")),
        "severity": str(event.get("severity") or "warning"),
        "step": int(number(event.get("step") or 0)),
        "message": str(event.get("message")),
        "where": ", at ".join(part for part in (named, f"`{place}`" if place else "") if part),
        "others": quoted[NAMED:],
        "evidence": ", ".join(evidence),
        "fix": str(event.get("fix") or ""),
        "policy_rules": str(event.get("policy_rule") or "").splitlines(),
    }
