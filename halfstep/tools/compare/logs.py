"""Logs that other tools have written: CSV, an export of W&B, JSONL, TensorBoard, trackio.

A CSV file has a header. Its column `step` counts updates (without one, the lines are counted), and each other
column is a number: `loss`, `val_loss` and other common names of a loss. Each line of JSONL is an object, and its
keys are such columns; those of an object in it are called `train/loss`. W&B exports one number of several runs, in
columns `RUN - NAME`; its columns of minima and maxima (`__MIN`, `__MAX`) and of steps (`_step`) are left out. A
TensorBoard log is an event file or the folder around it. trackio keeps the runs of a project in PROJECT.db.

A run has the seed that its name says: `seed-3.csv`, or `bf16-seed-3` in a project.
"""

import csv
import io
import itertools
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.reading import MOST_TABLE, open_regular, parse_json, read_bytes
from halfstep.core.compare.gaps import CompareInputError
from halfstep.core.errors import how_to_install
from halfstep.tools.compare.curves import HELD_OUT, LOSS, Curve, as_arrays
from halfstep.training.files import os_errors

STEPS = ("step", "_step", "global_step", "iteration", "iter", "trainer/global_step", "train/global_step")
# What people call a loss, the likeliest first; case, spaces and what separates words do not matter.
HELD_OUT_NAMES = ["held_out_loss", "validation_loss", "val_loss", "eval_loss", "test_loss", "loss_validation"]
HELD_OUT_NAMES += ["loss_val", "loss_eval", "loss_held_out", "validation", "eval", "val", "held_out"]
LOSS_NAMES = ["loss", "train_loss", "training_loss", "loss_train", "loss_training"]
_WANDB, _NOT_READ = " - ", ("__MIN", "__MAX", "_step")
EMPTY = ("", "none", "null", "na", "n/a", "-")  # cells that hold nothing
EVENT_FILE = "events.out.tfevents"
LAST_STEP = 2.0**53  # up to here floats count
TABLES, JSON_LINES, TRACKIO = (".csv", ".tsv", ".txt", ".log"), (".jsonl", ".ndjson"), ".db"
FILES = (*TABLES, *JSON_LINES)  # a folder of these has a run in each
_SEED = re.compile(r"(?<![a-z])seed[-_= ]?(\d{1,18})(?!\d)", re.IGNORECASE)


@dataclass
class Column:
    """A column of a log: its numbers by step, the steps without one, and where it holds text, if it does."""

    numbers: dict[int, float] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    text: str = ""

    def add(self, step: int, cell: str, where: str) -> None:
        """Takes a cell in; `where` says what it is if it is text."""
        if (value := _value(cell)) is not None:
            self.numbers[step] = value
        elif cell.lower() in EMPTY:
            self.empty.add(step)
        else:
            self.text = self.text or where


Line = tuple[str, dict[str, Any]]  # where it is, and its keys and values


def read_log(path: Path, column: str | None = None) -> list[Curve]:
    """Returns the runs of a log; `column` names the loss to compare, if its name does not say that it is one."""
    if path.is_dir() or EVENT_FILE in path.name:
        return [_named(str(path), {tag: Column(found) for tag, found in _tensorboard(path).items()}, column)]
    with os_errors(CompareInputError, f"`{path}` cannot be read", "name a log or a run folder"):
        content = read_bytes(path, MOST_TABLE)
    if path.suffix in JSON_LINES:
        return [_named(str(path), _columns(_json_lines(path, content)), column)]
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


def read_logs(folder: Path, column: str | None = None) -> list[Curve]:
    """Returns the runs of a folder that has a log of each."""
    files = sorted(path for path in folder.iterdir() if path.suffix in FILES)
    curves = [curve for path in files for curve in read_log(path, column)]
    if twice := [
        seed for seed, count in Counter(c.seed for c in curves).items() if seed is not None and count > 1
    ]:
        raise CompareInputError(
            f"`{folder}` has two runs of the seed {twice[0]}", hint="a side of a comparison has each seed once"
        )
    return curves


