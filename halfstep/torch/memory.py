"""How much memory a torch device has, how much was held, and which errors say that it was not enough."""

import torch

from halfstep.core import host

# What torch says where it has no type of error for it: on CPUs, of sizes beyond 64 bits, of cuBLAS and of MPS.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "calculation overflowed", "ALLOC_FAILED")


def capacity(device: torch.device) -> int | None:
    """The bytes that a device has; None where nobody says."""
    match device.type:
        case "cpu":
            return host.memory()
        case "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory)
        case "xpu":
            return int(torch.xpu.get_device_properties(device).total_memory)
        case "mps":
            return int(torch.mps.recommended_max_memory())
        case _:
            return None


def peak(device: torch.device) -> int:
    """The most bytes held so far: of the device's allocator, or of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host.peak_memory()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
