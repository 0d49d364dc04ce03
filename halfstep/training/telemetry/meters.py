"""Where the time of a run goes, and what the device does with it.

    wall = training + saving + evaluation + other
           training = first step + steps;   lost to input is a part of it

*First step*: it compiles, tunes and warms up, in every session; speed, utilization and busy share are of the
steps after it. *Input*: the loop waits for a batch. A device that works on its own has the step before to do
meanwhile, so what is lost is the shorter of the wait and the device's own pause before the step. Where the pause
is not known, the wait counts: at most that much is lost. *Saving* is the time that training stands still for it,
the wait for the last checkpoint among it. *Other*: going back, the artifact, and what lies between.

*Model FLOPs utilization* is tokens a second x FLOPs a token (halfstep.config.flops) / ceiling (ceiling.py).

*Busy share* is the share of the training time in which a step was on the device, by two events that the device
stamps as it comes to them. Reading them waits for nothing: the step's numbers were read before. A pause between
two kernels of one step is not seen, so the share is an upper bound; what it shows is a device that waits between
steps.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, final

from halfstep.config.flops import flops_per_token
from halfstep.config.run import RunConfig
from halfstep.training.session import Session
from halfstep.training.telemetry.ceiling import Ceiling
from halfstep.training.telemetry.tally import Watch

T = TypeVar("T")
Part = Literal["saving", "evaluation"]


@final
class Meters:
    """The clocks of one session of a run. `watch` counts the time spent training."""

    def __init__(
        self,
        config: RunConfig,
        ceiling: Ceiling,
        session: Session,
        watch: Watch,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        training = config.training
        self.ceiling, self.session, self.watch = ceiling, session, watch
        self.flops_per_step = (
            flops_per_token(config.model) * training.batch * training.micro_batches * config.model.context
        )
        self.lost: dict[str, float] = {"input": 0.0, "saving": 0.0, "evaluation": 0.0}
        self.steps = 0
        self._first = 0.0  # seconds of the first step
        self._busy: float | None = 0.0  # of the steps after it; None where one of them is not known
        self._waits: deque[float] = deque()  # for the batches of steps that were not read yet
        self._clock, self._began = clock, clock()

    def fed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, and how long each was waited for."""
        self._waits.clear()  # of steps that were given up
        iterator = iter(batches)
        while True:
            begun = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waits.append(self._clock() - begun)
            yield batch

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Counts the time inside."""
        begun = self._clock()
        try:
            yield
        finally:
            self.lost[name] += self._clock() - begun

    def read(self, result: Any, steps_per_second: float) -> dict[str, float | None]:
        """Takes a step whose numbers were read; what its event says of it."""
        wait = self._waits.popleft()
        spent = self.session.device_time(result)
        idle = None if spent is None else spent[1]
        self.lost["input"] += wait if idle is None else min(wait, idle)
        self.steps += 1
        if self.steps == 1:
            self._first = self.watch.seconds
        elif self._busy is not None:
            self._busy = None if spent is None else self._busy + spent[0]
        return {"mfu": self._utilization(steps_per_second), "input_wait": wait}

    def speed(self) -> float:
        """Steps a second after the first, those that a rollback gave up among them; of all where there are few."""
        steps, seconds = self.steps, self.watch.seconds
        if self._settled:
            steps, seconds = steps - 1, seconds - self._first
        return steps / seconds if seconds > 0 else 0.0

    def totals(self) -> dict[str, Any]:
        """What the event of a stop or an end says."""
        wall, training = self._clock() - self._began, self.watch.seconds
        other = max(0.0, wall - training - self.lost["saving"] - self.lost["evaluation"])
        later, busy = training - self._first, self._busy if self._settled else None
        busy = None if busy is None else min(1.0, busy / later)
        return {
            "spent": {
                "wall": wall, "training": training, "first_step": self._first, **self.lost, "other": other
            },
            "mfu": self._utilization(self.speed()) if self._settled else None,
            "busy": busy,
            "busy_unknown": None if busy is not None else self.session.untimed or "too few steps",
            "memory": self.session.memory(),
        }  # fmt: skip

    @property
    def _settled(self) -> bool:
        """Whether the steps after the first say something: two can be read at once."""
        return self.steps > 2 and self.watch.seconds > self._first

    def _utilization(self, steps_per_second: float) -> float | None:
        if self.ceiling.flops is None:
            return None
        return steps_per_second * self.flops_per_step / self.ceiling.flops


def told(totals: dict[str, Any], ceiling: Ceiling) -> str:
    """Totals in one line: `41 % of 745 TFLOP/s; lost to input 0.1 %, to saving 0.3 %`."""
    spent = totals["spent"]
    lost = ", ".join(
        f"to {name} {100 * spent[name] / spent['wall'] if spent['wall'] else 0.0:.1f} %"
        for name in ("input", "saving")
    )
    used = str(ceiling) if totals["mfu"] is None else f"{100 * totals['mfu']:.3g} % of {ceiling}"
    busy = "" if totals["busy"] is None else f"; device busy {100 * totals['busy']:.1f} %"
    return f"{used}; lost {lost}{busy}"
