"""Exponential moving averages of masters, in fp32: the rule of core.averages, on all tensors in three launches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.core.averages import check_decay
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.optim.masters import BY_DTYPE, Masters


class Averages:
    """The average of each parameter's master."""

    def __init__(self, masters: Masters, parameters: Sequence[Tensor], decay: float):
        check_decay(decay)
        self.masters, self.decay = masters, decay
        self.parameters = [p for p in parameters if p.dtype in BY_DTYPE]
        self.restart()

    def restart(self) -> None:
        """Begins from the masters as they are now."""
        self.values = [w.detach().clone() for w in self.masters.wide(self.parameters)]

    def named(self) -> dict[str, Tensor]:
        """Returns the averages by the names of their parameters."""
        return {self.masters.names[p]: a for p, a in zip(self.parameters, self.values, strict=True)}

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Moves the averages towards the masters if `applied`, a device scalar, is 1, and not if it is 0."""
        away = torch._foreach_sub([w.detach() for w in self.masters.wide(self.parameters)], self.values)
        torch._foreach_mul_(away, (1.0 - self.decay) * applied)
        torch._foreach_add_(self.values, away)

    @contextmanager
    def swap_in(self, count: Tensor) -> Iterator[None]:
        """Inside, the parameters are the averages, held as masters are; after, the masters are back, exactly."""
        remainders = [lo for lo in self.masters.layout(self.parameters).remainders if lo is not None]
        live = [*map(values_of, self.parameters), *remainders]
        before = [t.clone() for t in live]
        with torch.no_grad():
            self.masters.assign(self.parameters, self.values, count)
        try:
            yield
        finally:
            for t, old in zip(live, before, strict=True):
                t.copy_(old)
            self.masters.note_writes(self.parameters)
