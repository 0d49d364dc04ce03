"""Checkpoints written by a thread, while training goes on.

    training thread     wait for the writer | snapshot |  step  step  step ...
    writer                                  | bytes arrive, safetensors, digest, fsync, rename, prune |

A save costs the step what taking a snapshot costs: on a GPU the launch of copies into pinned memory, in the order
of the stream; on a CPU a copy of the tensors. Writing, hashing and flushing release the interpreter's lock.

**One at a time.** When a save is due and the one before is still being written, training waits for it, and the
time is counted as lost to saving. Leaving the save out would not wait, but then which checkpoints a run leaves
would hang on the speed of a disk; what was asked for (`training.save_every`) is done, and a warning says when it
is too often.

**A save that fails** (a full disk, a folder that became read-only) leaves the checkpoints before it whole. It is
told, training goes on, and the next one that is due is the next try. Only an error that is no HalfstepError, which
is a defect of ours, stops the run.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, final

from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Snapshot
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.arrays import Array, CheckpointError
from halfstep.training.checkpoints.retention import Retention, prune


@final
@dataclass(frozen=True)
class Saved:
    """How a save went. `path` is None where it failed, and `trouble` says why, or what failed after it."""

    step: int
    path: Path | None
    bytes: int
    seconds: float  # from when it was due until it was complete
    waited: float  # of these, how long training stood still
    trouble: HalfstepError | None = None


@final
class Saver:
    """Writes the checkpoints of a run, one at a time. Every method is called by the training thread."""

    def __init__(self, folder: Path, retention: Retention, saved_step: int | None = None):
        self.folder, self.retention = folder, retention
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
        """Takes a snapshot and has it written; returns the seconds that this held the caller, since it was `due`.

        The snapshot is taken after the one before was written: they may share their buffers.
        """
        started = time.perf_counter() if due is None else due
        self.wait()
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
        """Waits until nothing is being written, for so long at most; whether that is so."""
        if self._thread is not None:
            self._thread.join(seconds if seconds is None else max(0.0, seconds))
        return not self.is_busy

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call. Raises what was not foreseen."""
        found = []
        while not self._done.empty():
            one = self._done.get()
            if isinstance(one, BaseException):
                raise one
            if one.path is not None:
                self.saved_step, self.longest = one.step, max(self.longest, one.seconds)
            found.append(one)
        return found

    def _write(
        self,
        step: int,
        read: Snapshot,
        meta: Mapping[str, Any],
        good: int | None,
        started: float,
        waited: float,
    ) -> None:
        path, size = None, 0
        trouble: HalfstepError | None = None
        try:
            arrays = {name: Array(*record) for name, record in read().items()}
            size = sum(memoryview(array.data).nbytes for array in arrays.values())
            path = checkpoint.save(self.folder, step, arrays, meta)
            prune(self.folder, self.retention, good)
        except HalfstepError as error:
            trouble = error
        except (OSError, MemoryError) as error:
            trouble = CheckpointError(f"the checkpoint of step {step}: {str(error) or 'no memory is left'}")
        except BaseException as error:
            self._done.put(error)
            return
        self._done.put(Saved(step, path, size, time.perf_counter() - started, waited, trouble))
