"""What a model holds, listed once, and its buffers before a step, restored if the step is skipped.

A buffer was written to if torch's version counter moved or it is another tensor, except in batch and instance
norms, whose kernels write to running statistics without counting.
"""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# A buffer's module and its name there.
Place = tuple[nn.Module, str]
# A copy, the buffer it is a copy of, and that buffer's version then.
BufferCopy = tuple[Tensor, Tensor, int]
Written = tuple[Place, Tensor, Tensor]  # a buffer and its copy


class Contents:
    """The modules, parameters and buffers of a model: `model.modules()` costs several Python calls for each."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._list()

    def refresh(self) -> None:
        """Lists everything again if a module or parameter was added, removed or replaced."""
        children, held = _list_values(self._child_dicts), _list_values(self._held_dicts)
        if not (_same_objects(self._children, children) and _same_objects(self._held, held)):
            self._list()

    def _list(self) -> None:
        modules, seen = [self.model], {id(self.model)}
        for module in modules:  # grows as it is walked
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        self._child_dicts, self._held_dicts = [m._modules for m in modules], [m._parameters for m in modules]
        self._children, self._held = _list_values(self._child_dicts), _list_values(self._held_dicts)
        self.modules: list[nn.Module] = modules
        self.buffer_dicts: list[dict[str, Tensor | None]] = [m._buffers for m in modules]
        self.parameters: list[Tensor] = list({id(p): p for p in self._held if p is not None}.values())


class Buffers:
    """The buffers of a model, as they were before the step that is running."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self._kept: dict[Place, BufferCopy] = {}
        self.were_written = False  # by some step
        # The buffers after the last look, and their versions.
        self._settled: tuple[list[Any], list[int]] = ([], [])
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Copies what was written to buffers since the last step: a skipped step restores that."""
        if self._nothing_written():
            return
        written = self._written()
        for buffers, kept in _by_format(written):
            torch._foreach_copy_(kept, buffers)
        self._settle(written)

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Restores the buffers if `finite`, a device scalar, is false."""
        if self._nothing_written():
            return
        self.were_written = True
        written = self._written()
        for buffers, kept in _by_format(written):
            now, before = (torch.cat([t.reshape(-1) for t in tensors]) for tensors in (buffers, kept))
            chosen = torch.where(finite, now, before).split([t.numel() for t in buffers])
            parts = [part.view(t.shape) for part, t in zip(chosen, buffers, strict=True)]
            torch._foreach_copy_(buffers, parts)
            torch._foreach_copy_(kept, parts)
        self._settle(written)

    def _written(self) -> list[Written]:
        """Returns what may have been written to since it was copied; copies what is new."""
        written = []
        for place, buffer, uncounted in self._buffers():
            kept, known, version = self._kept.get(place, (None, None, -1))
            if kept is None or (buffer.shape, buffer.dtype) != (kept.shape, kept.dtype):
                self._kept[place] = buffer.detach().clone(), buffer, buffer._version
            elif uncounted or known is not buffer or version != buffer._version:
                written.append((place, buffer, kept))
        return written

    def _nothing_written(self) -> bool:
        known, versions = self._settled
        now = _list_values(self.contents.buffer_dicts)
        return _same_objects(known, now) and [b._version for b in now if b is not None] == versions

    def _settle(self, written: Sequence[Written]) -> None:
        for place, buffer, kept in written:
            self._kept[place] = (kept, buffer, buffer._version)
        now = _list_values(self.contents.buffer_dicts)
        uncounted = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in self.contents.modules)
        # Where writes are not counted, there is always something to look at.
        self._settled = (now, [-1] if uncounted else [b._version for b in now if b is not None])

    def _buffers(self) -> list[tuple[Place, Tensor, bool]]:
        """Every buffer with its place, and whether it may be written to without its version changing."""
        return [
            ((module, name), buffer, isinstance(module, nn.modules.batchnorm._NormBase))
            for module in self.contents.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


def _by_format(written: Sequence[Written]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns tensors of one dtype and device together, which take a few kernels instead of one each."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for _, buffer, kept in written:
        buffers, copies = groups.setdefault((buffer.dtype, buffer.device), ([], []))
        buffers.append(buffer.detach())
        copies.append(kept)
    return [*groups.values()]


def _list_values(dicts: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, dicts))))  # most are empty


def _same_objects(known: list[Any], now: list[Any]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))
