"""A step's numbers on their way to the host, sent as the step is launched.

A device works off one queue. Reading a step while the next one runs must not ask the device for anything: what is
asked then waits behind the next step, and the device has nothing to do while the host launches the one after. So
the copy is queued right behind the step it is of, into pinned memory, and reading waits for an event of its own.
"""

from collections import deque
from typing import Any, final

import torch
from torch import Tensor

NAMES = ("loss", "skipped", "scale", "grad_norm", "stuck")
UNREAD = 8  # a benchmark may never read; older ones are forgotten


@final
class Numbers:
    """The numbers of steps that were launched and not read yet."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sent: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque(maxlen=UNREAD)

    def send(self, result: Any) -> None:
        """Queues the copy of a step's numbers behind the step; waits for nothing."""
        stacked = torch.stack([getattr(result, name).float() for name in NAMES])
        event = None
        if self.device.type == "cuda":
            stacked = stacked.to("cpu", non_blocking=True)  # pinned: torch makes it so
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        self._sent.append((result, stacked, event))

    def take(self, result: Any) -> dict[str, float]:
        """A step's numbers; waits until that step is done, and not for those after it."""
        if all(whose is not result for whose, _, _ in self._sent):
            self.send(result)  # forgotten, or another run's
        while True:
            whose, values, event = self._sent.popleft()  # steps before it were given up
            if whose is result:
                if event is not None:
                    event.synchronize()
                return dict(zip(NAMES, values.tolist(), strict=True))
