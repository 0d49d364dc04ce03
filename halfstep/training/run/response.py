"""What happens after a bad step: it is reported with its data, and the run continues, rolls back or stops.

gradients not finite, once       the update was skipped on the device; an event names shards and offsets
  and no loss scale explains it    the step runs again to find what made it: a `cause` event and a line
only the loss not finite         the same, and the loss scale stays
a loss scale low and falling     an alarm, once per fall: an event, a line and a row of the page
a loss scale at its floor        the run stops, names the first bad tensor and leaves a checkpoint
HOPELESS times in a row          the same: the step runs again to name the tensor; a good checkpoint is kept
a loss that stays up             back to the newest checkpoint from before, if training.rollback is set
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.config.session import Session
from halfstep.core.audit.cause import Cause
from halfstep.core.errors import ScaleFloorError, ScalingError
from halfstep.core.policy import Policy
from halfstep.core.scaling import ScaleAlarm
from halfstep.training.data.batches import Batches, Place, TokenBatch
from halfstep.training.job import Job
from halfstep.training.run.checkpointing import Checkpointer
from halfstep.training.run.health import Health
from halfstep.training.telemetry.meters import Meters, Tally

REST = 500  # steps in which a cause is not sought again


class RollBackError(Exception):
    """The loss jumped and stays up: the steps since the last good checkpoint are given up."""


@dataclass(eq=False)
class Responder:
    """Checks the numbers of each step."""

    health: Health
    batches: Batches
    session: Session
    checkpointer: Checkpointer
    tally: Tally
    job: Job
    # They count the time of searches for causes; without them, only a run that must stop is searched.
    meters: Meters | None
    _searched: int = field(default=-REST, init=False)  # the step at which a cause was last sought

    def __post_init__(self) -> None:
        self.change_policy(self.session.policy)

    def change_policy(self, policy: Policy) -> None:
        """Watches the loss scale of another policy from here on."""
        self.alarm = ScaleAlarm(policy.scale)

    def check(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raises RollBackError if the last steps should be given up, ScalingError if nothing helps."""
        health, scale = self.health, numbers["scale"]
        fault = health.observe(step, numbers)
        if message := self.alarm.observe(scale, falling=fault == "skip"):
            self.checkpointer.events.write("low_scale", step=step, scale=scale, message=message)
            self.checkpointer.bar.note(f"warning: step {step}: {message}")
        if fault is None:
            return
        ranks, where = self._locate(step, numbers)
        fields = {
            "step": step,
            "loss": numbers["loss"],
            "where": where,
            **({} if ranks is None else {"ranks": ranks}),
        }
        write = self.checkpointer.events.write
        if fault == "spike":
            write("spike", median=health.spikes.median, in_a_row=health.spikes.streak, **fields)
            if health.spikes.is_due and self.checkpointer.can_roll_back(step):
                raise RollBackError
            return
        write(fault, in_a_row=health.in_a_row, grad_norm=numbers["grad_norm"], scale=numbers["scale"], **fields)
        # A dynamic scale finds its value by overflowing; only a loss that is not finite is worth a line.
        ordinary = numbers["scale"] > 1 and math.isfinite(numbers["loss"])
        if health.in_a_row == 1 and not ordinary:
            place = f"`{where[0]['file'].strip('`')}` at token {where[0]['offsets'][0]}"
            what = "was" if fault == "skip" else "had a loss that is"
            then = f"{what} not finite and was skipped"
            on = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
            self.checkpointer.bar.note(f"step {step} {then}{on}; its data begins in {place}")
        if health.is_hopeless:
            raise self._hopeless_error(step, scale)
        if not ordinary or message:
            self._search(step, scale)

    def _search(self, step: int, scale: float) -> None:
        """Looks for what made a step not finite, once per episode: the first step of many that fail alike."""
        if self.meters is None or step < self._searched + REST:
            return
        self._searched = step
        with self.meters.part("monitor"):
            cause = self._find(step, scale)
        self.tally.watch.start(step)  # that was no time spent training
        self.checkpointer.bar.note(f"step {step}: {cause}")

    def _find(self, step: int, scale: float) -> Cause:
        self.job.set_activity(f"looking for what made step {step} not finite", timed=False)
        cause = self.session.blame(self.tokens_after(step - 1), scale)
        rank, at = cause.rank or 0, step - 1 + self.health.shift
        where = self.batches.locate(at, rank, self.job.ranks, cause.micro_batch)
        self.checkpointer.events.write("cause", step=step, where=where, **cause.to_dict())
        return cause

    def _locate(self, step: int, numbers: Mapping[str, float]) -> tuple[list[int] | None, list[Place]]:
        """Returns the first rank whose own loss is not finite, and where its data is; if none is, all data."""
        at = step - 1 + self.health.shift
        if self.job.ranks == 1:
            return None, self.batches.locate(at)
        first = int(numbers.get("bad_rank", -1))
        bad = [first] if first >= 0 else []
        places = [place for rank in bad for place in self.batches.locate(at, rank, self.job.ranks)]
        return bad, places or self.batches.locate(at)

    def stop(self, step: int, result: Any) -> None:
        """Ends a run whose loss scale is at its floor."""
        self._keep_one()
        self.session.check(result, self.tokens_after(step - 1))

    def tokens_after(self, step: int) -> TokenBatch:
        """Returns this rank's tokens of the update after `step` updates, past what rollbacks have skipped."""
        return self.batches.at(step + self.health.shift, *self.job.share)

    def _keep_one(self) -> None:
        """Saves if nothing was: skipped updates changed nothing, and a launched step is in the weights already."""
        self.checkpointer.wait()
        if self.checkpointer.saver.saved_step is None:
            self.checkpointer.save(self.tally.launched)

    def _hopeless_error(self, step: int, scale: float) -> ScalingError:
        self._keep_one()
        cause = self._find(step, scale)
        self.checkpointer.wait()
        good = self.checkpointer.newest_good()
        kept = f"start anew from the weights before it, `--init {good}`, with" if good else "start anew with"
        return ScaleFloorError(
            f"{self.health.in_a_row} steps in a row were not finite, up to step {step}; {cause}",
            hint=f"{kept} a lower optimizer.rate; under fp16, let the scale fall with `scale=dynamic`",
        )
