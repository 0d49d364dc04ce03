"""Where the time of a run goes, how busy the device is, and what it could do at most.

    wall = training + saving + evaluation + monitor + other
           training = first step + steps;   lost to input is a part of it

The first step compiles, tunes and warms up: speed, utilization and busy share are of the steps after it. While the
loop waits for input, an asynchronous device still has the step before to do, so what is lost is the shorter of the
wait and the device's own pause before the step; if that is unknown, the whole wait.

Model FLOPs utilization is tokens per second x FLOPs per token (config.model) / ceiling. The busy share, by two
events that the device timestamps, does not see a pause inside a step: it is an upper bound.

The ceiling is the most FLOPs per second that the device does in the policy's `compute` format. Matmuls are timed
(`halfstep.tools.probe`), and the fastest repeat counts: a data sheet's number holds at clocks that the device does
not keep. If only matmuls that are mostly launch time were affordable, the ceiling is unknown. fp8 operands, which
rules give to some matmuls, do not move it: an fp8 run compares with a bf16 run, and may exceed it. A resumed run
uses the recorded value, unless its device or its format is another.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from halfstep.config.model import flops_per_token
from halfstep.config.run import RunConfig
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import Format
from halfstep.core.policy import Policy


@dataclass(frozen=True)
class Ceiling:
    """FLOPs per second, and what was measured; or None, and why nothing was."""

    flops: float | None
    basis: str

    def record(self) -> dict[str, Any]:
        """Returns the ceiling as the `start` event holds it."""
        return {"flops": self.flops, "told": self.basis}

    def __str__(self) -> str:
        return f"unknown: {self.basis}" if self.flops is None else format_flops(self.flops)


UNMEASURED = Ceiling(None, "this device was not measured; `halfstep train` measures it")


def recorded_ceiling(events: Path, device: str, fmt: Format) -> Ceiling | None:
    """Returns the ceiling that an earlier session of the run measured in a format on a device of that name."""
    from halfstep.training.telemetry.events import line_starts, newest_first  # loads numpy

    if not events.exists():  # a death before the first event, or a copy of the checkpoints alone
        return None
    for start in newest_first(events, line_starts("start")):
        flops = (start.get("ceiling") or {}).get("flops")
        if isinstance(flops, float) and flops > 0 and start.get("device", {}).get("name") == device:
            with suppress(HalfstepError):  # a policy of another version
                if Policy.parse(str(start.get("policy"))).compute.format == fmt:
                    return Ceiling(flops, str(start["ceiling"].get("told")))
    return None


def format_flops(number: float) -> str:
    """Returns FLOPs per second in the unit that suits them: `745 TFLOP/s`."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if number >= size:
            return f"{number / size:.3g} {letter}FLOP/s"
    return f"{number / 1e6:.3g} MFLOP/s"


T = TypeVar("T")
Part = Literal["saving", "evaluation", "monitor"]


class Watch:
    """Time spent training, and the speed over the last few steps: results read late can be read two at once."""

    def __init__(self, steps: int = 10):
        self.seconds = 0.0
        self._taken = 0
        self._reads: deque[tuple[float, int]] = deque(maxlen=steps + 1)

    def start(self, step: int) -> None:
        """Starts timing after a pause."""
        self._reads.clear()
        self._reads.append((time.perf_counter(), step))

    def read(self, step: int) -> float:
        """Records that a step was read; returns steps per second."""
        now = time.perf_counter()
        self.seconds += now - self._reads[-1][0]
        self._reads.append((now, step))
        self._taken += 1
        if self._taken == 3 and len(self._reads) == 4:  # no pause since the start
            self._reads.popleft()
        first, before = self._reads[0]
        return (step - before) / (now - first)


@dataclass
class Tally:
    """What the loop counts while it runs."""

    step: int  # the newest one whose numbers were read
    launched: int  # the newest one launched on the device: the weights are after it, or will be
    skipped: int = 0
    tokens: int = 0
    loss: float = math.nan
    watch: Watch = field(default_factory=Watch)


