"""Delayed scaling: the amax of earlier updates, for operands that are scaled by it (`compute=e4m3:delayed`).

For each layer and each of its three operands (x, the weight, the incoming gradient) the largest magnitudes of the
last HISTORY updates are kept; the largest of them scales the next one. As long as there is none, an operand is
scaled by its own. With micro-batches an update has the largest of theirs. An update that is skipped leaves the
history as it was.

**How an amax gets out of a backward pass.** Writing to a tensor there would be a side effect inside compiled code.
Instead each layer has a `probe`, a leaf of three numbers that nothing is computed from, and says that its gradient
is the three amaxes. Autograd brings them here, compiled or not; a hook keeps the larger of what was there and what
came, and takes the gradient away. Autograd sums the gradients of a tensor that is used twice: a layer that a pass
uses n times has the sum of its amaxes, which is no less than the largest, and at most n times it.

Nothing is read from the device: the history is a tensor, and what follows from it is computed there. The price is
that delayed scaling takes no less time than current scaling: one graph serves the first update too, which waits
for the tensor's own amax.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from halfstep.core.precision import Precision
    from halfstep.torch.layers import Casts

HISTORY = 16
"""Updates whose amax is remembered."""
OPERANDS = 3


class Past:
    """The history of one layer: `history` is (OPERANDS, HISTORY), the newest update first."""

    def __init__(self, history: Tensor, pending: Tensor):
        self.history, self.pending = history, pending
        self.probe = torch.zeros(OPERANDS, device=history.device, requires_grad=True)
        self._made: dict[Precision, Casts] = {}

        def take(probe: Tensor) -> None:
            if probe.grad is not None:
                torch.maximum(pending, probe.grad, out=pending)
                probe.grad = None

        self.probe.register_post_accumulate_grad_hook(take)

    def hung_on(self, casts: "Casts") -> "Casts":
        """The same casts with this past; one object a precision, so that compiled code knows it again."""
        return self._made.setdefault(casts.precision, replace(casts, past=self))

    def __deepcopy__(self, memo: Any) -> "Past":
        return Past(self.history.clone(), self.pending.clone())


class Amaxes:
    """The histories of all layers of a model that have delayed operands, in one tensor."""

    def __init__(self, names: Iterable[str], device: torch.device):
        names = list(names)
        self.history = torch.zeros(len(names), OPERANDS, HISTORY, device=device)
        self.pending = torch.zeros(len(names), OPERANDS, device=device)
        self.pasts = {n: Past(h, p) for n, h, p in zip(names, self.history, self.pending, strict=True)}

    def __deepcopy__(self, memo: Any) -> "Amaxes":
        twin = Amaxes((), self.history.device)
        twin.history, twin.pending = self.history.clone(), self.pending.clone()
        twin.pasts = copy.deepcopy(self.pasts, memo)  # a model that is copied with it may have copied them before
        for past, history, pending in zip(twin.pasts.values(), twin.history, twin.pending, strict=True):
            past.history.set_(history)
            past.pending.set_(pending)
        return twin

    def named(self) -> dict[str, Tensor]:
        """The history of each layer, by its name; the live tensors."""
        return {name: past.history for name, past in self.pasts.items()}

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Remembers what came since the last update, where `finite`, a device scalar, is true."""
        # A step may be finite although an operand was not, if nothing that is trained depends on it.
        came = torch.nan_to_num(self.pending, nan=0.0, posinf=0.0, neginf=0.0).unsqueeze(-1)
        moved = torch.cat([came, self.history[..., :-1]], dim=-1)
        self.history.copy_(torch.where(finite, moved, self.history))
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Drops what came and was not used."""
        self.pending.zero_()
