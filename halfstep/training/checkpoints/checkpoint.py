"""Checkpoints: whole or absent, verified on load, and read without running any code.

    RUN/checkpoints/step-000500/
        state.safetensors      every tensor, bit for bit
        manifest.json          {"format": 1, "step": 500,
                                "files": {"state.safetensors": {"sha256": ..., "bytes": ...}},
                                "tensors": {name: {"dtype": "BF16", "shape": [...]}},
                                ...,            what the caller adds: policy, config, data position, versions
                                "digest": ...}  SHA-256 of all the rest, as JSON with sorted keys and no spaces

A save writes into a sibling folder `step-000500.partial`, flushes files and folder to disk, renames the folder,
and flushes the parent: `step-NNNNNN` is complete or not there, whenever the machine dies. The next save removes
what a killed one left. Removing renames first too. One run writes at a time (files.RunLock).

A change of any meaningful bit is found and named: a resumed run that is wrong in one bit is worse than one that
stops. The checkpoint before a damaged one is taken only if the user allows it; the damaged one is then renamed to
`step-NNNNNN.damaged`, never removed. Nothing here unpickles: any file but `state.safetensors` is refused by name.

Everywhere here, `folder` is RUN/checkpoints. Loading holds the file and its tensors in memory at once.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.reading import MOST_TABLE, fits_in_memory, open_regular, parse_json, read_bytes
from halfstep.config.schema import Count, build
from halfstep.core.errors import ConfigError, HalfstepError, one_of
from halfstep.core.state_format import Stored
from halfstep.training.files import PICKLES, digest_of, flush, os_errors, write_whole
from halfstep.training.paths import CHECKPOINTS

FORMAT = 1
STATE, MANIFEST = "state.safetensors", "manifest.json"
OWN_KEYS = ("format", "step", "files", "tensors", "digest")

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

_FOLDER = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(partial|removed)")


class CheckpointError(HalfstepError):
    """A checkpoint that cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class _File:
    sha256: str
    bytes: Count


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[Count, ...]


@dataclass(frozen=True)
class _Manifest:
    """What every manifest holds; run/manifest.py adds to it."""

    step: Count
    files: Mapping[str, _File]
    tensors: Mapping[str, _Tensor]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint, and the errors of damaged newer ones that were set aside for it."""

    path: Path
    arrays: dict[str, Stored]
    manifest: dict[str, Any]
    damaged: tuple[DamagedCheckpointError, ...] = ()


def save(folder: Path, step: int, arrays: Mapping[str, Stored], meta: Mapping[str, Any]) -> Path:
    """Writes a checkpoint and returns its folder. Again changes nothing; other tensors are an error."""
    target = folder / f"step-{step:06d}"
    partial = target.with_name(f"{target.name}.partial")
    try:
        if not folder.parent.is_dir():
            raise CheckpointError(
                f"checkpoint `{target}` cannot be written: `{folder.parent}` was moved or removed",
                hint="move the run folder back: the next save tries again",
            )
        if not folder.is_dir():
            folder.mkdir()
            flush(folder.parent)
        _remove_leftovers(folder)
        os.mkdir(partial)
        written = _write_files(partial, step, arrays, meta)
        if target.exists() and _is_intact(target):
            _check_same(target, written)
            shutil.rmtree(partial)
            return target
        if target.exists():
            set_aside(target)  # damaged: this one takes its place
        os.rename(partial, target)
        flush(folder)
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


def load(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Returns the tensors, writable and unshared, and the manifest of a checkpoint's folder, verified."""
    from safetensors import SafetensorError, deserialize

    manifest = check_complete(path)
    expected = manifest["files"][STATE]
    file = path / STATE
    if not fits_in_memory(2 * expected["bytes"]):
        raise CheckpointError(f"loading `{file}` takes twice its {expected['bytes']:,} bytes of memory")
    content = _read(file, expected["bytes"])
    if (sha256 := hashlib.sha256(content).hexdigest()) != expected["sha256"]:
        raise _damaged(file, f"its SHA-256 is {sha256}, expected {expected['sha256']}")
    try:
        tensors = deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise _damaged(file, f"it does not read as safetensors ({error})") from None
    arrays = {name: Stored(t["dtype"], tuple(t["shape"]), memoryview(t["data"])) for name, t in tensors}
    _check_table(path / MANIFEST, manifest["tensors"], table(arrays))
    return arrays, manifest


