"""Exponential moving averages of masters, in fp32: the rule of core.averages."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from halfstep.core.averages import averaged, check_decay
from halfstep.mlx.optim.masters import Masters


class Averages:
    """The average of each parameter's master."""

    def __init__(self, masters: Masters, decay: float):
        check_decay(decay)
        self.masters, self.decay = masters, decay
        self.arrays = masters.wide()  # compiled code keeps this dict

    def update(self, applied: mx.array) -> None:
        """Moves the averages towards the masters if `applied`, and not if the update was skipped."""
        share = mx.where(applied, 1.0 - self.decay, 0.0)
        self.arrays.update(averaged(self.arrays, self.masters.wide(), share))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the parameters are the averages, held as masters are; after, the masters are back, exactly."""
        masters = self.masters
        before, remainders = {n: place.array for n, place in masters.places.items()}, dict(masters.remainders)
        masters.set(self.arrays)
        try:
            yield
        finally:
            masters.remainders.update(remainders)
            masters.put(before)
