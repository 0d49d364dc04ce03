"""A tensor as bytes, whatever framework it comes from, and what can be wrong with a checkpoint that holds it.

An `Array` is a dtype's name in safetensors, a shape, and little-endian bytes. numpy has no bf16, and no framework
is imported here; each backend's `state` turns its tensors into these and back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfstep.core.errors import HalfstepError, one_of
from halfstep.core.state_format import Held

# safetensors' name in files: (its name in the API that writes them, bytes an element)
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}


class CheckpointError(HalfstepError):
    """A checkpoint that cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Array:
    """A tensor as bytes: row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CheckpointError(f"no checkpoint holds dtype `{self.dtype}`; it must be {one_of(DTYPES)}")
        expected = math.prod(self.shape) * DTYPES[self.dtype][1]
        found = memoryview(self.data).nbytes
        if found != expected:
            raise CheckpointError(
                f"an array of {self.dtype} and shape {list(self.shape)} has {found} bytes, expected {expected}"
            )


def held(arrays: Mapping[str, Array]) -> dict[str, Held]:
    """Arrays as a session takes them."""
    return {name: (array.dtype, array.shape, array.data) for name, array in arrays.items()}
