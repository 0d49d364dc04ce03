"""The checkpoints of a run that goes on: when one was saved or could not be, the last one, and going back.

writer.py writes them; here their fate is told, as events and as words, and acted on.

**The last one.** A run that ends, or that somebody stops, waits for its last step to be saved. When that fails, as
on a full disk, it is tried again every few seconds for five minutes: somebody may free space, and what is lost
otherwise is all that was trained since. After a signal with a deadline, no save is started that would not end in
time by the measure of the longest one so far: half a checkpoint is none, and the time may be used better. Nothing
here waits past the deadline, whenever the signal comes.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.arrays import Array, CheckpointError, DamagedCheckpointError, held
from halfstep.training.checkpoints.retention import due_step, good_step, survey
from halfstep.training.checkpoints.writer import Saved, Saver
from halfstep.training.run.health import Health
from halfstep.training.run.signals import StopRequest
from halfstep.training.session import Session
from halfstep.training.telemetry.events import Events
from halfstep.training.telemetry.progress import Progress

PATIENCE, PAUSE = 300.0, 5.0  # seconds in which the last save is tried again, and between two tries
GLANCE = 0.1  # seconds between two looks at the deadline while something is waited for
LONG = 1.0  # seconds that training may wait for a save before it is told


@final
class Keeper:
    """Saves, tells of it, and goes back. `describe(step, held_out)` is what a manifest says."""

    def __init__(
        self,
        saver: Saver,
        session: Session,
        health: Health,
        events: Events,
        bar: Progress,
        describe: Callable[[int, float | None], Mapping[str, Any]],
        stop: StopRequest,
        deadline: float | None = None,
    ):
        self.saver, self.session, self.health = saver, session, health
        self.events, self.bar, self.describe = events, bar, describe
        self.stop, self.deadline = stop, deadline
        self.failed: Saved | None = None  # the newest save, where it failed
        self._looked: dict[int, float] = {}
        self._told_wait = False
        self._waiting = False  # whether events do
        self._is_last = False  # whether no step comes any more

    def save(self, step: int, held_out: float | None = None) -> None:
        """Has the state after `step` updates written. A save that is under way is waited for; where that takes
        until the deadline, this one is left out."""
        if held_out is not None and math.isfinite(held_out):
            self._looked[step] = held_out
            self.health.evaluated(step)
        due, busy = time.perf_counter(), self.saver.is_busy
        if not self.settle():
            return
        meta = self.describe(step, self._looked.get(step))
        try:
            waited = self.saver.save(step, self.session.snapshot, meta, self.health.good, due)
        except Exception as error:
            if not self.session.ran_out(error):
                raise
            took = time.perf_counter() - due
            why = CheckpointError(f"the checkpoint of step {step}: no memory of the host is left for a copy")
            self._tell(Saved(step, None, 0, took, took, why))
            return
        if busy and waited > LONG and not self._told_wait:
            self._told_wait = True
            self.warn(
                "saving takes longer than the steps between two checkpoints, and training waits for it; "
                "raise training.save_every, or save to a faster disk"
            )

    def tell(self) -> None:
        """Tells of the saves that ended since the last call, and of events that the disk does not take."""
        for saved in self.saver.poll():
            self._tell(saved)
        failure = self.events.failure
        if (failure is not None) != self._waiting:
            self._waiting = failure is not None
            refused = f"NOT WRITTEN: {failure}: events wait in memory" if failure else "events are written again"
            self.bar.note(refused)

    def settle(self) -> bool:
        """Waits until nothing is being written, or the deadline is over, and tells of it; whether nothing is."""
        while not self.saver.wait(GLANCE):
            if self._left() <= 0:
                break
        self.tell()
        return not self.saver.is_busy

    def save_last(self, step: int) -> bool:
        """Waits until the state after `step` updates is saved; whether it was, in time.

        Where nobody asked to stop, a save that keeps failing is an error in the end.
        """
        give_up, held_out, self._is_last = math.inf, self._looked.get(step), True
        while self.settle():
            if self.saver.saved_step == step or step == 0:
                return True
            if self.failed is not None and self.failed.step == step:  # an earlier one's failure says little
                give_up = min(give_up, time.monotonic() + PATIENCE)
                if time.monotonic() + PAUSE > give_up:
                    if self.stop.requested:
                        return False
                    assert self.failed.trouble is not None
                    raise self.failed.trouble
                self._pause()
            if self._left() < self.saver.longest:
                return False
            self.save(step, held_out)
        return False

    def _left(self) -> float:
        """The seconds until the deadline, if a signal came that has one."""
        left = self.stop.left(self.deadline)
        return math.inf if left is None else left

    def _pause(self) -> None:
        over = time.monotonic() + PAUSE
        while (rest := min(over - time.monotonic(), self._left())) > 0:
            time.sleep(min(rest, GLANCE))

    def can_roll_back(self, at: int) -> bool:
        """Whether there is a checkpoint from before a spike; where not, the losses from now on are the measure."""
        if not self.settle():
            return False
        if due_step(survey(self.saver.folder), self.health.good) is not None:
            return True
        self.health.spikes.reset()
        self.warn(f"the loss spiked up to step {at}, and there is no checkpoint from before to go back to")
        return False

    def roll_back(self, at: int) -> int:
        """Goes back to the newest checkpoint from before the spike that is whole; its step."""
        arrays, manifest = self._load_good()
        to = int(manifest["step"])
        left_out = self.health.roll_back(at, to, manifest["guard"])
        # The newest first: a death in between leaves a run that spikes again, and goes back again.
        for path in reversed(checkpoint.step_folders(self.saver.folder)):
            if checkpoint.step_of(path) > to:
                checkpoint.discard(path)
        self.session.load(held(arrays))
        self.saver.saved_step = to
        self._looked = {step: loss for step, loss in self._looked.items() if step <= to}
        message = f"the loss spiked: back from step {at} to the checkpoint of step {to}, past the data since"
        self.events.write("rollback", step=at, to=to, skipped_data=left_out, message=message)
        self.bar.note(message)
        return to

    def _load_good(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The newest good checkpoint that was due; damaged ones are set aside on the way to it."""
        first: DamagedCheckpointError | None = None
        while (step := due_step(found := survey(self.saver.folder), self.health.good)) is not None:
            try:
                return checkpoint.load(found[step].path)
            except DamagedCheckpointError as error:
                first = first or error
                checkpoint.set_aside(found[step].path)
                self.warn(f"{error.message}; it was set aside")
        assert first is not None  # can_roll_back said that there is one
        raise first

    def newest_good(self) -> Path | None:
        """The newest checkpoint whose weights are known to be good, of those that were due where there is one."""
        found = survey(self.saver.folder)
        step = good_step(found, self.health.good)
        return None if step is None else found[step].path

    def note_look(self, step: int, held_out: float) -> None:
        """Writes into a checkpoint what a look at it found, where a signal had broken that off."""
        path = self.saver.folder / f"step-{step:06d}"
        try:
            if math.isfinite(held_out) and checkpoint.read_manifest(path).get("held_out") is None:
                checkpoint.note(path, held_out=held_out)
                self.health.evaluated(step)
        except CheckpointError as error:  # a full disk: the look is in the events all the same
            self.warn(error.message)

    def _tell(self, saved: Saved) -> None:
        if saved.path is None:
            self.failed = saved
            self.events.write("save_failed", step=saved.step, message=str(saved.trouble))
            then = "it is tried again" if self._is_last else "training goes on, the next save is the next try"
            self.bar.note(f"NOT SAVED: {saved.trouble}; {then}")
            return
        self.failed = None
        self.events.write(
            "checkpoint",
            step=saved.step,
            path=_beside(saved.path),
            seconds=saved.seconds,
            waited=saved.waited,
            bytes=saved.bytes,
            held_out=self._looked.pop(saved.step, None),
        )
        if saved.trouble is not None:
            self.warn(str(saved.trouble))

    def warn(self, message: str) -> None:
        """Tells of what a user may want to change."""
        self.events.write("warning", message=message)
        self.bar.note(f"warning: {message}")


def _beside(path: Path) -> str:
    """A checkpoint's path as seen from the run folder."""
    return str(path.relative_to(path.parent.parent))
