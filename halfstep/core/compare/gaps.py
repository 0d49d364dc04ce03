"""The verdict on two ways to train, from the gaps of their losses.

The gaps are those of pairs: run A and run B of a pair have the same seed, so the same weights to begin with and
the same data, and a gap is A's final held-out loss minus B's. From n gaps with mean m and standard deviation s,
Student's t with n - 1 degrees of freedom gives intervals for the true mean, m +- t s / sqrt(n):

    different      the 99 % interval excludes 0, and |m| > delta; or a run of A ended without a finite loss
    same           the 90 % interval lies inside [-delta, delta] (two one-sided tests, each at 5 %)
    cannot tell    neither; `more_seeds` is how many more pairs would decide if m and s stay as they are

`delta` is the gap that nobody needs to care about. Its default is half the seed spread of B, the reference: the
standard deviation of its held-out losses. The range of the losses would not do: it grows with the number of seeds,
and so the verdict "same" would get cheaper the more is run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halfstep.core.errors import HalfstepError

SURE, CLOSE = 0.99, 0.90  # of the interval that must exclude 0, and of the one that must lie inside delta
MOST_SEEDS = 1000  # nobody trains more: then `more_seeds` is None

Kind = Literal["same", "different", "cannot tell"]
Interval = tuple[float, float]


class CompareError(HalfstepError):
    """Runs, logs or policies that cannot be compared."""


class CompareInputError(CompareError):
    """What is to be compared does not exist, cannot be read, or is the same twice."""


class IncomparableError(CompareError):
    """Runs or numbers of which no verdict can be made."""


@dataclass(frozen=True)
class Verdict:
    """Whether two ways to train are the same, and the numbers that decide."""

    kind: Kind
    mean: float  # of the gaps, A minus B
    interval90: Interval
    interval99: Interval
    delta: float
    more_seeds: int | None = None  # None: decided, or one pair only, or more than MOST_SEEDS
    diverged: int = 0  # runs of A that ended without a finite loss


def verdict(gaps: Sequence[float], delta: float) -> Verdict:
    """Returns what the gaps of held-out losses say, one for each pair; infinite where A's run has diverged."""
    if not gaps or any(math.isnan(gap) for gap in gaps):
        raise IncomparableError("a verdict needs the gap of at least one pair, and no gap may be NaN")
    if not 0 <= delta < math.inf:
        raise IncomparableError(f"delta is {delta}, and a gap to tolerate is a finite number of at least 0")
    if diverged := sum(math.isinf(gap) for gap in gaps):
        beyond = (math.inf, math.inf)
        return Verdict("different", math.inf, beyond, beyond, delta, diverged=diverged)
    n, mean = len(gaps), float(np.mean(gaps))
    if n == 1:
        unknown = (-math.inf, math.inf)
        return Verdict("cannot tell", mean, unknown, unknown, delta)
    spread = float(np.std(gaps, ddof=1))
    close, sure = interval(mean, spread, n, CLOSE), interval(mean, spread, n, SURE)
    kind = _decide(mean, spread, n, delta)
    more = _more_seeds(mean, spread, n, delta) if kind == "cannot tell" else None
    return Verdict(kind, mean, close, sure, delta, more)


def seed_spread(losses: Sequence[float]) -> float:
    """Returns the spread of the final losses of one way to train over seeds: their standard deviation."""
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        raise IncomparableError(
            f"the spread over seeds needs two finite losses or more, and there are {list(losses)}",
            hint="give the reference more seeds, or say with --delta which gap does not matter",
        )
    return float(np.std(losses, ddof=1))


def interval(mean: float, spread: float, n: int, level: float) -> Interval:
    """Returns the interval that holds the true mean with this probability, given that of n values."""
    half = t_quantile(0.5 + level / 2, n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half


def _decide(mean: float, spread: float, n: int, delta: float) -> Kind:
    low, high = interval(mean, spread, n, SURE)
    if abs(mean) > delta and (low > 0 or high < 0):
        return "different"
    low, high = interval(mean, spread, n, CLOSE)
    return "same" if -delta <= low and high <= delta else "cannot tell"


def _more_seeds(mean: float, spread: float, n: int, delta: float) -> int | None:
    """Returns how many more pairs decide with this mean and spread: intervals only narrow, so bisection does."""
    if _decide(mean, spread, MOST_SEEDS, delta) == "cannot tell":
        return None
    undecided, decided = n, MOST_SEEDS
    while decided - undecided > 1:
        middle = (undecided + decided) // 2
        if _decide(mean, spread, middle, delta) == "cannot tell":
            undecided = middle
        else:
            decided = middle
    return decided - n


def t_quantile(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t above the median, to the last bits: by bisection of its distribution."""
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t / sqrt(degrees)
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_mass(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(high)


def _t_mass(angle: float, degrees: int) -> float:
    """Returns the probability of |t| < sqrt(degrees) tan(angle): a finite sum for whole degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
