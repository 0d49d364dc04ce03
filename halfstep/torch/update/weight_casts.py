"""Weights in the compute format, cast in a few launches for all layers and micro-batches of an update.

A layer that casts its own weight launches a kernel for each weight, bias and micro-batch; at small batches that
is a large part of the host's time. So layers that run eagerly leave a mark on the parameters they cast
(lowering.py), and the next `Run.step` casts all marked ones together before its first micro-batch. Compiled layers
leave no mark: there casts are fused with other work.

Casts live only inside `Run.step`, and not through the last backward pass: with one micro-batch the memory of each
is free again when its layer is done. A write to a parameter meanwhile (a clamp, averages) makes its cast useless;
one through `parameter.data`, which torch does not count, must not happen inside a loss function.
"""

import torch
from torch import Tensor

from halfstep.torch.numerics.lowering import CAST
from halfstep.torch.update.buffers import Contents


class WeightCasts:
    """The casts of the update that is running."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self._listed: list[Tensor] = []
        self._marks: list[torch.dtype | None] = []
        self._marked: list[tuple[torch.dtype, list[Tensor]]] = []  # for each device and dtype
        self._casted: list[Tensor] = []

    @torch.no_grad()
    def make(self) -> None:
        """Casts every marked parameter."""
        listed = self.contents.parameters
        marks = [None if (mark := p.__dict__.get(CAST)) is None else mark.dtype for p in listed]
        if marks != self._marks or listed is not self._listed:
            groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for p, dtype in zip(listed, marks, strict=True):
                if dtype is not None:
                    groups.setdefault((p.device, dtype), []).append(p)
            self._marked = [(dtype, group) for (_, dtype), group in groups.items()]
            self._listed, self._marks = listed, marks
        for dtype, parameters in self._marked:
            casts = [torch.empty_like(p, dtype=dtype) for p in parameters]
            torch._foreach_copy_(casts, parameters)
            for p, cast in zip(parameters, casts, strict=True):
                p.__dict__[CAST].hold(cast, p)
            self._casted += parameters

    def drop(self) -> None:
        """Forgets the casts; a backward pass that needs one still holds it. An unused one loses its mark."""
        for p in self._casted:
            made = p.__dict__[CAST]
            made.cast = None
            if not made.taken:
                del p.__dict__[CAST]
        self._casted = []

    def unmark(self) -> None:
        """Removes every trace from the parameters."""
        self.drop()
        for p in self.contents.parameters:
            p.__dict__.pop(CAST, None)
