"""The top of the page: the run in one sentence, where it stands, and its key figures."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halfstep.report.history import History, nested
from halfstep.report.number_format import count, duration, moment, number, percent, plain, plural, size
from halfstep.report.time_breakdown import utilization


def headline(history: History) -> str:
    """Says what was trained, in which precision, how long, and on what."""
    parameters = count(number(history.start.get("parameters")))
    verb = "trained" if history.end else "has trained"
    shown = " and then ".join(_without_rules(policy) for _, policy in history.policies)
    # What was learned from, without the held-out text and the counts that the description also has.
    source = str(nested(history.start, "data", "description") or "text").partition(": ")[0]
    source = source.partition(" and, held out, ")[0]
    return f"A decoder of {parameters} parameters {verb} in {shown} {_how_long(history)} on {source}."


def _without_rules(policy: str) -> str:
    """Returns a policy without its rules, which may be many; the section on precision has them."""
    roles, *rules = policy.split(";")
    return f"`{roles.strip()}`" + (f" with {plural(len(rules), 'rule')}" if rules else "")


def _how_long(history: History) -> str:
    steps, planned = history.last_step, nested(history.config, "training", "steps")
    if history.end is None and isinstance(planned, int):
        taken = f"{steps:,} of {plural(planned, 'step')}"
    else:
        taken = plural(steps, "step")
    return f"for {taken} and {duration(history.seconds)}"


def result(history: History) -> str:
    """Says how well the model does on held-out text."""
    bits, bigram = bits_per_byte(history), number(nested(history.start, "data", "bigram_bits"))
    if bits is not None and math.isfinite(bits):
        score = f"Held-out text takes {plain(bits)} bits per byte"
        if not bigram > 0:
            return f"{score}."
        return f"{score}; its bigram entropy is {plain(bigram)}, a ratio of {plain(bits / bigram, 3)}."
    loss = validation_loss(history)
    if loss is not None:
        return f"The loss on held-out text is {plain(loss)}."
    return "No held-out text has been scored yet."


@dataclass(frozen=True)
class Status:
    """A note on a run that did not reach its end."""

    title: str
    details: str


def status(history: History) -> Status | None:
    """Returns where an unfinished run stands; None for one that reached its end."""
    if history.end is not None:
        return None
    stop = history.stop
    if stop is not None:
        at = int(stop.get("step") or history.last_step)
        return Status("This run was stopped", f" at step {at:,}: {stop.get('reason')}")
    seen = moment(history.sessions[-1].last_time)
    details = f": its events end at step {history.last_step:,}, {seen}. It is still running, or it was killed."
    return Status("This run is unfinished", details)


def particulars(history: History) -> list[str]:
    """Returns the framework, the machine and the time, for one quiet line."""
    start = history.start
    parts = [
        f"{nested(start, 'backend', 'name')} {nested(start, 'backend', 'version')}",
        f"{nested(start, 'device', 'name')} ({nested(start, 'device', 'kind')})",
        f"started {moment(history.sessions[0].began)}",
    ]
    resumed = len(history.sessions) - 1
    if resumed:
        parts.append(f"resumed {({1: 'once', 2: 'twice'}).get(resumed, f'{resumed} times')}")
    return parts


def initial_weights(history: History) -> str | None:
    """Says which file the first weights were read from; None if they were drawn at random."""
    path, layout, digest = (nested(history.start, "init", key) for key in ("path", "layout", "sha256"))
    if not path:
        return None
    notes = nested(history.start, "init", "notes") or []
    return "; ".join([f"{layout} from {path}, SHA-256 {digest}", *map(str, notes)])


@dataclass(frozen=True)
class Tile:
    """One key figure, and what to compare it with."""

    name: str
    value: str
    note: str


def tiles(history: History) -> list[Tile]:
    """Returns the key figures that were recorded."""
    bits, bigram = bits_per_byte(history), number(nested(history.start, "data", "bigram_bits"))
    speeds, memory = history.steps.even("tokens_per_second").numbers, history.column("memory").numbers
    tokens = number(history.start.get("tokens_per_step")) * history.last_step
    used, of = utilization(history) or (None, "")
    evaluated = max(history.validations, default=0)
    figures: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("bits per byte, held out", bits, plain, f"bigram entropy {plain(bigram)}" if bigram > 0 else ""),
        ("held-out loss", validation_loss(history), plain, f"at step {evaluated:,}" if evaluated else ""),
        ("training loss", training_loss(history), plain, f"at step {history.last_step:,}"),
        ("tokens per second", float(np.median(speeds)) if len(speeds) else None, count, "median of the steps"),
        ("model FLOPs utilization", used, percent, of),
        ("time", history.seconds, duration, f"{count(tokens)} tokens"),
        ("skipped steps", sum(history.skips().values()), plain, f"of {history.last_step:,}"),
        ("peak memory", float(memory.max()) if len(memory) else None, size, "highest that a step recorded"),
    ]
    return [Tile(name, shown(value), note) for name, value, shown, note in figures if value is not None]


def bits_per_byte(history: History) -> float | None:
    """Returns the last score of held-out text in bits per byte; None if there is none."""
    return _value_at_end(history, "bits_per_byte", _last_evaluation(history, "bits_per_byte"))


def validation_loss(history: History) -> float | None:
    """Returns the last loss on held-out text."""
    return _value_at_end(history, "validation_loss", _last_evaluation(history, "loss"))


def training_loss(history: History) -> float | None:
    """Returns the loss of the last step."""
    return _value_at_end(history, "loss", history.steps.latest("loss"))


def _value_at_end(history: History, name: str, otherwise: float | None) -> float | None:
    """Returns what the end recorded, or else the last event; a NaN is reported as such, not passed over."""
    recorded = (history.end or {}).get(name)
    return otherwise if recorded is None else number(recorded)


def _last_evaluation(history: History, name: str) -> float | None:
    recorded = (event.get(name) for event in reversed(history.validations.values()))
    return next((number(value) for value in recorded if value is not None), None)
