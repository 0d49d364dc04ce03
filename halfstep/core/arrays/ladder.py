"""Times matmuls within a budget: never starts a size that is not affordable.

The time of a matmul is unknown before it runs, but it grows with the number of operations, so each format climbs a
ladder of sizes from one that is cheap everywhere:

    predicted = MARGIN * time * operations / operations before       for each run; a rung needs ROUNDS

The lowest rung is timed for every format, whatever it costs, so that each has an answer. A higher one is started
only if it fits the format's share of the time that is left. fp32 climbs first, since all others are compared with
it, and no other climbs higher. Half of the budget is for climbing. The rest repeats the highest rung of each
format in turns with fp32 at the same shape, so that other work of the machine slows both alike. A comparison needs
ROUNDS turns (choice.py).

A format alone is compared with nothing: what counts is its peak. It has two thirds of the budget to climb in, and
the rest repeats its fastest rungs, which need not be the highest. The clock and the work are arguments: a test can
fake a device.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from halfstep.core.choice import ROUNDS, Shape, Timing, Work
from halfstep.core.formats import FP32, Format

Run = Callable[[int], object]
"""Does the work that many times, and returns when all are done."""
Start = Callable[[Format, Shape], Run]
"""Makes operands of a format and shape, and returns what multiplies them."""
Clock = Callable[[], float]

MARGIN = 1.5
REPEATS = 15  # on a busy machine the median of 7 chose now one format and now another
# A shorter timing would measure the clock and the launch, so several matmuls are timed together.
ENOUGH = 2e-3
MOST_AT_ONCE = 50


def climb(
    start: Start,
    formats: Iterable[Format],
    shapes: Sequence[Shape],
    *,
    budget: float,
    clock: Clock,
    work: Work = "matmuls",
) -> list[Timing]:
    """Times each format at the shapes, from small to large, that the budget in seconds allows."""
    first, *others = sorted(dict.fromkeys(formats), key=lambda fmt: fmt != FP32)
    race = _Race(start, clock, clock() + budget, runs=ROUNDS if others else 2)
    reach = race.climb(first, shapes, share=budget / 2 / (len(others) + 1) if others else budget * 2 / 3)
    for place, fmt in enumerate(others):
        share = (race.left() - budget / 2) / (len(others) - place)
        race.climb(fmt, shapes[:reach], share=share)
    race.repeat([key for fmt in others for key in ((first, race.highest(fmt)), (fmt, race.highest(fmt)))])
    return [Timing(fmt, shape, tuple(seconds), work) for (fmt, shape), seconds in race.seconds.items()]


@dataclass
class _Race:
    start: Start
    clock: Clock
    deadline: float
    runs: int  # that a rung must have time for
    seconds: dict[tuple[Format, Shape], list[float]] = field(default_factory=dict)
    started: dict[tuple[Format, Shape], Run] = field(default_factory=dict)

    def left(self) -> float:
        return self.deadline - self.clock()

    def climb(self, fmt: Format, shapes: Sequence[Shape], *, share: float) -> int:
        """Times the format at each shape that fits its share, and returns how many did."""
        end = self.clock() + min(share, self.left())
        overhead = per_operation = 0.0
        for place, shape in enumerate(shapes):
            predicted = overhead + self.runs * MARGIN * per_operation * _operations(shape)
            if place and self.clock() + predicted > end:
                return place
            started = self.clock()
            self.started[fmt, shape] = self.start(fmt, shape)
            self._time_runs(fmt, shape, 1)  # warms up: kernels are chosen and compiled, memory is mapped
            once = self._time_runs(fmt, shape, 1)
            overhead = max(0.0, self.clock() - started - 2 * once)
            count = _enough(once)
            again = once if count == 1 else self._time_runs(fmt, shape, count)
            self.seconds[fmt, shape] = [again]
            per_operation = min(once, again) / _operations(shape)  # once may be mostly a launch
        return len(shapes)

    def repeat(self, turns: Sequence[tuple[Format, Shape]]) -> None:
        """Times these in turns while the budget lasts; without any, the two rungs that were fastest."""
        fastest = sorted(self.seconds, key=lambda key: min(self.seconds[key]) / _operations(key[1]))
        turns = list(dict.fromkeys(turns or fastest[:2]))
        for _ in range(REPEATS - 1):
            for key in turns:
                once = min(self.seconds[key])
                count = _enough(once)
                if MARGIN * count * once <= self.left():
                    self.seconds[key].append(self._time_runs(*key, count))

    def highest(self, fmt: Format) -> Shape:
        """Returns the largest shape the format was timed at."""
        return max((shape for f, shape in self.seconds if f == fmt), key=_operations)

    def _time_runs(self, fmt: Format, shape: Shape, count: int) -> float:
        started = self.clock()
        self.started[fmt, shape](count)
        # If the clock did not move, this was below its resolution, and counts as a nanosecond.
        return max(self.clock() - started, 1e-9) / count


def _operations(shape: Shape) -> int:
    m, k, n = shape
    return 2 * m * k * n


def _enough(once: float) -> int:
    return max(1, min(MOST_AT_ONCE, math.ceil(ENOUGH / once)))
