"""The processes that mlx.launch has started for one `halfstep train`, and how they talk (training/job.py).

A ring has no store beside it, so nobody can read what a rank does that does not arrive: each process times its own
waits (ranks.py), and says what it was doing itself.
"""

import faulthandler
import os
import sys

import mlx.core as mx

from halfstep.config import session
from halfstep.core.errors import RankError
from halfstep.mlx.measure import devices
from halfstep.mlx.parallel.ranks import TIMEOUT, Ranks, is_launched

CONNECTED = TIMEOUT  # seconds until all processes have started
_ranks_of_job: list[Ranks] = []  # the processes that sessions of this one train with


class Host(session.Host):
    """This process among those of its job. A lost one needs no explanation: the error of a wait is one."""

    backend, launcher = "mlx", "mlx.launch"

    def __init__(self) -> None:
        self._ranks = Ranks(_wait_for_all_ranks())
        self.rank, self.ranks = self._ranks.rank, self._ranks.size

    def connect(self, device: str | None, timeout: float) -> str:
        self._ranks.timeout = timeout
        _ranks_of_job.append(self._ranks)
        return device or devices()[0]

    def broadcast(self, text: str | None) -> str:
        return str(self._ranks.exchange("what rank 0 decides", text)[0])

    def gather(self, text: str) -> list[str]:
        return self._ranks.exchange("what each rank reports", text)

    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tuple(row) for row in self._ranks.exchange("numbers of each rank", numbers)]

    def note(self, key: str, text: str) -> None:
        if key == "at":  # what this rank does, for its own report
            self._ranks.doing = text

    def close(self) -> None:
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
