"""What happened to a run besides its steps: what went wrong, what came of it, stops and resumes.

The events tell it one by one; here it becomes rows, in the order of time. What belongs together is one row:

    skips, spikes       of steps in a row
    saves that fail     until one is complete, which is a row of its own
    warnings            in the same words

No row is put away, as steps are that a later session takes again (history.py): what was seen was seen. Two things
are no rows. An overflow under a loss scale is how the scale is found, and its chart marks it. A warning from
before the first step is about what was asked for, and stands with the precision.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from halfstep.report.history import Event, History
from halfstep.report.markup import Html, join, tag, with_code
from halfstep.report.number_format import number, occasions, plain, plural
from halfstep.report.tables import table

# What the rows are called, by the event they come from; `saved` and `resume` come from a checkpoint and a start.
NAMES = {
    "skip": "update skipped",
    "not_finite": "loss not finite",
    "spike": "loss spike",
    "rollback": "rolled back",
    "save_failed": "save failed",
    "saved": "saved again",
    "warning": "warning",
    "stop": "stopped",
    "resume": "resumed",
}
# The other kinds: they tell of a run that goes its way.
ORDINARY = ("start", "step", "validation", "checkpoint", "artifact", "end")

SHOWN = 50  # rows, the last of them; a page is read, events.jsonl has the rest
OFFSETS = 4  # places of data that a row names


@dataclass
class Happening:
    """One row; `details` are those of the first time where there were several."""

    kind: str
    first: int
    last: int
    time: float
    details: Html
    times: int = 1
    words: str = ""  # what a warning said

    @property
    def what(self) -> str:
        """Its name."""
        return NAMES[self.kind]

    @property
    def span(self) -> str:
        """The step, or the first and the last."""
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


@dataclass
class Story:
    """All that happened."""

    rows: list[Happening] = field(default_factory=list)
    overflows: int = 0  # skips by which a loss scale was found

    @property
    def marks(self) -> list[int]:
        """The steps at which something happened; a warning has no step of its own."""
        return sorted({row.first for row in self.rows if row.kind != "warning"})


def happenings(events: Iterable[Event], history: History) -> Story:
    """What happened to the run that `history` tells of; both are made of the same events."""
    teller = Teller()
    for event in events:
        teller.take(event)
    return teller.story(history)


def happened(story: Story) -> Html:
    """The section of the page; one line where nothing happened."""
    summary = _summary(story)
    return tag(
        "section",
        tag("h2", "What happened", id="happened"),
        tag("p", " ".join(summary)) if summary else None,
        _table(story) if story.rows else None,
        aria_labelledby="happened",
    )


def _summary(story: Story) -> list[str]:
    told = [] if story.rows else ["Nothing out of the ordinary."]
    if len(story.rows) > SHOWN:
        amounts: Counter[str] = Counter()
        for row in story.rows:
            amounts[row.what] += row.times
        told.append(f"In all: {', '.join(f'{what} {amount:,}' for what, amount in amounts.items())}.")
    if story.overflows:
        told.append(
            f"{plural(story.overflows, 'update')} overflowed under the loss scale and took no effect: this is how "
            "the scale is found, and its chart marks them."
        )
    return told


def _table(story: Story) -> Html:
    caption = "In the order of time"
    if len(story.rows) > SHOWN:
        caption += f": the last {SHOWN} of {len(story.rows):,}"
    body = [
        (
            row.span,
            tag("span", row.what, class_="whole"),
            join(row.details, " ", tag("small", occasions(row.times, row.time), class_="whole")),
        )
        for row in story.rows[-SHOWN:]
    ]
    return table(caption, ("step", "what", "details"), body, right=("step",), described=True)


@final
class Teller:
    """Takes the events of a run one by one, so that they need not be in memory together."""

    def __init__(self) -> None:
        self._begun = False
        self._forget()

    def _forget(self) -> None:
        self._story = Story()
        self._open: dict[tuple[str, str], Happening] = {}  # rows that may grow, by kind and words
        self._step = 0  # the last that was told
        self._newest = 0  # step of the newest checkpoint
        self._running = False  # whether a session has begun that told no end

    def story(self, history: History) -> Story:
        """What happened, without the warnings that the history has: they are told elsewhere."""
        said = {str(event.get("message")) for event in history.warnings}
        rows = [row for row in self._story.rows if row.kind != "warning" or row.words not in said]
        return Story(rows, self._story.overflows)

    def take(self, event: Event) -> None:
        """Adds what an event tells; a start that resumes nothing begins anew."""
        if event.get("event") == "start" and (event.get("resumed_from") is None or not self._begun):
            self._begun = True
            self._forget()
        if self._begun:
            self._take(event)

    def _take(self, event: Event) -> None:
        step = _whole(event.get("step"), self._step)
        match event.get("event"):
            case "start":
                self._start(event)
            case "step":
                self._step = step
            case "checkpoint":
                self._saved(step, event)
            case "skip":
                self._skip(step, event)
            case "not_finite":
                self._streak("not_finite", step, event, _with_data("the gradients were finite", event))
            case "spike":
                self._streak("spike", step, event, _spike(event))
            case "rollback":
                self._row("rollback", step, event, _message(event))
                self._step = _whole(event.get("to"), self._step)
                self._newest = min(self._newest, self._step)
            case "save_failed":
                self._grow("save_failed", step, event, _message(event))
            case "warning":
                self._grow("warning", self._step, event, _message(event), str(event.get("message")))
            case "stop" | "end" as kind:
                self._running = False
                if kind == "stop":
                    self._row("stop", step, event, _stop(step, event))

    def _start(self, event: Event) -> None:
        if event.get("resumed_from") is not None:
            at = _whole(event["resumed_from"], 0)
            parts = [f"from the checkpoint of step {at:,}"]
            if self._running:
                parts.append("the session before it ended without a word")
            if self._step > at:
                parts.append(f"given up: {plural(self._step - at, 'step')}")
            if self._newest > at:
                parts.append(f"passed over: the checkpoint of step {self._newest:,}, which is newer")
            self._row("resume", at, event, join("; ".join(parts)))
            self._step = self._newest = at
        self._open = {key: row for key, row in self._open.items() if row.kind == "warning"}
        self._running = True

    def _saved(self, step: int, event: Event) -> None:
        self._newest = step
        failed = self._open.pop(("save_failed", ""), None)
        if failed is not None:
            path = tag("code", str(event.get("path")))
            self._row("saved", step, event, join(path, f" is complete; failed before it: {failed.times:,}"))

    def _skip(self, step: int, event: Event) -> None:
        loss = number(event.get("loss"))
        # The loop is silent about these, by the same rule (halfstep.training.run.response).
        if number(event.get("scale")) > 1 and math.isfinite(loss):
            self._story.overflows += 1
            return
        norm = plain(number(event.get("grad_norm")))
        self._streak(
            "skip", step, event, _with_data(f"the loss was {plain(loss)}, the gradient norm {norm}", event)
        )

    def _streak(self, kind: str, step: int, event: Event, details: Html) -> None:
        if not number(event.get("in_a_row")) > 1:
            self._open.pop((kind, ""), None)
        self._grow(kind, step, event, details)

    def _grow(self, kind: str, step: int, event: Event, details: Html, words: str = "") -> None:
        """Adds to the row of this kind and these words that is open, or opens one."""
        row = self._open.get((kind, words))
        if row is None:
            self._open[kind, words] = row = self._row(kind, step, event, details)
            row.words = words
        else:
            row.last, row.times = max(row.last, step), row.times + 1

    def _row(self, kind: str, step: int, event: Event, details: Html) -> Happening:
        self._story.rows.append(Happening(kind, step, step, number(event.get("time")), details))
        return self._story.rows[-1]


def _message(event: Event) -> Html:
    """The words of the run itself."""
    return with_code(str(event.get("message")))


def _stop(step: int, event: Event) -> Html:
    told = with_code(str(event.get("reason")))
    if "saved" not in event:
        return told
    saved = _whole(event["saved"], 0)
    if saved == 0:
        return join(told, "; nothing was saved")
    if saved >= step:
        return join(told, f"; step {saved:,} was saved")
    return join(told, f"; not saved: {plural(step - saved, 'step')} after the checkpoint of step {saved:,}")


def _spike(event: Event) -> Html:
    loss, median = (plain(number(event.get(name))) for name in ("loss", "median"))
    return _with_data(f"the loss was {loss}, the median of those before it {median}", event)


def _with_data(told: str, event: Event) -> Html:
    """Words on an update, and where the data begin that it saw: in the first file, and how many places more."""
    places = list(_places(event.get("where")))
    if not places:
        return join(told)
    file = places[0][0]
    named = [offset for name, offset in places if name == file][:OFFSETS]
    more = len(places) - len(named)
    return join(
        f"{told}; data: ",
        tag("code", file.strip("`")),
        f" at {'token' if len(named) == 1 else 'tokens'} {', '.join(named)}",
        f" and {plural(more, 'more place')}, in events.jsonl" if more else None,
    )


def _places(where: Any) -> Iterable[tuple[str, str]]:
    """(file, offset) of each window of an update."""
    for one in where if isinstance(where, list) else ():
        offsets = one.get("offsets") if isinstance(one, Mapping) else None
        for offset in offsets if isinstance(offsets, list) else ():
            yield str(one.get("file")), str(offset)


def _whole(value: Any, otherwise: int) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else otherwise
