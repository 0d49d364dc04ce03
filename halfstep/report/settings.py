"""What a run was given: its policies, its settings with their meaning, and the command that repeats it."""

import json
import shlex
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from halfstep.config.load import load, recipe_names
from halfstep.config.run import RunConfig
from halfstep.config.schema import flatten, rows, to_table
from halfstep.config.schema import shown as in_toml
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.report.history import History
from halfstep.report.number_format import number


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
    parts = [f"`{policy}` up to step {until:,}" for (_, policy), (until, _) in pairwise(history.policies)]
    return ", then ".join([*parts, f"`{history.policies[-1][1]}`"]) if parts else ""


def starting_warnings(history: History) -> dict[str, list[float]]:
    """Returns each message once, with the times at which it came."""
    times: dict[str, list[float]] = {}
    for event in history.warnings:
        times.setdefault(str(event.get("message")), []).append(number(event.get("time")))
    return times
