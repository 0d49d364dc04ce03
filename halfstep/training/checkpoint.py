"""Checkpoints: whole or absent, verified on load, and read without running any code.

    RUN/checkpoints/step-000500/
        state.safetensors      every tensor, bit for bit
        manifest.json          what they are, what wrote them, and the digests that prove both

**Whole or absent.** A save writes into a sibling folder `step-000500.partial`, flushes files and folder to
the disk, renames the folder, and flushes the parent. A rename is one act: whenever the process or the machine
dies, `step-NNNNNN` either is not there or is complete, and earlier ones were never touched. What a killed
save left is removed by the next one. Pruning renames first too, so a half-deleted folder never looks like a
checkpoint. One run writes to a folder at a time.

**Verified.** The manifest is

    {"format": 1, "step": 500,
     "files": {"state.safetensors": {"sha256": ..., "bytes": ...}},
     "tensors": {name: {"dtype": "BF16", "shape": [...]}},
     ...,                                     what the caller adds: policy, config, data position, versions
     "digest": ...}                           SHA-256 of all the rest, as JSON with sorted keys and no spaces

so a change of any bit that means something, in either file, is found and named. A resumed run that is wrong
in one bit is worse than one that stops.

**Bytes, not arrays.** An `Array` is a dtype's name in safetensors, a shape, and little-endian bytes. numpy
has no bf16, and no framework is imported here; each backend's `state` turns its tensors into these and back.
Loading holds the file and its tensors in memory at once.

Everywhere here, `folder` is the folder of checkpoints, RUN/checkpoints.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.core.errors import HalfstepError, one_of

FORMAT = 1
STATE, MANIFEST = "state.safetensors", "manifest.json"
OWN_KEYS = ("format", "step", "files", "tensors", "digest")

_FOLDER = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(partial|removed)")

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


def save(folder: Path, step: int, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> Path:
    """Writes a run's checkpoint of a step, and returns its folder.

    Saving the same tensors for the same step again changes nothing, not even the manifest; other tensors for
    a step that is there are an error.
    """
    target = folder / f"step-{step:06d}"
    partial = target.with_name(f"{target.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        os.mkdir(partial)
        written = _write_files(partial, step, arrays, meta)
        if target.exists() and _is_intact(target):
            _check_same(target, written)
            shutil.rmtree(partial)
            return target
        if target.exists():
            os.rename(target, target.with_name(f"{target.name}.removed"))  # damaged: this one replaces it
        os.rename(partial, target)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        place = error.filename or folder
        raise CheckpointError(
            f"checkpoint `{target}` cannot be written: {error.strerror or error} (`{place}`)",
            hint="earlier checkpoints are untouched; free space, or choose another folder with `--out`",
        ) from None
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def load(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors and the manifest of a checkpoint's folder, verified.

    The arrays' data can be written to and is shared with nobody.
    """
    from safetensors import SafetensorError, deserialize

    manifest = read_manifest(path)
    expected = manifest["files"][STATE]
    file = path / STATE
    content = _read(file)
    if len(content) != expected["bytes"]:
        raise _damaged(file, f"it has {len(content)} bytes, expected {expected['bytes']}")
    if (found := hashlib.sha256(content).hexdigest()) != expected["sha256"]:
        raise _damaged(file, f"its SHA-256 is {found}, expected {expected['sha256']}")
    try:
        tensors = deserialize(content)  # type: ignore[no-untyped-call]
        arrays = {
            name: Array(tensor["dtype"], tuple(tensor["shape"]), memoryview(tensor["data"]))
            for name, tensor in tensors
        }
    except (SafetensorError, CheckpointError) as error:
        raise _damaged(file, f"it does not read as safetensors ({error})") from None
    _check_table(path / MANIFEST, manifest["tensors"], table(arrays))
    return arrays, manifest


