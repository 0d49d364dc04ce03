"""Progress on stderr: a live bar on a terminal, plain lines everywhere else.

    step 120/1000  loss 3.214  2 skipped  scale 65536  0:01:20 left  45,120 tokens/s  1.2 GiB
    packing  120.5 MiB of 1.2 GiB  9.7%  31,204,112 tokens  410,000 tokens/s  0:04:31 left

A plain line is printed for the first update and the last, every 2.5 seconds, and for every tenth of the steps.
Speed and time left count from the first update on: neither compiling nor what an earlier session did counts. A
full disk, a closed terminal or a pipe without a reader loses lines; nothing stops for them (`drop_refusals`).
"""

import math
import mmap
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TextIO

from halfstep.core.errors import as_message
from halfstep.core.host import format_bytes

Clock = Callable[[], float]

SECONDS_BETWEEN_LINES = 2.5
NARROWEST_BAR = 6  # columns, with the spaces around it
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # a path stays whole
FOREVER = 1e9  # seconds, thirty years: not worth showing
# Since when nothing was said, and how many seconds of silence say nothing new; forked processes share it.
SILENCE = memoryview(mmap.mmap(-1, 16)).cast("d")


class Progress:
    """Shows how much of a whole is done; of an infinite one, that is not known. A context manager."""

    tenths = 0  # how many lines a fast run prints in any case

    def __init__(
        self, total: float, start: int = 0, stream: TextIO | None = None, *, clock: Clock = time.monotonic
    ):
        self.total, self.clock = total, clock
        self._stream = drop_refusals(sys.stderr if stream is None else stream)
        self._first: tuple[float, int] | None = None  # the first update: when, and how much was done
        self._last_line = -math.inf  # when it was printed
        self._updated = math.inf  # compiling counts for no update
        self._last_tenth = 0.0
        # A dumb terminal (such as one inside an editor) cannot redraw a line.
        self.is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if self.is_live:
            self._bar = _rich_bar(self._stream)
            known = total if total < math.inf else None
            self._task = self._bar.add_task("", total=known, completed=start, label=self._label(start))

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        text = wrap_line(as_message(text), self._stream)
        if self.is_live:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def _label(self, done: int) -> str:
        """Returns how much is done, in the unit that is counted."""
        raise NotImplementedError

    def _seconds(self, done: int) -> float:
        now = self.clock()
        self._first = self._first or (now, done)
        return now - self._first[0]

    def _time_left(self, done: int) -> str:
        assert self._first is not None
        began, first = self._first
        if not first < done < self.total:
            return ""
        left = (self.clock() - began) / (done - first) * (self.total - done)
        return f"{timedelta(seconds=round(left))} left" if left < FOREVER else ""

    def _show(self, done: int, parts: Iterable[str]) -> None:
        shown, label = list(filter(None, parts)), self._label(done)
        now = self.clock()
        expect_silence(2 * (now - self._updated))
        self._updated = now
        if self.is_live:
            # The last ones are left out where the terminal is too narrow for them and a bar.
            room = terminal_width(self._stream) - len(label) - NARROWEST_BAR
            while len(shown) > 1 and len("  ".join(shown)) > room:
                shown.pop()
            total = self.total if self.total < math.inf else None
            numbers = {"completed": done, "total": total, "label": label, "refresh": done >= self.total}
            self._bar.update(self._task, description="  ".join(shown), **numbers)
            return
        tenth = self.tenths * done // max(1, self.total)
        is_late = now - self._last_line >= SECONDS_BETWEEN_LINES
        if is_late or tenth > self._last_tenth or done >= self.total:
            self._last_line, self._last_tenth = now, tenth
            self.note(f"{label}  {'  '.join(shown)}".rstrip())

    def __enter__(self) -> Self:
        if self.is_live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        expect_silence(0.0)
        if self.is_live:
            self._bar.stop()


class StepProgress(Progress):
    """The progress of a run of `total` updates, `start` of them already done."""

    tenths = 10

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        memory: float | None = None,
        scale: float | None = None,
        skipped: int = 0,
    ) -> None:
        """Shows that `step` updates are done. None is a number that is unknown."""
        self._seconds(step)
        self._show(
            step,
            (
                f"loss {loss:.4g}" if loss is not None else "",
                f"{skipped} skipped" if skipped > 0 else "",
                f"scale {scale:g}" if scale is not None and scale != 1 else "",
                self._time_left(step),
                f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else "",
                format_bytes(memory) if memory is not None else "",
            ),
        )

    def _label(self, done: int) -> str:
        return f"step {done}/{self.total}"


class RunsProgress(Progress):
    """The progress of several runs, in the steps of all of them; `doing` names the one that trains."""

    tenths = 10

    def update(self, done: int, doing: str) -> None:
        """Shows that `done` steps are done."""
        self._seconds(done)
        self._show(done, (doing, self._time_left(done)))

    def _label(self, done: int) -> str:
        return f"{done:,} of {self.total:,} steps"


class BytesProgress(Progress):
    """The progress of a command that reads bytes; call it with bytes done, bytes in all, and tokens so far."""

    def __init__(self, word: str, stream: TextIO | None = None, *, clock: Clock = time.monotonic):
        self._word, self._tokens_before = word, 0
        super().__init__(0, stream=stream, clock=clock)

    def __call__(self, done: int, total: int, tokens: int = 0) -> None:
        """Shows how far it is; 0 tokens are not shown."""
        self.total = total
        if self._first is None:
            self._tokens_before = tokens
        took, new = self._seconds(done), tokens - self._tokens_before
        speed = f"{new / took:,.0f} tokens/s" if took > 0 and new > 0 else ""
        share = f"{100 * done / max(1, total):.1f}%"
        self._show(done, (share, f"{tokens:,} tokens" if tokens else "", speed, self._time_left(done)))

    def _label(self, done: int) -> str:
        return f"{self._word}  {format_bytes(done)} of {format_bytes(self.total)}"


def _rich_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.fields[label]}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream),
        refresh_per_second=4,
        redirect_stdout=False,  # stdout is for data; it never moves to stderr
        redirect_stderr=False,  # the stream may be stderr itself
        expand=True,
    )


def wrap_line(text: str, stream: TextIO) -> str:
    """Wraps a line between words to the width of a terminal; for a file or a pipe it stays unchanged."""
    return "\n".join(textwrap.wrap(text, terminal_width(stream), **_WHOLE_WORDS)) if stream.isatty() else text


def terminal_width(stream: TextIO) -> int:
    """Returns the width of a terminal in columns: 80 where it has no size, as in some containers."""
    with suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns) or 80
    return 80


def drop_refusals(stream: TextIO | None) -> Any:
    """Returns a stream that drops what the given one refuses, and never raises; None drops everything."""
    return stream if isinstance(stream, _Lossy) else _Lossy(stream)


def expect_silence(seconds: float) -> None:
    """Counts as said, without a word; then silence of so many seconds is nothing new."""
    SILENCE[0], SILENCE[1] = time.monotonic(), seconds


_REFUSALS = (OSError, ValueError)  # ValueError: the stream is closed, or its encoding lacks a letter


class _Lossy:
    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            SILENCE[0] = time.monotonic()
            with suppress(*_REFUSALS):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with suppress(*_REFUSALS):
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no stream, and no descriptor of it")
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
