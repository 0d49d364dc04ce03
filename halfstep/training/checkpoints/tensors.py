"""The safetensors files of a checkpoint: written, verified against what its manifest says of them, and read."""

import errno
import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.config.reading import open_regular, parse_json
from halfstep.core.errors import HalfstepError, one_of
from halfstep.core.state_format import Stored
from halfstep.training.files import flush

MANIFEST = "manifest.json"

# safetensors' name in files: (its name in the API that writes them, bytes per element)
DTYPES: Mapping[str, tuple[str, int]] = {
    **{f"U{8 * size}": (f"uint{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": (f"int{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": (f"float{8 * size}", size) for size in (2, 4, 8)},
    "BOOL": ("bool", 1),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_CHUNK = 1 << 20  # bytes that are hashed at a time where no tensor is wanted


class CheckpointError(HalfstepError):
    """A checkpoint that cannot be written or read."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that cannot be written, by this process or by another rank."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that does not exist, is not complete, or cannot be read by this version."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was written."""


class Piece(NamedTuple):
    """The rows of a tensor that one file holds; a tensor without dimensions has one row."""

    start: int
    stop: int
    shape: tuple[int, ...]  # in the file
    dtype: str


def write_tensors(file: Path, arrays: Mapping[str, Stored], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file and flushes it to disk."""
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # The writer takes addresses: `views` keeps what they point at alive until it is done.
    views, specs = {}, {}
    for name, (dtype, shape, data) in arrays.items():
        view = views[name] = np.frombuffer(data, dtype=np.uint8)
        if dtype not in DTYPES:
            raise CheckpointWriteError(f"a checkpoint cannot hold dtype `{dtype}`; it must be {one_of(DTYPES)}")
        if view.nbytes != (size := math.prod(shape) * DTYPES[dtype][1]):
            raise CheckpointWriteError(
                f"`{name}` of {dtype} and shape {list(shape)} has {view.nbytes} bytes, expected {size}"
            )
        specs[name] = TensorSpec(
            dtype=DTYPES[dtype][0], shape=shape, data_ptr=view.ctypes.data, data_len=view.nbytes
        )
    try:
        serialize_file(specs, file, metadata)
    except SafetensorError as error:
        raise OSError(None, str(error), str(file)) from None
    # safetensors lets only the owner read what it writes; here the umask decides, as for the folder.
    os.chmod(file, file.parent.stat().st_mode & 0o666)
    flush(file)


def read_header(file: Path, expected: Mapping[str, Any], held: Mapping[str, Piece]) -> dict[str, tuple[int, int]]:
    """Returns where the bytes of each tensor are in a file, in order; checks them against the manifest."""
    try:
        with name_read_errors(file), open_regular(file) as opened:
            found = _parse_header(opened, expected["bytes"])
        there = {name: (dtype, shape) for name, (dtype, shape, _, _) in found.items()}
        stated = {name: (each.dtype, each.shape) for name, each in held.items()}
        for name in sorted(stated.keys() | there.keys()):
            was, now = stated.get(name), there.get(name)
            if was != now:
                reason = f"tensor `{name}` is {_describe(now)} in {file.name}, expected {_describe(was)}"
                raise damage_error(file.parent / MANIFEST, reason)
    except DamagedCheckpointError:
        with name_read_errors(file):
            sha256 = describe_file(file)["sha256"]
        check_digest(file, sha256, expected)
        raise
    return {name: (begin, end) for name, (_, _, begin, end) in found.items()}


def _parse_header(opened: BufferedReader, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    file = Path(opened.name)
    try:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = parse_json(opened.read(min(length, size)))
        header.pop("__metadata__", None)
        found, last = {}, 8 + length
        for name, entry in sorted(header.items(), key=lambda each: tuple(each[1]["data_offsets"])):
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = (8 + length + place for place in entry["data_offsets"])
            if begin != last or end - begin != math.prod(shape) * DTYPES[dtype][1]:
                raise ValueError(f"the offsets of `{name}`")
            found[name] = (dtype, shape, begin, end)
            last = end
        if last != size:
            raise ValueError(f"{last} bytes are described")
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise damage_error(file, f"it does not read as safetensors ({error})") from None
    return found


def read_rows(
    file: Path,
    expected: Mapping[str, Any],
    header: Mapping[str, tuple[int, int]],
    held: Mapping[str, Piece],
    wanted: Mapping[str, tuple[int, int]],
    arrays: Mapping[str, Stored],
) -> None:
    """Reads a file once, hashes all of it, and copies the rows that are wanted into their arrays."""
    sha256 = hashlib.sha256()
    scrap = memoryview(bytearray(_CHUNK))
    with name_read_errors(file), open_regular(file) as opened:

        def read_into(into: memoryview) -> None:
            got = opened.readinto(into)
            if got != len(into):
                raise damage_error(file, "it ends early")
            sha256.update(into)

        def skip_to(place: int) -> None:
            while (left := place - opened.tell()) > 0:
                read_into(scrap[: min(left, _CHUNK)])

        for name, (begin, end) in header.items():
            (start, stop, _, _), (first, last) = held[name], wanted[name]
            low, high = max(start, first), min(stop, last)
            if low < high and begin < end:
                size = (end - begin) // (stop - start)
                skip_to(begin + (low - start) * size)
                read_into(memoryview(arrays[name].data)[(low - first) * size : (high - first) * size])
        skip_to(expected["bytes"])
    check_digest(file, sha256.hexdigest(), expected)


def overlaps(held: Mapping[str, Piece], wanted: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a file holds rows that are wanted."""
    return any(max(each.start, wanted[name][0]) < min(each.stop, wanted[name][1]) for name, each in held.items())


def check_digest(file: Path, sha256: str, expected: Mapping[str, Any]) -> None:
    """Refuses a file whose SHA-256 is not the one its manifest states."""
    if sha256 != expected["sha256"]:
        raise damage_error(file, f"its SHA-256 is {sha256}, expected {expected['sha256']}")


def _describe(described: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if described is None else f"{described[0]} of shape {list(described[1])}"


def describe_file(file: Path, *, just_written: bool = False) -> dict[str, Any]:
    """Returns what a manifest says of a file, which may be a pipe or a device unless it was `just_written`."""
    with open(file, "rb") if just_written else open_regular(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"sha256": digest, "bytes": file.stat().st_size}


@contextmanager
def name_read_errors(file: Path) -> Iterator[None]:
    """Turns an OSError in the block into a checkpoint error that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise damage_error(file.parent, f"`{file.name}` is missing") from None
    except OSError as error:
        if error.errno == errno.EIO:  # the disk gave up on a block
            raise damage_error(file, "the disk cannot read it (I/O error)") from None
        raise CheckpointReadError(f"`{file}` cannot be read: {error.strerror or error}") from None


def damage_error(place: Path, reason: str) -> DamagedCheckpointError:
    """Returns the error of a file that is not what was written."""
    return DamagedCheckpointError(
        f"`{place}` is damaged: {reason}",
        hint="restore it; or continue from the one before it with --resume --allow-older; to read another, name "
        "its folder",
    )
