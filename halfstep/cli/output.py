"""How results and errors look on a terminal and in a pipe."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch of the command line that is off unless named."""


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


def print_error(message: str, hint: str | None = None) -> None:
    """An error as every command shows it: what is wrong, and what to do next."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
