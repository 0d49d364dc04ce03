"""TensorBoard, trackio and W&B, each optional, behind one small interface.

A logger gets what is written to events.jsonl, which stays the record. One that is not installed is refused before
the run begins; one that fails during the run (a disk, a network) is dropped with one warning, and training
continues. Resuming continues the same run in the logger: its id is in the run folder. Steps that are taken again
keep their numbers; what happens to the older ones depends on the logger, and each file here says.
"""

import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfstep.config.reading import MOST_SETTINGS, parse_json, read_bytes
from halfstep.core.errors import ConfigError, HalfstepError, how_to_install
from halfstep.training.files import write_whole
from halfstep.training.paths import LOGGERS

# The events that are curves, and their prefix: `train/loss`, `validation/loss`.
CURVES = {"step": "train", "validation": "validation", "checkpoint": "checkpoint"}
PLACES = ("event", "time", "step")


@dataclass(frozen=True)
class Where:
    """The run that a logger shows."""

    folder: Path
    id: str  # the same in every session of the run
    resumed_from: int | None


class Logger:
    """An open logger. What a logger cannot do, it leaves as it is here: nothing."""

    def start(self, event: Mapping[str, Any]) -> None:
        """Begins a session; the event holds the settings."""

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Records numbers of a step."""

    def rolled_back(self, step: int) -> None:
        """Records a rollback: the next step is the one after this."""

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Ends the session; `totals` are its final numbers."""


def check(names: Sequence[str]) -> None:
    """Refuses a logger whose package is not installed."""
    for name in names:
        spec = find_spec(name)
        # W&B leaves a folder `wandb` behind, which Python takes for a package without any file.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f'training.loggers names "{name}", but the package `{name}` is not installed',
                hint=f"{how_to_install(name)}, or leave it out",
            )


def curve_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of an event, named as loggers show them; unknown ones are left out."""
    prefix = CURVES.get(event["event"])
    if prefix is None:
        return {}
    return {f"{prefix}/{name}": value for name, value in numbers_of(event).items()}


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fields of an event, and of tables in it, that are numbers."""
    numbers: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}_{inner}": number for inner, number in numbers_of(value).items()}
        elif name not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


class Board:
    """The loggers of a run, open inside its `with` block; `take` is the listener of its events."""

    def __init__(self, names: Sequence[str], folder: Path, resumed_from: int | None, warn: Callable[[str], None]):
        self.names, self.folder, self.resumed_from = names, folder, resumed_from
        self.warn = warn  # reports a logger that was dropped
        self.loggers: dict[str, Logger] = {}
        self._totals: dict[str, float] = {}

    def __enter__(self) -> "Board":
        if not self.names:
            return self
        where = Where(self.folder, _identity(self.folder, self.warn), self.resumed_from)
        for name in dict.fromkeys(self.names):
            try:
                with redirect_stdout(sys.stderr):  # stdout is for data
                    self.loggers[name] = _open(name, where)
            except Exception as error:
                self._not_opened(name, error)
        return self

    def take(self, event: Mapping[str, Any]) -> None:
        """Passes an event on."""
        if event["event"] in ("end", "stop"):
            self._totals = numbers_of(event)
        for name, logger in list(self.loggers.items()):
            self._try(name, lambda logger=logger: _pass_on(logger, event))  # type: ignore[misc]

    def close(self, *, failed: bool = False) -> None:
        """Closes all. Idempotent."""
        for name, logger in list(self.loggers.items()):
            self._try(name, lambda logger=logger: logger.close(self._totals, failed=failed))  # type: ignore[misc]
        self.loggers.clear()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            with redirect_stdout(sys.stderr):
                call()
        except Exception as error:  # nothing here is worth stopping training for
            self.loggers.pop(name, None)  # first: the warning is an event too
            self.warn(f"the logger `{name}` failed and is dropped: {_describe(error)}")

    def _not_opened(self, name: str, error: Exception) -> None:
        """Refuses a new run; a resumed one has more to lose than its curves."""
        if self.resumed_from is None:
            self.close(failed=True)
            raise HalfstepError(
                f"the logger `{name}` cannot start: {_describe(error)}",
                hint="leave it out of training.loggers, or fix it and name another folder with --out",
            ) from None
        self.warn(f"the logger `{name}` cannot start and is dropped: {_describe(error)}")

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def _open(name: str, where: Where) -> Logger:
    logger: Logger = import_module(f"halfstep.training.telemetry.loggers.{name}").open_logger(where)
    return logger


def _pass_on(logger: Logger, event: Mapping[str, Any]) -> None:
    if event["event"] == "start":
        logger.start(event)
    elif event["event"] == "rollback":
        logger.rolled_back(int(event["to"]))
    elif values := curve_of(event):
        logger.curve(int(event["step"]), float(event["time"]), values)


def _identity(folder: Path, warn: Callable[[str], None]) -> str:
    """Returns the id of the run, new if there is none; a lost one stops no run."""
    path = folder / LOGGERS
    try:
        return str(parse_json(read_bytes(path, MOST_SETTINGS))["id"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        warn(f"`{path}` is damaged and holds no id: loggers begin a new run")
    identity = uuid.uuid4().hex[:8]
    try:
        write_whole(path, json.dumps({"id": identity}).encode() + b"\n")
    except OSError as error:
        warn(f"`{path}` cannot be written ({error.strerror}): after a resume, loggers begin a new run")
    return identity


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
