"""The numbers and the device time of steps that were launched, on their way to the host.

A device works off one queue: a request made while the next step runs would wait behind it. So the copy to pinned
memory is queued right behind the step itself, and reading waits for that copy's own event.

On CUDA (and ROCm) the device stamps the events around a step: their distance is its device time, that from the end
of the step before is idle time. Kernels of one step that wait for the host in between count as busy.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.core.errors import warn_caller
from halfstep.core.scaling import DynamicScale, Scale, ScaleAlarm

NAMES = ("loss", "skipped", "scale", "grad_norm", "stuck")
UNREAD = 8  # a benchmark may never read; older steps are forgotten
LOOKS = range(5, 13)  # updates: the first ones compile kernels and make states
EVERY = 4  # updates; a scale takes ten to fall from where the alarm begins to its floor


class _Launched(NamedTuple):
    result: Any
    numbers: Tensor
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None


@final
class Unread:
    """A copy of a tensor to the host that may still be running."""

    def __init__(self, numbers: Tensor, finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None):
        self._finish = finish
        self._event: Any = None
        if numbers.device.type == "cpu":
            self._numbers = numbers.clone()
            return
        self._numbers = numbers.to("cpu", non_blocking=True)  # torch allocates it in pinned memory
        self._event = torch.get_device_module(numbers.device).Event()
        self._event.record()

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns the numbers; waits for the kernels that compute them, not for later ones."""
        if self._event is not None:
            self._event.synchronize()
        numbers = self._numbers.numpy()
        return numbers if self._finish is None else self._finish(numbers)


@final
class ScaleWatch:
    """Warns once when the loss scale is low and falling. It reads the scale of a past update, without waiting."""

    def __init__(self, law: Scale, device: torch.device):
        self.device = device
        watched = isinstance(law, DynamicScale) and device.type != "meta"  # a meta tensor has no numbers
        self._alarm: ScaleAlarm | None = ScaleAlarm(law) if watched else None  # type: ignore[arg-type]
        self.forget()

    def forget(self) -> None:
        """Forgets the scale: another state was loaded."""
        self._updates, self._last = 0, 0.0
        self._copy: Unread | None = None

    def look(self, scale: Tensor) -> None:
        """Takes the scale of the update that was launched last."""
        if self._alarm is None:
            return
        if self.device.type == "cpu":
            self._observe(float(scale))
            return
        if self._copy is not None and self._copy.ready:
            self._observe(float(self._copy.read()))
            self._copy = None
        if self._copy is None and self._updates % EVERY == 0:
            self._copy = Unread(scale)
        self._updates += 1

    def _observe(self, scale: float) -> None:
        message = self._alarm.observe(scale, falling=scale < self._last) if self._alarm is not None else ""
        self._last = scale
        if message:
            self._alarm = None
            warn_caller(message)


@final
class HostWatch:
    """Whether a GPU waits for the host: asked in a few updates, without waiting.

    An event is queued behind the last backward pass. If the GPU has passed it when the host comes to the
    optimizers, it had nothing left to do.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._updates = 0
        self._event: Any = None
        self._waited: list[bool] = []

    def mark(self) -> None:
        """Takes note that the backward passes of an update are launched."""
        self._updates += 1
        if self._updates not in LOOKS or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self.device))

    def look(self) -> None:
        """Asks whether the GPU has computed them; the optimizers' steps are not launched yet."""
        if self._event is not None:
            self._waited.append(self._event.query())
            self._event = None

    @property
    def finding(self) -> str:
        """How often the GPU waited, if it nearly always did; empty if not, or if it is not known yet."""
        waits, looks = sum(self._waited), len(self._waited)
        limit = looks == len(LOOKS) and waits >= 0.75 * looks
        return f"the host is the limit: the GPU waited for it in {waits} of {looks} updates" if limit else ""


@final
class Readback:
    """A queue of launched steps that were not read yet."""

    def __init__(self, device: torch.device):
        self.device = device
        self.untimed = "" if device.type == "cuda" else f"torch times no steps on {device.type}"
        self._queue: deque[_Launched] = deque(maxlen=UNREAD)
        self._read: _Launched | None = None  # the step that was read last
        self._end: torch.cuda.Event | None = None  # of the step that was timed last

    def start(self) -> torch.cuda.Event | None:
        """Marks the present moment on the device: for `send`, the start of a step."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def send(self, result: Any, start: torch.cuda.Event | None = None) -> None:
        """Queues the copy of a step's numbers behind the step, without waiting."""
        bad = getattr(result, "bad_rank", None)
        values = [getattr(result, name) for name in NAMES] + ([] if bad is None else [bad])
        numbers = torch.stack([value.float() for value in values])
        if self.device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)  # torch makes it pinned
        self._queue.append(_Launched(result, numbers, start, self.start()))

    def read(self, result: Any) -> dict[str, float]:
        """Returns a step's numbers; waits until that step is done, but not for those after it."""
        if all(step.result is not result for step in self._queue):
            self.send(result)  # forgotten, or another run's
        while True:
            step = self._queue.popleft()  # steps before it will not be read
            if step.result is result:
                if step.end is not None:
                    step.end.synchronize()
                self._read = step
                return dict(zip((*NAMES, "bad_rank"), step.numbers.tolist(), strict=False))

    def device_time(self, result: Any) -> tuple[float, float | None] | None:
        """Returns (seconds of the step that was read last, idle seconds before it), or None if unknown."""
        step, self._read = self._read, None
        if step is None or step.result is not result or step.start is None or step.end is None:
            return None
        before, self._end = self._end, step.end
        idle = None if before is None else before.elapsed_time(step.start) / 1000
        return step.start.elapsed_time(step.end) / 1000, idle
