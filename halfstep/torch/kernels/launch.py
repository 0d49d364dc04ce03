"""Launching a kernel without Triton's own look at every argument, which takes longer than a small kernel runs."""

from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[Any, Any] = {}


def launch(kernel: Any, key: Any, beside: Tensor, programs: int, *args: Any, **options: Any) -> None:
    """Launches a kernel of so many programs on the device of a tensor; `args` are its parameters, in their order.

    What code Triton makes depends on dtypes, on whether an address or an integer is a multiple of 16, and on
    constants and options: `key` must tell apart all that differ from call to call.
    """
    device = beside.get_device()
    if device >= 0 and torch.cuda.current_device() != device:  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(kernel, key, beside, programs, *args, **options)
    place = (kernel.fn, key, device)
    known = _COMPILED.get(place)
    if known is None:
        _COMPILED[place] = kernel[(programs, 1, 1)](*args, **options)  # None if it is interpreted
    else:
        known[(programs, 1, 1)](*args)
