"""The processes that mlx.launch has started for one `halfstep train`, and how they talk (training/job.py).

A ring has no store beside it, so nobody can read what a rank does that does not arrive: each process times its own
waits (ranks.py), and says what it was doing itself.
"""

import faulthandler
import os
import sys

import mlx.core as mx

from halfstep.core.errors import RankError
from halfstep.mlx.measure import devices
from halfstep.mlx.parallel.ranks import TIMEOUT, Ranks, is_launched

CONNECTED = TIMEOUT  # seconds until all processes have started
_ranks_of_job: list[Ranks] = []  # the processes that sessions of this one train with


class Host:
    """This process among those of its job."""

    backend, launcher, has_notes = "mlx", "mlx.launch", False

    def __init__(self) -> None:
        self._ranks = Ranks(_wait_for_all_ranks())
        self.rank, self.ranks = self._ranks.rank, self._ranks.size

    def connect(self, device: str | None, timeout: float) -> str:
        """Makes sessions train with the other processes; returns the device of this one."""
        self._ranks.timeout = timeout
        _ranks_of_job.append(self._ranks)
        return device or devices()[0]

    def broadcast(self, text: str | None) -> str:
        """Returns what rank 0 passes."""
        return str(self._ranks.exchange("what rank 0 decides", text)[0])

    def gather(self, text: str) -> list[str]:
        """Returns the text of each rank."""
        return self._ranks.exchange("what each rank reports", text)

    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the numbers of each rank."""
        return [tuple(row) for row in self._ranks.exchange("numbers of each rank", numbers)]

    def note(self, key: str, text: str) -> None:
        """Keeps what this rank does, for its own report."""
        if key == "at":
            self._ranks.doing = text

    def notes(self, key: str) -> list[str | None]:
        """Returns None for each rank: none can read what another one noted."""
        return [None] * self.ranks

    def claim(self, key: str) -> bool:
        """Whether this rank is the first to ask, for all it knows."""
        return True

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error still needs to be explained: a lost process already is."""
        return False

    def close(self) -> None:
        """Makes sessions train alone."""
        _ranks_of_job.clear()


def open_host() -> Host | None:
    """Returns the host of this process; None if nobody has started others."""
    return Host() if is_launched() else None


def ranks_of_job() -> Ranks | None:
    """Returns the processes that sessions train with; None if this one is alone."""
    return _ranks_of_job[-1] if _ranks_of_job else None


def _wait_for_all_ranks() -> mx.distributed.Group:
    """Connects the processes that mlx.launch has started. MLX stops all threads meanwhile, but not this timer."""
    faulthandler.dump_traceback_later(CONNECTED, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        return mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise RankError(
            f"rank {os.environ['MLX_RANK']} of mlx.launch cannot reach the others: {error}",
            hint="the addresses in its hostfile must be reachable, and their ports free (--starting-port)",
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
