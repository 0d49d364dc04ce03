"""When checkpoints are saved: reporting each save, waiting for the last one, and rolling back.

A run that ends or is stopped waits for its last step to be saved. If that fails, for example on a full disk, it
tries again every few seconds for five minutes: space may be freed. After a signal with a deadline, no save is
started that would not end in time, judging by the longest one so far. Nothing here waits past the deadline.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.config.session import Session
from halfstep.core.state_format import Snapshot, Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.checkpoints.tensors import CheckpointError, DamagedCheckpointError
from halfstep.training.checkpoints.writer import Saved, Saver, due_step, good_step, survey
from halfstep.training.job import Job
from halfstep.training.run.health import Health
from halfstep.training.run.signals import StopRequest
from halfstep.training.telemetry.events import Events
from halfstep.training.telemetry.progress import Progress

PATIENCE, PAUSE = 300.0, 5.0  # seconds in which the last save is tried again, and between two tries
GLANCE = 0.1  # seconds between two checks of the deadline while waiting
LONG = 1.0  # seconds that training may wait for a save before a warning


class NullSaver(Saver):
    """The saver of a rank that writes nothing, as rank 0 has the same state: a save is done once it is due."""

    def save(self, step: int, *_: Any, **__: Any) -> float:
        """Records the step as saved; writes nothing."""
        self.saved_step = step
        return 0.0


def _raise_no_memory() -> dict[str, Stored]:
    raise MemoryError("the host has no memory left for a copy")


@dataclass(eq=False)
class Checkpointer:
    """Saves, reports it, and rolls back."""

    saver: Saver
    session: Session
    health: Health
    events: Events
    bar: Progress
    describe: Callable[[int, float | None], Mapping[str, Any]]  # (step, held-out loss) -> what a manifest holds
    load: Callable[[Loaded], object]  # puts a checkpoint back into the session
    stop: StopRequest
    job: Job = field(default_factory=Job)
    failed: Saved | None = field(default=None, init=False)  # the newest save, if it failed
    _held_out: dict[int, float] = field(default_factory=dict, init=False)
    _warned_of_waiting: bool = field(default=False, init=False)
    _events_wait: bool = field(default=False, init=False)
    _is_last: bool = field(default=False, init=False)  # whether no step follows

    def save(self, step: int, held_out: float | None = None) -> None:
        """Saves in the background, once the save in progress is done; not if that one lasts past the deadline."""
        if held_out is not None and math.isfinite(held_out):
            self._held_out[step] = held_out
            self.health.note_evaluation(step)
        due, busy = time.perf_counter(), self.saver.is_busy
        if not self._agreed(self.wait()):
            return
        meta = self.describe(step, self._held_out.get(step))
        waited = self.saver.save(step, self._snapshot, meta, self.health.good, due)
        if busy and waited > LONG and not self._warned_of_waiting:
            self._warned_of_waiting = True
            self.warn(
                "saving takes longer than the steps between two checkpoints, and training waits for it; "
                "raise training.save_every, or save to a faster disk"
            )

    def _snapshot(self) -> Snapshot:
        """Copies the state. Without memory for a copy the save fails later, and for all ranks that share it."""
        try:
            return self.session.snapshot()
        except Exception as error:
            if not self.session.is_out_of_memory(error):
                raise
            return _raise_no_memory

    def report(self) -> None:
        """Reports the saves that ended since the last call, and events that the disk refuses."""
        for saved in self.saver.poll():
            self._report(saved)
        failure = self.events.failure
        if (failure is not None) != self._events_wait:
            self._events_wait = failure is not None
            refused = f"NOT WRITTEN: {failure}: events wait in memory" if failure else "events are written again"
            self.bar.note(refused)

    def wait(self) -> bool:
        """Waits until nothing is being written or the deadline is over; returns whether nothing is."""
        while not self.saver.wait(GLANCE):
            if self.stop.seconds_left <= 0:
                break
        self.report()
        return not self.saver.is_busy

    def save_last(self, step: int) -> bool:
        """Waits for the last save; returns whether it was in time. Failing is an error, unless asked to stop."""
        give_up, held_out, self._is_last = math.inf, self._held_out.get(step), True
        while self._agreed(self.wait()):
            if self._agreed(self.saver.saved_step == step or step == 0):
                return True
            # An earlier one's failure says little.
            if self._agreed(self.failed is not None and self.failed.step == step):
                give_up = min(give_up, time.monotonic() + PATIENCE)
                if self._agreed(time.monotonic() + PAUSE > give_up):
                    if self.stop.requested:
                        return False
                    assert self.failed is not None  # a save fails for all ranks
                    assert self.failed.trouble is not None
                    raise self.failed.trouble
                self._pause()
            if self._agreed(self.stop.seconds_left < self.saver.longest):
                return False
            self.save(step, held_out)
        return False

    def _agreed(self, answer: bool) -> bool:
        """Returns the answer of rank 0, if several ranks write a checkpoint together; else the given one."""
        if not self.job.is_sharded:
            return answer
        if decided := bool(self.job.broadcast(answer)):
            self.saver.wait()  # a save ends for all of them at once
            self.report()
        return decided

    def _pause(self) -> None:
        over = time.monotonic() + PAUSE
        while (rest := min(over - time.monotonic(), self.stop.seconds_left)) > 0:
            time.sleep(min(rest, GLANCE))

    def can_roll_back(self, at: int) -> bool:
        """Whether there is a checkpoint from before a spike; if not, the losses from now on are the new normal."""
        there = (
            self.wait() and self.job.owner and due_step(survey(self.saver.folder), self.health.good) is not None
        )
        there, late = self.job.broadcast([there, self.saver.is_busy])
        if there or late:
            return bool(there)
        self.health.spikes.reset()
        self.warn(f"the loss spiked up to step {at}, and there is no checkpoint from before to roll back to")
        return False

    def roll_back(self, at: int) -> int:
        """Rolls back to the newest whole checkpoint from before the spike; returns its step."""
        loaded = self._load_good()
        to = int(loaded.manifest["step"])
        skipped = self.health.roll_back(at, to, loaded.manifest["guard"])
        # The newest first: a death in between leaves a run that spikes again, and rolls back again.
        for path in reversed(checkpoint.step_folders(self.saver.folder)):
            if checkpoint.parse_step(path) > to and self.job.owner:
                checkpoint.discard(path)
        self.load(loaded)  # perhaps of another policy, if it was changed since
        self.saver.saved_step = to
        self._held_out = {step: loss for step, loss in self._held_out.items() if step <= to}
        message = f"the loss spiked: back from step {at} to the checkpoint of step {to}, past the data since"
        self.events.write("rollback", step=at, to=to, skipped_data=skipped, message=message)
        self.bar.note(message)
        return to

    def _load_good(self) -> Loaded:
        """Loads the newest good checkpoint that was due; damaged ones are set aside on the way to it."""
        if not self.job.owner:
            path = Path(self.job.broadcast())
            return Loaded(path, *checkpoint.load(path, self.session.rows))
        first: DamagedCheckpointError | None = None
        while (step := due_step(there := survey(self.saver.folder), self.health.good)) is not None:
            try:
                if self.job.is_sharded:
                    checkpoint.verify(there[step].path)  # the parts of other ranks too
                loaded = Loaded(there[step].path, *checkpoint.load(there[step].path, self.session.rows))
                self.job.broadcast(str(loaded.path))
                return loaded
            except DamagedCheckpointError as error:
                first = first or error
                checkpoint.set_aside(there[step].path)
                self.warn(f"{error.message}; it was set aside")
        assert first is not None  # can_roll_back has seen one
        raise first

    def newest_good(self) -> Path | None:
        """Returns the newest checkpoint whose weights are known to be good, if possible one that was due."""
        there = survey(self.saver.folder)
        step = good_step(there, self.health.good)
        path = self.job.broadcast(None if step is None else str(there[step].path))
        return None if path is None else Path(path)

    def note_held_out(self, step: int, held_out: float) -> None:
        """Records the evaluation of a checkpoint that a signal had interrupted when it was saved."""
        path = self.saver.folder / f"step-{step:06d}"
        if not self.job.owner:
            if math.isfinite(held_out):
                self.health.note_evaluation(step)
            return
        try:
            if math.isfinite(held_out) and checkpoint.read_manifest(path).get("held_out") is None:
                checkpoint.note(path, held_out=held_out)
                self.health.note_evaluation(step)
        except CheckpointError as error:  # a full disk: the evaluation is still in the events
            self.warn(error.message)

    def _report(self, saved: Saved) -> None:
        if saved.path is None:
            self.failed = saved
            self.events.write("save_failed", step=saved.step, message=str(saved.trouble))
            then = "trying again" if self._is_last else "training continues, and the next save tries again"
            self.bar.note(f"NOT SAVED: {saved.trouble}; {then}")
            return
        self.failed = None
        path, held_out = saved.path.relative_to(saved.path.parent.parent), self._held_out.pop(saved.step, None)
        took = {"seconds": saved.seconds, "waited": saved.waited, "bytes": saved.bytes}
        self.events.write("checkpoint", step=saved.step, path=str(path), **took, held_out=held_out)
        if saved.trouble is not None:
            self.warn(str(saved.trouble))

    def warn(self, message: str) -> None:
        """Warns of something a user may want to change."""
        self.events.write("warning", message=message)
        self.bar.note(f"warning: {message}")
