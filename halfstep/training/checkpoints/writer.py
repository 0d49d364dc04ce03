"""Writes checkpoints in a thread, while training continues, and removes those that are not kept.

    training thread     wait for the writer | snapshot |  step  step  step ...
    writer                                  | bytes arrive, safetensors, digest, fsync, rename, prune |

A save costs the step no more than a snapshot: on a GPU the launch of copies into pinned memory, in stream order;
on a CPU a copy of the tensors. Writing, hashing and flushing release the interpreter's lock.

If a save is due while the one before is still being written, training waits for it: leaving it out would make a
run's checkpoints depend on the speed of a disk. A save that fails (a full disk) leaves earlier checkpoints whole;
it is reported, training continues, and the next save tries again. Only an unexpected error stops the run.

Ranks that share the state each have a saver and call it at the same steps; a save is complete, or has failed, for
all of them (parts.py). Rank 0 alone removes old checkpoints.

Which are kept:

    a step is kept  <=>  the newest, among the `last` that were due, step % every == 0, the best, or protected

The best has the lowest held-out loss, which its manifest holds. Protected is the newest one known to be good
(health.py): what comes after may be worthless, and must not push it out. Stopping a run leaves a checkpoint that
was not due: it is not rolled back to, and not one of the `last`, so a stopped run keeps what an uninterrupted one
keeps. What is incomplete, or not written by this halfstep alone, is left for its owner to examine, and does not
count.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from halfstep.config.run import TrainingConfig
from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Snapshot
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.parts import save_part
from halfstep.training.checkpoints.tensors import CheckpointError, CheckpointWriteError


@dataclass(frozen=True)
class Retention:
    """The settings `training.keep_*`."""

    last: int = 2
    every: int = 0  # 0 is none
    best: bool = False


def warn_of_keep_best(training: TrainingConfig) -> list[str]:
    """Returns a warning if `keep_best` has no choice: no step before the last is both saved and evaluated."""
    both = math.lcm(training.save_every, training.validate_every)
    if not training.keep_best or both < training.steps or training.save_every >= training.steps:
        return []
    return [
        f"training.keep_best keeps the last checkpoint alone: it is saved every {training.save_every} steps and "
        f"evaluated every {training.validate_every}, which first meet at step {both}; make one a multiple of the "
        "other"
    ]


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint, and what decides whether it is kept."""

    path: Path
    due: bool  # the schedule of its time asked for it; a stopped run saves one that is not due
    held_out: float | None

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> "Candidate":
        """Returns the checkpoint that a manifest describes."""
        step, loss = manifest["step"], manifest.get("held_out")
        training = manifest.get("config", {}).get("training", {})
        due = step % training.get("save_every", 1) == 0 or step == training.get("steps")
        return cls(path, due, loss if isinstance(loss, float) and math.isfinite(loss) else None)


def survey(folder: Path, known: dict[Path, Candidate] | None = None) -> dict[int, Candidate]:
    """Returns the complete checkpoints by step. Those `known` are not read again; those read are added."""
    known = {} if known is None else known
    paths = checkpoint.step_folders(folder)
    for path in paths:
        if path not in known:
            with suppress(CheckpointError, OSError):
                known[path] = Candidate.of(path, checkpoint.check_complete(path))
    return {checkpoint.parse_step(path): known[path] for path in paths if path in known}


def steps_to_keep(seen: Mapping[int, Candidate], retention: Retention, good: int | None = None) -> set[int]:
    """Returns the steps whose checkpoints stay; one of them is known to be good if step `good` is."""
    ordered = sorted(seen)
    due = [step for step in ordered if seen[step].due]
    stay: set[int | None] = {*due[-retention.last :], *ordered[-1:]}
    if retention.every:
        stay |= {step for step in ordered if step % retention.every == 0}
    if retention.best:
        stay.add(best_step(seen))
    if good is not None:
        stay.add(good_step(seen, good))
    return {step for step in stay if step is not None}


def prune(
    folder: Path, retention: Retention, good: int | None = None, known: dict[Path, Candidate] | None = None
) -> list[Path]:
    """Removes the complete checkpoints that are not kept; returns them. `known` is as in `survey`."""
    seen = survey(folder, known)
    stay = steps_to_keep(seen, retention, good)
    old = [one.path for step, one in seen.items() if step not in stay]
    for path in old:
        checkpoint.discard(path)
    return old


def due_step(seen: Mapping[int, Candidate], good: int) -> int | None:
    """Returns the newest checkpoint up to a step that was due: the one to roll back to."""
    return max((step for step, one in seen.items() if step <= good and one.due), default=None)


def good_step(seen: Mapping[int, Candidate], good: int) -> int | None:
    """Returns the newest checkpoint up to a step that was due; if none was, the newest of all up to it."""
    due = due_step(seen, good)
    return max((step for step in seen if step <= good), default=None) if due is None else due


def best_step(seen: Mapping[int, Candidate]) -> int | None:
    """Returns the step with the lowest held-out loss, the earlier of two equal ones."""
    known = [(one.held_out, step) for step, one in seen.items() if one.held_out is not None]
    return min(known)[1] if known else None


@dataclass(frozen=True)
class Saved:
    """How a save went. `path` is None if it failed, and `trouble` is why, or what failed after it."""

    step: int
    path: Path | None
    bytes: int
    seconds: float  # from when it was due until it was complete
    waited: float  # of these, how long training stood still
    trouble: HalfstepError | None = None


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run, one at a time. Every method is called by the training thread."""

    folder: Path
    retention: Retention
    saved_step: int | None = None  # the newest that is complete
    rank: int = 0  # of several that share the state
    ranks: int = 1
    token: str = ""  # of all ranks, and of no other job
    waited: float = field(default=0.0, init=False)  # seconds in which training stood still, in all
    longest: float = field(default=0.0, init=False)  # seconds the longest save took
    _number: int = field(default=0, init=False)  # of the save: a step may be saved again after a failure
    # Those whose manifests were read or written already.
    _known: dict[Path, Candidate] = field(default_factory=dict, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _done: SimpleQueue[Saved | BaseException] = field(default_factory=SimpleQueue, init=False)

    def save(
        self,
        step: int,
        take: Callable[[], Snapshot],
        meta: Mapping[str, Any],
        good: int | None = None,
        due: float | None = None,
    ) -> float:
        """Takes a snapshot and writes it in a thread; returns how long training waited since it was `due`."""
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
        """Waits for the save in progress, `seconds` at most; returns whether it is done."""
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
                path, manifest = checkpoint.write(self.folder, step, arrays, meta)
            else:
                place, token = (self.folder, step), f"{self.token}-{self._number}"
                path = save_part(*place, read, meta, rank=self.rank, ranks=self.ranks, token=token)
                if self.rank == 0:
                    manifest = checkpoint.read_manifest(path)
                    size = sum(file["bytes"] for file in manifest["files"].values())
            if self.rank == 0:
                self._known[path] = Candidate.of(path, manifest)
                prune(self.folder, self.retention, good, self._known)
        except HalfstepError as error:
            trouble = error
        except (OSError, MemoryError) as error:
            trouble = CheckpointWriteError(f"the checkpoint of step {step}: {str(error) or 'no memory left'}")
        except BaseException as error:
            self._done.put(error)
            return
        self._done.put(Saved(step, path, size, time.perf_counter() - started, waited, trouble))
