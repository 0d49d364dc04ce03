"""What changes over a run: the learning rate, which warms up, stays and warms down, and Muon's momentum.

With n updates applied so far, S steps, a warmup of w steps and a warmdown of d = round(share * S) steps, the
next update's rate is the optimizer's rate times

    factor(n) = min( 1,  (n + 1) / w,  (S - n) / d )          a part whose length is 0 is left out

never 0, since an update at rate 0 is a batch thrown away. Past the end the factor stays at 1 / d.

n counts *applied* updates, those that loss scaling did not skip, so a skipped step delays the schedule instead of
bending it. That count is on the device. So the law is only arithmetic, comparison and `xp.where`, as in
core.scaling: it runs traced on any array namespace and never needs the truth value of an array. n may be an
integer or a float scalar (fp32 counts exactly to 2^24); the strict array API divides floats only.

Muon's momentum rises along a straight line, from `start` at the first update to `end` after `warmup` of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from halfstep.config.run import TrainingConfig
from halfstep.core.scaling import Namespace

Scalar = Any


def build_schedule(training: TrainingConfig) -> Callable[[Scalar, Namespace], Scalar]:
    """Returns the factor of a run as a function of the updates applied so far and their array namespace."""
    return partial(factor, steps=training.steps, warmup=training.warmup_steps, warmdown_share=training.warmdown)


def factor(step: Scalar, xp: Namespace, *, steps: int, warmup: int, warmdown_share: float) -> Scalar:
    """Returns what the learning rate is multiplied by after `step` applied updates: a scalar of `xp` in (0, 1]."""
    assert steps >= 1
    assert warmup >= 0
    assert 0 <= warmdown_share <= 1
    # A length of 1 is not a slope either: its one step has the factor 1.
    up, down = max(1, warmup), max(1, round(warmdown_share * steps))
    rise = xp.where(step + 1 < up, (step + 1) / up, 1.0)
    left = xp.where(step < steps - 1, steps - step, 1)
    fall = xp.where(left < down, left / down, 1.0)
    return xp.where(fall < rise, fall, rise)


def momentum(step: Scalar, xp: Namespace, *, start: float, end: float, warmup: int) -> Scalar:
    """Returns Muon's momentum after `step` applied updates, a scalar of `xp`."""
    assert warmup >= 1
    share = xp.where(step < warmup, step / warmup, 1.0)
    return (1 - share) * start + share * end
