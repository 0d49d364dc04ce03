"""The top of the page: the run in one sentence, where it stands, and its key figures."""

import math
from collections.abc import Callable

import numpy as np

from halfstep.report.history import Event, History, nested
from halfstep.report.markup import Html, join, tag, with_code
from halfstep.report.number_format import count, duration, moment, number, plain, plural, size
from halfstep.report.time_breakdown import percent, utilization


def headline(history: History) -> Html:
    """What trained, in which precision, on what, how long, and what came of it."""
    start = history.start
    subject = f"A decoder of {count(number(start.get('parameters')))} parameters "
    verb = "trained in " if history.end else "has trained in "
    return tag(
        "h1",
        subject,
        verb,
        _short_policy(history),
        f" {_how_long(history)} on ",
        with_code(_source(history)),
        ". ",
        tag("strong", _result(history)),
    )


def _short_policy(history: History) -> Html:
    """The policy without its rules, which may be many; the section on precision has them."""
    base, *rules = str(history.start.get("policy")).split(";")
    return join(tag("code", base.strip()), f" with {plural(len(rules), 'rule')}" if rules else None)


def _source(history: History) -> str:
    """What the data is, without the counts that its description gives after a colon."""
    return str(nested(history.start, "data", "description") or "text").partition(": ")[0]


def _how_long(history: History) -> str:
    steps, planned = history.last_step, nested(history.config, "training", "steps")
    if history.end is None and isinstance(planned, int):
        taken = f"{steps:,} of {plural(planned, 'step')}"
    else:
        taken = plural(steps, "step")
    return f"for {taken} and {duration(history.seconds)}"


def _result(history: History) -> str:
    bits, bigram = bits_per_byte(history), number(nested(history.start, "data", "bigram_bits"))
    if bits is not None and math.isfinite(bits):
        told = f"Held-out text takes {plain(bits)} bits per byte"
        if not bigram > 0:
            return f"{told}."
        return f"{told}; its bigram entropy is {plain(bigram)}: a ratio of {plain(bits / bigram, 3)}."
    loss = validation_loss(history)
    if loss is not None:
        return f"The loss on held-out text is {plain(loss)}."
    return "No held-out text has been scored yet."


def status(history: History) -> Html | None:
    """A word of warning where the run did not come to its end."""
    if history.end is not None:
        return None
    stop = history.stop
    if stop is not None:
        told = f" at step {int(stop.get('step') or history.last_step):,}: {stop.get('reason')}"
        return tag("p", tag("strong", "This run was stopped"), with_code(told), class_="status", role="note")
    seen = moment(history.sessions[-1].last_time)
    told = f": its events end at step {history.last_step:,}, {seen}. It is running still, or it was killed."
    return tag("p", tag("strong", "This run is unfinished"), told, class_="status", role="note")


def particulars(history: History) -> Html:
    """The machine, the framework, the time and the recipe's own words, in one quiet line."""
    start = history.start
    backend = f"{nested(start, 'backend', 'name')} {nested(start, 'backend', 'version')}"
    device = f"{nested(start, 'device', 'name')} ({nested(start, 'device', 'kind')})"
    parts = [backend, device, f"started {moment(history.sessions[0].began)}"]
    if len(history.sessions) > 1:
        parts.append(f"resumed {_times(len(history.sessions) - 1)}")
    title, data = nested(history.config, "title"), nested(start, "data", "description")
    return join(
        tag("p", f"Recipe: {title}") if title else None,  # its own words: settings of it may have changed
        tag("p", *[tag("span", part) for part in parts], class_="particulars"),
        tag("p", with_code(f"Data: {data}"), class_="particulars") if data else None,
        _origin(start),
    )


def _origin(start: Event) -> Html | None:
    """Where the first weights came from, if they were not drawn."""
    path, layout, digest = (nested(start, "init", key) for key in ("path", "layout", "sha256"))
    if not path:
        return None
    told = "; ".join([f"{layout} from {path}, SHA-256 {digest}", *map(str, nested(start, "init", "notes") or [])])
    return tag("p", with_code(f"First weights: {told}"), class_="particulars")


def tiles(history: History) -> Html:
    """The key figures, each with what it is to be compared with."""
    bits, bigram = bits_per_byte(history), number(nested(history.start, "data", "bigram_bits"))
    speeds, memory = history.steps.even("tokens_per_second").numbers, history.column("memory").numbers
    tokens = number(history.start.get("tokens_per_step")) * history.last_step
    used, of = utilization(history) or (None, "")
    shown = [
        _tile("bits per byte, held out", bits, plain, f"bigram entropy {plain(bigram)}" if bigram > 0 else ""),
        _tile("held-out loss", validation_loss(history), plain, _at(max(history.validations, default=0))),
        _tile("training loss", training_loss(history), plain, _at(history.last_step)),
        _tile("tokens a second", float(np.median(speeds)) if len(speeds) else None, count, "median of the steps"),
        _tile("model FLOPs utilization", used, percent, of),
        _tile("time", history.seconds, duration, f"{count(tokens)} tokens"),
        _tile("skipped steps", sum(history.skips().values()), plain, f"of {history.last_step:,}"),
        _tile("peak memory", float(memory.max()) if len(memory) else None, size, "highest that a step recorded"),
    ]
    return tag("dl", *shown, class_="tiles")


def _tile(name: str, value: float | None, written: Callable[[float], str], note: str) -> Html | None:
    """One figure; no tile where it was not recorded."""
    if value is None:
        return None
    return tag("div", tag("dt", name), tag("dd", written(value)), tag("dd", note, class_="note"))


def bits_per_byte(history: History) -> float | None:
    """The last score of held-out text, in bits a byte; None where there is none."""
    return _at_end(history, "bits_per_byte", _last_look(history, "bits_per_byte"))


def validation_loss(history: History) -> float | None:
    """The last loss on held-out text."""
    return _at_end(history, "validation_loss", _last_look(history, "loss"))


def training_loss(history: History) -> float | None:
    """The loss of the last step."""
    return _at_end(history, "loss", history.steps.latest("loss"))


def _at_end(history: History, name: str, otherwise: float | None) -> float | None:
    """What the end says, or else the last event: a NaN is told as such, and is not passed over."""
    said = (history.end or {}).get(name)
    return otherwise if said is None else number(said)


def _last_look(history: History, name: str) -> float | None:
    said = (event.get(name) for event in reversed(history.validations.values()))
    return next((number(value) for value in said if value is not None), None)


def _at(step: int) -> str:
    return f"at step {step:,}" if step else ""


def _times(amount: int) -> str:
    return {1: "once", 2: "twice"}.get(amount, f"{amount} times")
