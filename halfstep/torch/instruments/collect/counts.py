"""Positions and timesteps in a narrow format: as integers, or as the angles of a sine and a cosine.

bf16 has every whole number to 256, fp16 to 2048. A count such as `torch.ones_like(x[..., 0]).cumsum(1)` is made
again in fp32: what differs was rounded. It matters where the result, or what is computed from it element by
element, becomes integers. Sums that are not whole, such as those of probabilities, are no counts. Angles that
are narrow, or are computed from a narrow tensor, may be more than a radian off beyond those numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.core.torch_functions import named
from halfstep.torch.instruments.collect.tensors import is_narrow, tensors_of

_PLACES = (torch, Tensor)
_COUNTING = frozenset(named("cumsum arange", *_PLACES))
_ANGLES = frozenset(named("sin cos sin_ cos_", *_PLACES))
_CASTS = frozenset(named("long int short to type type_as", Tensor))
_FOLLOWED = _CASTS | frozenset(
    named(
        "add sub mul __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ add_ sub_ mul_ "
        "clamp clamp_ masked_fill masked_fill_ where __getitem__ view reshape squeeze unsqueeze expand flatten "
        "flip contiguous clone detach float double half bfloat16 cat stack div __truediv__ transpose permute",
        *_PLACES,
    )
)


class Count(NamedTuple):
    """What a narrow tensor counts."""

    function: str  # empty of a tensor that is narrow, and counts nothing that was seen
    dtype: torch.dtype
    rounded: Tensor | int = 0  # how many of its numbers were; on their device
    elements: int = 0


class Counts:
    """Follows counts through the functions that a model calls."""

    def __init__(self) -> None:
        self._counts: Any = WeakTensorKeyDictionary()

    @torch.no_grad()
    def see(self, function: Any, args: Any, kwargs: Any, out: Any) -> Count | None:
        """Takes a call that was made; returns the count if it made integers of one, or took them for angles."""
        if not isinstance(out, Tensor) or not (
            function in _COUNTING or function in _FOLLOWED or function in _ANGLES
        ):
            return None
        if function in _COUNTING and is_narrow(out.dtype) and "out" not in kwargs:
            exact = function(*args, **{**kwargs, "dtype": torch.float32})
            rounded = (exact == exact.round()).all() * (out != exact).sum()
            self._counts[out] = Count(function.__name__, out.dtype, rounded, out.numel())
        given = [*tensors_of(args, kwargs)]
        narrow = (Count("", t.dtype) for t in given if is_narrow(t.dtype) and not out.requires_grad)
        count = next((c for t in given if (c := self._counts.get(t)) is not None), None) or next(narrow, None)
        if count is None or out.dtype == torch.bool:
            return None
        if function in _ANGLES:
            coarse = given[0].abs() * torch.finfo(count.dtype).eps > 2
            return Count(function.__name__.strip("_"), count.dtype, coarse.sum(), out.numel())
        if function in _FOLLOWED and out.is_floating_point():
            self._counts[out] = count
        return count if count.function and function in _FOLLOWED and not out.is_floating_point() else None
