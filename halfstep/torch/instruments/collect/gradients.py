"""Whether the gradients of activations are large enough for their format.

A gradient that is too small for fp16 is zero, and zeros say nothing of where they come from: a rectifier makes
them, and so does a weight that begins at zero. So two facts count:

    few bits      of the numbers that are not zero, how many are among the sixteen smallest of the format
    all zero      a layer's gradient is zero throughout, that of the block around it is not, and no matrix of the
                  block began at zero
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.core.audit.record import Operation
from halfstep.core.formats import parse
from halfstep.torch.instruments.collect.models import full_name
from halfstep.torch.instruments.collect.tensors import format_name, local

FEW = 16
_SEEN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Tally:
    dtype: torch.dtype
    amax: Tensor
    nonzero: Tensor | int = 0
    few_bits: Tensor | int = 0
    calls: int = 0
    elements: int = 0


class Gradients:
    """Gathers gradients; `operations` returns what was gathered."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self.places: dict[str, str | None] = {}  # where a module is called
        self._zero: dict[str, Tensor] = {}  # whether a matrix was zero when watching began

    def find_zeros(self, model: str, root: nn.Module) -> None:
        """Remembers which matrices are zero, without waiting for the device."""
        for name, p in root.named_parameters():
            if p.dim() > 1:
                self._zero.setdefault(full_name(model, name), ~local(p.detach()).any())

    def see(self, name: str, grad: Tensor) -> None:
        """Adds the gradient of a module's output."""
        grad = local(grad.detach())
        if grad.dtype not in _SEEN or not grad.numel():
            return
        size = grad.abs()
        tally = self._tallies.get(name)
        if tally is None or tally.dtype != grad.dtype:
            tally = self._tallies[name] = _Tally(grad.dtype, torch.zeros((), device=grad.device))
        tally.calls += 1
        tally.elements += grad.numel()
        tally.amax = torch.maximum(tally.amax, size.amax().float())
        tally.nonzero += (size != 0).sum()
        smallest = parse(format_name(grad.dtype)).smallest_subnormal
        tally.few_bits += ((size != 0) & (size < FEW * smallest)).sum()

    def operations(self) -> Iterator[Operation]:
        """Yields one operation per module whose gradients were seen in a narrow format."""
        for name, tally in self._tallies.items():
            if tally.dtype != torch.float32:
                nonzero, lost = int(tally.nonzero), int(tally.few_bits)
                if not nonzero and tally.dtype == torch.float16 and self._should_have_some(name):
                    nonzero = lost = tally.elements
                yield Operation(
                    name,
                    "other",
                    outputs=[format_name(tally.dtype)],
                    count=tally.calls,
                    amax=float(tally.amax),
                    underflow=lost,
                    place=self.places.get(name),
                    backward=True,
                    elements=nonzero,
                )

    def _should_have_some(self, name: str) -> bool:
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:depth])
            outer = self._tallies.get(around)
            if outer is not None and float(outer.amax) > 0:
                return not any(bool(zero) for name, zero in self._zero.items() if name.startswith(f"{around}."))
        return False
