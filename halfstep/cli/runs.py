"""`halfstep runs`, `report` and `watch`: how the runs of a folder stand, and the page of one, on disk or live."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from halfstep.cli import train
from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words, rest
from halfstep.core.errors import OptionError
from halfstep.training.paths import REPORT

if TYPE_CHECKING:
    from halfstep.tools.runs import RunState

Run = Annotated[Path, Parameter(help="A run folder, finished or not; `halfstep runs` lists them.")]
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
    from halfstep.core.choice.layers import with_outcome
    from halfstep.report.number_format import duration, plain

    return (
        run.folder,
        run.state,
        f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else ""),
        "" if run.loss is None else plain(run.loss),
        "" if run.validation_loss is None else plain(run.validation_loss),
        with_outcome(run.policy or "", run.outcome),
        "" if run.time is None else f"{duration(max(0.0, now - run.time))} ago",
    )


def report(run: Run, /, *, out: Path | None = None) -> None:
    """Write the page of a run again, from its record: also of one that is running, was stopped or crashed.

    The page is one file that needs nothing else. Its path is printed.

    Parameters
    ----------
    out
        The file to write; by default, report.html in the run folder.
    """
    from halfstep.report.page import write
    from halfstep.report.watch import record_of

    page = out or run / REPORT
    if page.is_dir():
        raise OptionError(f"`{page}` is a folder", hint="name a file with --out")
    write(record_of(run), page)
    print(page)


def watch(run: Run, /, *, port: int = 0) -> int:
    """Serve the page of a run to a browser on this machine, and keep it current while the run trains.

    The address is printed; Ctrl-C ends it. Only this machine can reach it: from another, tunnel the port, with
    `ssh -L PORT:127.0.0.1:PORT HOST`, and open the same address.

    Parameters
    ----------
    port
        The port to listen on; by default, one that is free.
    """
    from halfstep.report.watch import LivePage, Server

    if not 0 <= port <= 65535:
        raise OptionError(f"--port {port} is not a port", hint="a port is between 1 and 65535")
    with Server(LivePage(run), port) as server:
        try:
            print(server.url, flush=True)
            print_words(f"watching `{run}`; Ctrl-C ends it")
            rest()
            server.serve_forever()
        except KeyboardInterrupt:
            pass  # the usual way to end it
    return 0
