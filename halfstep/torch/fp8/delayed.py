"""Delayed scaling: operands that are scaled by the amaxes of earlier updates (`compute=e4m3:delayed`).

For each layer and each of its three operands (x, the weight, the incoming gradient) the amaxes of the last HISTORY
updates are kept, of several micro-batches the largest; a skipped update leaves them. The largest scales the next
update; until there is one, an operand is scaled by its own. Nothing is read from the device.

**How an amax leaves a backward pass.** Writing to a tensor there would be a side effect inside compiled code.
Instead each layer has a `probe`, a leaf of three numbers that nothing is computed from, whose gradient is defined
to be the three amaxes; a hook keeps the maximum of them and what was pending. Autograd sums the gradients of a
tensor that is used twice: a layer that one pass uses n times reports the sum of its amaxes, at most n times the
largest.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.core.arrays.cast import HISTORY

OPERANDS = 3


class History:
    """The amaxes of one layer: `amaxes` is (OPERANDS, HISTORY), the newest update first."""

    def __init__(self, amaxes: Tensor, pending: Tensor):
        self.amaxes, self.pending = amaxes, pending
        self.probe = torch.zeros(OPERANDS, device=amaxes.device, requires_grad=True)

        def take(probe: Tensor) -> None:
            if probe.grad is not None:
                torch.maximum(pending, probe.grad, out=pending)
                probe.grad = None

        self.probe.register_post_accumulate_grad_hook(take)

    def __deepcopy__(self, memo: Any) -> "History":
        return History(self.amaxes.clone(), self.pending.clone())


class Amaxes:
    """The histories of all layers of a model that have delayed operands, in one tensor."""

    def __init__(self, names: Iterable[str], device: torch.device):
        names = list(names)
        self.history = torch.zeros(len(names), OPERANDS, HISTORY, device=device)
        self.pending = torch.zeros(len(names), OPERANDS, device=device)
        self.layers = {n: History(h, p) for n, h, p in zip(names, self.history, self.pending, strict=True)}

    def __deepcopy__(self, memo: Any) -> "Amaxes":
        twin = Amaxes((), self.history.device)
        twin.history, twin.pending = self.history.clone(), self.pending.clone()
        twin.layers = copy.deepcopy(self.layers, memo)  # the model's copy, if there is one, shares them
        for layer, amaxes, pending in zip(twin.layers.values(), twin.history, twin.pending, strict=True):
            layer.amaxes.set_(amaxes)
            layer.pending.set_(pending)
        return twin

    def named(self) -> dict[str, Tensor]:
        """Returns the history of each layer by its name; the live tensors."""
        return {name: layer.amaxes for name, layer in self.layers.items()}

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Moves the pending amaxes into the history if `finite`, a device scalar, is true."""
        # A step may be finite although an operand was not, if nothing that is trained depends on it.
        newest = torch.nan_to_num(self.pending, nan=0.0, posinf=0.0, neginf=0.0).unsqueeze(-1)
        moved = torch.cat([newest, self.history[..., :-1]], dim=-1)
        self.history.copy_(torch.where(finite, moved, self.history))
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Drops the pending amaxes."""
        self.pending.zero_()
