"""Averages of weights in a narrow format, such as an EMA in bf16: do they move?

They are found among all tensors of the process: in bf16 or fp16, of the shape of a weight, in no optimizer, and
written to again and again. An element stands still if it has its first value after all writes although it is not
the weight, rounded: a copy of the weights, which is written too, is the weight.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.core.audit.record import Average
from halfstep.torch.instruments.collect.tensors import format_name, is_narrow, local

LIMIT = 2048  # elements of a tensor that are looked at
WRITES = 3  # before anything is said
PAIRS = 50_000  # of an average and a weight that may be its own: about a second, where thousands have one shape
SEARCHES = (1, 4)  # the looks at which new ones are searched for: some scripts make theirs late


@dataclass
class _Candidate:
    tensor: "weakref.ref[Tensor]"
    format: str
    state: tuple[int, int]  # changes with every write
    writes: int = 0
    name: str = ""  # of the weight
    first: Tensor | None = None  # its numbers after the first write that was seen, in fp32
    moved: Tensor | None = None  # which elements have ever differed from those
    behind: Tensor | None = None  # which are not the weight, rounded


class AverageWatch:
    """Follows narrow tensors that may be averages of weights."""

    def __init__(self) -> None:
        self._candidates: dict[int, _Candidate] = {}
        self._looks = self._pairs = 0

    @torch.no_grad()
    def look(self, weights: Mapping[str, Tensor], apart: Iterable[Tensor]) -> None:
        """Takes note of what was written since the last look; `apart` are tensors that are no averages."""
        self._looks += 1
        for each in self._candidates.values():
            tensor = each.tensor()
            if tensor is not None and _state(tensor) != each.state:
                each.state = _state(tensor)
                each.writes += 1
                if each.first is not None or self._pairs < PAIRS:
                    self._pairs += _compare(each, tensor, weights)
        if self._looks in SEARCHES:
            shapes = {_shape(weight) for weight in weights.values()}
            found = _find(shapes, {*map(id, apart), *self._candidates})
            self._candidates |= {id(each.tensor()): each for each in found}

    def averages(self) -> Iterator[Average]:
        """Yields those that were written to several times, some of which may be gone by now."""
        for each in self._candidates.values():
            if each.moved is not None and each.behind is not None and each.writes >= WRITES:
                still = each.behind & ~each.moved
                yield Average(each.name, each.format, each.writes, int(each.behind.sum()), int(still.sum()))


def _shape(tensor: Tensor) -> tuple[bool, torch.Size]:
    """Returns what an average has in common with its weight: whether it is sharded, and this rank's shape.

    What FSDP gathers of a shard is narrow, has the weight's shape, and loses its memory after each layer.
    """
    return local(tensor) is not tensor, local(tensor).shape


def _find(shapes: set[tuple[bool, torch.Size]], apart: set[int]) -> Iterator[_Candidate]:
    """Yields tensors that may be averages. Their numbers are not read: memory behind them may be gone."""
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", Tensor)
    for each in [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter, sharded)]:
        fits = each.dim() and is_narrow(each.dtype) and _shape(each) in shapes and id(each) not in apart
        if fits and each.is_leaf and not each.is_inference() and not each.is_meta:
            yield _Candidate(weakref.ref(each), format_name(each.dtype), _state(each))


def _compare(each: _Candidate, tensor: Tensor, weights: Mapping[str, Tensor]) -> int:
    """Notes the numbers of a tensor that was just written to; returns how many weights it was compared with."""
    if local(tensor).untyped_storage().nbytes() < local(tensor).numel() * tensor.itemsize:
        return 0  # its memory is lent
    part, names = _part(tensor), list[str]()
    if each.first is None:
        # Of several weights of one shape it is an average of the one that it is most like.
        names = [name for name, weight in weights.items() if _shape(weight) == _shape(tensor)]
        alike = [(_part(weights[name]).to(part) == part).sum() for name in names]
        each.name = names[int(torch.stack(alike).argmax())] if alike else ""
        each.first = part.float()
    if each.name in weights:
        differs = part.float() != each.first
        each.moved = differs if each.moved is None else each.moved | differs
        each.behind = part != _part(weights[each.name]).to(part)
    return len(names)


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, local(tensor).data_ptr()


def _part(tensor: Tensor) -> Tensor:
    flat = local(tensor).detach().reshape(-1)
    return flat[:: -(-flat.numel() // LIMIT)] if flat.numel() > LIMIT else flat
