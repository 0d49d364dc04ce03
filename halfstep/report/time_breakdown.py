"""Where the time of the run went: parts that add up to the wall time.

Each session that stopped or finished records its totals (training/telemetry/meters.py), which are added up; a
session that was killed recorded none. Waiting for input is part of training, so `steps` is the time without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.report.history import History, nested
from halfstep.report.number_format import count, number, percent
from halfstep.training.telemetry.meters import format_flops

# (the name of a part, its color's class, what it is), in the order of the bar.
PARTS = (
    ("steps", "main", "training, without the first step of a session and waits for data"),
    ("first step", "raw", "compiles and warms up, once per session"),
    ("input", "mark", "lost: training waited for data"),
    ("saving", "held-out", "lost: training waited for a checkpoint"),
    ("evaluation", "reference", "evaluations on held-out text"),
    ("monitor", "monitor", "samples of what each layer computes, and searches for what was not finite"),
    ("other", "other", "rollbacks, the artifact, and everything else"),
)


@dataclass(frozen=True)
class Part:
    """One part of the bar; `begin` is where it starts, as a share of the wall time like `share`."""

    name: str
    look: str
    meaning: str
    seconds: float
    begin: float
    share: float


@dataclass(frozen=True)
class TimeBreakdown:
    """The parts of the time, and what else is known of it."""

    parts: list[Part]
    notes: list[str]

    @property
    def description(self) -> str:
        """The bar as text."""
        return ", ".join(f"{part.name} {percent(part.share)}" for part in self.parts)


def time_breakdown(history: History) -> TimeBreakdown | None:
    """Returns where the time went; None if no session recorded its totals."""
    sessions = [session.outcome for session in history.sessions]
    outcomes = [o for o in sessions if o is not None and isinstance(o.get("spent"), Mapping)]
    spent = _sum([outcome["spent"] for outcome in outcomes])
    wall = sum(spent.values())
    if not wall > 0:
        return None
    parts, begin = [], 0.0
    for name, look, meaning in PARTS:
        share = spent[name] / wall
        parts.append(Part(name, look, meaning, spent[name], begin, share))
        begin += share
    return TimeBreakdown(parts, _notes(history, outcomes))


def describe_sampling(history: History) -> str:
    """Says how often layers are sampled, and what that took; nothing if the settings do not say it."""
    every, time = nested(history.config, "monitor", "sample_every"), time_breakdown(history)
    if not isinstance(every, int):
        return ""
    when = f"every {every:,} steps" if every else "after alarms"
    share = next((part.share for part in time.parts if part.name == "monitor"), 0.0) if time else 0.0
    took = f": part of a batch runs again, which took {percent(share)} of the time" if share else ""
    return f" One is taken {when} and at the end (`monitor.sample_every`){took}."


def utilization(history: History) -> tuple[float, str] | None:
    """Returns model FLOPs utilization, and what it is a share of: FLOPs done of FLOPs possible.

    It is unknown above 1: then what was timed is not the fastest that the device can do.

    Each session has its own ceiling: a run may move to another device, or continue in another precision.
    """
    if not (sessions := _utilized_sessions(history)):
        return None
    used = sum(mfu * possible for mfu, possible, _ in sessions) / sum(possible for _, possible, _ in sessions)
    return (used, f"{_ceilings(sessions, '')}, measured") if used <= 1 else None


def _utilized_sessions(history: History) -> list[tuple[float, float, Mapping[str, Any]]]:
    """Returns the utilization of each session, the FLOPs it could have done after its first step, its ceiling."""
    found = []
    for session in history.sessions:
        outcome: Mapping[str, Any] = session.outcome or {}
        ceiling: Mapping[str, Any] = session.start.get("ceiling") or {}
        mfu, flops = number(outcome.get("mfu")), number(nested(ceiling, "flops"))
        spent = outcome.get("spent")
        seconds = _seconds(spent, "training") - _seconds(spent, "first_step") if isinstance(spent, Mapping) else 0
        if mfu == mfu and flops > 0 and seconds > 0:
            found.append((mfu, flops * seconds, ceiling))
    return found


def _ceilings(sessions: list[tuple[float, float, Mapping[str, Any]]], basis: str) -> str:
    """Names each ceiling once, in order; `basis` is the key of what was measured, or empty."""
    texts = [f"of {format_flops(c['flops'])}" + (f" ({c.get(basis)})" if basis else "") for _, _, c in sessions]
    return ", then ".join(dict.fromkeys(texts))


def _notes(history: History, outcomes: list[Mapping[str, Any]]) -> list[str]:
    notes = []
    flops, ceiling = number(history.start.get("flops_per_token")), history.start.get("ceiling")
    if (used := utilization(history)) is not None:
        notes.append(
            f"Model FLOPs utilization is {percent(used[0])} {_ceilings(_utilized_sessions(history), 'told')}, "
            f"at {count(flops, 4)} FLOPs per token; first steps are left out."
        )
    elif sessions := _utilized_sessions(history):
        notes.append(
            f"Model FLOPs utilization is not known: steps did more than 100 % {_ceilings(sessions, 'told')}."
        )
    elif ceiling is not None:
        notes.append(f"Model FLOPs utilization is not known: {nested(ceiling, 'told')}.")
    busy = number(outcomes[-1].get("busy"))
    if busy == busy:
        notes.append(f"A step was on the device {percent(busy)} of the training time.")
    else:
        notes.append(f"How busy the device was is not known: {outcomes[-1].get('busy_unknown')}.")
    if missing := len(history.sessions) - len(outcomes):
        notes.append(
            f"Sessions that ended abruptly, and are not in the table: {missing} of {len(history.sessions)}."
        )
    return notes


def _sum(tables: list[Mapping[str, Any]]) -> dict[str, float]:
    spent = dict.fromkeys((name for name, _, _ in PARTS), 0.0)
    for one in tables:
        first, lost = _seconds(one, "first_step"), _seconds(one, "input")
        spent["steps"] += max(0.0, _seconds(one, "training") - first - lost)
        spent["first step"] += first
        for name in ("input", "saving", "evaluation", "monitor", "other"):
            spent[name] += _seconds(one, name)
    return spent


def _seconds(spent: Mapping[str, Any], name: str) -> float:
    return max(0.0, number(spent.get(name)))  # 0 for a NaN too
