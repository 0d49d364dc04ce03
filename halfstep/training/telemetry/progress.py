"""How far a run is, on stderr: a live bar on a terminal, plain lines everywhere else.

    step 120/1000  loss 3.214  45,120 tokens/s  0:01:20 left  1.2 GiB  scale 65536  2 skipped

A plain line is written for the first step and the last, whenever 5 seconds have passed since the last line,
and whenever a tenth of the steps is done: a log of a short run shows its course, and that of a long one is
not flooded. The scale is shown when it is not 1 and skipped steps when there are some: they are news.

Numbers given here are host numbers; reading them from a device is the caller's decision. The time left is
reckoned from the first update on, so that compiling, which the first one waits for, does not enter.

A log on a disk that is full refuses lines, and so does a terminal that went away, or a pipe that nobody reads:
they are left out, and training goes on (`lossy`).
"""

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, cast, final

if TYPE_CHECKING:
    from rich.progress import TaskID

Clock = Callable[[], float]

SECONDS_BETWEEN_LINES = 5.0
LINES_BY_STEPS = 10
FOREVER = 1e9  # seconds, thirty years: nobody waits for it


class Progress(ABC):
    """What is shown while a run goes on. A context manager; `progress` chooses the kind."""

    def __init__(self, total: int, stream: TextIO, clock: Clock):
        self.total, self.stream, self.clock = total, stream, clock
        self._first: tuple[int, float] | None = None  # the first update seen: its step, and when

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
        """Shows that `step` updates are done. None is a number that is not known."""
        now = self.clock()
        self._first = self._first or (step, now)
        parts = [
            f"loss {loss:.4g}" if loss is not None else "",
            f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else "",
            self._time_left(step, now),
            in_bytes(memory) if memory is not None else "",
            f"scale {scale:g}" if scale is not None and scale != 1 else "",
            f"{skipped} skipped" if skipped > 0 else "",
        ]
        self._show(step, now, "  ".join(part for part in parts if part))

    @abstractmethod
    def note(self, text: str) -> None:
        """Says something between the steps."""

    @abstractmethod
    def _show(self, step: int, now: float, text: str) -> None:
        """Shows a step and its numbers, or not."""

    @abstractmethod
    def __enter__(self) -> "Progress": ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    def _time_left(self, step: int, now: float) -> str:
        assert self._first is not None
        first, then = self._first
        if step <= first or step >= self.total:
            return ""
        left = (now - then) / (step - first) * (self.total - step)
        return f"{timedelta(seconds=round(left))} left" if left < FOREVER else ""


@final
class PlainProgress(Progress):
    """Lines, for logs and pipes."""

    def __init__(self, total: int, start: int, stream: TextIO, clock: Clock):
        super().__init__(total, stream, clock)
        self._last_line: float | None = None
        self._last_tenth = 0

    def note(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self.stream, flush=True)

    def _show(self, step: int, now: float, text: str) -> None:
        tenth = self._tenth(step)
        due = (
            self._last_line is None
            or now - self._last_line >= SECONDS_BETWEEN_LINES
            or tenth > self._last_tenth
            or step >= self.total
        )
        if due:
            self._last_line, self._last_tenth = now, tenth
            self.note(f"step {step}/{self.total}  {text}".rstrip())

    def _tenth(self, step: int) -> int:
        return step * LINES_BY_STEPS // max(1, self.total)

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@final
class LiveProgress(Progress):
    """A bar that is redrawn in place, for people at a terminal."""

    def __init__(self, total: int, start: int, stream: TextIO, clock: Clock):
        super().__init__(total, stream, clock)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
            refresh_per_second=4,
            redirect_stdout=False,  # stdout is for data; it never moves to stderr
            redirect_stderr=False,  # the stream may be stderr itself
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=total, completed=start)

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, step: int, now: float, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text, refresh=step >= self.total)

    def __enter__(self) -> "LiveProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def progress(
    total: int, start: int = 0, stream: TextIO | None = None, *, clock: Clock = time.monotonic
) -> Progress:
    """The progress of a run of `total` updates, `start` of them already done, on stderr or `stream`."""
    stream = lossy(sys.stderr if stream is None else stream)
    # A dumb terminal (as inside an editor) cannot redraw a line.
    kind = LiveProgress if stream.isatty() and os.environ.get("TERM") != "dumb" else PlainProgress
    return kind(total, start, stream, clock)


def lossy(stream: TextIO | None) -> TextIO:
    """A stream that loses what the given one does not take, and raises nothing; all is lost where that is None."""
    return cast(TextIO, stream if isinstance(stream, _Lossy) else _Lossy(stream))


_REFUSALS = (OSError, ValueError)  # ValueError: the stream is closed, or its encoding lacks a letter


@final
class _Lossy:
    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(*_REFUSALS):
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

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


def in_bytes(number: float) -> str:
    """A number of bytes in the unit that suits it: `1.2 GiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log2(number) // 10), len(units) - 1) if number >= 1 else 0
    return f"{number:.0f} bytes" if power == 0 else f"{number / 1024**power:.1f} {units[power]}"
