"""How long a step was on the device, without waiting for it.

Two events around a step are stamped by the device as it comes to them. Their distance is asked for when the
numbers of the step were read, which is after the second: nothing waits. The distance from the end of the step
before says how long the device had no step. Kernels of one step that wait for the host in between are not told
apart from busy ones.

CUDA alone (and ROCm, which goes by its name): elsewhere a step has no span.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch

T = TypeVar("T")

UNREAD = 8  # a benchmark may never read; older ones are forgotten


@final
class Spans:
    """The spans of steps that were launched and not read yet."""

    def __init__(self, device: torch.device):
        self.device = device
        self.untimed = "" if device.type == "cuda" else f"torch times no steps on {device.type}"
        self._open: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=UNREAD)
        self._last: torch.cuda.Event | None = None  # the end of the step that was read last

    def around(self, launch: Callable[[], T]) -> T:
        """Launches a step between two events."""
        if self.untimed:
            return launch()
        stream = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        result = launch()
        end.record(stream)
        self._open.append((result, start, end))
        return result

    def take(self, result: Any) -> tuple[float, float | None] | None:
        """(seconds of a step that was read, seconds without a step before it); None where they are not known."""
        while self._open:
            whose, start, end = self._open.popleft()  # steps before it were given up
            if whose is result and end.query():
                before, self._last = self._last, end
                idle = None if before is None else before.elapsed_time(start) / 1000
                return start.elapsed_time(end) / 1000, idle
        return None
