"""What of a run's events counts.

Events are appended and never taken back, so a run that was killed and resumed tells some steps twice. The
rule is that the later ones count:

    a start that resumes      the first step it takes, s, puts away every step from s on that came before
    a start that does not     puts away everything: the folder was used again
    a rollback                puts away every step after the one it went back to

Held-out looks and checkpoints are put away with the steps they followed. Warnings stay: what was seen in a
session that was abandoned was seen. Here are those from before the first step, and each time one of them is said
again, as a resume does; the others are among what happened (incidents.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from halfstep.core.errors import HalfstepError
from halfstep.report.number_format import number
from halfstep.report.series import Series
from halfstep.report.step_history import Course

Event = Mapping[str, Any]


@dataclass
class Session:
    """From a start to the next one, or to the last event."""

    start: Event
    last_time: float
    first_step: int | None = None
    last_step: int | None = None
    outcome: Event | None = None  # its stop or end, where it has one

    @property
    def began(self) -> float:
        """When, in seconds since 1970."""
        return number(self.start.get("time"))

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.start.get("resumed_from") is not None

    @property
    def seconds(self) -> float:
        """How long: what the end says where it was not resumed, else from its first event to its last."""
        if not self.resumed and self.outcome is not None and self.outcome["event"] == "end":
            return number(self.outcome.get("seconds"))
        return max(0.0, self.last_time - self.began)


@dataclass
class History:
    """What counts of a run, in order of steps."""

    sessions: list[Session] = field(default_factory=list)
    steps: Course = field(default_factory=Course)
    validations: dict[int, Event] = field(default_factory=dict)
    checkpoints: dict[int, Event] = field(default_factory=dict)
    warnings: list[Event] = field(default_factory=list)

    @property
    def start(self) -> Event:
        """The last start: what runs now, or ran to the end."""
        return self.sessions[-1].start

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, section by section."""
        return self.start.get("config") or {}

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """Why the policy was chosen. A resumed session goes on with what an earlier one chose."""
        same = [s.start for s in self.sessions if s.start.get("policy") == self.start.get("policy")]
        return next((start["choice"] for start in reversed(same) if start.get("choice")), None)

    @property
    def end(self) -> Event | None:
        """The end of the run; None while there is none."""
        outcome = self.sessions[-1].outcome
        return outcome if outcome is not None and outcome["event"] == "end" else None

    @property
    def stop(self) -> Event | None:
        """What stopped the last session before the end of the run."""
        outcome = self.sessions[-1].outcome
        return outcome if outcome is not None and outcome["event"] == "stop" else None

    @property
    def last_step(self) -> int:
        """The last step taken; 0 is none."""
        return self.steps.last

    @property
    def seconds(self) -> float:
        """Time spent running, over all sessions; pauses between them do not count."""
        return sum(session.seconds for session in self.sessions)

    def column(self, name: str) -> Series:
        """One field of the steps, over steps."""
        return self.steps.column(name)

    def held_out(self, name: str) -> Series:
        """One field of the looks at held-out text, over steps."""
        looks = self.validations
        return Series(list(looks), [number(event.get(name)) for event in looks.values()])

    def skips(self) -> dict[int, int]:
        """Steps that were skipped, by the step whose event first counts them."""
        counts = self.column("skipped")
        known = np.isfinite(counts.values)
        steps, totals = np.asarray(counts.steps)[known], np.asarray(counts.values)[known]
        before = np.concatenate([[0.0], totals[:-1]])
        # A count that falls started again with a session.
        more = np.where(totals >= before, totals - before, totals)
        rose = more > 0
        return dict(zip(steps[rose].tolist(), more[rose].astype(int).tolist(), strict=True))

    def put_away_from(self, step: int) -> None:
        """Forgets what was told of a step and of all after it."""
        self.steps.put_away_from(step)
        for kept in (self.validations, self.checkpoints):
            for late in [s for s in kept if s >= step]:
                del kept[late]


def read_history(events: Iterable[Event]) -> History:
    """What counts of a run's events; an error where no run was started."""
    reader = Reader()
    for event in events:
        reader.take(event)
    return reader.history()


@final
class Reader:
    """Takes the events of a run one by one, so that they need not be in memory together."""

    def __init__(self) -> None:
        self._history = History()

    def take(self, event: Event) -> None:
        """Adds one event; those before the first start belong to no run."""
        if event.get("event") == "start":
            if event.get("resumed_from") is None:
                self._history = History()
            self._history.sessions.append(Session(event, number(event.get("time"))))
        elif self._history.sessions:
            _take(self._history, event)

    def history(self) -> History:
        """What counts of them."""
        history = self._history
        if not history.sessions:
            raise HalfstepError(
                "there is no `start` among the events: no run was started here",
                hint="give the events.jsonl of a run's folder, as `halfstep train` writes it",
            )
        for name in ("validations", "checkpoints"):
            setattr(history, name, dict(sorted(getattr(history, name).items())))
        return history


def _take(history: History, event: Event) -> None:
    """Adds one event of the session that runs. Kinds that are not known here are passed over."""
    session = history.sessions[-1]
    time = number(event.get("time"))
    session.last_time = max(session.last_time, time) if time == time else session.last_time
    kind = event.get("event")
    if kind == "step":
        step = int(event["step"])
        if session.first_step is None:
            session.first_step = step
            history.put_away_from(step)
        elif session.last_step is not None and step <= session.last_step:
            history.put_away_from(step)  # a rollback's own line, or that of a start, may be lost
        session.last_step = step
        history.steps.add(step, event)
    elif kind == "validation":
        history.validations[int(event["step"])] = event
    elif kind == "checkpoint":
        history.checkpoints[int(event["step"])] = event
    elif kind == "warning":
        if _is_of_the_start(history, event):
            history.warnings.append(event)
    elif kind == "rollback":
        to = number(event.get("to"))
        if to == to:
            history.put_away_from(int(to) + 1)
    elif kind == "end" or (kind == "stop" and session.outcome is None):
        session.outcome = event


def _is_of_the_start(history: History, event: Event) -> bool:
    """Whether a warning came before the first step, or repeats one that did."""
    if len(history.sessions) == 1 and history.sessions[0].first_step is None:
        return True
    return any(known.get("message") == event.get("message") for known in history.warnings)


def nested(table: Any, *keys: str) -> Any:
    """The value below a path of keys, or None where the path ends early."""
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table
