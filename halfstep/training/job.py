"""The processes of one run, and what they tell each other on the host.

A job is this process alone, or several that torchrun (mlx.launch) has started, each with a rank. All ranks run the
same loop and take the same decisions, because they decide on numbers that they have agreed on:

    broadcast   rank 0 decides, and the others follow: the folder, what `auto` chose, a rollback
    exchange    a few numbers of each rank before each step and each held-out batch: was a signal received, are the
                tokens there, how much memory is held
    gather      texts of each rank, where something went wrong

None of this touches a device. Rank 0 owns the folder, the events, the page and the terminal.

A rank that does not arrive ends the run after `parallel.timeout`, by a thread of each rank (`Watchdog`): the main
thread of a rank that waits for others is inside a collective and hears nothing. So each rank notes what it does
(`step 12`, `reading its data for step 12`), and this thread publishes it, with a count that grows while the
process lives. If a rank is at one thing for longer than the time-out, its thread reads the notes of all:

    silent     its count stands still: the process is stopped, or its machine is gone
    behind     it has noted fewer things than others: they wait for it
    neither    all are in the same step: the line that each one's code is at tells them apart

The first thread to find out reports, and all processes end: torchrun starts them again if it may.
"""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.config.run import RunConfig
from halfstep.config.session import Host
from halfstep.core.errors import HalfstepError, RankError, RunFolderError, SettingConflictError, as_message
from halfstep.training.files import os_errors
from halfstep.training.session import backend_module

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells the processes it starts
SEEN_WITHIN = 10.0  # seconds within which a file that one machine wrote must appear on another
REPORTED_WITHIN = 2.0  # seconds in which rank 0 reports an error that others have too
CODE = 1  # of a process that ends because a rank hangs
SLOWEST = 5.0  # seconds between two notes at most


