"""The folder of a run, and which runs may go on in it.

    run.toml          the resolved configuration
    lock              held by the process that writes here (lock.py)
    events.jsonl      what happened, append-only
    checkpoints/      step-NNNNNN/
    report.html       written at the end
    loggers.json      the id of the run to its loggers, which write to tensorboard/ and wandb/
    cache/            what was compiled and tuned, under `training.deterministic`

A folder belongs to one run. A new run refuses a folder that holds one; a resumed run must be the same run: the
same configuration but for how often it looks and saves, and the same policy and data (which the checkpoint knows).
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
from halfstep.training.checkpoints.checkpoint import newest_manifest, step_folders
from halfstep.training.files import RunLock, make_folder, write_whole
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS
from halfstep.training.telemetry.events import EventsError, newest_first

# What may differ between a run and its continuation: none of these changes an update that was made.
FREE = {
    "policy",
    "title",
    "data.source",  # data may move: their digest is in the checkpoint
    "training.validate_every",
    "training.validation_tokens",
    "training.save_every",
    "training.keep_last",
    "training.keep_every",
    "training.keep_best",
    "training.rollback",
    "training.compile",
    "training.recompute_blocks",
    "training.loggers",
    "training.measure_ceiling",
}

# What may differ where the product stays: an update sees the same sequences, in other pieces.
PIECES = ("training.batch", "training.micro_batches")


def lock(folder: Path, *, new: bool) -> RunLock:
    """Takes the folder of a run for this process; it is made for a new one."""
    if not new and not _can_restore(folder):
        read_config(folder)  # what is no run is said before what cannot be written
    try:
        if new:
            make_folder(folder)
        return RunLock(folder)
    except OSError as error:
        hint = "name another folder by --out" if new else "change its permissions"
        raise ConfigError(f"`{folder}` cannot be written: {error.strerror}", hint=hint) from None


def check_free(folder: Path, *, new: bool, allow_older: bool = False) -> list[str]:
    """Refuses what `lock` and `create` would, before anything is measured on a device that others may use.

    A run.toml that is gone is written again, as the newest checkpoint knows it; returns what there is to tell.
    """
    if new:
        _check_empty(folder)
        _check_can_be_made(folder)
        return []
    held = lock(folder, new=False)
    try:
        return _restore(folder, allow_older) if _can_restore(folder) else []
    finally:
        held.release()


def _can_restore(folder: Path) -> bool:
    """Whether a run lost its configuration, and not its checkpoints."""
    return not (folder / CONFIG).exists() and bool(step_folders(folder / CHECKPOINTS))


def _restore(folder: Path, allow_older: bool) -> list[str]:
    newest, manifest = newest_manifest(folder / CHECKPOINTS, allow_older=allow_older)
    config = build(RunConfig, {**manifest["config"], "policy": manifest["policy"]})
    _write(folder, config, hint="change its permissions, or free space")
    return [f"`{folder}` had no {CONFIG}: it was written again as `{newest}` knows it"]


def check_not_lost(folder: Path, *, allow_older: bool) -> None:
    """Refuses to begin a run again whose checkpoints were there once: their disk may not be mounted."""
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
            hint="mount the disk, or put them back; with --resume --allow-older the run begins again at step 0",
        )


def _last_saved(folder: Path) -> int | None:
    """The step of the last checkpoint on record since the run began, or was begun again."""
    if not (folder / EVENTS).exists():
        return None
    for event in newest_first(folder / EVENTS):
        if event["event"] == "checkpoint":
            return int(event["step"])
        if event["event"] == "start" and event["resumed_from"] is None:
            return None
    return None


def check_apart(folder: Path, source: str) -> None:
    """Refuses to make a run in the folder of its own data: its record would be among them when it goes on."""
    named = Path(os.path.expanduser(source))
    if glob.has_magic(source) and not named.exists():
        if not fnmatch(CONFIG, named.name):
            return
        named = named.parent
    if source and named.is_dir() and folder.is_dir() and named.samefile(folder):
        raise ConfigError(
            f"`{folder}` holds the data of the run, and its record would be among them",
            hint="name another folder by --out; one inside this one will do",
        )


def has_ended(folder: Path) -> bool:
    """Whether the record of a run says that it came to its end."""
    if not (folder / EVENTS).exists():  # a copy of the checkpoints alone
        return False
    for event in newest_first(folder / EVENTS):
        if event["event"] in ("end", "start"):
            return bool(event["event"] == "end")
    return False


def create(folder: Path, config: RunConfig) -> None:
    """Makes the folder of a new run and writes its configuration."""
    _check_empty(folder)
    check_apart(folder, config.data.source)
    _write(folder, config, hint="name another folder by --out")


def _write(folder: Path, config: RunConfig, hint: str) -> None:
    try:
        make_folder(folder)
        write_whole(folder / CONFIG, to_toml(config).encode())
    except OSError as error:
        raise ConfigError(f"`{folder}` cannot be written: {error.strerror}", hint=hint) from None


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder, or what is left of one."""
    # Checkpoints alone are a run too: its later ones would outlive, and push out, those of a new one.
    return (folder / CONFIG).exists() or (folder / EVENTS).exists() or bool(step_folders(folder / CHECKPOINTS))


