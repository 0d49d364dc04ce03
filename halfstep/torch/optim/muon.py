"""Muon (Jordan et al.), for matrices, with explicit formats for masters and moments.

The update is the momentum with its singular values pushed to one by five Newton-Schulz steps,

    X <- a X + (b A + c A^2) X,    A = X X^T,    times sqrt(max(1, rows / columns))

Matrices of one shape go through them in one batch, a tall one transposed: A is the smaller of the two products.
Only the steps are not fp32: they run in the policy's compute format, emulated if the policy is. The ranks of a job
share them: each takes some of the matrices (owners.py).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.formats import FP32, Format, parse
from halfstep.torch.cast import carried
from halfstep.torch.dtypes import dtype_of
from halfstep.torch.optim.adamw import Grads, Optimizer, Params
from halfstep.torch.optim.masters import Masters
from halfstep.torch.optim.owners import work_on_owned
from halfstep.torch.shards import is_shard, local


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices; those of one shape are updated in one batch."""

    slots = ("momentum",)
    _kept = (*Optimizer._kept, "own", "iteration", "emulate", "_momentum", "_shares")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iteration: Format | str | None = None,
        emulate: bool = False,
        **formats: Any,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.own = parse(iteration) if isinstance(iteration, str) else iteration
        self.iteration, self.emulate = self.own or FP32, emulate
        self._momentum: Tensor | None = None
        self._shares = False  # whether several ranks take the same steps
        super().__init__(params, defaults, **formats)

    def _problem(self, parameter: Tensor) -> tuple[str, str] | None:
        if parameter.ndim == 2:
            return super()._problem(parameter)
        problem = f"has the shape {tuple(parameter.shape)}, and Muon updates matrices"
        return problem, "give it to AdamW: prepare(model, [Muon(matrices), AdamW(the_rest)], policy)"

    def bind(self, masters: Masters, moments: Mapping[str, Format], compute: Format, *, emulate: bool) -> None:
        """Sets the formats of a policy; the iteration runs in `compute` unless it was given its own format."""
        super().bind(masters, moments, compute, emulate=emulate)
        self.iteration, self.emulate = self.own or compute, emulate
        self._shares = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def release(self) -> None:
        """Holds everything as before a policy was applied."""
        super().release()
        self._shares = False

    def set_momentum(self, momentum: Tensor) -> None:
        """Sets every group's momentum to a device scalar: our schedules count updates on the device."""
        self._momentum = momentum

    @torch.no_grad()
    def update(self, grads: Grads, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Updates every matrix that has a gradient, unless `found_inf` is 1."""
        self.start()
        batches: list[tuple[list[Tensor], _Batch]] = []
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if id(p) in grads:
                    by_shape.setdefault(p.shape, []).append(p)
            kept = group["momentum"] if self._momentum is None else self._momentum
            batches += [(params, _Batch(group, kept, grads, scale, self.state)) for params in by_shape.values()]
        work = partial(orthogonalize, iteration=self.iteration, emulate=self.emulate)
        updates: Mapping[int, Tensor] = {}
        if batches and (self._shares or is_shard(batches[0][0][0])):
            out = torch.float32 if self.emulate else dtype_of(self.iteration)
            inputs = [batch.directions for _, batch in batches]
            updates = work_on_owned([params for params, _ in batches], inputs, work, out)
        for params, batch in batches:
            old, momentum, direction = batch.momenta(params)
            update = torch.stack([updates[id(p)] for p in params]) if updates else work(direction)
            self._update(params, batch.group, old, momentum, update, found_inf)

    def _update(
        self,
        params: list[Tensor],
        group: dict[str, Any],
        old: Tensor,
        momentum: Tensor,
        update: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        rows, columns = params[0].shape
        update = update.float() * max(1.0, rows / columns) ** 0.5
        applied = torch.ones((), device=update.device) if found_inf is None else 1 - found_inf
        # where, not a product: zero times NaN is NaN
        momentum = torch.where(applied > 0, momentum, old)
        update = torch.where(applied > 0, update, 0.0)
        rate = self.rate_of(group)
        decay = 1 - applied * rate * group["weight_decay"]
        states = [self.state[p] for p in params]
        wide = [*map(local, self.masters.wide(params))]
        for state, w, m, u in zip(states, wide, momentum, update, strict=True):
            state["step"] += applied
            local(state["momentum"]).copy_(m)
            w.mul_(decay).sub_(rate * u)
        self.masters.put(params, wide, [state["step"] for state in states])


class _Batch(NamedTuple):
    """What matrices of one group and shape move by."""

    group: dict[str, Any]
    kept: float | Tensor  # of the momentum
    grads: Grads
    scale: Tensor | None
    state: Mapping[Tensor, Mapping[str, Tensor]]

    def momenta(self, params: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the momenta before and after, and where they point (Nesterov): of what this rank has."""
        given = torch.stack([local(self.grads[id(p)]).float() for p in params])
        grads = given if self.scale is None else given * self.scale
        old = torch.stack([local(self.state[p]["momentum"]) for p in params]).float()
        momentum = self.kept * old + grads
        return old, momentum, grads + self.kept * momentum

    def directions(self, params: Sequence[Tensor]) -> Tensor:
        """Returns where the momenta point."""
        return self.momenta(params)[2]


def orthogonalize(matrices: Tensor, iteration: Format, steps: int = 5, *, emulate: bool = False) -> Tensor:
    """Pushes the singular values of each matrix of a batch to about one, by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = carried(x, iteration) if emulate else x.to(dtype_of(iteration))
    for _ in range(steps):
        if emulate:  # rounds what hardware would store
            product = carried(x @ x.mT, iteration)
            inner = carried(b * product + c * carried(product @ product, iteration), iteration)
            x = carried(a * x + inner @ x, iteration)
        else:
            product = x @ x.mT
            x = a * x + (b * product + c * (product @ product)) @ x
    return x.mT if tall else x
