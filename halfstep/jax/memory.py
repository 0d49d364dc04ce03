"""How much memory a JAX device has, how much was held, and which errors say that it was not enough."""

import jax

from halfstep.core import host


def capacity(device: jax.Device) -> int | None:
    """The bytes that JAX may take of a device; None where nobody says."""
    if device.platform == "cpu":
        return host.memory()
    stats = device.memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def peak(device: jax.Device) -> int:
    """The most bytes held so far: of the device's allocator, or of the process on a CPU."""
    stats = device.memory_stats() or {}
    return int(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else host.peak_memory()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    if isinstance(error, MemoryError):  # of numpy, which draws the first weights
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
