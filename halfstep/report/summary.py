"""The top of the page: the run in one sentence, where it stands, and its key figures."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from halfstep.config.load import load, recipe_names
from halfstep.config.run import RunConfig
from halfstep.config.schema import flatten, rows, to_table
from halfstep.config.schema import shown as in_toml
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.report.history import History, nested
from halfstep.report.number_format import count, duration, moment, number, percent, plain, plural, size
from halfstep.report.time_breakdown import utilization

# What a run was given: its policies, its settings with their meaning, and the command that repeats it.


@dataclass(frozen=True)
class Setting:
    """A row of the table of settings; `default` is None if the value is the default."""

    key: str
    value: str
    help: str
    default: str | None


def settings(history: History) -> list[Setting]:
    """Returns every setting; those that differ from the default say what that is."""
    known = {row.key: row for row in rows(RunConfig)}
    shown = []
    for key, value in flatten(_plain_data(history.config)).items():
        default = _plain_data(known[key].default) if key in known else value
        help = known[key].help if key in known else ""
        shown.append(Setting(key, as_toml(value), help, None if default == value else as_toml(default)))
    return shown


def command(history: History) -> str:
    """Returns the command that repeats the run: the nearest recipe, the changes to it, and the policy that ran."""
    given = flatten(_plain_data(history.config))
    given.pop("policy", None)
    differing = {
        name: {key: value for key, value in given.items() if key not in base or base[key] != value}
        for name, base in _recipes().items()
    }
    nearest = min(differing, key=lambda name: len(differing[name]))
    # What only names things and changes no number need not be repeated.
    changes = {key: value for key, value in differing[nearest].items() if key not in ("title", "backend")}
    first, *_ = history.start.get("schedule") or [{"policy": history.start.get("policy")}]
    words = ["halfstep", "train", nearest, "--policy", str(first.get("policy"))]
    if "backend" in differing[nearest]:
        words += ["--backend", str(given["backend"])]
    for key, value in changes.items():
        words += ["--set", f"{key}={as_toml(value)}"]
    return shlex.join(words)


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    return {name: flatten(_plain_data(to_table(load(name)))) for name in recipe_names()}


def as_toml(value: Any) -> str:
    """A setting as `--set` takes it: text bare, all else as TOML."""
    return value if isinstance(value, str) else in_toml(value)


def _plain_data(value: Any) -> Any:
    """Returns the value as JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value))


def read_policy(history: History) -> tuple[Policy | None, str]:
    """Returns the policy that ran last; if another version wrote what this one cannot read, None and the error."""
    try:
        return Policy.parse(history.policies[-1][1]), ""
    except HalfstepError as error:
        return None, str(error)


def describe_policies(history: History) -> str:
    """Says which precisions the run had one after another; empty if it had one."""
    names = [f"`{history.name_of(policy)}`" for _, policy in history.policies]
    parts = [f"{name} up to step {until:,}" for name, (until, _) in zip(names, history.policies[1:], strict=False)]
    return ", then ".join([*parts, names[-1]]) if parts else ""


def starting_warnings(history: History) -> dict[str, list[float]]:
    """Returns each message once, with the times at which it came."""
    times: dict[str, list[float]] = {}
    for event in history.warnings:
        times.setdefault(str(event.get("message")), []).append(number(event.get("time")))
    return times


def headline(history: History) -> str:
    """Says what was trained, in which precision, how long, and on what."""
    parameters = count(number(history.start.get("parameters")))
    verb = "trained" if history.end else "has trained"
    shown = " and then ".join(_without_rules(policy, history) for _, policy in history.policies)
    # What was learned from, without the held-out text and the counts that the description also has.
    source = str(nested(history.start, "data", "description") or "text").partition(": ")[0]
    source = source.partition(" and, held out, ")[0]
    return f"A decoder of {parameters} parameters {verb} in {shown} {_how_long(history)} on {source}."


def _without_rules(policy: str, history: History) -> str:
    """Returns a policy without its rules, which may be many; the section on precision has them."""
    roles, *rules = policy.split(";")
    outcome = history.name_of(policy).removeprefix(policy)
    return f"`{roles.strip()}`" + (f" with {plural(len(rules), 'rule')}" if rules else "") + outcome


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
        return (
            f"{score}, {plain(bits / bigram, 3)} times its bigram entropy of {plain(bigram)}, which is what each "
            "byte takes if only the one before it is known."
        )
    if (loss := _last_score(history, "loss")) is not None:
        return f"The loss on held-out text is {plain(loss)}."
    return "No held-out text has been scored yet."


def status(history: History) -> tuple[str, str] | None:
    """Returns where an unfinished run stands, a title and details; None for one that reached its end."""
    if history.end is not None:
        return None
    if (stop := history.stop) is not None:
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
    if resumed := len(history.sessions) - 1:
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
