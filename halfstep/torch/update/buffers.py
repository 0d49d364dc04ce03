"""What a model holds, listed once, and its buffers before a step, restored if the step is skipped.

A buffer was written to if torch's version counter moved or it is another tensor, except in batch and instance
norms, whose kernels write to running statistics without counting.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

# A buffer's module and its name there.
Place = tuple[nn.Module, str]
# A copy, the buffer it is a copy of, and that buffer's version then.
BufferCopy = tuple[Tensor, Tensor, int]
Written = tuple[Place, Tensor, Tensor]  # a buffer and its copy
_VERSION = attrgetter("_version")


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
        # The buffers after the last look; those of them whose writes are counted, and the counts.
        self._settled: tuple[list[Any], list[Tensor], list[int]] = ([], [], [])
        self._norms: list[_NormBuffers] = []
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Copies what was written to buffers since the last step: a skipped step restores that."""
        if self._only_norms_written():
            for norms in self._norms:
                norms.remember()
            return
        written = self._written()
        for buffers, kept in _by_format(written):
            torch._foreach_copy_(kept, buffers)
        self._settle(written)

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Restores the buffers if `finite`, a device scalar, is false."""
        if self._only_norms_written():
            for norms in self._norms:
                self.were_written = True
                norms.restore_unless(finite)
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
        for place, buffer in self._buffers():
            kept, known, version = self._kept.get(place, (None, None, -1))
            if kept is None or _form(buffer) != _form(kept):  # new, of another shape, or moved
                self._kept[place] = buffer.detach().clone(), buffer, buffer._version
            elif known is not buffer or version != buffer._version or _is_uncounted(place):
                written.append((place, buffer, kept))
        return written

    def _only_norms_written(self) -> bool:
        """Whether the buffers are the ones of the last look, and none was written to but those of norms."""
        known, counted, versions = self._settled
        same = _same_objects(known, _list_values(self.contents.buffer_dicts))
        return same and [*map(_VERSION, counted)] == versions and all(norms.in_place() for norms in self._norms)

    def _settle(self, written: Sequence[Written]) -> None:
        for place, buffer, kept in written:
            self._kept[place] = (kept, buffer, buffer._version)
        norms: dict[Any, list[Place]] = {}
        counted: list[Tensor] = []
        for place, buffer in self._buffers():
            if _is_uncounted(place):
                norms.setdefault((buffer.dtype, buffer.device), []).append(place)
            else:
                counted.append(buffer)
        self._settled = (_list_values(self.contents.buffer_dicts), counted, [*map(_VERSION, counted)])
        self._norms = [_NormBuffers(self._kept, places) for places in norms.values()]

    def _buffers(self) -> list[tuple[Place, Tensor]]:
        """Every buffer with its place."""
        return [
            ((module, name), buffer)
            for module in self.contents.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


class _NormBuffers:
    """Buffers of norms, of one dtype on one device, beside one copy of them all: a step takes a few kernels."""

    def __init__(self, kept: dict[Place, BufferCopy], places: list[Place]):
        """Moves the copies of these places into one tensor."""
        self._buffers = [kept[place][1] for place in places]
        self._pointers = [*map(Tensor.data_ptr, self._buffers)]
        self._live = [buffer.detach().view(-1) for buffer in self._buffers]
        self._sizes = [t.numel() for t in self._live]
        self._copy = torch.cat([kept[place][0].view(-1) for place in places])
        for place, part, buffer in zip(places, self._copy.split(self._sizes), self._buffers, strict=True):
            kept[place] = (part.view(buffer.shape), buffer, buffer._version)

    def in_place(self) -> bool:
        """Whether the numbers are still where they were."""
        return [*map(Tensor.data_ptr, self._buffers)] == self._pointers

    def remember(self) -> None:
        """Copies the numbers as they are."""
        torch.cat(self._live, out=self._copy)

    def restore_unless(self, finite: Tensor) -> None:
        """Restores the numbers if `finite` is false."""
        torch.where(finite, torch.cat(self._live), self._copy, out=self._copy)
        torch._foreach_copy_(self._live, list(self._copy.split(self._sizes)))


def _form(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device


def _is_uncounted(place: Place) -> bool:
    """Whether a buffer may be written to without its version changing."""
    return isinstance(place[0], nn.modules.batchnorm._NormBase)


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
