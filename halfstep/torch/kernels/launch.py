"""Launching a kernel of Triton that is launched often.

Triton's own launch looks at every argument to find the code it has compiled for arguments of that kind; on the
host that takes longer than a small kernel runs. Here the caller says what kind they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[Any, Any] = {}
# What is called instead of a launch, by type of device: for `meta`, while a step is planned.
INSTEAD: dict[str, Callable[..., None]] = {}


def launch(kernel: Any, key: Any, beside: Tensor, programs: int, *args: Any, **options: Any) -> None:
    """Launches `programs` programs of a kernel on the device of a tensor, with its parameters in order.

    What code Triton makes depends on dtypes, on whether an address or an integer is a multiple of 16, and on
    constants and options: `key` must tell apart all that differ from call to call.
    """
    device = beside.get_device()
    known = _COMPILED.get((kernel.fn, key, device))
    if known is not None and torch._C._cuda_getDevice() == device:
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Triton's own profilers, which the Nones stand for, do not see this launch.
        known.run(programs, 1, 1, stream, known.function, known.packed_metadata, None, None, None, *args)
    elif beside.device.type in INSTEAD:
        INSTEAD[beside.device.type](kernel, key, beside, programs, *args, **options)
    elif device < 0:
        kernel[(programs,)](*args, **options)  # interpreted
    else:
        with torch.cuda.device(device):
            _COMPILED[kernel.fn, key, device] = kernel[(programs,)](*args, **options)
