"""Averages of weights in a narrow format, such as an EMA in bf16: do they move?

They are found among all tensors of the process: in bf16 or fp16, of the shape of a weight, in no optimizer, and
written to again and again. An element stands still if it has its first value after all writes although it is not
the weight, rounded: a copy of the weights, which is written too, is the weight.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.core.audit.record import Average
from halfstep.torch.instruments.collect.tensors import format_name, is_narrow, local

LIMIT = 2048  # elements of a tensor that are looked at
WRITES = 3  # before anything is said
SEARCHES = (1, 4)  # the looks at which new ones are searched for: some scripts make theirs late


@dataclass
class _Candidate:
    tensor: "weakref.ref[Tensor]"
    weight: "weakref.ref[Tensor]"
    name: str
    format: str
    first: Tensor  # in fp32: what is narrow may itself be taken for an average
    state: tuple[int, int]  # changes with every write
    writes: int = 0
    moved: Tensor | None = None  # which elements have ever differed from the first value
    behind: Tensor | None = None  # which are not the weight, rounded


class AverageWatch:
    """Follows narrow tensors that may be averages of weights."""

    def __init__(self) -> None:
        self._candidates: dict[int, _Candidate] = {}
        self._looks = 0

    @torch.no_grad()
    def look(self, weights: Mapping[str, Tensor], apart: Iterable[Tensor]) -> None:
        """Takes note of what was written since the last look; `apart` are tensors that are no averages."""
        self._looks += 1
        if self._looks in SEARCHES:
            found = _find(weights, {*map(id, apart), *self._candidates})
            self._candidates |= {id(each.tensor()): each for each in found}
        for each in self._candidates.values():
            tensor, weight = each.tensor(), each.weight()
            if tensor is not None and weight is not None and _state(tensor) != each.state:
                each.state = _state(tensor)
                each.writes += 1
                part = _part(tensor)
                each.behind = part != _part(weight).to(part)
                differs = part.float() != each.first
                each.moved = differs if each.moved is None else each.moved | differs

    def averages(self) -> Iterator[Average]:
        """Yields those that were written to several times, some of which may be gone by now."""
        for each in self._candidates.values():
            if each.moved is not None and each.behind is not None and each.writes >= WRITES:
                still = each.behind & ~each.moved
                yield Average(each.name, each.format, each.writes, int(each.behind.sum()), int(still.sum()))


def _find(weights: Mapping[str, Tensor], apart: set[int]) -> Iterator[_Candidate]:
    by_shape: dict[torch.Size, list[str]] = {}
    for name, weight in weights.items():
        # What FSDP gathers of a shard is narrow, has the weight's shape, and loses its memory after each layer.
        if local(weight) is weight:
            by_shape.setdefault(weight.shape, []).append(name)
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    for each in tensors:
        names = by_shape.get(each.shape, []) if each.dim() and is_narrow(each.dtype) else []
        if not names or id(each) in apart or not each.is_leaf or each.is_inference():
            continue
        # Of several weights of one shape it is an average of the one that it is most like.
        part = _part(each)
        alike = [(_part(weights[name]).to(part) == part).sum() for name in names] if len(names) > 1 else []
        name = names[int(torch.stack(alike).argmax())] if alike else names[0]
        refs = weakref.ref(each), weakref.ref(weights[name])
        yield _Candidate(*refs, name, format_name(each.dtype), part.float(), _state(each))


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, local(tensor).data_ptr()


def _part(tensor: Tensor) -> Tensor:
    flat = local(tensor).detach().reshape(-1)
    return flat[:: -(-flat.numel() // LIMIT)] if flat.numel() > LIMIT else flat