class Meters:
    """The clocks of one session (config/session.py) of a run. `watch` counts the time spent training."""

    def __init__(
        self,
        config: RunConfig,
        ceiling: Ceiling,
        session: Any,
        watch: Watch,
        *,
        devices: int = 1,
        begun: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        training = config.training
        self.ceiling, self.session, self.watch = ceiling, session, watch
        self.flops_per_step = (
            flops_per_token(config.model) * training.batch * training.micro_batches * config.model.context
        ) / devices  # of each
        self.lost: dict[str, float] = dict.fromkeys(("input", "saving", "evaluation", "monitor"), 0.0)
        self.steps = 0
        self._first = 0.0  # seconds of the first step
        self._busy: float | None = 0.0  # of the steps after it; None if one of them is unknown
        self._waits: deque[float] = deque()  # for the batches of steps that were not read yet
        self._clock, self._began = clock, clock()
        self._command_began = self._began if begun is None else begun
        self.until_first_step: float | None = None  # seconds from the start of the command

    def start(self) -> None:
        """Starts the wall clock."""
        self._began = self._clock()

    def timed_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches, and times the wait for each."""
        self._waits.clear()  # of steps that a rollback gave up
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
        """Counts the time of the block towards a part."""
        begun = self._clock()
        try:
            yield
        finally:
            self.lost[name] += self._clock() - begun

    def read(self, result: Any, steps_per_second: float) -> dict[str, float | None]:
        """Records a step whose numbers were read; returns the fields of its event."""
        wait = self._waits.popleft()
        spent = self.session.device_time(result)
        idle = None if spent is None else spent[1]
        self.lost["input"] += wait if idle is None else min(wait, idle)
        self.steps += 1
        if self.steps == 1:
            self._first, self.until_first_step = self.watch.seconds, self._clock() - self._command_began
        elif self._busy is not None:
            self._busy = None if spent is None else self._busy + spent[0]
        return {"mfu": self._utilization(steps_per_second), "input_wait": wait}

    def speed(self) -> float:
        """Returns steps per second after the first, with those a rollback gave up; of all if there are few."""
        steps, seconds = self.steps, self.watch.seconds
        if self._settled:
            steps, seconds = steps - 1, seconds - self._first
        return steps / seconds if seconds > 0 else 0.0

    def totals(self) -> dict[str, Any]:
        """Returns the fields of a `stop` or `end` event."""
        wall, training = self._clock() - self._began, self.watch.seconds
        other = max(0.0, wall - training - sum(self.lost.values()) + self.lost["input"])  # input is in training
        later, busy = training - self._first, self._busy if self._settled else None
        busy = None if busy is None else min(1.0, busy / later)
        return {
            "spent": {
                "wall": wall, "training": training, "first_step": self._first, **self.lost, "other": other
            },
            "until_first_step": self.until_first_step,
            "mfu": self._utilization(self.speed()) if self._settled else None,
            "busy": busy,
            "busy_unknown": None if busy is not None else self.session.untimed or "too few steps",
            "memory": self.session.memory(),
        }  # fmt: skip

    @property
    def _settled(self) -> bool:
        """Whether there are enough steps after the first: two can be read at once."""
        return self.steps > 2 and self.watch.seconds > self._first

    def _utilization(self, steps_per_second: float) -> float | None:
        if self.ceiling.flops is None:
            return None
        return steps_per_second * self.flops_per_step / self.ceiling.flops


def describe_totals(totals: dict[str, Any], ceiling: Ceiling) -> str:
    """Returns totals in one line: `41 % of 745 TFLOP/s; lost to input 0.1 %, to saving 0.3 %`."""
    spent = totals["spent"]
    lost = ", ".join(
        f"to {name} {100 * spent[name] / spent['wall'] if spent['wall'] else 0.0:.1f} %"
        for name in ("input", "saving")
    )
    mfu = totals["mfu"]
    used = str(ceiling) if mfu is None else f"{100 * mfu:.3g} % of {ceiling}"
    if mfu is not None and mfu > 1:
        used = f"unknown: steps did more than 100 % of {ceiling}"
    busy = "" if totals["busy"] is None else f"; device busy {100 * totals['busy']:.1f} %"
    return f"{used}; lost {lost}{busy}"