def split_trackio(given: str) -> tuple[Path, str] | None:
    """Returns the file and the runs that `PROJECT.db:RUNS` names; all of them without `:RUNS`."""
    file, dot, runs = given.partition(TRACKIO)
    return (Path(file + dot), runs[1:] or "*") if dot and runs[:1] in ("", ":") else None


def read_trackio(path: Path, runs: str = "*", column: str | None = None) -> list[Curve]:
    """Returns the runs of a project of trackio whose names match."""
    lines: dict[str, list[Line]] = {}
    for number, (run, step, metrics) in enumerate(_trackio_rows(path), 1):
        if fnmatchcase(str(run), runs):
            place = f"`{path}`, record {number}"
            lines.setdefault(str(run), []).append((place, _json_line(metrics, place) | {"step": step}))
    if not lines:
        raise CompareInputError(
            f"`{path}` has no run called `{runs}`", hint=f"name some of its runs: `{path}:bf16-*`, in quotes"
        )
    return [_named(f"{path}: {run}", _columns(rows), column) for run, rows in sorted(lines.items())]


def _trackio_rows(path: Path) -> list[tuple[Any, Any, Any]]:
    with os_errors(CompareInputError, f"`{path}` cannot be read", "name the database of a project of trackio"):
        open_regular(path).close()
        logged = path.with_name(f"{path.name}-wal")
        unread = logged.exists() and logged.stat().st_size
    # Read-only, SQLite would still leave files beside a database in WAL mode; there is nothing in them to miss.
    mode = "mode=ro" if unread else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as database:
            kind = database.execute("SELECT type FROM sqlite_master WHERE name = 'metrics'").fetchone()
            if kind != ("table",):  # a view may compute for ever
                raise sqlite3.DatabaseError("it has no table `metrics`")
            return database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise CompareInputError(
            f"`{path}` is not a database of trackio: {error}", hint="name PROJECT.db in the folder of trackio"
        ) from None


def _json_lines(path: Path, content: bytes) -> Iterator[Line]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _json_line(line, f"{path}:{number}")


def _json_line(line: str | bytes, place: str) -> dict[str, Any]:
    """Returns an object as one of numbers and texts; what is in an object within it is called `train/loss`."""
    try:
        found = parse_json(line)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return dict(_flat(found))
    except (ValueError, TypeError, RecursionError) as error:
        raise CompareInputError(
            f"{place}: not a line of JSON: {error}",
            hint="repair or remove the line; the last line of a log that is still written may be cut off",
        ) from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _columns(lines: Iterable[Line]) -> dict[str, Column]:
    """Returns each key of the lines as a column, which is empty where a line does not have it."""
    columns: dict[str, Column] = {}
    steps: set[int] = set()
    for number, (place, row) in enumerate(lines, 1):
        counted = next((name for name in row if name.lower() in STEPS), None)
        step = number if counted is None else _step(str(row.pop(counted)), place)
        steps.add(step)
        for name, value in row.items():
            cell = "[...]" if isinstance(value, list) else str(value)
            columns.setdefault(name, Column()).add(step, cell, f"{place}: `{cell}` in the column `{name}`")
    for found in columns.values():
        found.empty |= steps - found.numbers.keys()
    return columns


def _table(path: Path, content: bytes) -> dict[str, Column]:
    """Returns each column of a CSV file."""
    head, lines = _rows(path, content)
    counted = next((i for i, name in enumerate(head) if name.lower() in STEPS), None)
    kept = {i: Column() for i, name in enumerate(head) if i != counted and not name.endswith(_NOT_READ)}
    for number, (place, cells) in enumerate(lines, 1):
        step = number if counted is None else _step(cells[counted], place)
        for i, found in kept.items():
            cell = cells[i].strip()
            found.add(step, cell, f"{place}: `{cell}` in the column `{head[i]}`")
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
    if loss is None and (unread := _find(columns, [*HELD_OUT_NAMES, *LOSS_NAMES])):
        loss = unread  # it holds no number, which is refused below
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
    seed = _SEED.findall(name.rpartition("/")[2])
    return Curve(
        name,
        int(seed[-1]) if seed else None,
        series,
        math.inf if diverged else last,
        step,
        notes=tuple(filter(None, notes)),
    )


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