class Job:
    """The processes of a run; without a host, this process alone, which agrees with itself."""

    def __init__(self, host: Host | None = None):
        self.is_sharded = False  # whether each process has a part of the state
        self._watchdog: Watchdog | None = None
        self._device: str | None = None
        self._join(host)

    def _join(self, host: Host | None) -> None:
        self.host = host
        self.rank, self.ranks = (0, 1) if host is None else (host.rank, host.ranks)
        self.owner = self.rank == 0  # of the folder, the events and the terminal
        # What `Batches.at` takes to read this rank's share of an update: nothing if it reads all.
        self.share: tuple[int, ...] = () if self.ranks == 1 else (self.rank, self.ranks)

    def connect(self, config: RunConfig, device: str | None) -> str | None:
        """Connects the devices of all processes; returns the device of this one. Idempotent."""
        if self._device is not None:
            return self._device
        if self.host is None and config.parallel.shard != "none":
            self._join(backend_module("torch", "parallel.job").Host())
        if self.host is None:
            return device
        if config.backend != self.host.backend:
            started = self.host.launcher
            raise SettingConflictError(
                f"{started} has started {self.ranks} processes, which share a run on backend {self.host.backend}, "
                f"and this one is on {config.backend}",
                hint=f"use --backend {self.host.backend}, or start `halfstep train` without {started}",
            )
        self._device = self.host.connect(device, config.parallel.timeout)
        self.is_sharded = self.ranks > 1 and config.parallel.shard != "none"
        if self.ranks > 1 and self.host.has_notes:
            self._watchdog = Watchdog(self.host, config.parallel.timeout)
        return self._device

    def broadcast(self, value: Any = None) -> Any:
        """Returns what rank 0 passes, on every rank."""
        if self.host is None or self.ranks == 1:
            return value
        return json.loads(self.host.broadcast(json.dumps(value) if self.owner else None))

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns what each rank passes, by rank; `what` describes the activity to other ranks."""
        if self.host is None or self.ranks == 1:
            return [value]
        self.set_activity(what)
        return [json.loads(text) for text in self.host.gather(json.dumps(value))]

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        """Returns the numbers of each rank, by rank."""
        return [numbers] if self.host is None or self.ranks == 1 else self.host.exchange(numbers)

    def set_activity(self, what: str, *, timed: bool = True) -> None:
        """Publishes what this rank does, for others to read if it hangs. What is not `timed` may take any time."""
        if self._watchdog is not None:
            self._watchdog.note(what, timed=timed)
        elif self.host is not None and self.ranks > 1:
            self.host.note("at", what)

    def check_same(self, facts: Mapping[str, Any], hint: str) -> None:
        """Refuses to continue if a rank differs from rank 0 in one of the facts."""
        first, *others = self.gather(dict(facts), "comparing itself with the other ranks")
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise RankError(
                        f"rank {rank} is not the same run as rank 0: {name} is {other.get(name)!r} there, and "
                        f"{first.get(name)!r} on rank 0",
                        hint=hint,
                    )

    def check_folder(self, out: Path) -> None:
        """Refuses a folder that some ranks do not see."""
        if self.ranks == 1:
            return
        token = self.broadcast(secrets.token_hex(8) if self.owner else None)
        path = out / f"job-{token}"
        if self.owner:
            with os_errors(RunFolderError, f"`{out}` cannot be written", "name another folder with --out"):
                path.touch()
        self.gather(None, f"waiting for a file in `{out}`")  # it is there now
        seen = self.gather(self.owner or bool(_poll(path.exists, SEEN_WITHIN)), f"looking into `{out}`")
        if self.owner:
            with suppress(OSError):
                path.unlink()
        if not all(seen):
            raise RankError(
                f"rank {seen.index(False)} does not see the run folder `{out}` that rank 0 writes to",
                hint="name a folder with --out that every machine has mounted, by its full path",
            )

    @contextmanager
    def explain_lost_ranks(self) -> Iterator[None]:
        """Turns a broken connection in the block into the error of the rank that broke it."""
        try:
            yield
        except HalfstepError:
            raise
        except Exception as error:
            if self.host is None or self.ranks == 1 or not self.host.has_lost(error):
                raise
            raise self._lost_rank_error() from error

    def _lost_rank_error(self) -> RankError:
        assert self.host is not None
        if (found := _poll(lambda: next(self._failures(), None), REPORTED_WITHIN / 2)) is not None:
            rank, (message, hint) = found
            return RankError(f"rank {rank}: {message}", hint=hint)
        return RankError(
            "the connection to another rank broke: it has ended, or its machine has",
            hint="what it printed, or torchrun's report, says why; --resume continues from the last checkpoint",
        )

    def _failures(self) -> Iterator[tuple[int, tuple[str, str | None]]]:
        assert self.host is not None
        for rank, text in enumerate(self.host.notes("failed")):
            if text is not None and rank != self.rank:
                yield rank, json.loads(text)

    def error_to_report(self, error: HalfstepError | OSError) -> HalfstepError | OSError | None:
        """Returns an error as this rank reports it; None if rank 0 reports the same."""
        if self.host is None or self.ranks == 1:
            return error
        given = error if isinstance(error, HalfstepError) else HalfstepError(str(error))
        with suppress(Exception):  # the store may have ended with rank 0
            self.host.note("failed", json.dumps([given.message, given.hint]))
            if self.owner or _poll(lambda: self._rank_0_reports(given.message), REPORTED_WITHIN):
                return error if self.owner else None
        return given.within(f"rank {self.rank}")

    def _rank_0_reports(self, message: str) -> bool:
        reported, _ = dict(self._failures()).get(0, ("", None))
        return bool(reported) and (message in reported or reported in message)

    def close(self) -> None:
        """Ends the watch and leaves the group."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self.host is not None:
            self.host.close()
        self._device = None


def open_job() -> Job:
    """Returns the job that this process was started for."""
    if "MLX_RANK" in os.environ:
        return Job(backend_module("mlx", "parallel.job").open_host())
    given = [name for name in LAUNCHED if os.environ.get(name)]
    if "RANK" not in given and os.environ.get("WORLD_SIZE", "1") == "1":
        return Job()
    if missing := [name for name in LAUNCHED if name not in given]:
        raise SettingConflictError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, and {missing[0]} is not: this looks "
            "like one process of a job",
            hint="start it with torchrun, which sets them all; or unset them to train in this process alone",
        )
    host: Host = backend_module("torch", "parallel.job").Host()
    return Job(host)


def _poll(ask: Any, seconds: float) -> Any:
    """Calls `ask` until it returns something true, for `seconds` at most; returns its last answer."""
    over = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < over:
        time.sleep(0.05)
    return answer


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
        self.host.note("at", json.dumps(Row(self._beat, mark.number, mark.what, _current_line(), process)))

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


def _current_line() -> str:
    """Returns the line that the main thread is at."""
    if (frame := sys._current_frames().get(threading.main_thread().ident or 0)) is None:
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
