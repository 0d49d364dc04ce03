"""The verdict on two ways to train, from the gaps of their losses.

The gaps are those of pairs: run A and run B of a pair have the same seed, so the same weights to begin with and
the same data, and a gap is A's final held-out loss minus B's. From n gaps with mean m and standard deviation s,
Student's t with n - 1 degrees of freedom gives intervals for the true mean, m +- t s / sqrt(n).
Runs that share no seeds make no pairs: there m is the difference of the mean losses, and Welch's interval holds
the luck of all seeds. The intervals decide:

    different      the 99 % interval excludes 0, and |m| > delta; or a run of A ended without a finite loss
    same           the 90 % interval lies inside [-delta, delta] (two one-sided tests, each at 5 %)
    cannot tell    neither; `more_seeds` is how many more pairs, or runs of each, would decide with these m and s

`delta` is the gap that nobody needs to care about. Its default is half the seed spread of B, the reference: the
standard deviation of its held-out losses. The range of the losses would not do: it grows with the number of seeds,
and so the verdict "same" would get cheaper the more is run.

Of several verdicts that are read together, more come out by chance. `holm` corrects for their number: the p of a
difference is that of the interval that excludes 0, the p of sameness the larger one of the two one-sided tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
    p_different: float = 1.0  # below 1 - SURE: different
    p_same: float = 1.0  # at most (1 - CLOSE) / 2: same


@dataclass(frozen=True)
class _Mean:
    """What is known of a mean gap: from it and its spread follows what more seeds would say."""

    mean: float
    variance: float  # of the mean of n
    n: int  # pairs, or runs of the side that has fewer
    degrees: int

    def interval(self, level: float, n: int | None = None) -> Interval:
        """Returns the interval that holds the true mean with this probability, from these seeds or from `n`."""
        n = n or self.n
        half = t_quantile(0.5 + level / 2, self.degrees * (n - 1) // (self.n - 1))
        half *= math.sqrt(self.variance * self.n / n)
        return self.mean - half, self.mean + half

    def decide(self, delta: float, n: int | None = None) -> Kind:
        """Returns what these seeds decide, or what `n` would."""
        low, high = self.interval(SURE, n)
        if abs(self.mean) > delta and (low > 0 or high < 0):
            return "different"
        low, high = self.interval(CLOSE, n)
        return "same" if -delta <= low and high <= delta else "cannot tell"

    def p_values(self, delta: float) -> tuple[float, float]:
        """Returns the p of a difference and the p of sameness; the one that the mean speaks against is 1."""
        excess = abs(self.mean) - delta
        if excess > 0:
            return self._tail(abs(self.mean)), 1.0
        return 1.0, self._tail(-excess) / 2

    def _tail(self, distance: float) -> float:
        """Returns the probability that the mean is further than this from the true one, on either side."""
        if not self.variance:
            return 0.0
        return 1.0 - _t_mass(math.atan(distance / math.sqrt(self.variance * self.degrees)), self.degrees)

    def more_seeds(self, delta: float) -> int | None:
        """Returns how many more seeds decide with this mean and spread: by bisection, as intervals only narrow."""
        if self.decide(delta, MOST_SEEDS) == "cannot tell":
            return None
        undecided, decided = self.n, MOST_SEEDS
        while decided - undecided > 1:
            middle = (undecided + decided) // 2
            if self.decide(delta, middle) == "cannot tell":
                undecided = middle
            else:
                decided = middle
        return decided - self.n


def verdict(gaps: Sequence[float], delta: float) -> Verdict:
    """Returns what the gaps of held-out losses say, one for each pair; infinite where A's run has diverged."""
    if not gaps or any(math.isnan(gap) for gap in gaps):
        raise IncomparableError("a verdict needs the gap of at least one pair, and no gap may be NaN")
    n = len(gaps)
    _check_delta(delta)
    if n == 1 or not all(map(math.isfinite, gaps)):
        return _undecided(gaps, float(np.mean(gaps)), delta)
    return _judged(_Mean(float(np.mean(gaps)), float(np.var(gaps, ddof=1)) / n, n, n - 1), delta)


