"""TensorBoard, trackio and W&B, each optional, behind one small interface.

A logger gets what is written to events.jsonl, which stays the record. One that is not installed is refused before
the run begins; one that fails during the run (a disk, a network) is dropped with one warning, and training
continues. Resuming continues the same run in the logger: its id is in the run folder. Steps that are taken again
keep their numbers; what happens to the older ones depends on the logger, and each class says.
"""

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from halfstep.config.reading import MOST_SETTINGS, parse_json, read_bytes
from halfstep.core.errors import LoggerError, SettingValueError, how_to_install
from halfstep.training.files import write_whole
from halfstep.training.paths import LOGGERS

# The events that are curves, and their prefix: `train/loss`, `validation/loss`.
CURVES = {"step": "train", "validation": "validation", "checkpoint": "checkpoint"}
PROJECT = "halfstep"  # of trackio and W&B
SECONDS_BETWEEN_FLUSHES = 10.0  # of TensorBoard
PLACES = ("event", "time", "step")


@dataclass(frozen=True)
class Where:
    """The run that a logger shows."""

    folder: Path
    id: str  # the same in every session of the run
    resumed_from: int | None


class Logger:
    """An open logger. A subclass leaves out what its library cannot do."""

    def __init__(self, where: Where):
        """Opens it for a run."""

    def start(self, event: Mapping[str, Any]) -> None:
        """Begins a session; the event holds the settings."""

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Records numbers of a step."""

    def roll_back(self, step: int) -> None:
        """Records a rollback: the next step is the one after this."""

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Ends the session; `totals` are its final numbers."""


def check(names: Sequence[str]) -> None:
    """Refuses a logger whose package is not installed."""
    for name in names:
        spec = find_spec(name)
        # W&B leaves a folder `wandb` behind, which Python takes for a package without any file.
        if spec is None or spec.origin is None:
            raise SettingValueError(
                f'training.loggers names "{name}", but the package `{name}` is not installed',
                hint=f"{how_to_install(name)}, or leave it out",
            )


def curve_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of an event, named as loggers show them; unknown ones are left out."""
    if (prefix := CURVES.get(event["event"])) is None:
        return {}
    return {f"{prefix}/{name}": value for name, value in numeric_fields(event).items()}


def numeric_fields(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fields of an event, and of tables in it, that are numbers."""
    numbers: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}_{inner}": number for inner, number in numeric_fields(value).items()}
        elif name not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


class Board:
    """The loggers of a run, open inside its `with` block; `log_event` is the listener of its events."""

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
                self._refuse_or_drop(name, error)
        return self

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Passes an event on to all loggers."""
        if event["event"] in ("end", "stop"):
            self._totals = numeric_fields(event)
        for name, logger in list(self.loggers.items()):
            self._try(name, lambda logger=logger: _pass_on(logger, event))  # type: ignore[misc]

    def close(self, *, failed: bool = False) -> None:
        """Closes all loggers. Idempotent."""
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

    def _refuse_or_drop(self, name: str, error: Exception) -> None:
        """Refuses a new run; a resumed one has more to lose than its curves."""
        if self.resumed_from is None:
            self.close(failed=True)
            raise LoggerError(
                f"the logger `{name}` cannot start: {_describe(error)}",
                hint="leave it out of training.loggers, or fix it and name another folder with --out",
            ) from None
        self.warn(f"the logger `{name}` cannot start and is dropped: {_describe(error)}")

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def _open(name: str, where: Where) -> Logger:
    kinds: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}
    return kinds[name](where)


def _pass_on(logger: Logger, event: Mapping[str, Any]) -> None:
    if event["event"] == "start":
        logger.start(event)
    elif event["event"] == "rollback":
        logger.roll_back(int(event["to"]))
    elif values := curve_values(event):
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


class TensorBoard(Logger):
    """TensorBoard: event files in RUN/tensorboard, by the package's own writer, which loads no framework.

    A resumed session writes another file, which begins with a mark that voids what was written of later steps.
    TensorBoard then shows each step once, as it was taken last.
    """

    def __init__(self, where: Where):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._session_log = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = EventFileWriter(str(where.folder / "tensorboard"))
        self._flushed = monotonic()
        if where.resumed_from is not None:
            self.roll_back(where.resumed_from)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=points)))
        # A kill loses what was not flushed; flushing every step would wait for the disk.
        if monotonic() - self._flushed >= SECONDS_BETWEEN_FLUSHES:
            self._writer.flush()
            self._flushed = monotonic()

    def roll_back(self, step: int) -> None:
        """Voids what was written of later steps."""
        mark = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=mark))

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Writes the rest."""
        self._writer.close()


class Trackio(Logger):
    """trackio: a local database that its dashboard shows, or a Hugging Face Space.

    Trackio's own variables decide where it goes: `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`. A run is
    named by its folder and its id. A resumed session adds to the run of that name; steps that are taken again are
    there twice. trackio writes in a thread and reports its own failures without raising them.
    """

    def __init__(self, where: Where):
        import trackio

        self._trackio, self._name = trackio, f"{where.folder.resolve().name}-{where.id}"
        self._run: Any = None

    def start(self, event: Mapping[str, Any]) -> None:
        """Begins, with the settings."""
        # The machine's own meters cost a thread each, and events have what matters.
        off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        config = dict(event["config"])
        self._run = self._trackio.init(project=PROJECT, name=self._name, resume="allow", config=config, **off)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve; trackio takes only finite ones."""
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Waits until all is written."""
        if self._run is not None:
            self._trackio.finish()


class WandB(Logger):
    """Weights & Biases: files in RUN/wandb, which `wandb sync` sends; or a server, if the environment says so.

    Offline unless `WANDB_MODE` names another mode: a run uses the network only if its user asked for it. The x
    axis of the curves is our own `step`: W&B's counter refuses to go back, and would drop the steps that are taken
    again after a kill. Those are there twice.
    """

    def __init__(self, where: Where):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=where.id,
            name=where.folder.resolve().name,
            dir=str(where.folder),
            mode=mode,
            # Offline nobody knows whether the run exists.
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True),  # what we print is ours to keep
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def start(self, event: Mapping[str, Any]) -> None:
        """Records the settings."""
        self._run.config.update(dict(event["config"]), allow_val_change=True)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._run.log({"step": step, **values})

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Records the totals, and ends the run."""
        self._run.summary.update(dict(totals))
        self._run.finish(exit_code=1 if failed else 0)
