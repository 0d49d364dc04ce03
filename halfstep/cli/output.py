"""How results and errors look on a terminal and in a pipe, and what happens to output that is refused."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from halfstep.core.errors import HalfstepError, as_message, printable
from halfstep.training.telemetry.progress import SILENCE, drop_refusals, expect_silence, wrap_line

STDERR = 2
PATIENCE = 2.5  # seconds of silence before the first sign of life


@contextmanager
def drop_refused_output(*, stdout: bool) -> Iterator[None]:
    """Drops messages that stderr refuses, such as on a full disk; with `stdout`, output too."""
    before = sys.stdout, sys.stderr
    sys.stderr = drop_refusals(sys.stderr)
    sys.stdout = drop_refusals(sys.stdout) if stdout else sys.stdout
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before if stdout else before[1:]:
            try:
                stream.flush()
            except OSError:  # Python would raise it again at exit
                discard(stream)


class Pulse:
    """Decides when a silent command says that it still works: often for two minutes, and then ever later."""

    def __init__(self) -> None:
        self._since, self._next = math.nan, 0.0

    def words(self, now: float) -> str:
        """Returns what is to be said, or nothing."""
        since, patience = SILENCE
        if since != self._since:
            self._since, self._next = since, PATIENCE
        silent = now - since
        if silent < max(self._next, patience):
            return ""
        self._next = silent + PATIENCE * max(1, silent / 120)
        return f"still working after {silent:.0f} s"


@contextmanager
def signs_of_life() -> Iterator[None]:
    """Says on stderr that the command still works, where it would be silent; in a job, its first process does.

    A process says it, as importing a library can stop every thread for seconds. It is forked, so the caller has no
    threads yet; where the system cannot fork (Windows), there are no signs.
    """
    if os.environ.get("RANK", os.environ.get("MLX_RANK", "0")) != "0" or not hasattr(os, "fork"):
        yield
        return
    expect_silence(0.0)
    command = os.getpid()
    if (speaker := os.fork()) == 0:
        _speak_until_the_end_of(command)
    try:
        yield
    finally:
        os.kill(speaker, signal.SIGKILL)
        os.waitpid(speaker, 0)


def _speak_until_the_end_of(command: int) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has it too, and may take a while to end
        pulse = Pulse()
        while os.getppid() == command:
            if words := pulse.words(time.monotonic()):
                with suppress(OSError):
                    os.write(STDERR, f"{words}\n".encode())
            time.sleep(0.25)
    finally:
        os._exit(0)


def rest() -> None:
    """Gives no signs of life from here on: someone else speaks, or there is nothing to do."""
    expect_silence(math.inf)


def discard(stream: TextIO) -> None:
    """Sends everything that a stream still holds, and all that follows, to the null device."""
    with suppress(OSError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def print_json(data: Any) -> None:
    """Prints data for programs on stdout."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """Returns data as JSON, with null for NaN and infinities, which JSON lacks."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Prints a table on stdout; the columns in `right` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text: the brackets of a glob are not markup.
        table.add_row(*(Text(printable(cell, lines=True)) for cell in row))
    # A pipe has no width to fit: a wide table keeps one line per row, which suits grep.
    console = Console()
    Console(width=None if console.is_terminal else max(console.width, 200)).print(table)


def print_words(*lines: str) -> None:
    """Prints a message on stderr, line by line; a terminal gets them broken between words."""
    for line in lines:
        print(wrap_line(as_message(line), sys.stderr), file=sys.stderr)


def print_failure(error: HalfstepError | OSError, *, json: bool = False) -> None:
    """Prints an error of halfstep or of the system."""
    if isinstance(error, HalfstepError):
        print_error(error.message, error.hint, code=error.code, json=json)
    else:
        message = f"{error.strerror or error}" + (f": `{error.filename}`" if error.filename else "")
        print_error(message, code="system", json=json)


def print_error(message: str, hint: str | None = None, *, code: str = "halfstep", json: bool = False) -> None:
    """Prints what is wrong, and what to do next; with `json` also on stdout, for programs."""
    print_words(f"error: {message}", *(("", f"hint: {hint}") if hint else ()))
    if json:
        with suppress(OSError):  # stdout refuses output, which may be the error
            print_json({"code": code, "message": message, "hint": hint})
