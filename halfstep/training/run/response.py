"""What comes of a step that went wrong: it is told with the data it saw; the run goes on, goes back or stops.

    gradients not finite, once       the update was skipped on the device; an event names shards and offsets
    the loss alone not finite        the same, but that nothing was skipped
    a loss scale at its floor        the run stops, with the first bad tensor named and a checkpoint left
    HOPELESS times in a row          the run stops: the step is run again to name the first bad tensor; the newest
                                     checkpoint from before is kept
    a loss that stays up             back to the newest checkpoint from before, where the run asks for it

health.py keeps the count; checkpointing.py has the checkpoints.
"""

import math
from collections.abc import Mapping
from typing import Any, final

from halfstep.core.errors import ScalingError
from halfstep.training.data.batches import Batches
from halfstep.training.run.checkpointing import Keeper
from halfstep.training.run.health import Health
from halfstep.training.session import Session
from halfstep.training.telemetry.meters import Tally


class RollBackError(Exception):
    """The loss has jumped and stays up: the steps since the last good checkpoint are given up."""


@final
class Judge:
    """Looks at the numbers of each step."""

    def __init__(self, health: Health, batches: Batches, session: Session, keeper: Keeper, tally: Tally):
        self.health, self.batches, self.session, self.keeper = health, batches, session, keeper
        self.tally = tally

    def see(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes a step; raises RollBackError where it is to be given up, ScalingError where nothing helps."""
        health = self.health
        fault = health.observe(step, numbers)
        if fault is None:
            return
        where = self.batches.locate(step - 1 + health.shift)
        told = {"step": step, "loss": numbers["loss"], "where": where}
        if fault == "spike":
            self.keeper.events.write("spike", median=health.spikes.median, in_a_row=health.spikes.streak, **told)
            if health.spikes.is_due and self.keeper.can_roll_back(step):
                raise RollBackError
            return
        told |= {"grad_norm": numbers["grad_norm"], "scale": numbers["scale"]}
        self.keeper.events.write(fault, in_a_row=health.in_a_row, **told)
        # Under a dynamic scale an overflow is how the scale is found; a loss that is not finite is news.
        if health.in_a_row == 1 and not (numbers["scale"] > 1 and math.isfinite(numbers["loss"])):
            place = f"`{where[0]['file'].strip('`')}` at token {where[0]['offsets'][0]}"
            then = "was not finite and was skipped" if fault == "skip" else "had a loss that is not finite"
            self.keeper.bar.note(f"step {step} {then}; its data begin in {place}")
        if health.is_hopeless:
            raise self._hopeless(step)

    def stop(self, step: int, result: Any) -> None:
        """Ends a run whose loss scale has nowhere to fall."""
        self._keep_one()
        self.session.check(result, self.batches.at(step - 1 + self.health.shift))

    def _keep_one(self) -> None:
        """Saves a run that is about to stop, where nothing was saved yet: skipped updates changed nothing.

        A step that was launched and is not read yet may have changed something: the weights are those after it.
        """
        self.keeper.settle()
        if self.keeper.saver.saved_step is None:
            self.keeper.save(self.tally.launched)

    def _hopeless(self, step: int) -> ScalingError:
        self._keep_one()
        cause = self.session.blame(self.batches.at(step - 1 + self.health.shift))
        self.keeper.settle()
        good = self.keeper.newest_good()
        kept = f"start anew from the weights before it, `--init {good}`, with" if good else "start anew with"
        return ScalingError(
            f"{self.health.in_a_row} steps in a row were not finite, up to step {step}; {cause}",
            hint=f"{kept} a lower optimizer.rate; under fp16, let the scale fall with `scale=dynamic`",
        )
