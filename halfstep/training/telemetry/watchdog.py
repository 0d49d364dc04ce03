"""A thread on each rank that ends the run if a rank does not arrive, and says which one and what it was doing.

The main thread of a rank that waits for others is inside a collective and hears nothing. So each rank notes what
it does (`step 12`, `reading its data for step 12`), and this thread publishes it, with a count that grows while
the process lives. If a rank is at one thing for longer than the time-out, its thread reads the notes of all:

    silent     its count stands still: the process is stopped, or its machine is gone
    behind     it has noted fewer things than others: they wait for it
    neither    all are in the same step: the line that each one's code is at tells them apart

The first thread to find out reports, and all processes end: torchrun starts them again if it may.
"""

import json
import os
import sys
import threading
import time
from typing import NamedTuple, Protocol

from halfstep.core.errors import as_message

CODE = 1  # of a process that ends because a rank hangs
SLOWEST = 5.0  # seconds between two notes at most


class Host(Protocol):
    """How processes talk to each other; halfstep.torch.parallel.job and halfstep.mlx.parallel.job have it."""

    backend: str
    launcher: str
    has_notes: bool  # whether ranks can read each other's notes
    rank: int
    ranks: int

    def connect(self, device: str | None, timeout: float) -> str: ...  # noqa: D102

    def broadcast(self, text: str | None) -> str: ...  # noqa: D102

    def gather(self, text: str) -> list[str]: ...  # noqa: D102

    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]: ...  # noqa: D102

    def note(self, key: str, text: str) -> None: ...  # noqa: D102

    def notes(self, key: str) -> list[str | None]: ...  # noqa: D102

    def claim(self, key: str) -> bool: ...  # noqa: D102

    def has_lost(self, error: BaseException) -> bool: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Mark(NamedTuple):
    """What a rank does, since when, and how many things it did before."""

    number: int
    what: str
    timed: bool
    since: float


class Row(NamedTuple):
    """What a rank has published."""

    beats: int
    number: int  # of the things it noted
    what: str  # the last of them
    line: str  # that its main thread is at
    process: str


UNHEARD = Row(0, 0, "starting", "", "no process yet")


class Watchdog:
    """Watches this rank, from its first note on."""

    def __init__(self, host: Host, timeout: float):
        self.host, self.timeout = host, timeout
        self.every = min(SLOWEST, timeout / 4)
        self._mark = Mark(0, "starting", False, time.monotonic())
        self._beat = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def note(self, what: str, *, timed: bool) -> None:
        """Notes what this rank does from now on."""
        self._mark = Mark(self._mark.number + 1, what, timed, time.monotonic())

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self.every):
            mark = self._mark
            try:
                self._publish(mark)
                if mark.timed and time.monotonic() - mark.since > self.timeout:
                    self._end(mark)
            except Exception as error:  # the store has ended with the process that holds it
                if mark.timed and time.monotonic() - mark.since > self.timeout:
                    self._exit(f"rank 0, or what started it, does not answer ({error})")

    def _publish(self, mark: Mark) -> None:
        self._beat += 1
        process = f"process {os.getpid()} on {os.uname().nodename}"
        self.host.note("at", json.dumps(Row(self._beat, mark.number, mark.what, _line(), process)))

    def _end(self, mark: Mark) -> None:
        """Ends the process if it still waits after the others have had time to publish what they do."""
        before = self._read()
        for _ in range(3):
            if self._closed.wait(self.every):
                return
            self._publish(mark)
        if self._mark is mark:
            self._exit(describe(self.host.rank, before, self._read(), self.timeout))

    def _read(self) -> list[Row]:
        return [UNHEARD if text is None else Row(*json.loads(text)) for text in self.host.notes("at")]

    def _exit(self, message: str) -> None:
        first = True
        try:
            first = self.host.claim("alarm")
        finally:
            if first:
                hint = "`py-spy dump --pid` shows where a process hangs; parallel.timeout is how long others wait"
                sys.stderr.write(f"error: {as_message(message)}\n\nhint: {hint}\n")
                sys.stderr.flush()
            time.sleep(max(1.0, self.every))  # others must see that it is reported, before they are ended
            os._exit(CODE)


def _line() -> str:
    """Returns the line that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _name_ranks(ranks: list[int], rows: list[Row]) -> str:
    """Names ranks that are at the same line, and the process if there is only one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({rows[ranks[0]].process}) is in {rows[ranks[0]].line}"
    return f"ranks {', '.join(map(str, ranks))} are in {rows[ranks[0]].line}"


def describe(rank: int, before: list[Row], now: list[Row], timeout: float) -> str:
    """Returns who hangs, as rank `rank` finds out, from what all ranks have published a while ago and now."""
    silent = [r for r, row in enumerate(now) if r != rank and row.beats == before[r].beats]
    furthest = max(row.number for row in now)
    late = silent or [r for r, row in enumerate(now) if row.number < furthest]
    if not late:
        lines = [row.line for row in now]
        odd = sorted(set(lines), key=lambda line: (lines.count(line), "distributed" in line))  # the fewest first
        rows = [_name_ranks([r for r, row in enumerate(now) if row.line == line], now) for line in odd]
        return f"no rank has got any further than `{now[rank].what}` for {timeout:g} s: {'; '.join(rows)}"
    state = "does not answer; the last it did was" if silent else "is still at"
    rows = [f"rank {r} ({now[r].process}) {state} `{now[r].what}`, in {now[r].line}" for r in late]
    ahead = next((r for r in range(len(now)) if r not in late), rank)
    return f"{'; '.join(rows)}: rank {ahead} has waited for {timeout:g} s at `{now[ahead].what}`"
