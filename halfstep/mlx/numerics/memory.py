"""How much memory an MLX device has and used. On a CPU MLX checks no allocation, and dies silently."""

import mlx.core as mx

from halfstep.core import host

_WORDS = ("Unable to allocate", "Attempting to allocate", "out of memory")


def capacity(device: mx.Device) -> int | None:
    """Returns the bytes that a device has; None if unknown."""
    if device.type == mx.cpu:
        return host.memory()
    info = mx.device_info(device)
    size = info.get("memory_size", info.get("total_memory"))  # Metal's name, CUDA's
    return None if size is None else int(size)


def peak(device: mx.Device) -> int:
    """Returns the most bytes used so far: by the device's allocator, or by the process on a CPU."""
    return mx.get_peak_memory() if device.type == mx.gpu else host.peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that there was not enough memory."""
    if isinstance(error, MemoryError):  # of numpy, which draws the first weights
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
