"""`halfstep report` and `halfstep watch`: the page of a run, as a file or live in a browser."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from halfstep.cli.output import print_words

Run = Annotated[Path, Parameter(help="A run folder, finished or not; `halfstep runs` lists them.")]


def report(run: Run, /, *, out: Path | None = None) -> None:
    """Write the page of a run again, from its record: also of one that is running, was stopped or crashed.

    The page is one file that needs nothing else. Its path is printed.

    Parameters
    ----------
    out
        The file to write; by default, report.html in the run folder.
    """
    from halfstep.core.errors import ConfigError
    from halfstep.report.page import write
    from halfstep.report.watch import record_of
    from halfstep.training.paths import REPORT

    page = out or run / REPORT
    if page.is_dir():
        raise ConfigError(f"`{page}` is a folder", hint="name a file with --out")
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
    from halfstep.core.errors import ConfigError
    from halfstep.report.watch import LivePage, Server

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not a port", hint="a port is between 1 and 65535")
    with Server(LivePage(run), port) as server:
        try:
            print(server.url, flush=True)
            print_words(f"watching `{run}`; Ctrl-C ends it")
            server.serve_forever()
        except KeyboardInterrupt:
            pass  # the usual way to end it
    return 0
