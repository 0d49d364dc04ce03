"""The losses that a comparison needs: of our own runs, and of logs that other tools have written.

A CSV file has a header. Its column `step` counts updates (without one, the lines are counted), and each other
column is a number: `loss`, `val_loss` and other common names of a loss. W&B exports one number of several runs, in
columns `RUN - NAME`; its columns of minima and maxima (`__MIN`, `__MAX`) and of steps (`_step`) are left out. A
TensorBoard log is an event file or the folder around it.
"""

import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import MOST_TABLE, open_regular, read_bytes
from halfstep.config.schema import check
from halfstep.core.compare.divergence import Series
from halfstep.core.compare.gaps import CompareInputError
from halfstep.core.errors import how_to_install
from halfstep.training.files import os_errors
from halfstep.training.paths import EVENTS
from halfstep.training.run.signals import SIGNALS
from halfstep.training.telemetry.events import stream_events

LOSS, HELD_OUT, GRADIENT = "loss", "held-out loss", "gradient norm"
PARTING = (LOSS, GRADIENT)  # how the names of those series begin in which curves may part
ASKED = {"stopped", *(number.name for number in SIGNALS)}  # reasons to stop that say nothing about the training


# What is read of a run's settings.
_CONFIG: dict[str, Any] = {"seed": int, "model": Mapping[str, Any]}


@dataclass(frozen=True)
class Curve:
    """One run: its losses, and what it took. What its record does not say is None."""

    name: str
    seed: int | None
    series: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]  # steps and values; norms as logarithms
    held_out: float | None  # the loss at the last step; infinite if the run diverged
    step: int  # the last
    finished: bool = True
    tokens_per_second: float | None = None
    memory: int | None = None  # the peak, in bytes
    about: Mapping[str, Any] = field(default_factory=dict)  # its `start` event
    problem: str = ""  # why it diverged
    notes: tuple[str, ...] = ()  # on its log


def read_run(folder: Path) -> Curve:
    """Returns what the run in a folder has recorded."""
    start: dict[str, Any] = {}
    end: dict[str, Any] = {}
    layers: list[str] = []
    series: dict[str, dict[int, float]] = {LOSS: {}, HELD_OUT: {}, GRADIENT: {}}
    for event in stream_events(folder / EVENTS):
        kind = event["event"]
        if kind == "start":
            check(_CONFIG, event["config"])
            start, end = event, {}
        elif kind == "step":
            series[LOSS][event["step"]] = _number(event["loss"])
            series[GRADIENT][event["step"]] = _log(event["grad_norm"])
        elif kind == "monitor":
            layers = [layer["name"] for layer in event["layers"]]
        elif kind == "layers":
            for name, norm in zip(layers, event["weight"].get("gradient_norm", ()), strict=False):
                series.setdefault(f"{GRADIENT} of {name}", {})[event["step"]] = _log(norm)
        elif kind == "validation":
            series[HELD_OUT][event["step"]] = _number(event["loss"])
        elif kind in ("stop", "end"):
            end = event
    if not start or not series[LOSS]:
        raise CompareInputError(
            f"`{folder}` has recorded no step", hint="let the run train first, or name another folder"
        )
    last = max(series[LOSS])
    failed = end.get("event") == "stop" and end.get("reason") not in ASKED
    held_out = math.inf if failed else series[HELD_OUT].get(last)
    return Curve(
        str(folder),
        (start.get("config") or {}).get("seed"),
        {name: as_arrays(values) for name, values in series.items() if any(map(math.isfinite, values.values()))},
        math.inf if held_out is not None and not math.isfinite(held_out) else held_out,
        last,
        end.get("event") == "end",
        end.get("tokens_per_second"),
        end.get("memory"),
        start,
        str(end["reason"]) if failed else "",
    )