def load_newest(folder: Path, *, allow_older: bool = False) -> Loaded | None:
    """Returns the newest checkpoint, or None. With `allow_older`, damaged ones are set aside for a whole one."""
    damaged: dict[Path, DamagedCheckpointError] = {}
    while left := [path for path in step_folders(folder) if path not in damaged]:
        path = left[-1]
        try:
            arrays, manifest = load(path)
        except (CheckpointError, FileNotFoundError) as error:
            if not path.exists():
                continue
            if not allow_older or not isinstance(error, DamagedCheckpointError):
                raise
            damaged[path] = error
            continue
        for bad in damaged:
            set_aside(bad)
        return Loaded(path, arrays, manifest, tuple(damaged.values()))
    if damaged:
        raise next(iter(damaged.values()))
    return None


def load_named(path: Path) -> Loaded | None:
    """Returns the checkpoint that a path names: a checkpoint's own folder, or a run's (its newest)."""
    return Loaded(path, *load(path)) if is_checkpoint(path) else load_newest(path / CHECKPOINTS)


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, or a copy of one, and not a run (which may be called `step-` too)."""
    if (path / CHECKPOINTS).is_dir():
        return False
    return all((path / name).is_file() for name in (MANIFEST, STATE)) or path.name.startswith("step-")


def latest(folder: Path) -> Path | None:
    """Returns the newest checkpoint's folder, or None; refuses an incomplete one. Only `load` checks contents."""
    paths = step_folders(folder)
    if paths:
        check_complete(paths[-1])
    return paths[-1] if paths else None


def note(path: Path, **facts: Any) -> None:
    """Adds to the manifest of a checkpoint what was measured after it was saved."""
    manifest = {**read_manifest(path), **facts}
    with os_errors(CheckpointError, f"`{path / MANIFEST}` cannot be written"):
        write_whole(path / MANIFEST, _as_text({**manifest, "digest": digest_of(manifest)}))


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint: it no longer counts, and can still be examined."""
    target = path.with_name(f"{path.name}.damaged")
    for number in range(2, 1000):
        if not target.exists():
            break
        target = path.with_name(f"{path.name}.damaged-{number}")
    os.rename(path, target)
    return target


def discard(path: Path) -> None:
    """Removes a checkpoint. A death on the way leaves the whole of it, or nothing that looks like one."""
    removed = path.with_name(f"{path.name}.removed")
    with os_errors(CheckpointError, f"checkpoint `{path}` cannot be removed"):
        os.rename(path, removed)
        _remove(removed)


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed saves and prunes left; what cannot be removed (a file open on NFS) stops no save."""
    for entry in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            with suppress(OSError):
                _remove(entry)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint's folder, verified by its own digest."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint `{path}`", hint="name a folder that holds one")
    file = path / MANIFEST
    _refuse_pickles(path)
    try:
        manifest = parse_json(_read(file, MOST_TABLE))
    except ValueError as error:
        raise _damaged(file, f"it is not JSON ({error})") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(file, "it states no `format`")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"`{file}` has format {manifest['format']!r}, this halfstep reads format {FORMAT}",
            hint="load it with the halfstep that wrote it; if that is newer, update yours",
        )
    if (digest := digest_of(manifest)) != manifest.get("digest"):
        raise _damaged(file, f"its digest is {digest}, expected {manifest.get('digest')!r}")
    try:
        files = build(_Manifest, manifest, others=True).files
    except ConfigError as error:
        raise _damaged(file, f"it is not what halfstep writes: {error.message}") from None
    if STATE not in files:
        raise _damaged(file, f"it has no {STATE}")
    if others := set(files) - {STATE}:
        raise CheckpointError(
            f"`{file}` points to `{sorted(others)[0]}`; a checkpoint is {STATE} in its own folder, and no other",
            hint="no halfstep wrote it: do not load what you do not trust; remove the folder",
        )
    # A copy may have any name; one that states a step (`step-000500.damaged` too) states which was meant.
    if (named := _FOLDER.match(Path(os.path.abspath(path)).name)) and int(named[1]) != manifest["step"]:
        raise _damaged(path, f"it holds step {manifest['step']}, expected the step in its name")
    return manifest


