"""Steps that went wrong: which they are, how many in a row, and what is still good.

A step whose gradients are not finite was skipped on the device; here it is counted and told with the data it saw.
So is a loss that is not finite though its gradients are: nothing was skipped then, and nothing was learned of use.
A loss that jumps and stays up is a reason to roll back, where the run asks for it (spikes.py). While either lasts,
checkpoints that are saved may be worth nothing: the newest one that is known to be good is never pruned.

    good        the newest step whose weights are known to be good: the step after it was neither skipped nor a
                spike. The weights of a step that looked good are not: its own update may have ruined them. Where
                nothing is gone back to, a look at held-out text that is finite says so at once.
    shift       updates' worth of data that rollbacks left out: the update after s sees the data of s + shift

All of it is in every checkpoint, with the memory of the spike rule: what a resumed run does is what the
uninterrupted one would have done.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, final

from halfstep.core.errors import HalfstepError
from halfstep.training.run.spikes import Spikes

# A dynamic scale falls from its start to its floor in 16 such steps; nothing else recovers by waiting.
HOPELESS = 50
# Rolling back to one checkpoint more often than this helps no more: it is not the data.
ROLLBACKS = 3

Fault = Literal["skip", "not_finite", "spike"]


class DivergedError(HalfstepError):
    """A run whose loss does not come back."""


@final
class Guard:
    """What is known of the health of a run."""

    def __init__(self, rollback: float):
        self.spikes = Spikes(rollback)
        self.in_a_row = 0  # steps that were skipped, or whose loss was not finite
        self.good = 0
        self.shift = 0
        self._went_back: Counter[int] = Counter()

    def see(self, step: int, numbers: Mapping[str, float]) -> Fault | None:
        """Takes the numbers of a step; what is wrong with it."""
        if numbers["skipped"]:
            self.in_a_row += 1
            return "skip"
        if not math.isfinite(numbers["loss"]):  # and its gradients were: the update was made
            self.in_a_row += 1
            return "not_finite"
        self.in_a_row = 0
        if self.spikes.see(numbers["loss"]):
            return "spike"
        self.good = step - 1
        return None

    def looked(self, step: int) -> None:
        """Held-out text had a finite loss after a step: no weight is ruined, though the loss may have jumped."""
        if not self.spikes.threshold:
            self.good = step

    @property
    def is_hopeless(self) -> bool:
        """Whether no waiting will help."""
        return self.in_a_row >= HOPELESS

    def go_back(self, at: int, to: int, state: Mapping[str, Any]) -> int:
        """Goes back from a step to another, with its `state`; how many updates' worth of data that leaves out."""
        shift, went_back = self.shift + at - to, self._went_back + Counter([to])
        if went_back[to] > ROLLBACKS:
            raise DivergedError(
                f"the loss spiked again after {ROLLBACKS} rollbacks to step {to}, each past other data",
                hint="lower the learning rate, or raise training.rollback if the loss may rise so far",
            )
        self.load(state)
        # Data that was left out stays so, and the step gone back to is known to be good by now.
        self.good, self.shift, self._went_back = to, shift, went_back
        return at - to

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "good": self.good,
            "in_a_row": self.in_a_row,
            "shift": self.shift,
            "went_back": [*self._went_back.elements()],
            "spikes": self.spikes.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` gave."""
        self.good, self.in_a_row, self.shift = (int(state[key]) for key in ("good", "in_a_row", "shift"))
        self._went_back = Counter(int(step) for step in state["went_back"])
        self.spikes.load(state["spikes"])