def latest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None.

    Complete is: a manifest that verifies, and files of the sizes it says. What is inside them, `load` checks.
    A checkpoint of another format is an error, not passed over: it may be the one that counts.
    """
    complete = [path for path in _step_folders(folder) if _is_complete(path)]
    return complete[-1] if complete else None


def prune(folder: Path, keep: int) -> list[Path]:
    """Removes all complete checkpoints but the `keep` latest; returns what was removed.

    What is not complete is left for its owner to look at, and does not count.
    """
    if keep < 1:
        raise ValueError(f"prune must keep 1 checkpoint or more, not {keep}")
    old = [path for path in _step_folders(folder) if _is_complete(path)][:-keep]
    for path in old:
        removed = path.with_name(f"{path.name}.removed")
        try:
            os.rename(path, removed)
            shutil.rmtree(removed)
        except OSError as error:
            raise CheckpointError(f"checkpoint `{path}` cannot be removed: {error.strerror or error}") from None
    return old


def remove_leftovers(folder: Path) -> None:
    """Removes what killed saves and prunes left."""
    for entry in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's folder, verified by its own digest."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint `{path}`", hint="name a folder `step-NNNNNN`")
    file = path / MANIFEST
    try:
        manifest = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"it is not JSON ({error})") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(file, "it states no `format`")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"`{file}` has format {manifest['format']!r}, this halfstep reads format {FORMAT}",
            hint="load it with the halfstep that wrote it",
        )
    if (found := _digest(manifest)) != manifest.get("digest"):
        raise _damaged(file, f"its digest is {found}, expected {manifest.get('digest')!r}")
    if missing := [key for key in OWN_KEYS if key not in manifest] or set(manifest["files"]) ^ {STATE}:
        raise _damaged(file, f"it says nothing, or too much, of {', '.join(sorted(missing))}")
    if not (named := _FOLDER.fullmatch(path.name)) or int(named[1]) != manifest["step"]:
        raise _damaged(path, f"it holds step {manifest['step']}, expected the step in its name")
    return manifest


def table(arrays: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """The manifest's table of tensors."""
    return {name: {"dtype": array.dtype, "shape": list(array.shape)} for name, array in arrays.items()}


def _write_files(partial: Path, step: int, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Both files, flushed to the disk; returns the manifest."""
    _write_state(partial / STATE, arrays)
    _flush(partial / STATE)
    manifest = _manifest(step, _describe_file(partial / STATE), arrays, meta)
    with open(partial / MANIFEST, "wb") as file:
        file.write(json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    _flush(partial)
    return manifest


def _write_state(file: Path, arrays: Mapping[str, Array]) -> None:
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # The writer takes addresses: `views` keeps what they point at alive until it is done.
    views = {name: np.frombuffer(array.data, dtype=np.uint8) for name, array in arrays.items()}
    specs = {
        name: TensorSpec(
            dtype=DTYPES[array.dtype][0],
            shape=array.shape,
            data_ptr=views[name].ctypes.data,
            data_len=views[name].nbytes,
        )
        for name, array in arrays.items()
    }
    try:
        serialize_file(specs, file)
    except SafetensorError as error:
        raise OSError(None, str(error), str(file)) from None


def _manifest(
    step: int, state: Mapping[str, Any], arrays: Mapping[str, Array], meta: Mapping[str, Any]
) -> dict[str, Any]:
    if taken := [key for key in meta if key in OWN_KEYS]:
        raise ValueError(f"`{taken[0]}` is the checkpoint's own key and cannot be in meta")
    manifest = {"format": FORMAT, "step": step, "files": {STATE: state}, "tensors": table(arrays), **meta}
    try:
        text = json.dumps(manifest, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of step {step} is no JSON: {error}") from None
    # Read back, so that the digest is of what a reader will see (a tuple becomes a list).
    manifest = json.loads(text)
    return {**manifest, "digest": _digest(manifest)}


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _describe_file(file: Path) -> dict[str, Any]:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"sha256": digest, "bytes": file.stat().st_size}


def _check_same(target: Path, written: Mapping[str, Any]) -> None:
    """Refuses to save over a checkpoint with other tensors, or one that cannot be read."""
    found = read_manifest(target)["files"][STATE]
    expected = written["files"][STATE]
    if found != expected:
        raise CheckpointError(
            f"`{target}` is there already with other tensors: its SHA-256 is {found['sha256']}, this one's "
            f"{expected['sha256']}",
            hint="another run wrote it: choose another folder with `--out`, or remove it",
        )


def _check_table(file: Path, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise _damaged(
                file,
                f"tensor `{name}` is {found.get(name, 'absent')} in {STATE}, "
                f"expected {expected.get(name, 'absent')}",
            )


def _step_folders(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else []
    return sorted(
        (path for path in found if _FOLDER.fullmatch(path.name) and path.is_dir()),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def _is_complete(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == told["bytes"] for name, told in files.items())
    except (DamagedCheckpointError, OSError):
        return False


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint's files are what its manifest says, to the byte."""
    try:
        files = read_manifest(path)["files"]
        return all(_describe_file(path / name) == told for name, told in files.items())
    except (DamagedCheckpointError, OSError):
        return False


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise _damaged(file.parent, f"`{file.name}` is missing") from None
    except OSError as error:
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror or error}") from None


def _damaged(place: Path, said: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"`{place}` is damaged: {said}",
        hint="restore it, or move its folder away: --resume then takes the checkpoint before it",
    )


def _flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