def table(arrays: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
    """Returns the manifest's table of tensors."""
    return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape, _) in arrays.items()}


def _write_files(
    partial: Path, step: int, arrays: Mapping[str, Stored], meta: Mapping[str, Any]
) -> dict[str, Any]:
    write_tensors(partial / STATE, arrays)
    manifest = _manifest(step, _describe_file(partial / STATE), arrays, meta)
    (partial / MANIFEST).write_bytes(_as_text(manifest))
    flush(partial / MANIFEST)
    flush(partial)
    return manifest


def write_tensors(file: Path, arrays: Mapping[str, Stored], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file and flushes it to disk."""
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # The writer takes addresses: `views` keeps what they point at alive until it is done.
    views, specs = {}, {}
    for name, (dtype, shape, data) in arrays.items():
        view = views[name] = np.frombuffer(data, dtype=np.uint8)
        if dtype not in DTYPES:
            raise CheckpointError(f"a checkpoint cannot hold dtype `{dtype}`; it must be {one_of(DTYPES)}")
        if view.nbytes != (size := math.prod(shape) * DTYPES[dtype][1]):
            raise CheckpointError(
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


def _manifest(
    step: int, state: Mapping[str, Any], arrays: Mapping[str, Stored], meta: Mapping[str, Any]
) -> dict[str, Any]:
    if taken := [key for key in meta if key in OWN_KEYS]:
        raise ValueError(f"`{taken[0]}` is the checkpoint's own key and cannot be in meta")
    manifest = {"format": FORMAT, "step": step, "files": {STATE: state}, "tensors": table(arrays), **meta}
    try:
        text = json.dumps(manifest, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of step {step} is not JSON: {error}") from None
    # Read back, so that the digest is of what a reader will see (a tuple becomes a list).
    manifest = json.loads(text)
    return {**manifest, "digest": digest_of(manifest)}


def _as_text(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n"


def _describe_file(file: Path) -> dict[str, Any]:
    with open_regular(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"sha256": digest, "bytes": file.stat().st_size}


def _check_same(target: Path, written: Mapping[str, Any]) -> None:
    there, here = read_manifest(target)["files"][STATE], written["files"][STATE]
    if there != here:
        raise CheckpointError(
            f"`{target}` is there already with other tensors: its SHA-256 is {there['sha256']}, this one's "
            f"{here['sha256']}",
            hint="another run wrote it: choose another folder with `--out`, or remove it",
        )


def _check_table(file: Path, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        was, now = expected.get(name, "absent"), found.get(name, "absent")
        if was != now:
            raise _damaged(file, f"tensor `{name}` is {now} in {STATE}, expected {was}")


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders of checkpoints, complete or not, in the order of their steps."""
    entries = folder.iterdir() if folder.is_dir() else []
    return sorted((path for path in entries if _FOLDER.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def check_complete(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files have the sizes that it states."""
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise _damaged(path, f"`{name}` is missing") from None
        if size != entry["bytes"]:
            raise _damaged(path / name, f"it has {size} bytes, expected {entry['bytes']}")
    return manifest


def _refuse_pickles(path: Path) -> None:
    for entry in sorted(path.iterdir()):
        if entry.suffix.lower() in PICKLES:
            raise CheckpointError(
                f"`{entry}` is a pickle, which runs code when it is loaded, and is not part of a checkpoint",
                hint="remove it: a checkpoint is safetensors and JSON",
            )


def _is_intact(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all(_describe_file(path / name) == entry for name, entry in files.items())
    except (DamagedCheckpointError, OSError):
        return False


def _read(file: Path, most: int) -> bytes:
    try:
        return read_bytes(file, most)
    except FileNotFoundError:
        raise _damaged(file.parent, f"`{file.name}` is missing") from None
    except OSError as error:
        if error.errno == errno.EIO:  # the disk gave up on a block
            raise _damaged(file, "the disk cannot read it (I/O error)") from None
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror or error}") from None


def _damaged(place: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"`{place}` is damaged: {reason}",
        hint="restore it; or continue from the one before it with --resume --allow-older; to read another, name "
        "its folder",
    )
