"""How results and errors look on a terminal and in a pipe, and what becomes of words that nobody takes."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

from cyclopts import Parameter

from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.training.telemetry.progress import lossy

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch of the command line that is off unless named."""


def check_named(name: str, *given: str) -> None:
    """Refuses an empty text where something must be named: it is a shell's variable that is not set."""
    if "" in given:
        raise ConfigError(f"{name} is empty", hint="a variable that is not set? `.` is this folder")


def _named_path(_: Any, tokens: Sequence[Any]) -> Path:
    (token,) = tokens
    check_named(token.keyword or "a path", token.value)  # Path("") would be this folder
    return Path(token.value)


Place = Annotated[Path, Parameter(converter=_named_path)]
"""A path of the command line; an empty one is refused."""


@contextmanager
def losing_words(*, data: bool) -> Iterator[None]:
    """Loses what stderr does not take while the block runs, and goes on; with `data`, what stdout does not too."""
    before = sys.stdout, sys.stderr
    sys.stderr = lossy(sys.stderr)
    sys.stdout = lossy(sys.stdout) if data else sys.stdout
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        _give_up(before[1])
        if data:
            _give_up(before[0])


def _give_up(stream: TextIO | None) -> None:
    """Writes what a stream still holds, or has it lost: at its exit, Python would make an error of it."""
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        leave(stream)


def leave(stream: TextIO) -> None:
    """Sends all that is written to a stream from now on, and what it still holds, nowhere."""
    with suppress(OSError):  # one that Python made itself has no descriptor
        number = stream.fileno()
        found = os.open(os.devnull, os.O_WRONLY)
        os.dup2(found, number)
        os.close(found)


def print_json(data: Any) -> None:
    """Data for programs, on stdout."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """Data for programs, as JSON."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: Any) -> Any:
    """The data with null in place of NaN and infinities, which JSON does not know."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table for people, on stdout; the columns named in `right` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a glob's brackets are no markup
    # In a pipe there is no width to fit: a wide table keeps one line a row, which is what grep wants.
    console = Console()
    Console(width=None if console.is_terminal else max(console.width, 200)).print(table)


def print_words(text: str) -> None:
    """Words for people, on stderr."""
    print(text, file=sys.stderr)


def print_failure(error: HalfstepError | OSError) -> None:
    """An error of ours, or of the system."""
    if isinstance(error, HalfstepError):
        print_error(error.message, error.hint)
    else:
        print_error(f"{error.strerror or error}" + (f": `{error.filename}`" if error.filename else ""))


def print_error(message: str, hint: str | None = None) -> None:
    """An error as every command shows it: what is wrong, and what to do next."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
