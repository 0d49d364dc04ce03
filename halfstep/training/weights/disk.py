"""Tensors in files, read a few megabytes at a time: what their numbers show, and how two of them differ.

A tensor is a format, a shape, and the bytes that hold it: ranges of files, whatever wrote them. Nothing is loaded
whole, so a folder of any size takes the memory of a few chunks; chunks are read by several threads, because numpy
leaves the interpreter to others while it counts.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import open_regular
from halfstep.core.formats import Format, parse
from halfstep.core.rounding import cast, decode, encode
from halfstep.training.weights.safetensors import Tensor

CHUNK = 1 << 18  # elements
THREADS = min(4, os.cpu_count() or 1)
FORMATS = {
    "F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2",
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
_SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}


Codes = NDArray[Any]  # bit patterns


class Span(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class DiskTensor:
    """A tensor in files. Of a format that is no floating-point number, only that name is known.

    Its bytes may be in whatever order, such as that of a transposed tensor, unless it is `in_order`.
    """

    format: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    in_order: bool = True

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def is_readable(self) -> bool:
        """Whether its numbers are floating-point, and all of them are there."""
        size = _SIZES.get(self.format)
        return size is not None and 0 < self.elements * size == sum(span.size for span in self.spans)

    def chunks(self) -> Iterator[Span]:
        """Yields its bytes in chunks of at most CHUNK numbers."""
        size = CHUNK * _SIZES[self.format]
        for file, offset, length in self.spans:
            for start in range(0, length, size):
                yield Span(file, offset + start, min(size, length - start))

    def codes(self, chunk: Span) -> Codes:
        """Returns the bit patterns in a chunk."""
        size = _SIZES[self.format]
        with open_regular(chunk.file) as opened:
            codes = np.fromfile(opened, f"<u{size}", chunk.size // size, offset=chunk.offset)
        if len(codes) * size != chunk.size:
            raise OSError(5, "it ends early", str(chunk.file))
        return codes


def safetensor(tensor: Tensor) -> DiskTensor:
    """Returns a tensor of a safetensors file."""
    format = FORMATS.get(tensor.dtype, tensor.dtype.lower())
    size = math.prod(tensor.shape) * _SIZES.get(format, 0)
    return DiskTensor(format, tensor.shape, (Span(tensor.file, tensor.offset, size),))


@dataclass(frozen=True)
class Numbers:
    """What the numbers of a tensor show; counts of chunks add up."""

    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    subnormal: int = 0
    saturated: int = 0  # at the largest finite number
    bits: int = 0  # all that are set in any number
    lowest: int = -1  # the smallest and the largest bit pattern; equal if all numbers are
    highest: int = -1

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.subnormal + other.subnormal,
            self.saturated + other.saturated,
            self.bits | other.bits,
            min(self.lowest, other.lowest) if self.elements else other.lowest,
            max(self.highest, other.highest),
        )


@dataclass(frozen=True)
class Difference:
    """How many numbers of two tensors differ, and how many by one step of their format, and by more."""

    changed: int = 0
    by_one: int = 0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.changed + other.changed, self.by_one + other.by_one)


def numbers_of(tensors: Iterable[DiskTensor]) -> list[Numbers]:
    """Returns what the numbers of each tensor show."""

    def count(_: int, tensor: DiskTensor, chunk: Span) -> Numbers:
        return _count(tensor.codes(chunk), tensor.format)

    return _by_chunks([*tensors], count, Numbers())


def differences(pairs: Iterable[tuple[DiskTensor, DiskTensor]]) -> list[Difference]:
    """Returns how the tensors of each pair differ, once the first is rounded to the format of the second."""
    pairs = [*pairs]

    def compare(index: int, tensor: DiskTensor, chunk: Span) -> Difference:
        other = pairs[index][0]
        start = _position(tensor, chunk)
        first = _range(other, start, chunk.size // _SIZES[tensor.format])
        return _compare(_as_format(first, other.format, tensor.format), tensor.codes(chunk), tensor.format)

    return _by_chunks([b for _, b in pairs], compare, Difference())


def first_numbers(tensor: DiskTensor, most: int) -> NDArray[np.float64]:
    """Returns the first numbers of a tensor."""
    codes = _range(tensor, 0, min(most, tensor.elements))
    return _floats(codes, tensor.format).astype(np.float64)


def rows_of(tensor: DiskTensor, start: int, stop: int) -> Codes:
    """Returns the bit patterns of some rows, one after another."""
    row = math.prod(tensor.shape[1:])
    return _range(tensor, start * row, (stop - start) * row)


def value_of(tensor: DiskTensor, code: int) -> float:
    """Returns the number of a bit pattern."""
    return float(_floats(np.array([code], f"<u{_SIZES[tensor.format]}"), tensor.format)[0])


def _by_chunks(tensors: list[DiskTensor], count: Callable[[int, DiskTensor, Span], Any], zero: Any) -> list[Any]:
    work = [(i, tensor, chunk) for i, tensor in enumerate(tensors) for chunk in tensor.chunks()]
    sums = [zero] * len(tensors)
    with ThreadPoolExecutor(THREADS) as pool:
        for (i, *_), counted in zip(work, pool.map(lambda each: count(*each), work), strict=True):
            sums[i] = sums[i] + counted
    return sums


def _count(codes: Codes, format: str) -> Numbers:
    exponent, mantissa = _bits(format)
    sign = 1 << (exponent + mantissa)
    sizes = codes & codes.dtype.type(sign - 1)
    infinity = ((1 << exponent) - 1) << mantissa
    if format == "e4m3":  # no infinity, and one NaN
        infinity = sign - 1
    smallest, largest = int(sizes.min()), int(sizes.max())
    found = Numbers(len(codes), lowest=int(codes.min()), highest=int(codes.max()))
    if largest >= infinity - 1:
        nonfinite = int(np.count_nonzero(sizes >= infinity))
        saturated = int(np.count_nonzero(sizes >= infinity - 1)) - nonfinite
        found = replace(found, nonfinite=nonfinite, saturated=saturated)
    if smallest < 1 << mantissa:
        zeros = int(np.count_nonzero(sizes == 0))
        found = replace(found, zeros=zeros, subnormal=int(np.count_nonzero(sizes < 1 << mantissa)) - zeros)
    return replace(found, bits=int(np.bitwise_or.reduce(codes)))


def _compare(first: Codes, second: Codes, format: str) -> Difference:
    changed = first != second
    count = int(np.count_nonzero(changed))
    if not count:
        return Difference()
    steps = np.abs(_ordered(first[changed], format) - _ordered(second[changed], format))
    return Difference(int(np.count_nonzero(steps)), int(np.count_nonzero(steps == 1)))  # -0 is 0


def _ordered(codes: Codes, format: str) -> Codes:
    """Returns bit patterns as integers in the order of their numbers, one apart from neighbor to neighbor."""
    sign = 1 << sum(_bits(format))
    sizes = (codes & codes.dtype.type(sign - 1)).astype(np.int64 if codes.itemsize > 2 else np.int32)
    return np.asarray(np.where(codes >= sign, -sizes, sizes))


def _bits(format: str) -> tuple[int, int]:
    if format == "fp64":
        return 11, 52
    known: Format = parse(format)
    return known.exponent_bits, known.mantissa_bits


def _floats(codes: Codes, format: str) -> Codes:
    """Returns the numbers of bit patterns."""
    if format in ("fp64", "fp32"):
        return np.asarray(codes.view("<f8" if format == "fp64" else "<f4"))
    return np.asarray(decode(codes, format))


def _as_format(codes: Codes, format: str, wanted: str) -> Codes:
    """Returns bit patterns of the same numbers, rounded to a format."""
    if format == wanted:
        return codes
    if (format, wanted) == ("fp32", "bf16"):  # to the nearest, ties to even; the others are rarer, and slower
        return np.asarray(((codes + 0x7FFF + ((codes >> 16) & 1)) >> 16).astype("<u2"))
    numbers = _floats(codes, format)
    if wanted in ("fp64", "fp32"):
        return np.asarray(numbers.astype("<f8" if wanted == "fp64" else "<f4").view(f"<u{_SIZES[wanted]}"))
    return np.asarray(encode(cast(numbers.astype("<f4"), wanted, overflow="inf"), wanted))


def _position(tensor: DiskTensor, chunk: Span) -> int:
    """Returns which number of a tensor a chunk begins with."""
    before = 0
    for span in tensor.spans:
        if span.file == chunk.file and span.offset <= chunk.offset < span.offset + span.size:
            return (before + chunk.offset - span.offset) // _SIZES[tensor.format]
        before += span.size
    raise ValueError(f"{chunk} is not of this tensor")


def _range(tensor: DiskTensor, start: int, count: int) -> Codes:
    """Returns some bit patterns of a tensor, by position."""
    size = _SIZES[tensor.format]
    begin, end, before, parts = start * size, (start + count) * size, 0, [np.empty(0, f"<u{size}")]
    for file, offset, length in tensor.spans:
        low, high = max(begin - before, 0), min(end - before, length)
        if low < high:
            parts.append(tensor.codes(Span(file, offset + low, high - low)))
        before += length
    return np.concatenate(parts)


def comparable(first: DiskTensor, second: DiskTensor) -> bool:
    """Whether `differences` can compare two tensors."""
    known = second.format == first.format or second.format in ("bf16", "fp16", "fp32", "fp64")
    return first.is_readable and second.is_readable and first.elements == second.elements and known
