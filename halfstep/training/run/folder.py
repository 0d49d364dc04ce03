"""The folder of a run: what is inside (paths.py has the names), and what it says about the run.

run.toml is what a run continues with. It is replaced before the first update under new settings, so a crash at any
moment leaves the old settings or the new ones.
"""

import glob
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.config.load import load, to_toml
from halfstep.config.run import DataConfig, RunConfig
from halfstep.core.errors import ConfigError, RunFolderError
from halfstep.training.checkpoints.checkpoint import Damaged, check_complete, read_newest, step_folders
from halfstep.training.files import make_folder, os_errors, write_whole
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS
from halfstep.training.run.settings import train_command
from halfstep.training.telemetry.events import EventsError, newest_first


class Record(NamedTuple):
    """What the events of a run say of its end."""

    has_ended: bool  # the run has finished
    last_saved: int | None  # the step of its newest checkpoint, if it was saved since the run last began at step 0


@dataclass(frozen=True)
class RunFacts:
    """What the folder of a run says, each file read once; only the tensors of its checkpoint are not read."""

    out: Path
    written: RunConfig | None  # run.toml
    checkpoint: Path | None  # the newest complete one
    manifest: dict[str, Any] | None  # of that checkpoint
    record: Record
    dangling: str | None  # what `checkpoints` is a link to, if that is not there
    is_writable: bool


def read_facts(out: Path, damaged: Damaged, *, allow_older: bool = False) -> RunFacts:
    """Reads the folder of a run. With `allow_older`, damaged checkpoints are passed over and kept in `damaged`."""
    saved = out / CHECKPOINTS
    newest = read_newest(saved, lambda path: (path, check_complete(path)), damaged, allow_older=allow_older)
    path, manifest = newest or (None, None)
    written = load(str(out / CONFIG)) if has_config(out) else None
    dangling = os.readlink(saved) if saved.is_symlink() and not saved.exists() else None
    return RunFacts(out, written, path, manifest, read_record(out), dangling, os.access(out, os.W_OK))


def read_record(out: Path) -> Record:
    """Reads the events of a run from their end, as far as is needed."""
    has_ended: bool | None = None
    for event in newest_first(out / EVENTS) if (out / EVENTS).exists() else ():  # checkpoints may be copied alone
        kind = event["event"]
        if has_ended is None and kind in ("start", "end"):
            has_ended = kind == "end"
        if kind == "checkpoint" and "step" in event:
            return Record(bool(has_ended), int(event["step"]))
        if kind == "start" and event.get("resumed_from") is None:
            break
    return Record(bool(has_ended), None)


def has_config(folder: Path) -> bool:
    """Whether a folder has a run.toml."""
    return (folder / CONFIG).exists()


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    # Checkpoints alone are a run too: its later ones would outlive, and push out, those of a new one.
    return has_config(folder) or (folder / EVENTS).exists() or bool(step_folders(folder / CHECKPOINTS))


def not_a_run(folder: Path) -> ConfigError:
    """Returns the error of a folder without a run to resume."""
    start = "name the folder of one" if folder.exists() else f"{train_command('--out', folder)} starts one"
    return RunFolderError(f"`{folder}` holds no run: it has no {CONFIG}", hint=start)


def write_config(folder: Path, config: RunConfig, hint: str) -> None:
    """Writes run.toml; `hint` says what to do if that fails."""
    with os_errors(RunFolderError, f"`{folder / CONFIG}` cannot be written", hint):
        make_folder(folder)
        write_whole(folder / CONFIG, to_toml(config).encode())


def check_empty(folder: Path) -> None:
    """Refuses a folder that holds a run."""
    if holds_run(folder):
        raise RunFolderError(
            f"`{folder}` already holds a run",
            hint=f"{train_command('--resume', '--out', folder)} continues it; or name another folder with --out",
        )


def check_free(folder: Path) -> None:
    """Refuses early what `create_run` would, before anything is measured on a device that others may use."""
    check_empty(folder)
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        reason = f"`{there}` is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"`{there}` is not writable"
    else:
        return
    raise RunFolderError(f"`{folder}` cannot be written: {reason}", hint="name another folder with --out")


def check_apart(folder: Path, data: DataConfig) -> None:
    """Refuses a run folder that holds the run's own data: its record would be read as data when it resumes."""
    for source in (data.source, data.validation):
        if not isinstance(source, str) or not source:
            continue
        named = Path(os.path.expanduser(source))
        if glob.has_magic(source) and not named.exists():
            if not fnmatch(CONFIG, named.name):
                continue
            named = named.parent
        if named.is_dir() and folder.is_dir() and named.samefile(folder):
            raise RunFolderError(
                f"`{folder}` holds the data of the run, and its record would be read as data",
                hint="name another folder with --out; one inside this one will do",
            )


def newest(parent: Path, name: str | None = None) -> Path | None:
    """Returns the run below a folder that was trained last; of a recipe (NAME-DATE-TIME), if one is named."""
    named = re.compile(".*" if name is None else rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?", re.DOTALL)
    runs = [path for path in parent.glob("*") if named.fullmatch(path.name) and has_config(path)]
    return max(runs, key=lambda path: (_last_trained(path), path.name), default=None)


def _last_trained(folder: Path) -> float:
    try:
        return float(next(newest_first(folder / EVENTS))["time"])
    except (EventsError, StopIteration, KeyError, TypeError, ValueError):  # none was written, or it is damaged
        saved = step_folders(folder / CHECKPOINTS)
        return (saved[-1] if saved else folder / CONFIG).stat().st_mtime
