"""Writes checkpoints in a thread, while training continues.

    training thread     wait for the writer | snapshot |  step  step  step ...
    writer                                  | bytes arrive, safetensors, digest, fsync, rename, prune |

A save costs the step no more than a snapshot: on a GPU the launch of copies into pinned memory, in stream order;
on a CPU a copy of the tensors. Writing, hashing and flushing release the interpreter's lock.

If a save is due while the one before is still being written, training waits for it: leaving it out would make a
run's checkpoints depend on the speed of a disk. A save that fails (a full disk) leaves earlier checkpoints whole;
it is reported, training continues, and the next save tries again. Only an unexpected error stops the run.

Ranks that share the state each have a saver and call it at the same steps; a save is complete, or has failed, for
all of them (parts.py). Rank 0 alone removes old checkpoints.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Snapshot
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.parts import save_part
from halfstep.training.checkpoints.retention import Retention, prune
from halfstep.training.checkpoints.tensors import CheckpointError


@dataclass(frozen=True)
class Saved:
    """How a save went. `path` is None if it failed, and `trouble` is why, or what failed after it."""

    step: int
    path: Path | None
    bytes: int
    seconds: float  # from when it was due until it was complete
    waited: float  # of these, how long training stood still
    trouble: HalfstepError | None = None


class Saver:
    """Writes the checkpoints of a run, one at a time. Every method is called by the training thread.

    Of several ranks that share the state, each has its number, and all have one `token`, which no other job has.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        saved_step: int | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        token: str = "",
    ):
        self.folder, self.retention = folder, retention
        self.rank, self.ranks, self.token = rank, ranks, token
        self._number = 0  # of the save: a step may be saved again after a failure
        self.saved_step = saved_step  # the newest that is complete
        self.waited = 0.0  # seconds in which training stood still, in all
        self.longest = 0.0  # seconds the longest save took
        self._thread: threading.Thread | None = None
        self._done: SimpleQueue[Saved | BaseException] = SimpleQueue()

    def save(
        self,
        step: int,
        take: Callable[[], Snapshot],
        meta: Mapping[str, Any],
        good: int | None = None,
        due: float | None = None,
    ) -> float:
        """Snapshots, and writes in a thread; returns the seconds that training waited since it was `due`."""
        started = time.perf_counter() if due is None else due
        self.wait()
        self._number += 1  # before what may fail on one rank: the next save has the same number on all
        read = take()
        waited = time.perf_counter() - started
        self.waited += waited
        self._thread = threading.Thread(
            target=self._write, args=(step, read, meta, good, started, waited), name="checkpoint", daemon=True
        )
        self._thread.start()
        return waited

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until nothing is being written, or for so many seconds; returns whether nothing is."""
        if self._thread is not None:
            self._thread.join(seconds if seconds is None else max(0.0, seconds))
        return not self.is_busy

    def poll(self) -> list[Saved]:
        """Returns the saves that ended since the last call. Raises unexpected errors."""
        ended = []
        while not self._done.empty():
            saved = self._done.get()
            if isinstance(saved, BaseException):
                raise saved
            if saved.path is not None:
                self.saved_step, self.longest = saved.step, max(self.longest, saved.seconds)
            ended.append(saved)
        return ended

    def _write(
        self, step: int, read: Snapshot, meta: Mapping[str, Any], good: int | None, started: float, waited: float
    ) -> None:
        path, size = None, 0
        trouble: HalfstepError | None = None
        try:
            if self.ranks == 1:
                arrays = read()
                size = sum(memoryview(data).nbytes for _, _, data in arrays.values())
                path = checkpoint.save(self.folder, step, arrays, meta)
            else:
                place, token = (self.folder, step), f"{self.token}-{self._number}"
                path = save_part(*place, read, meta, rank=self.rank, ranks=self.ranks, token=token)
            if self.ranks > 1 and self.rank == 0:
                size = sum(file["bytes"] for file in checkpoint.read_manifest(path)["files"].values())
            if self.rank == 0:
                prune(self.folder, self.retention, good)
        except HalfstepError as error:
            trouble = error
        except (OSError, MemoryError) as error:
            trouble = CheckpointError(f"the checkpoint of step {step}: {str(error) or 'no memory left'}")
        except BaseException as error:
            self._done.put(error)
            return
        self._done.put(Saved(step, path, size, time.perf_counter() - started, waited, trouble))
