"""Counts in a narrow format that become integers, such as `torch.ones_like(x[..., 0]).cumsum(1).long()` in bf16.

bf16 has every whole number to 256, fp16 to 2048. A count is made again in fp32: what differs was rounded. It
matters where the result, or what is computed from it element by element, becomes integers. Sums that are not
whole, such as those of probabilities, are no counts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.core.torch_functions import named
from halfstep.torch.instruments.collect.tensors import is_narrow

_PLACES = (torch, Tensor)
_COUNTING = frozenset(named("cumsum arange", *_PLACES))
_CASTS = frozenset(named("long int short to type type_as", Tensor))
_FOLLOWED = _CASTS | frozenset(
    named(
        "add sub mul __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ add_ sub_ mul_ "
        "clamp clamp_ masked_fill masked_fill_ where __getitem__ view reshape squeeze unsqueeze expand flatten "
        "flip contiguous clone detach float double half bfloat16",
        *_PLACES,
    )
)


class Count(NamedTuple):
    """What a narrow tensor counts."""

    function: str
    dtype: torch.dtype
    rounded: Tensor  # how many of its numbers were; on their device
    elements: int


class Counts:
    """Follows counts through the functions that a model calls."""

    def __init__(self) -> None:
        self._counts: Any = WeakTensorKeyDictionary()

    @torch.no_grad()
    def see(self, function: Any, args: Any, kwargs: Any, out: Any) -> Count | None:
        """Takes a call that was made; returns the count if it made integers of one."""
        if not isinstance(out, Tensor) or not (function in _COUNTING or len(self._counts)):
            return None
        if function in _COUNTING and is_narrow(out.dtype) and "out" not in kwargs:
            exact = function(*args, **{**kwargs, "dtype": torch.float32})
            rounded = (exact == exact.round()).all() * (out != exact).sum()
            self._counts[out] = Count(function.__name__, out.dtype, rounded, out.numel())
        if function not in _FOLLOWED:
            return None
        given = (*args, *kwargs.values())
        count = next((c for t in given if isinstance(t, Tensor) and (c := self._counts.get(t)) is not None), None)
        if count is None or out.dtype == torch.bool:
            return None
        if out.is_floating_point():
            self._counts[out] = count
        return None if out.is_floating_point() else count
