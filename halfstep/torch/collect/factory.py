"""A model and its optimizers that a function made, stepped a few times, as an audit records them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.core.audit.record import Record
from halfstep.core.errors import ConfigError
from halfstep.torch.collect.formats import Formats
from halfstep.torch.collect.updates import UpdateWatch
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
    record, watch = Record("factory", framework="torch"), UpdateWatch()
    if loss_fn is None:
        record.unseen.append("no step was made: the factory returned neither a loss function nor a batch")
    else:
        formats = Formats()
        try:
            formats.install()
            formats.start({"": model})
            _steps(record, watch, optimizers, loss_fn, batch, steps)
        finally:
            formats.stop()
        formats.fill(record)
    record.weights, record.buffers = weights_of(model, optimizers, watch), buffers_of(model)
    return record


def _steps(
    record: Record,
    watch: UpdateWatch,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[Any], Any],
    batch: Any,
    steps: int,
) -> None:
    for _ in range(steps):
        loss = loss_fn(batch)
        loss.backward()
        for optimizer in optimizers:
            watch.before(optimizer)
            optimizer.step()
            watch.after(optimizer)
            optimizer.zero_grad()
        value = float(loss.detach())
        record.losses.append(value if abs(value) < float("inf") else None)
        record.updates += 1
