"""What the gradient of a model notices of a format in one of its modules.

The same batches run again, forward and backward, with one module in other formats and everything else as before.
With g the gradient of a weight and h the one that the rounding made of it, an optimizer whose steps do not depend
on the size of a gradient (Adam, Muon) goes down by |g| cos(g, h) instead of |g|. Over all weights:

    damage = sum |g| (1 - cos(g, h)) / sum |g|         the share of a step's descent that is lost

For noise of relative size e, independent of g, that is e^2 / 2: two modules that are rounded damage about as much
as both by themselves. It is 1 where nothing is left of the gradient, infinite where something is not finite.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.torch.apply import names_of
from halfstep.torch.convert.plan import matmuls, plans_of
from halfstep.torch.fp8.linear import MULTIPLE
from halfstep.torch.layers import Matmul
from halfstep.torch.run.replay import precisions_of, replay, replayed


@dataclass(frozen=True)
class MatmulLayer:
    """A module that multiplies by matrices, and how much it multiplies in a step."""

    name: str
    sizes: tuple[tuple[int, int], ...]  # inputs and outputs of each matrix
    rows: int  # that pass through it, such as tokens
    bias: bool = False

    @property
    def misfit(self) -> str:
        """Why no hardware multiplies it in fp8; empty if some does."""
        odd = [f"{n} features" for size in self.sizes for n in size if n % MULTIPLE]
        return f"{odd[0]}, and an fp8 matmul needs a multiple of {MULTIPLE}" if odd else ""

    def num_bytes(self, compute: int, grad: int) -> float:
        """Returns the bytes that its three matmuls read, with operands and gradients of so many bits."""
        forward = sum(self.rows * inputs + inputs * outputs for inputs, outputs in self.sizes)
        backward = sum(self.rows * outputs for _, outputs in self.sizes)
        return (2 * forward * compute + 2 * backward * grad) / 8


class Study:
    """A prepared model as it is now, and batches that run again and again."""

    def __init__(
        self, run: Any, loss_fn: Callable[[Any], Any], batches: Sequence[Any], names: Sequence[str] | None = None
    ):
        self.run, self.names = run, names_of(run.model, names)
        self._loss_fn, self._batches = loss_fn, batches
        self._base, self._ruled = precisions_of(run.model), precisions(run.policy, self.names)
        with self._counted() as rows:
            self._reference = self._gradients({})
        self.layers = self._layers(rows)

    def lost(self, policy: Policy) -> float:
        """Returns the share of a step's descent that is lost under a policy instead of the run's."""
        wanted = precisions(policy, self.names)
        changed = {n: p for n, p in wanted.items() if n in self._base and p != self._ruled[n]}
        return self._lost(self._gradients(changed))

    def _gradients(self, changed: dict[str, Precision]) -> dict[str, Tensor]:
        with replayed(self.run, {**self._base, **changed}):
            torch.manual_seed(0)  # the same dropout each time
            return replay(self.run, self._loss_fn, self._batches).gradients

    def _lost(self, grads: dict[str, Tensor]) -> float:
        lost, whole = 0.0, 0.0
        rows = []
        for name, reference in self._reference.items():
            other = grads.get(name)
            if other is None:
                other = torch.zeros_like(reference)
            # In fp64, of sums in fp32 that are relative to the norm: 1 - cos is as small as e^2 / 2.
            norm, size = reference.norm(), other.norm()
            apart = (reference / norm - other / size).norm()
            rows.append(torch.stack([norm.double(), size.double(), apart.double()]))
        for norm, size, apart in torch.stack(rows).tolist():
            if not all(map(math.isfinite, (norm, size))):
                return math.inf
            whole += norm
            lost += 0.0 if norm == 0 else norm if size == 0 else norm * apart**2 / 2
        return lost / whole if whole else 0.0

    @contextmanager
    def _counted(self) -> Iterator[dict[nn.Module, int]]:
        """Counts the rows that pass through each module."""
        rows: dict[nn.Module, int] = {}

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()), None)
            if x is not None:
                rows[module] = rows.get(module, 0) + x.numel() // x.shape[-1]

        kept = [plan.module for plan in matmuls(plans_of(self.run.model))]
        hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in kept]
        yield rows
        for hook in hooks:
            hook.remove()

    def _layers(self, rows: dict[nn.Module, int]) -> list[MatmulLayer]:
        layers = []
        for plan in matmuls(plans_of(self.run.model)):
            if plan.router or plan.module not in rows:
                continue
            sizes = tuple(cast(type[Matmul], plan.kind).matrix_sizes(cast(Matmul, plan.module)))
            bias = any(p.dim() == 1 for p in plan.module.parameters(recurse=False))
            layers.append(MatmulLayer(plan.name, sizes, rows[plan.module] // len(self._batches), bias))
        return layers
