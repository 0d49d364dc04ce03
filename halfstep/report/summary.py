"""The top of the page: the run in one sentence, where it stands, and its key figures."""

import math
from collections.abc import Callable

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
    steps, planned = history.steps.last, nested(history.config, "training", "steps")
    if history.end is None and isinstance(planned, int):
        taken = f"{steps:,} of {plural(planned, 'step')}"
    else:
        taken = plural(steps, "step")
    return f"for {taken} and {duration(history.seconds)}"


def result(history: History) -> str:
    """Says how well the model does on held-out text."""
    bits, bigram = _last_score(history, "bits_per_byte"), number(nested(history.start, "data", "bigram_bits"))
    if bits is not None and math.isfinite(bits):
        score = f"Held-out text takes {plain(bits)} bits per byte"
        if not bigram > 0:
            return f"{score}."
        return f"{score}; its bigram entropy is {plain(bigram)}, a ratio of {plain(bits / bigram, 3)}."
    loss = _last_score(history, "loss")
    if loss is not None:
        return f"The loss on held-out text is {plain(loss)}."
    return "No held-out text has been scored yet."


def status(history: History) -> tuple[str, str] | None:
    """Returns where an unfinished run stands, a title and details; None for one that reached its end."""
    if history.end is not None:
        return None
    stop = history.stop
    if stop is not None:
        at = int(stop.get("step") or history.steps.last)
        return "This run was stopped", f" at step {at:,}: {stop.get('reason')}"
    seen = moment(history.sessions[-1].last_time)
    details = f": its events end at step {history.steps.last:,}, {seen}. It is still running, or it was killed."
    return "This run is unfinished", details


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


def tiles(history: History) -> list[tuple[str, str, str]]:
    """Returns the key figures that were recorded: the name of each, its value, and what to compare it with."""
    bits, bigram = _last_score(history, "bits_per_byte"), number(nested(history.start, "data", "bigram_bits"))
    ended = (history.end or {}).get("loss")
    loss = history.steps.latest("loss") if ended is None else number(ended)
    memory = history.steps.column("memory").numbers
    speed, of_speed = _speed(history)
    tokens = number(history.start.get("tokens_per_step")) * history.steps.last
    used, of = utilization(history) or (None, "")
    evaluated = max(history.validations, default=0)
    figures: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("bits per byte, held out", bits, plain, f"bigram entropy {plain(bigram)}" if bigram > 0 else ""),
        ("held-out loss", _last_score(history, "loss"), plain, f"at step {evaluated:,}" if evaluated else ""),
        ("training loss", loss, plain, f"at step {history.steps.last:,}"),
        ("tokens per second", speed, count, of_speed),
        ("model FLOPs utilization", used, percent, of),
        ("time", history.seconds, duration, f"{count(tokens)} tokens"),
        ("skipped steps", sum(history.skips().values()), plain, f"of {history.steps.last:,}"),
        ("peak memory", float(memory.max()) if len(memory) else None, size, "highest that a step recorded"),
    ]
    return [(name, shown(value), note) for name, value, shown, note in figures if value is not None]


def _last_score(history: History, name: str) -> float | None:
    """Returns a score of held-out text, of the end or else of the last evaluation that has it.

    A NaN is reported as such, and not passed over for an earlier number.
    """
    at_end = (history.end or {}).get("validation_loss" if name == "loss" else name)
    scores = [at_end, *(event.get(name) for event in reversed(history.validations.values()))]
    return next((number(score) for score in scores if score is not None), None)


def _speed(history: History) -> tuple[float | None, str]:
    """Returns the speed that the last session ended with, as the terminal shows it; before, that of its steps."""
    ended = number((history.sessions[-1].outcome or {}).get("tokens_per_second")) if history.sessions else math.nan
    if ended == ended:
        return ended, "mean after the first step"
    steps = history.steps.column("tokens_per_second").numbers
    return (float(np.median(steps)), "median of the steps") if len(steps) else (None, "")
