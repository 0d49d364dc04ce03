"""Numbers on their way to the host: a copy is queued behind the kernels that make them; reading waits for it."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums: fp64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@final
class Unread:
    """A copy of a tensor to the host that may still be running."""

    def __init__(self, numbers: Tensor, finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None):
        self._finish = finish
        self._event: Any = None
        if numbers.device.type == "cpu":
            self._numbers = numbers.clone()
            return
        self._numbers = numbers.to("cpu", non_blocking=True)  # torch allocates it in pinned memory
        self._event = torch.get_device_module(numbers.device).Event()
        self._event.record()

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns the numbers; waits for the kernels that compute them, not for later ones."""
        if self._event is not None:
            self._event.synchronize()
        numbers = self._numbers.numpy()
        return numbers if self._finish is None else self._finish(numbers)
