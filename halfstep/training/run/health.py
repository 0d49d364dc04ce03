"""Bad steps: which steps went wrong, how many in a row, and which checkpoint is still good.

A step whose gradients or loss were not finite was skipped on the device; it is counted here. With m the median of
the last 32 losses that did not spike (8 at least), a step spikes when

    loss > m + threshold          in nats per token

and a run rolls back after 3 spiking steps in a row, if `training.rollback` sets a threshold. A single spike is
common and heals by itself, and does not move a median. A loss that is not finite is not a spike.

`good` is the newest step whose weights are known to be good, because the step after it was neither skipped nor a
spike (its own update may have ruined them); if rollback is off, a finite evaluation proves them at once. Its
checkpoint is never pruned. `shift` is the updates' worth of data that rollbacks left out. All of it is in every
checkpoint, so a resumed run decides as the uninterrupted one would have.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Literal

from halfstep.core.errors import HalfstepError

# A dynamic scale falls from its start to its floor in 16 such steps; nothing else recovers by waiting.
HOPELESS = 50
# After this many rollbacks to one checkpoint the data is not to blame.
ROLLBACKS = 3
# Losses that the median is of, losses it needs, and spikes in a row before a rollback.
REMEMBERED, NEEDED, IN_A_ROW = 32, 8, 3

Fault = Literal["skip", "not_finite", "spike"]


class DivergedError(HalfstepError):
    """A run whose loss does not recover."""


class Spikes:
    """The losses so far, and how many in a row spiked."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.streak = 0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def median(self) -> float | None:
        """The median that a loss is compared with; None while too few losses are known."""
        return statistics.median(self._recent) if len(self._recent) >= NEEDED else None

    def observe(self, loss: float) -> bool:
        """Records the loss of a step; returns whether it spikes."""
        if not self.threshold or not math.isfinite(loss):
            return False
        median = self.median
        if median is not None and loss > median + self.threshold:
            self.streak += 1
            return True
        self.streak = 0
        self._recent.append(loss)
        return False

    @property
    def is_due(self) -> bool:
        """Whether the run should roll back now."""
        return self.streak >= IN_A_ROW

    def reset(self) -> None:
        """Forgets all losses; the next ones are the new normal."""
        self.streak = 0
        self._recent.clear()

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"recent": list(self._recent), "streak": self.streak}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._recent = deque(state["recent"], maxlen=REMEMBERED)
        self.streak = int(state["streak"])


class Health:
    """What is known of the health of a run."""

    def __init__(self, rollback: float):
        self.spikes = Spikes(rollback)
        self.in_a_row = 0  # steps that were skipped
        self.good = 0
        self.shift = 0
        self._rollbacks: Counter[int] = Counter()

    def observe(self, step: int, numbers: Mapping[str, float]) -> Fault | None:
        """Records the numbers of a step; returns what is wrong with it."""
        if numbers["skipped"]:
            self.in_a_row += 1
            return "not_finite" if math.isfinite(numbers["grad_norm"]) else "skip"
        self.in_a_row = 0
        if self.spikes.observe(numbers["loss"]):
            return "spike"
        self.good = step - 1
        return None

    def note_evaluation(self, step: int) -> None:
        """Records a finite held-out loss after a step: no weight is ruined, though the loss may have jumped."""
        if not self.spikes.threshold:
            self.good = step

    @property
    def is_hopeless(self) -> bool:
        """Whether waiting will not help."""
        return self.in_a_row >= HOPELESS

    def roll_back(self, at: int, to: int, state: Mapping[str, Any]) -> int:
        """Goes from step `at` back to `to` with its `state`; returns the updates' worth of data skipped."""
        shift, rollbacks = self.shift + at - to, self._rollbacks + Counter([to])
        if rollbacks[to] > ROLLBACKS:
            raise DivergedError(
                f"the loss spiked again after {ROLLBACKS} rollbacks to step {to}, each past other data",
                hint="lower the learning rate, or raise training.rollback if the loss may rise so far",
            )
        self.load(state)
        # Skipped data stays skipped, and the step returned to is known to be good by now.
        self.good, self.shift, self._rollbacks = to, shift, rollbacks
        return at - to

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "good": self.good,
            "in_a_row": self.in_a_row,
            "shift": self.shift,
            "went_back": [*self._rollbacks.elements()],
            "spikes": self.spikes.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self.good, self.in_a_row, self.shift = (int(state[key]) for key in ("good", "in_a_row", "shift"))
        self._rollbacks = Counter(int(step) for step in state["went_back"])
        self.spikes.load(state["spikes"])
