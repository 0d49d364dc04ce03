"""Weights, gradients and updates of one update, on a fixed part of each parameter, and the updates that were lost.

Parts are copied before and after the step; of a split master, the joined value. An update is lost if it was
intended, the step was not skipped, and the stored number is the same as before. It was intended if, after the
step, the first moment (or the momentum) of the element or its weight decay is not zero; if the optimizer has no
such state, if the element has a gradient.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.torch.instruments.observe.sums import sum_dtype
from halfstep.torch.loss.plain import evenly_spaced
from halfstep.torch.numerics.cast import join
from halfstep.torch.numerics.shards import local
from halfstep.torch.numerics.split.operand import SPLIT, is_split, values_of
from halfstep.torch.optim.adamw import Grads, Optimizer
from halfstep.torch.update.readback import Unread

_MOMENTS = ("exp_avg", "momentum", "momentum_buffer")


class WeightNumbers:
    """The numbers of one update: `before` and `after` are called around the optimizers' steps."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], slice: int):
        self._size, self._layers = slice, len(modules)
        self._groups = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
        own = [(at, p) for at, module in enumerate(modules) for p in module.parameters()]
        self._owners = [(at, p) for at, p in own if id(p) in self._groups and p.requires_grad]
        self._unread: Unread | None = None

    @torch.no_grad()
    def before(self, grads: Grads, factor: Tensor | float) -> None:
        """Copies weights and gradients; `factor` unscales gradients."""
        self._owners = [(at, p) for at, p in self._owners if id(p) in grads and not grads[id(p)].is_sparse]
        self._weights = self._parts(stored_values(p, self._size) for _, p in self._owners)
        self._grads = self._parts(evenly_spaced(local(grads[id(p)]), self._size) for _, p in self._owners) * factor

    @torch.no_grad()
    def after(self, finite: Tensor) -> None:
        """Compares the weights with those before the step, and launches a copy of the numbers to the host."""
        if not self._owners:
            return
        parts = [stored_values(p, self._size) for _, p in self._owners]
        weights = self._parts(parts)
        pairs = zip(self._owners, self._grads.split([p.numel() for p in parts]), strict=True)
        intended = torch.cat([self._intended(p, grad) for (_, p), grad in pairs])
        lost = intended & (weights == self._weights)
        exact = [v.to(sum_dtype(weights.device)) for v in (self._weights, self._grads, weights)]
        squares = [exact[0].square(), exact[1].square(), (exact[2] - exact[0]).square()]
        table = torch.stack([*squares, intended.to(exact[0]), lost.to(exact[0])], -1)
        # Two short lists are copied without blocking: a long or blocking copy would wait for the step.
        sizes = torch.tensor([[at, v.numel()] for (at, _), v in zip(self._owners, parts, strict=True)])
        sizes = sizes.to(weights.device, non_blocking=True)
        layer = torch.repeat_interleave(sizes[:, 0], sizes[:, 1], output_size=len(table))
        sums = table.new_zeros(self._layers, table.shape[1]).index_add_(0, layer, table)
        self._unread = Unread(torch.cat([sums, finite.to(sums).expand(self._layers, 1)], -1), _columns)
        del self._weights, self._grads

    def _parts(self, parts: Iterable[Tensor]) -> Tensor:
        flat = [p.reshape(-1).float() for p in parts]
        return torch.cat([p.to(flat[0].device, non_blocking=True) for p in flat]) if flat else torch.zeros(0)

    def _intended(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns a mask of the elements for which an update was intended."""
        optimizer, group = self._groups[id(parameter)]
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        moment = next((state[key] for key in _MOMENTS if isinstance(state.get(key), Tensor)), None)
        moved = gradient if moment is None else evenly_spaced(local(moment), self._size).reshape(-1).float()
        rate = optimizer.rate_of(group) if isinstance(optimizer, Optimizer) else group.get("lr", 1.0)
        intended = moved != 0
        if group.get("weight_decay", 0.0):
            intended = intended | (stored_values(parameter, self._size).reshape(-1) != 0)
        return intended & (rate != 0)

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns (layers, WEIGHT_COLUMNS); waits for the update."""
        if self._unread is None:
            return np.full((self._layers, 4), np.nan)
        return self._unread.read()


def stored_values(parameter: Tensor, size: int) -> Tensor:
    """Returns at most about `size` of the elements that the optimizer steps; of a split master, joined."""
    values = evenly_spaced(local(values_of(parameter)), size)
    if not is_split(parameter):
        return values
    remainder = parameter.__dict__[SPLIT].remainder
    return join(values.contiguous(), evenly_spaced(remainder, size).contiguous())


def _columns(sums: NDArray[Any]) -> NDArray[np.float64]:
    squares, intended, lost, finite = sums[:, :3], sums[:, 3], sums[:, 4], sums[:, 5]
    norms = np.where((squares[:, :1] > 0) | (intended[:, None] > 0), np.sqrt(squares), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where((finite > 0) & (intended > 0), lost / intended, np.nan)
    return np.concatenate([norms, share[:, None]], axis=1)
