"""The order in which modules are made narrow, and the search for how far that may go.

Each module has options: a format for its operands and one for the gradients that enter it, what they damage, and
what the module then costs. The first option is the base, which damages nothing.

1.  A module's options become a ladder: the steps from the base on that save most per damage, each step saving less
    per damage than the one before (the convex hull). What costs as much and damages more is on no ladder.
2.  The steps of all ladders, sorted by what they save per damage, are a path from the base to the narrowest
    policy. Damage is a prediction, so only the order is taken from it.
3.  How far the path may be gone is asked (`meets`), which trains runs and takes long. The end comes first. If it
    fails, the path is bisected: where half of the predicted damage is left, and by turns where half of the steps
    are, as the prediction may be wrong. The step that fails is left out, and the rest of the path is tried again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Option:
    """Formats for one module; empty where they are those of the base."""

    compute: str = ""
    grad: str = ""
    damage: float = 0.0  # predicted: the share of a step's descent that is lost
    cost: float = 0.0  # of a training step: seconds or bytes


@dataclass(frozen=True)
class Step:
    """One module, made narrower."""

    module: str
    before: Option
    after: Option

    @property
    def damages(self) -> float:
        """How much more of the descent is lost."""
        return self.after.damage - self.before.damage

    @property
    def worth(self) -> float:
        """How much less a training step costs, per damage."""
        saved = self.before.cost - self.after.cost
        return saved / self.damages if self.damages > 0 else math.inf


# What each module runs in; modules that are not named run as the base does.
Assignment = dict[str, Option]


@dataclass
class SearchResult:
    """How a search ended."""

    steps: list[Step] = field(default_factory=list)  # the narrowest that is known to meet the budget
    left_out: list[Step] = field(default_factory=list)  # steps that did not meet it
    asked: int = 0
    finished: bool = True  # False if it stopped because it may ask no more

    @property
    def assignment(self) -> Assignment:
        """What the modules run in."""
        return assignment_of(self.steps)


def ladder(options: Sequence[Option]) -> list[Option]:
    """Returns the options worth having, from the base to the cheapest, by what each saves per damage."""
    rungs = [options[0]]
    while True:
        here = rungs[-1]
        if not (cheaper := [o for o in options if o.cost < here.cost and math.isfinite(o.damage)]):
            return rungs
        rungs.append(max(cheaper, key=lambda o: (Step("", here, o).worth, -o.cost)))


def path_of(modules: Mapping[str, Sequence[Option]]) -> list[Step]:
    """Returns the steps of all modules, those that save most per damage first."""
    steps = [Step(module, a, b) for module, options in modules.items() for a, b in pairwise(ladder(options))]
    return sorted(steps, key=lambda step: -step.worth)


def assignment_of(steps: Sequence[Step]) -> Assignment:
    """Returns what the modules run in after some steps."""
    return {step.module: step.after for step in steps}


def search(
    modules: Mapping[str, Sequence[Option]], meets: Callable[[Assignment], bool], most: int
) -> SearchResult:
    """Returns the narrowest policy that meets the budget, asking at most so often."""
    path, found = path_of(modules), SearchResult()

    def ask(steps: Sequence[Step]) -> bool:
        found.asked += 1
        return meets(assignment_of(steps))

    while True:
        stuck = {step.module for step in found.left_out}
        steps = [*found.steps, *(s for s in path if s not in found.steps and s.module not in stuck)]
        low, high = len(found.steps), len(steps)
        if low == high:
            return found
        if found.asked == most:
            break
        if ask(steps):
            found.steps = steps
            return found
        by_damage = True
        while high - low > 1 and found.asked < most:
            middle = _middle(steps, low, high, by_damage=by_damage)
            low, high = (middle, high) if ask(steps[:middle]) else (low, middle)
            found.steps, by_damage = steps[:low], not by_damage
        if high - low > 1:
            break
        found.left_out.append(steps[low])
    found.finished = False
    return found


def _middle(steps: Sequence[Step], low: int, high: int, *, by_damage: bool) -> int:
    """Returns where to cut between a cut that meets the budget and one that does not."""
    if not by_damage:
        return (low + high) // 2
    sums = [0.0, *accumulate(step.damages for step in steps)]
    half = (sums[low] + sums[high]) / 2
    return max([low + 1, *(cut for cut in range(low + 1, high) if sums[cut] <= half)])
