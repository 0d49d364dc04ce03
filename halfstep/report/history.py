"""Which of a run's events count: of steps that a resumed run records twice, the later ones.

    a start that resumes      its first step, s, drops every earlier record of step s and after
    a start that does not     drops everything: the folder was used again
    a rollback                drops every step after the one it went back to

Evaluations and checkpoints are dropped with the steps they followed. Warnings stay, even those of an abandoned
session: `History.warnings` are those from before the first step, and their repetitions; the others are incidents.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halfstep import __version__
from halfstep.config.schema import build
from halfstep.core.choice.layers import with_outcome
from halfstep.core.errors import RunFolderError
from halfstep.report.layer_history import LayerHistory
from halfstep.report.number_format import number
from halfstep.report.series import Series, StepHistory
from halfstep.training.telemetry.events import SettingsChange

Event = Mapping[str, Any]


def read_changes(start: Event) -> list[SettingsChange]:
    """Returns what was changed up to a start, in the order of steps."""
    return [build(SettingsChange, one) for one in start.get("changes") or ()]


@dataclass
class Session:
    """A part of a run: from a start to the next one, or to the last event."""

    start: Event
    last_time: float
    first_step: int | None = None
    last_step: int | None = None
    outcome: Event | None = None  # its stop or end, if it has one

    @property
    def began(self) -> float:
        """When it started, in seconds since 1970."""
        return number(self.start.get("time"))

    @property
    def resumed(self) -> bool:
        """Whether it resumes from a checkpoint."""
        return self.start.get("resumed_from") is not None

    @property
    def seconds(self) -> float:
        """How long it took: what the end says unless it was resumed, else from its first event to its last."""
        if not self.resumed and self.outcome is not None and self.outcome["event"] == "end":
            return number(self.outcome.get("seconds"))
        return max(0.0, self.last_time - self.began)

    @property
    def origin(self) -> str:
        """What it started from."""
        return f"step {self.start['resumed_from']:,}" if self.resumed else "the beginning"

    @property
    def span(self) -> str:
        """Its steps."""
        if self.first_step is None or self.last_step is None:
            return "none"
        return f"{self.first_step:,} to {self.last_step:,}"

    @property
    def ending(self) -> str:
        """What ended it."""
        if self.outcome is None:
            return "unknown"
        return "the end" if self.outcome["event"] == "end" else str(self.outcome.get("reason"))


@dataclass
class History:
    """The events of a run that count. Takes them one by one, so that they need not be in memory together."""

    sessions: list[Session] = field(default_factory=list)
    steps: StepHistory = field(default_factory=StepHistory)
    validations: dict[int, Event] = field(default_factory=dict)
    checkpoints: dict[int, Event] = field(default_factory=dict)
    warnings: list[Event] = field(default_factory=list)
    findings: list[Event] = field(default_factory=list)
    layers: LayerHistory = field(default_factory=LayerHistory)
    shadows: dict[int, Event] = field(default_factory=dict)
    shadow: Event | None = None  # of the next step
    _policies: list[tuple[int, str]] = field(default_factory=list)
    _outcomes: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> Event:
        """The last start: of the session that is running, or that ran to the end."""
        return self.sessions[-1].start

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, section by section."""
        return self.start.get("config") or {}

    @property
    def policies(self) -> list[tuple[int, str]]:
        """The precisions that the run had, each with the step after which it began."""
        if len(self._policies) > 1:
            return list(self._policies)
        # The events of earlier sessions may be lost.
        changes = [each for each in read_changes(self.start) if "policy" in each.settings]
        first = changes[0].settings["policy"][0] if changes else self.start.get("policy")
        return [(0, str(first)), *((each.step, str(each.settings["policy"][1])) for each in changes)]

    def name_of(self, policy: str) -> str:
        """Returns a policy with what measuring made of it in this run."""
        return with_outcome(policy, self._outcomes.get(policy))

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """Why the policy was chosen. A resumed session keeps the choice of an earlier one."""
        same = [s.start for s in self.sessions if s.start.get("policy") == self.start.get("policy")]
        return next((start["choice"] for start in reversed(same) if start.get("choice")), None)

    @property
    def end(self) -> Event | None:
        """The end of the run; None if it has not ended."""
        outcome = self.sessions[-1].outcome
        return outcome if outcome is not None and outcome["event"] == "end" else None

    @property
    def stop(self) -> Event | None:
        """What stopped the last session before the end of the run."""
        outcome = self.sessions[-1].outcome
        return outcome if outcome is not None and outcome["event"] == "stop" else None

    @property
    def seconds(self) -> float:
        """Time spent running, over all sessions; pauses between them do not count."""
        return sum(session.seconds for session in self.sessions)

    def held_out(self, name: str) -> Series:
        """One field of the evaluations on held-out text, over steps."""
        return Series(list(self.validations), [number(e.get(name)) for e in self.validations.values()])

    def skips(self) -> dict[int, int]:
        """Returns how many steps were skipped, by the step whose event first counts them."""
        counts = self.steps.column("skipped")
        known = np.isfinite(counts.values)
        steps, totals = np.asarray(counts.steps)[known], np.asarray(counts.values)[known]
        before = np.concatenate([[0.0], totals[:-1]])
        # A count that falls started again with a session.
        more = np.where(totals >= before, totals - before, totals)
        rose = more > 0
        return dict(zip(steps[rose].tolist(), more[rose].astype(int).tolist(), strict=True))

    def take(self, event: Event) -> None:
        """Adds one event; those before the first start belong to no run."""
        if event.get("event") == "start":
            _refuse_newer(event.get("halfstep"))
            if event.get("resumed_from") is None:
                vars(self).update(vars(History()))
            self.sessions.append(Session(event, number(event.get("time"))))
            self._take_policy(int(event.get("resumed_from") or 0), event)
        elif self.sessions:
            self._take(event)

    def finish(self) -> "History":
        """Puts all in order after the last event; refuses events without a start."""
        if not self.sessions:
            raise RunFolderError(
                "there is no `start` among the events: no run was started here",
                hint="give the events.jsonl of a run's folder, as written by `halfstep train`",
            )
        self.validations, self.checkpoints = (
            dict(sorted(d.items())) for d in (self.validations, self.checkpoints)
        )
        return self

    def _take(self, event: Event) -> None:
        session = self.sessions[-1]
        time = number(event.get("time"))
        session.last_time = max(session.last_time, time) if time == time else session.last_time
        match event.get("event"):
            case "step":
                step = int(event["step"])
                # The line of a rollback or a start may be lost: steps that come again show it.
                if session.last_step is None or step <= session.last_step:
                    self._drop_from(step)
                if session.first_step is None:
                    session.first_step = step
                session.last_step = step
                self.steps.add(step, event)
                if self.shadow is not None and int(self.shadow["step"]) == step:
                    self.shadows[step], self.shadow = self.shadow, None
            case "validation":
                self.validations[int(event["step"])] = event
            case "checkpoint":
                self.checkpoints[int(event["step"])] = event
            case "monitor":
                self.layers.monitor(event)
            case "layers":
                self.layers.add(event)
            case "sample":
                self.layers.sample(event)
            case "shadow":
                self.shadow = event
            case "finding":
                self.findings.append(event)
            case "warning" if self._is_of_the_start(event):
                self.warnings.append(event)
            case "rollback":
                to = number(event.get("to"))
                if to == to:
                    self._drop_from(int(to) + 1)
                    self._policies = [each for each in self._policies if each[0] < to] or self._policies[:1]
            case "policy":
                self._take_policy(int(event["step"]), event)
            case "end":
                session.outcome = event
            case "stop":
                session.outcome = session.outcome or event

    def _take_policy(self, after: int, event: Event) -> None:
        """Takes the policy of the steps after one; what was recorded of later ones no longer counts."""
        known, policy = [each for each in self._policies if each[0] < after], str(event.get("policy"))
        self._policies = known if known and known[-1][1] == policy else [*known, (after, policy)]
        self._outcomes[policy] = event.get("outcome")

    def _drop_from(self, step: int) -> None:
        self.steps.drop_from(step)
        self.layers.drop_from(step)
        for kept in (self.validations, self.checkpoints, self.shadows):
            for late in [s for s in kept if s >= step]:
                del kept[late]

    def _is_of_the_start(self, event: Event) -> bool:
        """Whether a warning came before the first step, or repeats one that did."""
        if len(self.sessions) == 1 and self.sessions[0].first_step is None:
            return True
        return any(known.get("message") == event.get("message") for known in self.warnings)


def _release(version: Any) -> tuple[int, ...]:
    parts = re.match(r"\d{1,9}(\.\d{1,9})*", str(version))
    return tuple(map(int, parts[0].split("."))) if parts else ()


def _refuse_newer(version: Any) -> None:
    if _release(version) > _release(__version__):
        raise RunFolderError(
            f"halfstep {version} wrote this run, and this is halfstep {__version__}, which may misread it",
            hint="use the halfstep that wrote it, or update yours",
        )


def nested(table: Any, *keys: str) -> Any:
    """Returns the value below a path of keys, or None if the path ends early."""
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table
