"""The processes of one run, and what they tell each other on the host.

A job is this process alone, or several that torchrun (mlx.launch) has started, each with a rank. All ranks run the
same loop and take the same decisions, because they decide on numbers that they have agreed on:

    tell        rank 0 decides, and the others follow: the folder, what `auto` chose, a rollback
    exchange    a few numbers of each rank before each step and each held-out batch: was a signal received, are the
                tokens there, how much memory is held
    gather      texts of each rank, where something went wrong

None of this touches a device. Rank 0 owns the folder, the events, the page and the terminal. A rank that does not
arrive ends the run after `parallel.timeout`, by a thread that each rank has (watchdog.py).
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import halfstep
from halfstep.config.run import RunConfig
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.training.files import os_errors
from halfstep.training.session import backend_module
from halfstep.training.telemetry.watchdog import Watchdog

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells the processes it starts
SEEN_WITHIN = 10.0  # seconds until a file that one machine wrote shows on another
SPOKEN_WITHIN = 2.0  # seconds in which rank 0 reports an error that others have too


class JobError(HalfstepError):
    """Processes that are not the same run, or lost each other."""


class Host(Protocol):
    """How processes talk to each other; halfstep.torch.parallel.job and halfstep.mlx.parallel.job have it."""

    backend: str
    launcher: str
    has_notes: bool  # whether ranks can read each other's notes
    rank: int
    ranks: int

    def connect(self, device: str | None, timeout: float) -> str: ...  # noqa: D102

    def tell(self, text: str | None) -> str: ...  # noqa: D102

    def gather(self, text: str) -> list[str]: ...  # noqa: D102

    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]: ...  # noqa: D102

    def note(self, key: str, text: str) -> None: ...  # noqa: D102

    def notes(self, key: str) -> list[str | None]: ...  # noqa: D102

    def claim(self, key: str) -> bool: ...  # noqa: D102

    def has_lost(self, error: BaseException) -> bool: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Job:
    """The processes of a run; without a host, this process alone, which agrees with itself."""

    def __init__(self, host: Host | None = None):
        self.host = host
        self._watchdog: Watchdog | None = None
        self._device: str | None = None
        self.is_sharded = False  # whether each process has a part of the state

    @property
    def rank(self) -> int:
        """The number of this process."""
        return 0 if self.host is None else self.host.rank

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return 1 if self.host is None else self.host.ranks

    @property
    def share(self) -> tuple[int, ...]:
        """What `Batches.at` takes to read this rank's share of an update: nothing if it reads all."""
        return () if self.ranks == 1 else (self.rank, self.ranks)

    @property
    def owner(self) -> bool:
        """Whether this process owns the folder, the events and the terminal."""
        return self.rank == 0

    def connect(self, config: RunConfig, device: str | None) -> str | None:
        """Connects the devices of all processes; returns the device of this one. Idempotent."""
        if self._device is not None:
            return self._device
        if self.host is None and config.parallel.shard != "none":
            self.host = backend_module("torch", "parallel.job").Host()
        if self.host is None:
            return device
        if config.backend != self.host.backend:
            started = self.host.launcher
            raise ConfigError(
                f"{started} has started {self.ranks} processes, which share a run on backend {self.host.backend}, "
                f"and this one is on {config.backend}",
                hint=f"use --backend {self.host.backend}, or start `halfstep train` without {started}",
            )
        self._device = self.host.connect(device, config.parallel.timeout)
        self.is_sharded = self.ranks > 1 and config.parallel.shard != "none"
        if self.ranks > 1 and self.host.has_notes:
            self._watchdog = Watchdog(self.host, config.parallel.timeout)
        return self._device

    def tell(self, value: Any = None) -> Any:
        """Returns what rank 0 passes, on every rank."""
        if self.host is None or self.ranks == 1:
            return value
        return json.loads(self.host.tell(json.dumps(value) if self.owner else None))

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns what each rank passes, by rank; `what` is being done."""
        if self.host is None or self.ranks == 1:
            return [value]
        self.doing(what)
        return [json.loads(text) for text in self.host.gather(json.dumps(value))]

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        """Returns the numbers of each rank, by rank."""
        return [numbers] if self.host is None or self.ranks == 1 else self.host.exchange(numbers)

    def doing(self, what: str, *, timed: bool = True) -> None:
        """Notes what this rank does now, for others to read if it hangs; unless `timed`, it may take any time."""
        if self._watchdog is not None:
            self._watchdog.note(what, timed=timed)
        elif self.host is not None and self.ranks > 1:
            self.host.note("at", what)

    def check_same(self, facts: Mapping[str, Any], hint: str) -> None:
        """Refuses ranks of which one differs from rank 0."""
        first, *others = self.gather(dict(facts), "comparing itself with the other ranks")
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise JobError(
                        f"rank {rank} is not the same run as rank 0: {name} is {other.get(name)!r} there, and "
                        f"{first.get(name)!r} on rank 0",
                        hint=hint,
                    )

    def check_folder(self, out: Path) -> None:
        """Refuses a folder that some ranks do not see."""
        if self.ranks == 1:
            return
        token = self.tell(secrets.token_hex(8) if self.owner else None)
        path = out / f"job-{token}"
        if self.owner:
            with os_errors(ConfigError, f"`{out}` cannot be written", "name another folder with --out"):
                path.touch()
        self.gather(None, f"waiting for a file in `{out}`")  # it is there now
        seen = self.gather(self.owner or _appears(path), f"looking into `{out}`")
        if self.owner:
            with suppress(OSError):
                path.unlink()
        if not all(seen):
            raise JobError(
                f"rank {seen.index(False)} does not see the run folder `{out}` that rank 0 writes to",
                hint="name a folder with --out that every machine has mounted, by its full path",
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, a broken connection becomes the error of the rank that broke it."""
        try:
            yield
        except HalfstepError:
            raise
        except Exception as error:
            if self.host is None or self.ranks == 1 or not self.host.has_lost(error):
                raise
            raise self._lost() from error

    def _lost(self) -> JobError:
        assert self.host is not None
        found = _poll(lambda: next(self._failures(), None), SPOKEN_WITHIN / 2)
        if found is not None:
            rank, (message, hint) = found
            return JobError(f"rank {rank}: {message}", hint=hint)
        return JobError(
            "the connection to another rank broke: it has ended, or its machine has",
            hint="what it printed, or torchrun's report, says why; --resume continues from the last checkpoint",
        )

    def _failures(self) -> Iterator[tuple[int, tuple[str, str | None]]]:
        assert self.host is not None
        for rank, text in enumerate(self.host.notes("failed")):
            if text is not None and rank != self.rank:
                yield rank, json.loads(text)

    def spoken(self, error: HalfstepError | OSError) -> HalfstepError | OSError | None:
        """Returns an error as this rank reports it; None if rank 0 reports the same."""
        if self.host is None or self.ranks == 1:
            return error
        given = error if isinstance(error, HalfstepError) else HalfstepError(str(error))
        with suppress(Exception):  # the store may have ended with rank 0
            self.host.note("failed", json.dumps([given.message, given.hint]))
            if self.owner or _poll(lambda: self._said_by_rank_0(given.message), SPOKEN_WITHIN):
                return error if self.owner else None
        return given.within(f"rank {self.rank}")

    def _said_by_rank_0(self, message: str) -> bool:
        said = dict(self._failures()).get(0)
        return said is not None and (message in said[0] or said[0] in message)

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
        raise ConfigError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, and {missing[0]} is not: this looks "
            "like one process of a job",
            hint="start it with torchrun, which sets them all; or unset them to train in this process alone",
        )
    host: Host = backend_module("torch", "parallel.job").Host()
    return Job(host)


@cache
def code_digest() -> str:
    """Returns the SHA-256 of halfstep's own source files."""
    root, digest = Path(halfstep.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _appears(path: Path) -> bool:
    return bool(_poll(path.exists, SEEN_WITHIN))


def _poll(ask: Any, seconds: float) -> Any:
    """Asks until the answer is true, or for so many seconds; returns the last answer."""
    over = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < over:
        time.sleep(0.05)
    return answer
