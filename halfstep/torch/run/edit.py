"""Whole masters for a while: parameters as any code of torch expects them, to read and to write."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.core.errors import HalfstepError
from halfstep.torch.optim.masters import Masters, swap_data
from halfstep.torch.run.accumulation import PREPARE_AGAIN


@contextmanager
def edited(masters: Masters, count: Tensor) -> Iterator[None]:
    """Inside, `parameter.data` is the fp32 master; after, it is held again as the policy says, split ones exactly.

    An error inside keeps what was written before it, as in torch. `count` numbers updates, for rounding.
    """
    narrow = [p for p in masters.names if not masters.is_whole(p)]
    masters.accept_writes()
    # Each in memory of its own: what saves weights takes parts of one storage for tied weights, and keeps one.
    held = swap_data(narrow, [w.clone() if w._is_view() else w for w in masters.wide(narrow)])
    try:
        yield
    finally:
        wide = swap_data(narrow, held)
        masters.note_writes(narrow)
        for p, old, new in zip(narrow, held, wide, strict=True):
            if (new.shape, new.device, new.dtype) != (old.shape, old.device, torch.float32):
                raise HalfstepError(
                    f"`{masters.names[p]}` was resized, cast or moved inside run.edit(): it is {new.dtype} of "
                    f"shape {tuple(new.shape)} on {new.device} now. No narrow or split master was changed",
                    hint=PREPARE_AGAIN,
                )
        masters.put(narrow, wide, [count] * len(narrow))