def unpaired_verdict(a: Sequence[float], b: Sequence[float], delta: float) -> Verdict:
    """Returns what the losses of runs with different seeds say; infinite where A's run has diverged."""
    _check_delta(delta)
    mean = float(np.mean(a)) - float(np.mean(b))
    if min(len(a), len(b)) == 1 or not all(map(math.isfinite, a)):
        return _undecided(a, mean, delta)
    parts = [float(np.var(losses, ddof=1)) / len(losses) for losses in (a, b)]
    shares = [part / (sum(parts) or 1.0) for part in parts]  # Welch and Satterthwaite
    divisor = sum(share**2 / (len(losses) - 1) for share, losses in zip(shares, (a, b), strict=True))
    degrees = math.floor(1 / divisor) if divisor else len(a) + len(b) - 2
    return _judged(_Mean(mean, sum(parts), min(len(a), len(b)), degrees), delta)


def _check_delta(delta: float) -> None:
    if not 0 <= delta < math.inf:
        raise IncomparableError(f"delta is {delta}, and a gap to tolerate is a finite number of at least 0")


def _undecided(values: Sequence[float], mean: float, delta: float) -> Verdict:
    """Returns the verdict on one pair, or on runs of which some diverged."""
    diverged = sum(math.isinf(value) for value in values)
    beyond = (math.inf, math.inf) if diverged else (-math.inf, math.inf)
    kind: Kind = "different" if diverged else "cannot tell"
    p_different = 0.0 if diverged else 1.0
    return Verdict(
        kind, math.inf if diverged else mean, beyond, beyond, delta, diverged=diverged, p_different=p_different
    )


def _judged(mean: _Mean, delta: float) -> Verdict:
    kind = mean.decide(delta)
    more = mean.more_seeds(delta) if kind == "cannot tell" else None
    p_different, p_same = mean.p_values(delta)
    return Verdict(
        kind,
        mean.mean,
        mean.interval(CLOSE),
        mean.interval(SURE),
        delta,
        more,
        p_different=p_different,
        p_same=p_same,
    )


def holm(verdicts: Sequence[Verdict | None], looks: int = 1) -> list[Kind]:
    """Returns what verdicts of one family are worth together (Holm); None is a verdict that is still to come.

    The chance that any of them is wrong is that of a single one. `looks` is how often each may be asked for as
    seeds are added: each look gets its share of that chance (Bonferroni).
    """
    different = _rejected([looks * v.p_different if v else 1.0 for v in verdicts], 1 - SURE)
    same = _rejected([looks * v.p_same if v else 1.0 for v in verdicts], (1 - CLOSE) / 2)
    kinds: list[tuple[bool, bool]] = list(zip(different, same, strict=True))
    return ["different" if apart else "same" if near else "cannot tell" for apart, near in kinds]


def _rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Returns which of m hypotheses fall: the smallest p against level / m, the next against level / (m - 1)"""
    rejected = [False] * len(p_values)
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] > level / (len(p_values) - place):
            break
        rejected[i] = True
    return rejected


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Returns how far the losses of pairs go together; None of fewer than three, or of losses that do not vary."""
    if len(a) < 3 or not all(map(math.isfinite, (*a, *b))) or not (np.std(a) and np.std(b)):
        return None
    return float(np.corrcoef(a, b)[0, 1])


def steps_behind(steps: NDArray[np.int64], losses: NDArray[np.float64], gap: float) -> int | None:
    """Returns how many more steps lower a loss by `gap`, at its slope over the last quarter of the steps.

    None if the loss does not fall there beyond doubt, or if it would take longer than the whole training has.
    """
    last = steps > steps[-1] - (steps[-1] - steps[0]) / 4
    x, y = steps[last] - np.mean(steps[last]), losses[last]
    if len(x) < 4 or not np.isfinite(y).all():
        return None
    slope = float(x @ y / (x @ x))
    error = math.sqrt(np.var(y - slope * x) * len(x) / (len(x) - 2) / float(x @ x))
    if slope + t_quantile(SURE, len(x) - 2) * error >= 0 or gap > -slope * steps[-1]:
        return None
    return math.ceil(gap / -slope)


def seed_spread(losses: Sequence[float]) -> float:
    """Returns the spread of the final losses of one way to train over seeds: their standard deviation."""
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        raise IncomparableError(
            f"the spread over seeds needs two finite losses or more, and there are {list(losses)}",
            hint="give the reference more seeds, or say with --delta which gap does not matter",
        )
    return float(np.std(losses, ddof=1))


@cache
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
