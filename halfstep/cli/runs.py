"""`halfstep runs`: the runs of a folder, and how each stands."""

from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli import train
from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words

if TYPE_CHECKING:
    from halfstep.tools.runs import RunState

COLUMNS = ("run", "state", "step", "loss", "held out", "policy", "last event")


def runs(folder: Path | None = None, /, *, json: Json = False) -> None:
    """List runs: which are running, finished, stopped or crashed, with step, loss and policy.

    The one with the newest event comes first. A run that crashed can be resumed, as one that was stopped can:
    `halfstep train --resume --out RUN`.

    Parameters
    ----------
    folder
        The folder that holds the runs, or one run; by default, runs.
    """
    import dataclasses
    import time

    from halfstep.tools.runs import list_runs

    folder = folder or train.RUNS
    found = list_runs(folder)
    now = time.time()
    for run in found:
        if run.problem:
            print_words(f"warning: `{run.folder}` cannot be read: {run.problem}")
    if json:
        print_json([dataclasses.asdict(run) | {"age": run.time and max(0.0, now - run.time)} for run in found])
    elif found:
        print_table(COLUMNS, [_row(run, now) for run in found], right=("step", "loss", "held out"))
    else:
        print_words(f"`{folder}` holds no runs")


def _row(run: "RunState", now: float) -> tuple[str, ...]:
    from halfstep.report.number_format import duration, plain

    return (
        run.folder,
        run.state,
        f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else ""),
        "" if run.loss is None else plain(run.loss),
        "" if run.validation_loss is None else plain(run.validation_loss),
        run.policy or "",
        "" if run.time is None else f"{duration(max(0.0, now - run.time))} ago",
    )
