"""When a loss has jumped, and stays up: the rule by which a run rolls back.

With m the median of the last 32 losses that did not spike (8 at least), a step spikes when

    loss > m + threshold          in nats a token

and a run rolls back after 3 spiking steps in a row. A single spike is common and heals by itself; a median is
not moved by it. A loss that is not finite is no spike: its update was skipped, and health.py counts those.
A threshold of 0 is off.

The rule sees losses alone and its memory is part of the checkpoint, so a resumed run decides as the uninterrupted
one would have.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, final

REMEMBERED, NEEDED, IN_A_ROW = 32, 8, 3


@final
class Spikes:
    """The losses so far, and how many in a row spiked."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.streak = 0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def median(self) -> float | None:
        """What a loss is held against; None while too few are known."""
        return statistics.median(self._recent) if len(self._recent) >= NEEDED else None

    def see(self, loss: float) -> bool:
        """Takes the loss of a step; whether it spikes."""
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
        """Whether the run is to roll back now."""
        return self.streak >= IN_A_ROW

    def reset(self) -> None:
        """Forgets everything: the losses that come are the measure from now on."""
        self.streak = 0
        self._recent.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"recent": list(self._recent), "streak": self.streak}

    def load(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` gave."""
        self._recent = deque(state["recent"], maxlen=REMEMBERED)
        self.streak = int(state["streak"])
