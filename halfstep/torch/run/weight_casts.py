"""Weights in the compute format, cast in a few launches for all layers and micro-batches of an update.

A layer that casts its own weight launches a kernel for each weight, bias and micro-batch; at small batches that
is a large part of the host's time. So layers that run eagerly leave a mark on the parameters they cast
(lowering.py), and the next `Run.step` casts all marked ones together before its first micro-batch. Compiled layers
leave no mark: there casts are fused with other work.

Casts live only inside `Run.step`, and not through the last backward pass: with one micro-batch the memory of each
is free again when its layer is done. A write to a parameter meanwhile (a clamp, averages) makes its cast useless;
one through `parameter.data`, which torch does not count, must not happen inside a loss function.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfstep.torch.lowering import CAST, CASTED_TO, MadeCast
from halfstep.torch.run.buffers import Contents

CHUNK = 64 * 2**20  # bytes that share an allocation, and are freed together
ALIGNED = 8  # numbers: of 16 bits each, the 16 bytes that fast matmuls want


class WeightCasts:
    """The casts of the update that is running."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self._casted: list[Tensor] = []

    @torch.no_grad()
    def make(self) -> None:
        """Casts every marked parameter."""
        marked: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in self.contents.parameters:
            if (dtype := getattr(p, CASTED_TO, None)) is not None and p.numel() % ALIGNED == 0:
                marked.setdefault((p.device, dtype), []).append(p)
        for (device, dtype), parameters in marked.items():
            for chunk in _chunks(parameters, CHUNK // dtype.itemsize):
                flat = torch.empty(sum(p.numel() for p in chunk), dtype=dtype, device=device)
                casts = list(torch._utils._unflatten_dense_tensors(flat, chunk))
                torch._foreach_copy_(casts, chunk)
                for p, cast in zip(chunk, casts, strict=True):
                    setattr(p, CAST, MadeCast(p, cast))
                self._casted += chunk

    def drop(self) -> None:
        """Forgets the casts; a backward pass that needs one still has it. Where nobody took one, the mark goes."""
        for p in self._casted:
            if not p.__dict__.pop(CAST).taken:
                p.__dict__.pop(CASTED_TO, None)
        self._casted = []

    def unmark(self) -> None:
        """Removes every trace from the parameters."""
        self.drop()
        for p in self.contents.parameters:
            p.__dict__.pop(CASTED_TO, None)


def _chunks(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    chunk, size = list[Tensor](), 0
    for p in parameters:
        if chunk and size + p.numel() > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += p.numel()
    yield chunk
