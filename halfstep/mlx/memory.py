"""How much memory an MLX device has, how much was held, and which errors say that it was not enough.

On a CPU MLX does not ask whether memory was given, and dies without a word: only what is checked before is told.
"""

import mlx.core as mx

from halfstep.core import host

_WORDS = ("Unable to allocate", "Attempting to allocate", "out of memory")


def capacity(device: mx.Device) -> int | None:
    """The bytes that a device has; None where nobody says."""
    if device.type == mx.cpu:
        return host.memory()
    info = mx.device_info(device)
    found = info.get("memory_size", info.get("total_memory"))  # Metal's name, CUDA's
    return None if found is None else int(found)


def peak(device: mx.Device) -> int:
    """The most bytes held so far: of the device's allocator, or of the process on a CPU."""
    return mx.get_peak_memory() if device.type == mx.gpu else host.peak_memory()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    if isinstance(error, MemoryError):  # of numpy, which draws the first weights
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
