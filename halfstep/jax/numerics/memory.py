"""How much memory a JAX device has, how much was used, and which errors mean that it was not enough."""

import jax

from halfstep.core import host


def capacity(device: jax.Device) -> int | None:
    """Returns the bytes that JAX may use on a device; None if unknown."""
    if device.platform == "cpu":
        return host.memory()
    stats = device.memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def peak(device: jax.Device) -> int:
    """Returns the most bytes used so far: by the device's allocator, or by the process on a CPU."""
    stats = device.memory_stats() or {}
    return int(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else host.peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that there was not enough memory."""
    if isinstance(error, MemoryError):  # of numpy, which draws the first weights
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
