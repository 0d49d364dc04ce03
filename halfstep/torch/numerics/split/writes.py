"""Writes to split masters by others (`nn.init`, a clamp, an average), which would be rounded to bf16, or lost.

The next update refuses them (`Masters.check_writes`) and names `run.edit()`, inside which a parameter is its whole
master. Noticed is what torch counts, data that were replaced, and a write to what is handed out:
`parameter.data`, whose counter is its own, and a tensor of a state dict, which is a joined copy here.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.core.errors import SplitMasterError
from halfstep.torch.numerics.cast import split
from halfstep.torch.numerics.split.operand import SPLIT, is_split

DATA: Any = torch._C.TensorBase.data  # of a plain parameter, which is not watched
_VERSION, _POINTER, _NOTED = attrgetter("_version"), methodcaller("data_ptr"), attrgetter(f"{SPLIT}.noted")


class _Handed(NamedTuple):
    """A tensor that was handed out, by what shares its version counter and none of its memory."""

    tensor: weakref.ref[Tensor]
    counter: Tensor
    version: int
    joined: bool  # a copy, in a state dict

    def was_written(self) -> bool:
        return self.counter._version != self.version


class _Watched:
    """Equals what `note_write` recorded until a tensor that was handed out is written to."""

    def __init__(self, noted: tuple[int, int], handed: list[_Handed]):
        self.noted, self.handed = noted, handed

    def __eq__(self, now: object) -> bool:
        return self.noted == now and not any(each.was_written() for each in self.handed)

    __hash__ = None  # type: ignore[assignment]


def note_write(parameter: Tensor) -> None:
    """Records that the last write to a split parameter also wrote its remainder."""
    if is_split(parameter):
        note_writes([parameter])


def note_writes(parameters: Sequence[Tensor]) -> None:
    """Does so for several, which are split."""
    for p, now in zip(parameters, _writes_of(parameters), strict=True):
        noted = (half := p.__dict__[SPLIT]).noted
        if isinstance(noted, _Watched):
            alive = [h._replace(version=h.counter._version) for h in noted.handed if h.tensor() is not None]
            now = _Watched(now, alive) if alive else now
        half.noted = now


def _writes_of(parameters: Sequence[Tensor]) -> list[Any]:
    """Returns how often torch counted a write to each parameter, and where its data are, without a Python call."""
    return list(zip(map(_VERSION, parameters), map(_POINTER, parameters), strict=True))


def unwritten(parameters: Sequence[Tensor]) -> bool:
    """Whether only we wrote to split parameters since `note_writes`."""
    return _writes_of(parameters) == list(map(_NOTED, parameters))


def watch(parameter: Tensor, tensor: Tensor, *, joined: bool = False) -> None:
    """Lets a write to a tensor that is handed out be noticed."""
    with torch.inference_mode(False):
        counter = tensor.detach()
        DATA.__set__(counter, tensor.new_empty(0))
    handed = _Handed(weakref.ref(tensor), counter, counter._version, joined)
    half = parameter.__dict__[SPLIT]
    noted = half.noted
    if isinstance(noted, _Watched):
        noted.handed = [h for h in noted.handed if h.was_written() or h.tensor() is not None] + [handed]
    else:
        half.noted = _Watched(noted, [handed])


def check_write(parameter: Tensor, name: str) -> None:
    """Refuses a split parameter that was written to by other code since `note_write`."""
    noted = _NOTED(parameter)
    if unwritten([parameter]):
        return
    edit = "write inside `with run.edit():`, where it is the whole fp32 master"
    if isinstance(noted, _Watched) and any(each.joined and each.was_written() for each in noted.handed):
        raise SplitMasterError(
            f"`{name}` of a state dict was written to: it is a copy of a split master, so the write is lost",
            hint=f"pass the dictionary to model.load_state_dict(), or {edit}",
        )
    raise SplitMasterError(
        f"`{name}` was written to outside of run.edit(): it is the bf16 half of a split master, so what was "
        "written is rounded to bf16, or lost",
        hint=f"{edit}; an empty one takes the number as it is now; or hold masters whole, with `param=fp32`",
    )


def accept_write(parameter: Tensor) -> None:
    """Takes what other code wrote to a split parameter as the whole number, also data in fp32."""
    half = parameter.__dict__[SPLIT]
    noted, remainder = half.noted, half.remainder
    if isinstance(noted, _Watched):
        through_data = any(not each.joined and each.was_written() for each in noted.handed)
        noted = None if through_data else noted.noted
    if parameter.dtype == torch.float32:
        parameter.data, lower = split(parameter.data)
        remainder.copy_(lower)
    elif noted != _writes_of([parameter])[0]:
        remainder.zero_()
    note_write(parameter)
