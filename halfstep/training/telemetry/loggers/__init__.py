"""Loggers of others: TensorBoard, trackio and W&B, each optional, behind one small interface.

A logger is told what is written to events.jsonl (it listens there), so its numbers are the same ones and nothing
is recorded twice in two ways. events.jsonl stays the record: a logger is for looking.

**Asked for and not installed**: refused before the run begins. **Fails while the run goes on** (a disk, a
network): it is dropped with one warning, and training goes on.

**Resuming** goes on in the same logger's run: its id lies in the run folder. Steps that are taken again, after a
kill or a rollback, keep their numbers; what a logger does with the older ones is its own matter, and each file
here says.
"""

import json
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, final

from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.training.files import write_whole
from halfstep.training.paths import LOGGERS

# The events that are curves, and what they are called: `train/loss`, `validation/loss`.
CURVES = {"step": "train", "validation": "validation", "checkpoint": "checkpoint"}
PLACES = ("event", "time", "step")


@dataclass(frozen=True)
class Where:
    """The run that a logger tells of."""

    folder: Path
    id: str  # the same in every session of the run
    resumed_from: int | None


class Logger(Protocol):
    """One of the loggers, open."""

    def start(self, event: Mapping[str, Any]) -> None:
        """A session begins; the event holds the settings."""

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Numbers of a step."""

    def went_back(self, step: int) -> None:
        """The next step is the one after this."""

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """The session is over; `totals` are the numbers of its end."""


def check(names: Sequence[str]) -> None:
    """Refuses a logger whose package is not installed."""
    for name in names:
        found = find_spec(name)
        # W&B leaves a folder `wandb` behind, which Python takes for a package without any file.
        if found is None or found.origin is None:
            raise ConfigError(
                f'training.loggers names "{name}", and the package `{name}` is not installed',
                hint=f"pip install 'halfstep[{name}]', or leave it out",
            )


def curve_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event, named as loggers show them; what is not known is left out."""
    prefix = CURVES.get(event["event"])
    if prefix is None:
        return {}
    return {f"{prefix}/{name}": value for name, value in numbers_of(event).items()}


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The fields of an event, and of tables in it, that are numbers."""
    found: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{inner}": number for inner, number in numbers_of(value).items()}
        elif name not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


@final
class Board:
    """The loggers of a run. A context manager; `take` is the listener of its events."""

    def __init__(self, names: Sequence[str], folder: Path, resumed_from: int | None, warn: Callable[[str], None]):
        self.warn = warn  # tells of a logger that was dropped
        self.loggers: dict[str, Logger] = {}
        self._totals: dict[str, float] = {}
        if not names:
            return
        where = Where(folder, _identity(folder, warn), resumed_from)
        for name in dict.fromkeys(names):
            try:
                with redirect_stdout(sys.stderr):  # stdout is for data
                    self.loggers[name] = _open(name, where)
            except Exception as error:
                self._not_opened(name, error, resumed_from is not None)

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
        except Exception as error:  # whatever it is, it is no reason to stop training
            self.loggers.pop(name, None)  # first: the warning is an event too
            self.warn(f"the logger `{name}` failed and is left out from here on: {_said(error)}")

    def _not_opened(self, name: str, error: Exception, resumed: bool) -> None:
        """A new run is refused; one that goes on has more to lose than a picture of itself."""
        if not resumed:
            self.close(failed=True)
            raise HalfstepError(
                f"the logger `{name}` cannot start: {_said(error)}",
                hint="leave it out of training.loggers, or see to it and name another folder by --out",
            ) from None
        self.warn(f"the logger `{name}` cannot start and is left out: {_said(error)}")

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def _open(name: str, where: Where) -> Logger:
    logger: Logger = import_module(f"halfstep.training.telemetry.loggers.{name}").open_logger(where)
    return logger


def _pass_on(logger: Logger, event: Mapping[str, Any]) -> None:
    if event["event"] == "start":
        logger.start(event)
    elif event["event"] == "rollback":
        logger.went_back(int(event["to"]))
    elif values := curve_of(event):
        logger.curve(int(event["step"]), float(event["time"]), values)


def _identity(folder: Path, warn: Callable[[str], None]) -> str:
    """The id of the run among others, made when a logger is first asked for; a lost one stops no run."""
    path = folder / LOGGERS
    try:
        return str(json.loads(path.read_bytes())["id"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        warn(f"`{path}` is damaged and holds no id: loggers begin a run of their own")
    made = uuid.uuid4().hex[:8]
    try:
        write_whole(path, json.dumps({"id": made}).encode() + b"\n")
    except OSError as error:
        warn(f"`{path}` cannot be written ({error.strerror}): after a resume, loggers begin a run of their own")
    return made


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those of the values that JSON can hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
