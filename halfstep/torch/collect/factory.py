"""A model and its optimizers that a function made, stepped a few times, as an audit records them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.core.audit.record import Record
from halfstep.core.errors import ConfigError
from halfstep.torch.collect.watch import Watch
from halfstep.torch.collect.weights import buffers_of, weights_of


def record_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[Any], Any] | None = None,
    batch: Any = None,
    *,
    steps: int = 20,
) -> Record:
    """Returns what is seen of a model; with a loss, of `steps` updates on the same batch."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if not isinstance(model, nn.Module) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ConfigError(
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
