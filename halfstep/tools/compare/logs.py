"""Losses that other tools have logged: CSV files, W&B's export, TensorBoard's event files.

A CSV file has a header. Its column `step` counts updates (without one, the lines are counted), and each other
column is a number: `loss`, `val_loss` and what else people call them. W&B exports one number of several runs, in
columns `RUN - NAME`; its columns of minima and maxima (`__MIN`, `__MAX`) and of steps (`_step`) are left out. A
TensorBoard log is an event file or the folder around it.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from halfstep.config.reading import MOST_TABLE, open_regular, read_bytes
from halfstep.core.compare import CompareError
from halfstep.core.errors import how_to_install
from halfstep.tools.compare.curves import HELD_OUT, LOSS, Curve, as_arrays
from halfstep.training.files import os_errors

STEPS = ("step", "_step", "global_step", "iteration", "iter", "trainer/global_step", "train/global_step")
# What people call a loss, the likeliest first; case, spaces and what separates words do not matter.
HELD_OUT_NAMES: tuple[str, ...] = (
    "held_out_loss",
    "validation_loss",
    "val_loss",
    "eval_loss",
    "test_loss",
    "loss_validation",
)
HELD_OUT_NAMES += ("loss_val", "loss_eval", "loss_held_out", "validation", "eval", "val")
LOSS_NAMES = ("loss", "train_loss", "training_loss", "loss_train", "loss_training")
_WANDB = " - "
EVENT_FILE = "events.out.tfevents"
LAST_STEP = 2.0**53  # up to here floats count


def read_log(path: Path, column: str | None = None) -> list[Curve]:
    """Returns the runs of a log; `column` names the loss to compare, if its name does not say that it is one."""
    if path.is_dir() or EVENT_FILE in path.name:
        return [_named(str(path), _tensorboard(path), column)]
    with os_errors(CompareError, f"`{path}` cannot be read", "name a CSV file, a TensorBoard log or a run folder"):
        content = read_bytes(path, MOST_TABLE)
    table = _table(path, content)
    if not table:
        raise CompareError(f"`{path}` holds no numbers", hint="the first line names the columns: step,loss")
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for name, values in table.items():
        run, dash, number = name.rpartition(_WANDB)
        runs.setdefault(run if dash else "", {})[number] = values
    if len(runs) > 1:
        runs.pop("", None)  # what W&B has no run for
    return [_named(f"{path}: {run}" if run else str(path), numbers, column) for run, numbers in runs.items()]


def _table(path: Path, content: bytes) -> dict[str, dict[int, float]]:
    """Returns each column of a CSV file by step; empty cells are left out."""
    try:
        text = content.decode("utf-8-sig")
        head, *lines = list(csv.reader(io.StringIO(text)))
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        why = "it is empty" if isinstance(error, ValueError) and not content.strip() else f"it is not CSV: {error}"
        raise CompareError(f"`{path}`: {why}", hint="the first line names the columns: step,loss") from None
    counted = next((i for i, name in enumerate(head) if name.strip().lower() in STEPS), None)
    kept = [i for i, name in enumerate(head) if i != counted and not name.endswith(("__MIN", "__MAX", "_step"))]
    columns: dict[str, dict[int, float]] = {head[i].strip(): {} for i in kept}
    for number, cells in enumerate(lines, 1):
        if not any(cells):
            continue
        step = number if counted is None else _step(cells, counted, f"{path}:{number + 1}")
        for i in kept:
            if i < len(cells) and (value := _value(cells[i])) is not None:
                columns[head[i].strip()][step] = value
    return {name: values for name, values in columns.items() if values}


def _step(cells: list[str], counted: int, place: str) -> int:
    given = cells[counted] if counted < len(cells) else ""
    value = _value(given)
    if value is None or not abs(value) <= LAST_STEP:
        raise CompareError(
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
        raise CompareError(
            f"`{path}` is a TensorBoard log, and tensorboard is not installed", hint=how_to_install("tensorboard")
        ) from None
    with os_errors(CompareError, f"`{path}` cannot be read", "name a TensorBoard log"):
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
        raise CompareError(
            f"`{path}` is damaged: {str(error) or type(error).__name__}",
            hint="name another log, or export a CSV file",
        ) from None
    return found


def _named(name: str, numbers: Mapping[str, dict[int, float]], column: str | None) -> Curve:
    """Returns a run with the columns that are losses."""
    if column is not None and column not in numbers:
        raise CompareError(f"`{name}` has no column `{column}`", hint=f"its columns are {_listed(numbers)}")
    held_out = column or _find(numbers, HELD_OUT_NAMES)
    loss = _find(numbers, LOSS_NAMES) or held_out
    if loss is None and len(numbers) == 1:
        (loss,) = numbers
    if loss is None:
        raise CompareError(
            f"`{name}` has no column that is called a loss",
            hint=f"name one with --column; its columns are {_listed(numbers)}",
        )
    series = {LOSS: as_arrays(numbers[loss])}
    if held_out is not None:
        series[HELD_OUT] = as_arrays(numbers[held_out])
    last = None if held_out is None else float(series[HELD_OUT][1][-1])
    diverged = last is not None and not math.isfinite(last)
    return Curve(name, None, series, math.inf if diverged else last, int(series[LOSS][0][-1]))


def _find(numbers: Iterable[str], names: tuple[str, ...]) -> str | None:
    """Returns the column with the likeliest of some names, with or without a section in front (`train/loss`)."""
    plain = {_plain(name): name for name in reversed(list(numbers))}
    plain |= {_plain(name.rpartition("/")[2]): name for name in plain.values()} | plain
    return next((plain[name] for name in names if name in plain), None)


def _plain(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:20]) or "none"
