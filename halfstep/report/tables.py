"""Tables of the page: sessions, settings, checkpoints; and the command that repeats the run."""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfstep.config.load import load, recipe_names
from halfstep.config.run import RunConfig
from halfstep.config.schema import Row, rows
from halfstep.report.history import History, Session
from halfstep.report.markup import Html, join, tag, with_code
from halfstep.report.number_format import duration, moment, number, size

# Lists that grow with a run are cut to this many rows: a page is read, the folder has the rest.
SHOWN = 20


def table(
    caption: str,
    columns: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    described: bool = False,
) -> Html:
    """A table in a frame that scrolls sideways where it must; each row is headed by its first cell.

    Columns named in `right` are aligned to the right. Where a table is `described`, its last column is words.
    """
    sides = ["number" if column in right else None for column in columns]
    head = tag("tr", *[tag("th", c, scope="col", class_=side) for c, side in zip(columns, sides, strict=True)])
    lines = [
        tag(
            "tr",
            tag("th", first, scope="row", class_=sides[0]),
            *[tag("td", cell, class_=side) for cell, side in zip(rest, sides[1:], strict=True)],
        )
        for first, *rest in body
    ]
    # A frame that scrolls must be reachable by keyboard, and then needs a name.
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", head),
            tag("tbody", *lines),
            class_="described" if described else None,
        ),
        class_="frame",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def settings(history: History) -> Html:
    """Every setting with its meaning; those that differ from the default say what that is."""
    given = dict(flatten(plain_data(history.config)))
    known = {row.key: row for row in rows(RunConfig)}
    body = [
        (
            tag("code", key),
            _setting(known.get(key), value),
            with_code(known[key].help) if key in known else "",
        )
        for key, value in given.items()
    ]
    return table("Settings", ("setting", "value", "what it is"), body, described=True)


def _setting(row: Row | None, value: Any) -> Html:
    shown = tag("code", as_toml(value))
    if row is None or plain_data(row.default) == value:
        return shown
    default = as_toml(plain_data(row.default))
    return join(tag("strong", shown), tag("small", f" default {default}") if default else None)


def sessions(history: History) -> Html | None:
    """One row a session, where there is more than one."""
    if len(history.sessions) < 2:
        return None
    body = [
        (
            moment(s.began),
            _origin(s),
            _span(s),
            duration(s.seconds),
            _ended(s),
        )
        for s in history.sessions
    ]
    return table("Sessions", ("started", "from", "steps", "time", "ended by"), body, right=("time",))


def _origin(session: Session) -> str:
    return f"step {session.start['resumed_from']:,}" if session.resumed else "the beginning"


def _span(session: Session) -> str:
    if session.first_step is None or session.last_step is None:
        return "none"
    return f"{session.first_step:,} to {session.last_step:,}"


def _ended(session: Session) -> str:
    if session.outcome is None:
        return "no word"
    return "the end" if session.outcome["event"] == "end" else with_code(str(session.outcome.get("reason")))


def checkpoints(history: History) -> Html:
    """One row a checkpoint that counts, the last SHOWN of them."""
    if not history.checkpoints:
        return tag("p", "No checkpoint was written.")
    body = [
        (
            f"{step:,}",
            size(number(event.get("bytes"))),
            duration(number(event.get("seconds"))),
            tag("code", str(event.get("path"))),
        )
        for step, event in list(history.checkpoints.items())[-SHOWN:]
    ]
    columns = ("step", "size", "time to write", "where")
    total = len(history.checkpoints)
    title = "Checkpoints written" if total <= SHOWN else f"Checkpoints written: the last {SHOWN} of {total:,}"
    return table(title, columns, body, right=("step", "size", "time to write"))


def command(history: History) -> str:
    """The command that repeats the run: the nearest recipe, what differs from it, and the policy that ran."""
    given = dict(flatten(plain_data(history.config)))
    given.pop("policy", None)
    recipes = {name: dict(flatten(plain_data(dataclasses.asdict(load(name))))) for name in recipe_names()}
    differing = {
        name: {key: value for key, value in given.items() if key not in base or base[key] != value}
        for name, base in recipes.items()
    }
    nearest = min(differing, key=lambda name: len(differing[name]))
    # What only names things and changes no number need not be repeated.
    changes = {key: value for key, value in differing[nearest].items() if key not in ("title", "backend")}
    words = ["halfstep", "train", nearest, "--policy", str(history.start.get("policy"))]
    if "backend" in differing[nearest]:
        words += ["--backend", str(given["backend"])]
    for key, value in changes.items():
        words += ["--set", f"{key}={as_toml(value)}"]
    return shlex.join(words)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting, in order."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def plain_data(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value))


def as_toml(value: Any) -> str:
    """A setting as `--set` takes it: text bare, all else as TOML."""
    return value if isinstance(value, str) else json.dumps(value)