def _check_empty(folder: Path) -> None:
    if holds_run(folder):
        raise ConfigError(
            f"`{folder}` already holds a run",
            hint="go on with it by --resume, or name another folder by --out",
        )


def _check_can_be_made(folder: Path) -> None:
    """Says at once what making the folder would say after the device was measured."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    why = None
    if not there.is_dir():
        why = f"`{there}` is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"nothing can be written to `{there}`"
    if why is not None:
        raise ConfigError(f"`{folder}` cannot be written: {why}", hint="name another folder by --out")


def check_same_run(folder: Path, config: RunConfig) -> None:
    """Refuses a configuration that does not continue the run in a folder."""
    was, now = (_flatten(dataclasses.asdict(each)) for each in (read_config(folder), config))
    for key in _fixed(was, now):
        raise ConfigError(
            f"`{folder}` holds another run: {key} was {was[key]!r} and is now {now[key]!r}",
            hint=f"`--resume --out {folder}` without a recipe goes on with what it was started with; "
            f"another --out starts anew, and `--init {folder}` begins with its weights",
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"`{folder}` cannot be written", hint="change its permissions")


def check_same_settings(saved: Path, before: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses settings that are not those of a checkpoint: run.toml may have been edited since."""
    was, now = _flatten(dict(before)), _flatten(json.loads(json.dumps(dataclasses.asdict(config))))
    for key in _fixed(was, now):
        raise ConfigError(
            f"`{saved}` was saved with {key} = {was[key]!r}, and the run has {now[key]!r}",
            hint=f"set it back in {CONFIG}, or start anew with `--init {saved}` and another --out",
        )


def with_origin(folder: Path, config: RunConfig) -> RunConfig:
    """The configuration of a run that goes on, with where its first weights came from unless it says so itself."""
    before = read_config(folder)
    if config.init not in ("", before.init):
        return config  # another: `check_same_run` says so
    return dataclasses.replace(config, init=before.init, init_digest=config.init_digest or before.init_digest)


def rewrite(folder: Path, config: RunConfig) -> None:
    """Writes the configuration that a run goes on with, where it changed: a full disk stops no other."""
    if read_config(folder) == config:
        return
    try:
        write_whole(folder / CONFIG, to_toml(config).encode())
    except OSError as error:
        raise ConfigError(
            f"`{folder / CONFIG}` cannot be written: {error.strerror}",
            hint="free space; or go on with the settings as they were, which writes nothing",
        ) from None


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in a folder."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"`{folder}` holds no run: it has no {CONFIG}", hint="`halfstep train` makes one")
    return load(str(folder / CONFIG))


def newest(parent: Path, name: str | None = None) -> Path | None:
    """The run below a folder that was trained last: of all, or of a recipe, whose runs are NAME-DATE-TIME."""
    named = re.compile(".*" if name is None else rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?", re.DOTALL)
    found = [path for path in parent.glob("*") if named.fullmatch(path.name) and (path / CONFIG).exists()]
    return max(found, key=lambda path: (_last_trained(path), path.name), default=None)


def _last_trained(folder: Path) -> float:
    """When, in seconds since 1970: by its own record, for a folder's time changes with whatever is put there."""
    try:
        return float(next(newest_first(folder / EVENTS))["time"])
    except (EventsError, StopIteration, KeyError, TypeError, ValueError):  # none was written, or it is damaged
        saved = step_folders(folder / CHECKPOINTS)
        return (saved[-1] if saved else folder / CONFIG).stat().st_mtime


def _fixed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ and may not. An update may be taken in other pieces: it sees the same sequences."""
    free = set(FREE)
    if math.prod(was.get(key, 0) for key in PIECES) == math.prod(now[key] for key in PIECES):
        free.update(PIECES)
    return [key for key in now if key not in free and key in was and was[key] != now[key]]


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
