"""The folder of a run (paths.py names what is inside), and which runs may resume in it.

A folder belongs to one run: a new run refuses a folder that holds one, and a resumed run must be the same run,
with the same configuration except how often it evaluates and saves, and with the same policy and data.
"""

import dataclasses
import glob
import json
import math
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from halfstep.config.load import load, to_toml
from halfstep.config.run import RunConfig
from halfstep.config.schema import build
from halfstep.core.errors import ConfigError
from halfstep.training.checkpoints.checkpoint import step_folders
from halfstep.training.files import make_folder, os_errors, write_whole
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS
from halfstep.training.telemetry.events import EventsError, newest_first

# What may differ between a run and its continuation: none of these changes an update that was made.
FREE = {"policy", "title", "data.source"}  # data may move: its digest is in the checkpoint
FREE |= {f"training.{name}" for name in ("validate_every", "validation_tokens", "save_every", "rollback")}
FREE |= {f"training.{name}" for name in ("keep_last", "keep_every", "keep_best", "loggers", "measure_ceiling")}
FREE |= {f"training.{name}" for name in ("compile", "recompute_blocks")}

# What may differ while the product stays: an update sees the same sequences, in other pieces.
PIECES = ("training.batch", "training.micro_batches")


def has_config(folder: Path) -> bool:
    """Whether a folder has a run.toml."""
    return (folder / CONFIG).exists()


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    # Checkpoints alone are a run too: its later ones would outlive, and push out, those of a new one.
    return has_config(folder) or (folder / EVENTS).exists() or bool(step_folders(folder / CHECKPOINTS))


def not_a_run(folder: Path) -> ConfigError:
    """Returns the error of a folder without a run to resume."""
    return ConfigError(f"`{folder}` holds no run: it has no {CONFIG}", hint="`halfstep train` makes one")


def read_config(folder: Path) -> RunConfig:
    """Returns the configuration of the run in a folder."""
    if not has_config(folder):
        raise not_a_run(folder)
    return load(str(folder / CONFIG))


def write_config(folder: Path, config: RunConfig, hint: str) -> None:
    """Writes run.toml; `hint` says what to do if that fails."""
    with os_errors(ConfigError, f"`{folder / CONFIG}` cannot be written", hint):
        make_folder(folder)
        write_whole(folder / CONFIG, to_toml(config).encode())


def restore_config(folder: Path, manifest: Mapping[str, Any]) -> RunConfig:
    """Writes a lost run.toml again, as a checkpoint knows it."""
    config = build(RunConfig, {**manifest["config"], "policy": manifest["policy"]})
    write_config(folder, config, "change its permissions, or free space")
    return config


def check_empty(folder: Path) -> None:
    """Refuses a folder that holds a run."""
    if holds_run(folder):
        raise ConfigError(
            f"`{folder}` already holds a run", hint="continue it with --resume, or name another folder with --out"
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
    raise ConfigError(f"`{folder}` cannot be written: {reason}", hint="name another folder with --out")


def check_apart(folder: Path, source: str) -> None:
    """Refuses a run folder that holds the run's own data: its record would be read as data when it resumes."""
    named = Path(os.path.expanduser(source))
    if glob.has_magic(source) and not named.exists():
        if not fnmatch(CONFIG, named.name):
            return
        named = named.parent
    if source and named.is_dir() and folder.is_dir() and named.samefile(folder):
        raise ConfigError(
            f"`{folder}` holds the data of the run, and its record would be read as data",
            hint="name another folder with --out; one inside this one will do",
        )


def check_not_lost(folder: Path, *, allow_older: bool) -> None:
    """Refuses to start a run over whose checkpoints are gone: their disk may not be mounted."""
    where = folder / CHECKPOINTS
    if where.is_symlink() and not where.exists():
        raise ConfigError(
            f"`{where}` is a link to `{os.readlink(where)}`, which is not there",
            hint="mount the disk; or remove the link, if what it held is gone",
        )
    step = None if allow_older else _last_saved(folder)
    if step is not None:
        raise ConfigError(
            f"`{where}` holds no checkpoint, and the record of the run says that step {step} was saved there",
            hint="mount the disk, or put them back; with --resume --allow-older the run starts over at step 0",
        )


def _last_saved(folder: Path) -> int | None:
    if not (folder / EVENTS).exists():
        return None
    for event in newest_first(folder / EVENTS):
        if event["event"] == "checkpoint":
            return int(event["step"])
        if event["event"] == "start" and event["resumed_from"] is None:
            return None
    return None


def has_ended(folder: Path) -> bool:
    """Whether the record of a run says that it finished."""
    if not (folder / EVENTS).exists():  # a copy of the checkpoints alone
        return False
    for event in newest_first(folder / EVENTS):
        if event["event"] in ("end", "start"):
            return bool(event["event"] == "end")
    return False


def check_same_run(folder: Path, written: RunConfig, config: RunConfig) -> None:
    """Refuses a configuration that does not continue the run whose run.toml was read."""
    was, now = (_flatten(dataclasses.asdict(each)) for each in (written, config))
    for key in _fixed(was, now):
        raise ConfigError(
            f"`{folder}` holds another run: {key} was {was[key]!r} and is now {now[key]!r}",
            hint=f"`--resume --out {folder}` without a recipe continues with what it was started with; "
            f"another --out starts anew, and `--init {folder}` begins with its weights",
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"`{folder}` cannot be written", hint="change its permissions")


def check_same_settings(saved: Path, before: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses settings that differ from a checkpoint's: run.toml may have been edited since."""
    was, now = _flatten(dict(before)), _flatten(json.loads(json.dumps(dataclasses.asdict(config))))
    for key in _fixed(was, now):
        raise ConfigError(
            f"`{saved}` was saved with {key} = {was[key]!r}, and the run has {now[key]!r}",
            hint=f"set it back in {CONFIG}, or start anew with `--init {saved}` and another --out",
        )


def with_origin(written: RunConfig, config: RunConfig) -> RunConfig:
    """Returns the configuration of a resumed run, with the origin of its initial weights unless it has its own."""
    if config.init not in ("", written.init):
        return config  # another origin: `check_same_run` refuses it
    return dataclasses.replace(config, init=written.init, init_digest=config.init_digest or written.init_digest)


def newest(parent: Path, name: str | None = None) -> Path | None:
    """Returns the run below a folder that was trained last, of a recipe if named (NAME-DATE-TIME)."""
    named = re.compile(".*" if name is None else rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?", re.DOTALL)
    runs = [path for path in parent.glob("*") if named.fullmatch(path.name) and has_config(path)]
    return max(runs, key=lambda path: (_last_trained(path), path.name), default=None)


def _last_trained(folder: Path) -> float:
    try:
        return float(next(newest_first(folder / EVENTS))["time"])
    except (EventsError, StopIteration, KeyError, TypeError, ValueError):  # none was written, or it is damaged
        saved = step_folders(folder / CHECKPOINTS)
        return (saved[-1] if saved else folder / CONFIG).stat().st_mtime


def _fixed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ and may not. An update may be cut into other pieces."""
    free = set(FREE)
    if math.prod(was.get(key, 0) for key in PIECES) == math.prod(now[key] for key in PIECES):
        free.update(PIECES)
    return [key for key in now if key not in free and key in was and was[key] != now[key]]


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