def as_arrays(values: Mapping[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns steps and their values in the order of the steps: a resumed run has recorded some twice."""
    steps = sorted(values)
    return np.array(steps, dtype=np.int64), np.array([values[step] for step in steps])


def stack_runs(curves: Sequence[Curve], steps: Mapping[str, NDArray[np.int64]]) -> dict[str, Series]:
    """Returns several runs as series with a row for each, at steps that all of them have."""
    found = {}
    for name, wanted in steps.items():
        runs = (curve.series[name] for curve in curves)
        rows = np.array([values[np.searchsorted(at, wanted)] for at, values in runs])
        # The gradients of all layers are of one kind.
        found[name] = Series(wanted, rows, name if name in (LOSS, GRADIENT) else "layers")
    return found


def common_steps(curves: Sequence[Curve]) -> dict[str, NDArray[np.int64]]:
    """Returns for each number that all runs have recorded the steps at which all of them did."""
    shared = set.intersection(*(set(curve.series) for curve in curves))
    found = {}
    for name in sorted(shared, key=lambda name: (name != LOSS, name != HELD_OUT, name != GRADIENT, name)):
        steps = curves[0].series[name][0]
        for curve in curves[1:]:
            steps = np.intersect1d(steps, curve.series[name][0])
        if steps.size:
            found[name] = steps
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _log(norm: float | None) -> float:
    """Returns the logarithm of a norm: seeds multiply it, so that its spread is a factor."""
    return math.log(norm) if norm is not None and 0 < norm < math.inf else math.nan


# Logs of other tools

STEPS = ("step", "_step", "global_step", "iteration", "iter", "trainer/global_step", "train/global_step")
# What people call a loss, the likeliest first; case, spaces and what separates words do not matter.
HELD_OUT_NAMES = ["held_out_loss", "validation_loss", "val_loss", "eval_loss", "test_loss", "loss_validation"]
HELD_OUT_NAMES += ["loss_val", "loss_eval", "loss_held_out", "validation", "eval", "val"]
LOSS_NAMES = ["loss", "train_loss", "training_loss", "loss_train", "loss_training"]
_WANDB, _NOT_READ = " - ", ("__MIN", "__MAX", "_step")
EMPTY = ("", "none", "null", "na", "n/a", "-")  # cells that hold nothing
EVENT_FILE = "events.out.tfevents"
LAST_STEP = 2.0**53  # up to here floats count


@dataclass
class Column:
    """A column of a log: its numbers by step, the steps without one, and where it holds text, if it does."""

    numbers: dict[int, float] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    text: str = ""


def read_log(path: Path, column: str | None = None) -> list[Curve]:
    """Returns the runs of a log; `column` names the loss to compare, if its name does not say that it is one."""
    if path.is_dir() or EVENT_FILE in path.name:
        return [_named(str(path), {tag: Column(found) for tag, found in _tensorboard(path).items()}, column)]
    with os_errors(
        CompareInputError, f"`{path}` cannot be read", "name a CSV file, a TensorBoard log or a run folder"
    ):
        content = read_bytes(path, MOST_TABLE)
    runs: dict[str, dict[str, Column]] = {}
    for name, found in _table(path, content).items():
        run, dash, number = name.rpartition(_WANDB)
        runs.setdefault(run if dash else "", {})[number] = found
    if len(runs) > 1:
        runs.pop("", None)  # what W&B has no run for
        for columns in runs.values():  # a run that ended earlier than others has empty cells for their steps
            steps = {step for found in columns.values() for step in found.numbers}
            for found in columns.values():
                found.empty &= steps
    if not any(found.numbers for columns in runs.values() for found in columns.values()):
        raise CompareInputError(f"`{path}` holds no numbers", hint="the first line names the columns: step,loss")
    return [_named(f"{path}: {run}" if run else str(path), columns, column) for run, columns in runs.items()]


def _table(path: Path, content: bytes) -> dict[str, Column]:
    """Returns each column of a CSV file."""
    head, lines = _rows(path, content)
    counted = next((i for i, name in enumerate(head) if name.lower() in STEPS), None)
    kept = {i: Column() for i, name in enumerate(head) if i != counted and not name.endswith(_NOT_READ)}
    for number, (place, cells) in enumerate(lines, 1):
        step = number if counted is None else _step(cells[counted], place)
        for i, found in kept.items():
            cell = cells[i].strip()
            if (value := _value(cell)) is not None:
                found.numbers[step] = value
            elif cell.lower() in EMPTY:
                found.empty.add(step)
            else:
                found.text = found.text or f"{place}: `{cell}` in the column `{head[i]}`"
    return {head[i]: found for i, found in kept.items()}


def _rows(path: Path, content: bytes) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the names of the columns, and each line that is not empty with its place."""
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip()[:1] in ("{", "["):
            raise csv.Error("it looks like JSON")
        tabs = "\t" in text.partition("\n")[0]
        table = csv.reader(io.StringIO(text), delimiter="\t" if tabs else ",", strict=True)
        head, *lines = [(f"{path}:{table.line_num}", cells) for cells in table]
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        why = "it is empty" if isinstance(error, ValueError) and not content.strip() else f"it is not CSV: {error}"
        raise CompareInputError(f"`{path}`: {why}", hint="the first line names the columns: step,loss") from None
    names = [name.strip() for name in head[1]]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise CompareInputError(
            f"`{path}` has two columns called `{twice[0]}`", hint="rename or remove one of them"
        )
    found = [(place, cells) for place, cells in lines if any(cells)]
    for place, cells in found:
        if len(cells) < len(names) or any(cells[len(names) :]):
            raise CompareInputError(
                f"{place}: {len(cells)} cells, and {len(names)} columns",
                hint="repair or remove the line; the last line of a log that is still written may be cut off",
            )
    return names, found


def _step(given: str, place: str) -> int:
    value = _value(given)
    if value is None or not abs(value) <= LAST_STEP:
        raise CompareInputError(
            f"{place}: the step is `{given}`, which is not a number of updates", hint="repair or remove the line"
        )
    return round(value)


def _value(cell: str) -> float | None:
    """Returns the number in a cell; None if it is empty or text, as a name or a date is."""
    try:
        return float(cell)
    except ValueError:
        return None


def _tensorboard(path: Path) -> dict[str, dict[int, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError:
        raise CompareInputError(
            f"`{path}` is a TensorBoard log, and tensorboard is not installed", hint=how_to_install("tensorboard")
        ) from None
    with os_errors(CompareInputError, f"`{path}` cannot be read", "name a TensorBoard log"):
        for file in path.iterdir() if path.is_dir() else [path]:
            if EVENT_FILE in file.name:
                open_regular(file).close()  # a pipe would wait for a writer
    try:
        log = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = log.Tags()
        found = {tag: {each.step: float(each.value) for each in log.Scalars(tag)} for tag in tags["scalars"]}
        for tag in tags["tensors"]:  # what TensorFlow 2 and JAX write
            arrays = {each.step: tensor_util.make_ndarray(each.tensor_proto) for each in log.Tensors(tag)}
            if arrays and all(array.size == 1 and array.dtype.kind in "fiu" for array in arrays.values()):
                found[tag] = {step: float(array.reshape(())) for step, array in arrays.items()}
    except Exception as error:  # whatever tensorboard makes of bytes that are no records
        raise CompareInputError(
            f"`{path}` is damaged: {str(error) or type(error).__name__}",
            hint="name another log, or export a CSV file",
        ) from None
    return found


def _named(name: str, columns: Mapping[str, Column], column: str | None) -> Curve:
    """Returns a run with the columns that are losses."""
    if column is not None and column not in columns:
        raise CompareInputError(f"`{name}` has no column `{column}`", hint=f"its columns are {_listed(columns)}")
    recorded = [each for each, found in columns.items() if found.numbers]
    held_out = column or _find(recorded, HELD_OUT_NAMES)
    loss = _find(recorded, LOSS_NAMES) or held_out
    if loss is None and len(recorded) == 1:
        (loss,) = recorded
    if loss is None:
        raise CompareInputError(
            f"`{name}` has no column that is called a loss",
            hint=f"name one with --column; its columns are {_listed(columns)}",
        )
    notes = [_check_gaps(name, each, columns[each]) for each in dict.fromkeys((loss, held_out)) if each]
    series = {LOSS: as_arrays(columns[loss].numbers)}
    if held_out is not None:
        series[HELD_OUT] = as_arrays(columns[held_out].numbers)
    last = None if held_out is None else float(series[HELD_OUT][1][-1])
    diverged = last is not None and not math.isfinite(last)
    step = int(series[LOSS][0][-1])
    return Curve(name, None, series, math.inf if diverged else last, step, notes=tuple(filter(None, notes)))


def _check_gaps(name: str, column: str, found: Column) -> str:
    """Refuses a loss that holds text or ends before its log; returns what to say of steps that lack it."""
    if found.text:
        raise CompareInputError(
            f"{found.text} is not a number", hint="write nan for a loss that was none, or leave the cell empty"
        )
    if not found.numbers:
        raise CompareInputError(
            f"`{name}`: the column `{column}` holds no number", hint="name another by --column"
        )
    steps = sorted(found.numbers)
    apart = np.diff(steps if len(steps) > 1 else [0, *steps])
    usual, longest = float(np.median(apart)), int(apart.max())
    due = longest if longest < 2 * usual else 2 * longest
    last = max(found.empty, default=0)
    if last - steps[-1] >= due:
        raise CompareInputError(
            f"`{name}`: the column `{column}` is empty from step {steps[-1]:,} on, and the log ends at {last:,}",
            hint="pandas writes NaN as an empty cell: write nan if the run diverged, or else cut the log there",
        )
    gaps = [(a, b) for a, b in itertools.pairwise(sorted({*steps, max(last, steps[-1])})) if b - a >= 2 * usual]
    missing = [f"between the steps {a:,} and {b:,}" for a, b in gaps if any(a < step <= b for step in found.empty)]
    return f"`{name}` has no `{column}` {', nor '.join(missing)}" if missing else ""


def _find(numbers: Iterable[str], names: Iterable[str]) -> str | None:
    """Returns the column with the likeliest of some names, with or without a section in front (`train/loss`)."""
    plain = {_plain(name): name for name in reversed(list(numbers))}
    plain |= {_plain(name.rpartition("/")[2]): name for name in plain.values()} | plain
    return next((plain[name] for name in names if name in plain), None)


def _plain(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:20]) or "none"
