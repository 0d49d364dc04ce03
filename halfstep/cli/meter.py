"""How far a command is that goes through bytes, on stderr: a bar on a terminal, plain lines everywhere else.

    packing  120.5 MiB of 1.2 GiB  9.7%  31,204,112 tokens  410,000 tokens/s  0:04:31 left

The speed and the time left are of this run: what an earlier one did is shown as done, and not as fast.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from halfstep.training.telemetry.progress import in_bytes

SECONDS_BETWEEN_LINES = 5.0
Told = Callable[[int, int, int], None]


@contextmanager
def meter(
    word: str, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Told]:
    """A function to call with bytes done, bytes in all, and tokens so far (0 where there are none)."""
    stream = sys.stderr if stream is None else stream
    reckon = _Reckoning(clock)
    # A dumb terminal (as inside an editor) cannot redraw a line.
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(word, stream, reckon) as told:
            yield told
        return
    last: list[float] = []

    def line(done: int, total: int, tokens: int) -> None:
        text = reckon.text(done, total, tokens)
        if not last or clock() - last[-1] >= SECONDS_BETWEEN_LINES or done >= total:
            last[:] = [clock()]
            print(f"{word}  {in_bytes(done)} of {in_bytes(total)}  {text}".rstrip(), file=stream, flush=True)

    yield line


class _Reckoning:
    """Speed and time left, from the first call on."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._first: tuple[float, int, int] | None = None

    def text(self, done: int, total: int, tokens: int) -> str:
        """What there is to say beside the bytes."""
        now = self._clock()
        began, first, already = self._first = self._first or (now, done, tokens)
        took = now - began
        parts = [f"{100 * done / max(1, total):.1f}%", f"{tokens:,} tokens" if tokens else ""]
        if took > 0 and tokens > already:
            parts.append(f"{(tokens - already) / took:,.0f} tokens/s")
        if took > 0 and first < done < total:
            parts.append(f"{timedelta(seconds=round(took / (done - first) * (total - done)))} left")
        return "  ".join(part for part in parts if part)


@contextmanager
def _bar(word: str, stream: TextIO, reckon: _Reckoning) -> Iterator[Told]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(
        TextColumn(word, markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream),
        redirect_stdout=False,  # stdout is for data; it never moves to stderr
        redirect_stderr=False,
        refresh_per_second=4,
        expand=True,
    )
    task = bar.add_task("", total=None)
    with bar:
        yield lambda done, total, tokens: bar.update(
            task, completed=done, total=total, description=reckon.text(done, total, tokens)
        )
