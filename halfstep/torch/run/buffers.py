"""Buffers before a step, restored if the step is skipped: running means and variances, and what else it wrote.

A buffer was written to if torch's version counter moved or it is another tensor, except in batch and instance
norms, whose kernels write to running statistics without counting.
"""

import torch
from torch import Tensor, nn

# A buffer's module and its name there.
Place = tuple[nn.Module, str]
# A copy, the buffer it is a copy of, and that buffer's version then.
Kept = tuple[Tensor, Tensor, int]


class Buffers:
    """The buffers of a model, as they were before the step that is running."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._kept: dict[Place, Kept] = {}
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Copies what was written to buffers since the last step: a skipped step restores that."""
        for place, buffer, uncounted in self._buffers():
            if self._changed(place, buffer):
                self._kept[place] = _copy(buffer)
            elif uncounted:
                self._kept[place][0].copy_(buffer)

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Restores the buffers if `finite`, a device scalar, is false."""
        written: list[tuple[Place, Tensor, Tensor]] = []
        for place, buffer, uncounted in self._buffers():
            before = self._kept[place][0] if place in self._kept else None
            if before is None or (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
                self._kept[place] = _copy(buffer)
            elif uncounted or self._changed(place, buffer):
                written.append((place, buffer, before))
        if written:
            buffers, kept = [now.detach() for _, now, _ in written], [before for _, _, before in written]
            chosen = [torch.where(finite, now, before) for now, before in zip(buffers, kept, strict=True)]
            torch._foreach_copy_(buffers, chosen)
            torch._foreach_copy_(kept, chosen)
        for place, buffer, before in written:
            self._kept[place] = (before, buffer, buffer._version)

    def _buffers(self) -> list[tuple[Place, Tensor, bool]]:
        """Every buffer with its place, and whether it may be written to without its version changing."""
        return [
            ((module, name), buffer, isinstance(module, nn.modules.batchnorm._NormBase))
            for module in modules_of(self.model)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _changed(self, place: Place, buffer: Tensor) -> bool:
        _, known, version = self._kept.get(place, (None, None, -1))
        return known is not buffer or version != buffer._version


def _copy(buffer: Tensor) -> Kept:
    return buffer.detach().clone(), buffer, buffer._version


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns all modules of a model, each once: `model.modules()` costs several Python calls for each."""
    modules, seen = [model], {id(model)}
    for module in modules:  # grows as it is walked
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Returns all parameters of a model, each once."""
    values = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    return list({id(p): p for p in values}.values())
