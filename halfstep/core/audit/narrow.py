"""Which formats are narrower than fp32, by the names that records use."""

# float64 is wide; integers and booleans are not formats that training computes in.
_WIDE = {"fp32", "fp64", "float32", "float64", "double", "complex64", "complex128"}


def is_narrow(name: str | None) -> bool:
    """Returns whether numbers of a format have fewer bits than fp32: bf16, fp16, fp8, int8 of a moment."""
    return name is not None and name not in _WIDE
