"""Which runs a folder holds, and how each stands: what `halfstep runs` lists.

A run writes `end` when it finishes and `stop` when it is stopped. If its last session wrote neither, its process
is still there, and holds the lock, or it ended abruptly:

    finished, stopped      what the record says
    running                the lock is held
    crashed                it is not
    unreadable             the record cannot be read; `problem` says why

Records are read from their end, so that a long one takes no longer than a short one.
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfstep.config.reading import open_regular
from halfstep.core.errors import HalfstepError, TargetError
from halfstep.training.paths import CONFIG, EVENTS, LOCK
from halfstep.training.run.folder import holds_run
from halfstep.training.telemetry.events import line_starts, newest_first

State = Literal["running", "finished", "stopped", "crashed", "unreadable"]


@dataclass(frozen=True)
class RunState:
    """How a run stands; what its record does not say is None."""

    folder: str
    state: State
    step: int = 0
    steps: int | None = None  # planned
    loss: float | None = None  # of the last step, NaN if it was not a number
    validation_loss: float | None = None
    policy: str | None = None
    outcome: str | None = None  # how many matmuls run in fp8, if that is less than the policy's name says
    time: float | None = None  # of the last event, in seconds since 1970
    problem: str | None = None


def list_runs(folder: Path) -> list[RunState]:
    """Returns the runs directly below a folder, or the run that it is, those with the newest events first."""
    if not folder.is_dir():
        raise TargetError(
            f"there is no folder `{folder}`",
            hint="name the folder that holds the runs; `halfstep train` makes one",
        )
    folders = [folder] if holds_run(folder) else sorted(p for p in folder.iterdir() if p.is_dir() and _holds(p))
    return sorted(map(state_of, folders), key=lambda run: -(run.time or 0))


def state_of(folder: Path) -> RunState:
    """Returns how the run in a folder stands."""
    try:
        return _state(folder)
    except HalfstepError as error:
        return RunState(str(folder), "unreadable", problem=error.message)
    except OSError as error:
        return RunState(str(folder), "unreadable", problem=error.strerror or str(error))


def _holds(folder: Path) -> bool:
    try:
        return holds_run(folder)
    except PermissionError:
        return True  # something is in there: it is listed, as unreadable


def _state(folder: Path) -> RunState:
    events = folder / EVENTS
    if not events.exists():  # a run writes run.toml first, and a copy may have checkpoints alone
        written = (folder / CONFIG).stat().st_mtime if (folder / CONFIG).exists() else None
        return RunState(str(folder), "running" if is_locked(folder) else "crashed", time=written)
    start = _last(events, "start") or {}
    # Of a session that has no step yet, those of the one before it.
    step, scored = _last(events, "step") or {}, _last(events, "validation") or {}
    outcome = (_last(events, "start", "stop", "end") or {}).get("event")
    states: dict[Any, State] = {"end": "finished", "stop": "stopped"}
    state = states.get(outcome) or ("running" if is_locked(folder) else "crashed")
    running = _last(events, "start", "policy") or {}
    training = (start.get("config") or {}).get("training") or {}
    return RunState(
        str(folder),
        state,
        int(step.get("step") or start.get("resumed_from") or 0),
        training.get("steps") if isinstance(training, dict) else None,
        step.get("loss"),
        scored.get("loss"),
        running.get("policy"),
        running.get("outcome") or None,
        (_last(events) or {}).get("time"),
    )


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder; asks for a share of it, and lets go at once."""
    if not (folder / LOCK).is_file():
        return False
    with open_regular(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a filesystem without locks
            return False
    return False


def _last(events: Path, *kinds: str) -> dict[str, Any] | None:
    return next(newest_first(events, line_starts(*kinds) or b""), None)
