"""Where the time of the run went: one bar, and the same as a table.

Each session that stopped or finished records its totals (training/telemetry/meters.py); they are added up. A
session that was killed told none, and the table says how many are in it. Input is a part of training, so the bar
shows the training that is left without it: its pieces are apart and fill the wall time.
"""

from collections.abc import Mapping
from typing import Any

from halfstep.report.history import History, nested
from halfstep.report.markup import Html, join, tag
from halfstep.report.number_format import count, duration, number, plain
from halfstep.report.tables import table
from halfstep.training.telemetry.ceiling import in_flops

# (the name of a part, its color's class, what it is), in the order of the bar.
PARTS = (
    ("steps", "main", "training, the first step of a session and waits for data aside"),
    ("first step", "raw", "it compiles and warms up, once a session"),
    ("input", "mark", "lost: training waited for data"),
    ("saving", "held-out", "lost: training stood still for a checkpoint"),
    ("evaluation", "reference", "looks at held-out text"),
    ("other", "other", "going back, the artifact, and what lies between"),
)


def utilization(history: History) -> tuple[float, str] | None:
    """Model FLOPs utilization, weighted by the time of sessions, and what it is a share of; None where unknown."""
    found = [(number(o.get("mfu")), _seconds(o["spent"], "training")) for o in _told(history)]
    found = [(mfu, weight) for mfu, weight in found if mfu == mfu and weight > 0]
    ceiling = number(nested(history.start, "ceiling", "flops"))
    if found and ceiling > 0:
        mean = sum(mfu * weight for mfu, weight in found) / sum(weight for _, weight in found)
        return mean, f"of {in_flops(ceiling)}, measured"
    return None


def percent(share: float) -> str:
    """`41.3 %`."""
    return f"{plain(100 * share, 3)} %"


def spending(history: History) -> Html | None:
    """The section; None where no session told its totals."""
    told = _told(history)
    if not told:
        return None
    spent = _sum([outcome["spent"] for outcome in told])
    wall = sum(spent.values())
    if not wall > 0:
        return None
    body = [
        (
            join(tag("span", class_=f"part {look}", aria_hidden="true"), name),
            duration(spent[name]),
            percent(spent[name] / wall),
            meaning,
        )
        for name, look, meaning in PARTS
    ]
    columns = ("part", "time", "share", "what it is")
    return tag(
        "section",
        tag("h2", "Where the time went", id="time"),
        _bar(spent, wall),
        table("Time", columns, body, right=("time", "share"), described=True),
        tag("p", " ".join(_notes(history, told))),
        aria_labelledby="time",
    )


def _bar(spent: Mapping[str, float], wall: float) -> Html:
    """One bar of 100 units; the table says the same in numbers."""
    pieces, x = [], 0.0
    for name, look, _ in PARTS:
        width = 100 * spent[name] / wall
        pieces.append(tag("rect", class_=look, x=f"{x:.3f}", y="0", width=f"{width:.3f}", height="6"))
        x += width
    said = ", ".join(f"{name} {percent(spent[name] / wall)}" for name, _, _ in PARTS)
    return tag(
        "svg",
        *pieces,
        class_="spent",
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
    )


def _notes(history: History, told: list[Mapping[str, Any]]) -> list[str]:
    notes = []
    flops, ceiling = number(history.start.get("flops_per_token")), history.start.get("ceiling")
    used = utilization(history)
    if used is not None:
        notes.append(
            f"Model FLOPs utilization is {percent(used[0])} of {in_flops(number(nested(ceiling, 'flops')))} "
            f"({nested(ceiling, 'told')}), at {count(flops, 4)} FLOPs a token; first steps are left out."
        )
    elif ceiling is not None:
        notes.append(f"Model FLOPs utilization is not known: {nested(ceiling, 'told')}.")
    busy = number(told[-1].get("busy"))
    if busy == busy:
        notes.append(f"A step was on the device {percent(busy)} of the training time.")
    else:
        notes.append(f"How busy the device was is not known: {told[-1].get('busy_unknown')}.")
    silent = len(history.sessions) - len(told)
    if silent:
        notes.append(
            f"Sessions that came to no end, and are not in the table: {silent} of {len(history.sessions)}."
        )
    return notes


def _told(history: History) -> list[Mapping[str, Any]]:
    outcomes = [session.outcome for session in history.sessions]
    return [o for o in outcomes if o is not None and isinstance(o.get("spent"), Mapping)]


def _sum(tables: list[Mapping[str, Any]]) -> dict[str, float]:
    spent = dict.fromkeys((name for name, _, _ in PARTS), 0.0)
    for one in tables:
        first, lost = _seconds(one, "first_step"), _seconds(one, "input")
        spent["steps"] += max(0.0, _seconds(one, "training") - first - lost)
        spent["first step"] += first
        for name in ("input", "saving", "evaluation", "other"):
            spent[name] += _seconds(one, name)
    return spent


def _seconds(spent: Mapping[str, Any], name: str) -> float:
    found = number(spent.get(name))
    return found if found > 0 else 0.0
