"""How much memory a torch device has, how much was held, and which errors mean that it was not enough."""

import torch

from halfstep.core import host

# Messages of errors that have no type of their own: of CPUs, sizes beyond 64 bits, cuBLAS and MPS.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "calculation overflowed", "ALLOC_FAILED")


def capacity(device: torch.device) -> int | None:
    """Returns the bytes that a device has; None if unknown."""
    match device.type:
        case "cpu":
            return host.memory()
        case "cuda" | "xpu":
            return int(getattr(torch, device.type).get_device_properties(device).total_memory)
        case "mps":
            return int(torch.mps.recommended_max_memory())
        case _:
            return None


def peak(device: torch.device) -> int:
    """Returns the peak of bytes held: by the device's allocator, or by the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host.peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was not enough memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
