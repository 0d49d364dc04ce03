"""Watches whatever trains in this process, by hooks that every torch script runs through.

    with Watch() as watch:
        train()
    record = watch.record()

No number of the script changes. Outside the `with` block nothing of it is left in torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.core.audit.record import Record
from halfstep.core.errors import FactoryError
from halfstep.torch.instruments.collect import loop_hooks, system_hooks
from halfstep.torch.instruments.collect.formats import Formats
from halfstep.torch.instruments.collect.log import TrainingLog
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.weights import buffers_of, weights_of


class Watch:
    """The hooks, from `with` to its end.

    Without `formats`, only the calls of the loop are logged, not what the model computes. `settings` are those of
    the log.
    """

    def __init__(self, *, formats: bool = True, **settings: Any):
        self.log = TrainingLog(Formats() if formats else None, **settings)
        self.patches = Patches()

    def __enter__(self) -> "Watch":
        if self.log.formats is not None:
            self.log.formats.install()
        for hooks in (loop_hooks, system_hooks):
            hooks.install(self.log, self.patches)
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.undo()
        if self.log.formats is not None:
            self.log.formats.stop()

    def record(self) -> Record:
        """Returns everything logged so far."""
        return self.log.record()


def record_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[Any], Any] | None = None,
    batch: Any = None,
    *,
    steps: int = 20,
) -> Record:
    """Returns the record of a model and its optimizers; with a loss, of `steps` updates on the same batch."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if not isinstance(model, nn.Module) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise FactoryError(
            f"the factory returned {type(model).__name__} and {type(optimizer).__name__}",
            hint="the first is a torch.nn.Module, the second an optimizer of torch or a list of them",
        )
    if loss_fn is None:
        record = Record("factory", weights=weights_of(model, optimizers), buffers=buffers_of(model))
        record.unseen.append("no step was made: the factory returned neither a loss function nor a batch")
        return record
    with Watch() as watch:
        for _ in range(steps):
            loss_fn(batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    record = watch.record()
    record.source = "factory"
    return record
