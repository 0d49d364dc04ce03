"""What a run counts while it goes on: steps, tokens, skips, and the time they took."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import final


@final
class Watch:
    """Time spent training, and the speed over the last few steps.

    Where results are read a step late, two can be read at once: the time between two reads says little of one
    step, and the speed is that of several. The very first step compiles; as soon as there are two after it, the
    speed is theirs.
    """

    def __init__(self, steps: int = 10):
        self.seconds = 0.0
        self._taken = 0
        self._reads: deque[tuple[float, int]] = deque(maxlen=steps + 1)

    def start(self, step: int) -> None:
        """Training goes on after a pause."""
        self._reads.clear()
        self._reads.append((time.perf_counter(), step))

    def read(self, step: int) -> float:
        """A step was read; steps a second."""
        now = time.perf_counter()
        self.seconds += now - self._reads[-1][0]
        self._reads.append((now, step))
        self._taken += 1
        if self._taken == 3 and len(self._reads) == 4:  # no pause since the start
            self._reads.popleft()
        first, before = self._reads[0]
        return (step - before) / (now - first)


@final
@dataclass
class Tally:
    """What the loop counts while it runs."""

    step: int  # the newest one whose numbers were read
    launched: int  # the newest one that the device was given: what the weights are after, or will be
    skipped: int = 0
    tokens: int = 0
    loss: float = math.nan
    watch: Watch = field(default_factory=Watch)
