"""Checkpoints: whole or absent, verified on load, and read without running any code.

    RUN/checkpoints/step-000500/
        state.safetensors      every tensor, bit for bit
        manifest.json          {"format": 3, "step": 500,
                                "files": {"state.safetensors": {"sha256": ..., "bytes": ...}},
                                "tensors": {name: {"dtype": "BF16", "shape": [...]}},
                                ...,            what the caller adds: policy, config, data position, versions
                                "digest": ...}  SHA-256 of all the rest, as JSON with sorted keys and no spaces

A job of several ranks that shard their state writes one file per rank (parts.py), and the manifest says where rows
are. A tensor that every rank has whole is in one file:

    RUN/checkpoints/step-000500/
        state-00001-of-00002.safetensors
        state-00002-of-00002.safetensors
        manifest.json          {"format": 4, "files": {...}, "tensors": {
                                name: {"dtype": ..., "shape": [50, 16], "rows": {FILE: [0, 25], FILE: [25, 50]}},
                                name: {"dtype": ..., "shape": [], "file": FILE}}, ...}

A save writes into a sibling folder `step-000500.partial`, flushes files and folder to disk, renames the folder,
and flushes the parent: `step-NNNNNN` is complete or not there, whenever the machine dies. The next save removes
what a killed one left. Removing renames first too. One run writes at a time (files.RunLock).

A change of any meaningful bit is found and named: a resumed run that is wrong in one bit is worse than one that
stops. The checkpoint before a damaged one is taken only if the user allows it; the damaged one is then renamed to
`step-NNNNNN.damaged`, never removed. Nothing here unpickles: any file but these is refused by name.

Everywhere here, `folder` is RUN/checkpoints. Loading takes the memory of the tensors, or of the rows that a rank
asks for: each file is read once from its beginning to its end, and hashed on the way.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from halfstep.config.reading import MOST_TABLE, fits_in_memory, parse_json, read_bytes
from halfstep.config.schema import Count, build
from halfstep.core.errors import ConfigError
from halfstep.core.state_format import Part, Stored
from halfstep.training.checkpoints.tensors import (
    DTYPES,
    MANIFEST,
    CheckpointError,
    CheckpointReadError,
    CheckpointWriteError,
    DamagedCheckpointError,
    Piece,
    check_digest,
    damage_error,
    describe_file,
    name_read_errors,
    overlaps,
    read_header,
    read_rows,
    write_tensors,
)
from halfstep.training.files import PICKLES, flush, os_errors, table_digest, write_whole
from halfstep.training.paths import CHECKPOINTS

FORMAT, FORMAT_OF_PARTS = 3, 4  # 1 and 2 named moments as each framework does
STATE = "state.safetensors"
PART = re.compile(r"state-\d{5,}-of-\d{5,}\.safetensors")  # what one rank of several wrote
OWN_KEYS = ("format", "step", "files", "tensors", "digest")

_FOLDER = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(partial|removed)(-[\w.-]+)?")

T = TypeVar("T")
Arrays = dict[str, Stored]
Damaged = dict[Path, DamagedCheckpointError]  # what was found in checkpoints that were passed over
# (name, shape) of a tensor -> the first row that is wanted and the one after the last; None: all of it
RowsOf = Callable[[str, tuple[int, ...]], tuple[int, int] | None]


@dataclass(frozen=True)
class _File:
    sha256: str
    bytes: Count


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[Count, ...]
    file: str = ""  # of those that ranks wrote, the one that holds all of it
    rows: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)  # or which rows of it each file holds


@dataclass(frozen=True)
class _Manifest:
    """What every manifest holds; run/manifest.py adds to it."""

    step: Count
    files: Mapping[str, _File]
    tensors: Mapping[str, _Tensor]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint."""

    path: Path
    arrays: dict[str, Stored]
    manifest: dict[str, Any]


def save(folder: Path, step: int, arrays: Mapping[str, Stored], meta: Mapping[str, Any]) -> Path:
    """Writes a checkpoint and returns its folder. Writing the same again changes nothing; others are an error."""
    return write(folder, step, arrays, meta)[0]


def write(
    folder: Path, step: int, arrays: Mapping[str, Stored], meta: Mapping[str, Any]
) -> tuple[Path, Mapping[str, Any]]:
    """Writes a checkpoint as `save` does; returns its folder and its manifest."""
    target = folder / f"step-{step:06d}"
    partial = target.with_name(f"{target.name}.partial")
    for name, each in arrays.items():
        if isinstance(each, Part) and each.rows != (0, each.shape[0]):
            raise ValueError(
                f"`{name}` has {each.shape[0]} of {each.rows[1]} rows: ranks save their parts together"
            )
    try:
        with name_write_errors(target):
            open_folder(folder, target)
            remove_leftovers(folder)
            os.mkdir(partial)
            write_tensors(partial / STATE, arrays)
            files = {STATE: describe_file(partial / STATE, just_written=True)}
            own = {"format": FORMAT, "step": step, "files": files, "tensors": table(arrays)}
            return target, put_in_place(partial, target, write_manifest(partial, own, meta))
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def name_write_errors(target: Path) -> Iterator[None]:
    """Turns an OSError in the block into an error that names the checkpoint and the place that failed."""
    try:
        yield
    except OSError as error:
        place = error.filename or target.parent
        raise CheckpointWriteError(
            f"checkpoint `{target}` cannot be written: {error.strerror or error} (`{place}`)",
            hint="earlier checkpoints are untouched; free space, or choose another folder with `--out`",
        ) from None


def open_folder(folder: Path, target: Path) -> None:
    """Makes the folder of checkpoints if the run's is there."""
    if not folder.parent.is_dir():
        raise CheckpointWriteError(
            f"checkpoint `{target}` cannot be written: `{folder.parent}` was moved or removed",
            hint="move the run folder back: the next save tries again",
        )
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def put_in_place(partial: Path, target: Path, written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives a complete checkpoint its name, unless the same is there; a damaged one is set aside for it.

    Returns the manifest of the one that has the name then.
    """
    if target.exists() and _is_intact(target):
        there = _check_same(target, written)
        shutil.rmtree(partial)
        return there
    if target.exists():
        set_aside(target)
    os.rename(partial, target)
    flush(target.parent)
    return written


def load(
    path: Path, rows: RowsOf | None = None, manifest: dict[str, Any] | None = None
) -> tuple[Arrays, dict[str, Any]]:
    """Returns the verified tensors of a checkpoint's folder, writable and unshared, and its manifest.

    Given `rows`, only those rows: a rank then reads and verifies the files that hold them, and no others. A
    `manifest` that `check_complete` has returned is not read again.
    """
    manifest = manifest or check_complete(path)
    arrays, wanted = dict[str, Stored](), dict[str, tuple[int, int]]()
    for name, entry in manifest["tensors"].items():
        shape, every = tuple(entry["shape"]), num_rows(entry["shape"])
        start, stop = wanted[name] = (rows(name, shape) if rows else None) or (0, every)
        arrays[name] = Stored(entry["dtype"], (stop - start, *shape[1:]) if shape else (), b"")
    there = _pieces(manifest)
    needed = [file for file, held in there.items() if rows is None or overlaps(held, wanted)]
    headers = {file: read_header(path / file, manifest["files"][file], there[file]) for file in needed}
    sizes = {name: math.prod(each.shape) * DTYPES[each.dtype][1] for name, each in arrays.items()}
    if not fits_in_memory(total := sum(sizes.values())):
        raise CheckpointReadError(f"loading `{path}` takes {total:,} bytes of memory, more than this machine has")
    arrays = {name: each._replace(data=memoryview(bytearray(sizes[name]))) for name, each in arrays.items()}
    for file, header in headers.items():
        read_rows(path / file, manifest["files"][file], header, there[file], wanted, arrays)
    return arrays, manifest


def verify(path: Path, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the manifest of a checkpoint's folder; reads and verifies all of its files, in constant memory."""
    manifest = manifest or check_complete(path)
    for file, held in _pieces(manifest).items():
        read_header(path / file, manifest["files"][file], held)
        with name_read_errors(path / file):
            sha256 = describe_file(path / file)["sha256"]
        check_digest(path / file, sha256, manifest["files"][file])
    return manifest


def read_newest(
    folder: Path, read: Callable[[Path], T], damaged: Damaged, *, allow_older: bool = False
) -> T | None:
    """Returns what `read` makes of the newest checkpoint; None if there is none.

    With `allow_older`, a damaged one is added to `damaged`, and the one before it is read.
    """
    while left := [path for path in step_folders(folder) if path not in damaged]:
        try:
            return read(left[-1])
        except (CheckpointError, FileNotFoundError) as error:
            if not left[-1].exists():  # removed meanwhile
                continue
            if not allow_older or not isinstance(error, DamagedCheckpointError):
                raise
            damaged[left[-1]] = error
    if damaged:
        raise next(iter(damaged.values()))
    return None


def load_newest(folder: Path, *, allow_older: bool = False) -> Loaded | None:
    """Returns the newest checkpoint, or None. With `allow_older`, damaged ones are set aside for a whole one."""
    damaged: Damaged = {}
    loaded = read_newest(folder, lambda path: Loaded(path, *load(path)), damaged, allow_older=allow_older)
    for path in damaged:
        set_aside(path)
    return loaded


def load_named(path: Path) -> Loaded | None:
    """Returns the checkpoint that a path names: a checkpoint's own folder, or a run's (its newest)."""
    return Loaded(path, *load(path)) if is_checkpoint(path) else load_newest(path / CHECKPOINTS)


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, or a copy of one, and not a run (which may be called `step-` too)."""
    if (path / CHECKPOINTS).is_dir():
        return False
    if path.name.startswith("step-"):
        return True
    return (path / MANIFEST).is_file() and any(is_state_file(entry) for entry in path.iterdir())


def is_state_file(file: Path) -> bool:
    """Whether a file is named like the tensor files of a checkpoint."""
    return file.is_file() and (file.name == STATE or PART.fullmatch(file.name) is not None)


def latest(folder: Path) -> Path | None:
    """Returns the newest checkpoint's folder, or None; refuses an incomplete one. Only `load` checks contents."""
    if paths := step_folders(folder):
        check_complete(paths[-1])
    return paths[-1] if paths else None


def note(path: Path, **facts: Any) -> None:
    """Adds facts to the manifest of a checkpoint that were measured after it was saved."""
    manifest = {**read_manifest(path), **facts}
    with os_errors(CheckpointWriteError, f"`{path / MANIFEST}` cannot be written"):
        write_whole(path / MANIFEST, _as_text({**manifest, "digest": table_digest(manifest)}))


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
    """Removes a checkpoint. A process killed on the way leaves all of it, or nothing that looks like one."""
    removed = path.with_name(f"{path.name}.removed")
    with os_errors(CheckpointWriteError, f"checkpoint `{path}` cannot be removed"):
        os.rename(path, removed)
        _remove(removed)


def remove_leftovers(folder: Path, besides: str = "") -> None:
    """Removes what killed saves and prunes left; what cannot be removed (a file open on NFS) stops no save."""
    for entry in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(entry.name) and entry.name != besides:
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
        raise CheckpointReadError(f"there is no checkpoint `{path}`", hint="name a folder that holds one")
    file = path / MANIFEST
    if _LEFTOVER.fullmatch(path.name):
        raise CheckpointReadError(
            f"`{path}` is not a complete checkpoint: it is being written, or what a killed process left of it",
            hint="name one without `.partial` or `.removed`; the run's own folder means the newest of them",
        )
    _refuse_pickles(path)
    try:
        with name_read_errors(file):
            manifest = parse_json(read_bytes(file, MOST_TABLE))
    except ValueError as error:
        raise damage_error(file, f"it is not JSON ({error})") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise damage_error(file, "it states no `format`")
    if manifest["format"] not in (FORMAT, FORMAT_OF_PARTS):
        raise CheckpointReadError(
            f"`{file}` has format {manifest['format']!r}, this halfstep reads formats {FORMAT} and "
            f"{FORMAT_OF_PARTS}",
            hint="load it with the halfstep that wrote it; if that is newer, update yours",
        )
    if (digest := table_digest(manifest)) != manifest.get("digest"):
        raise damage_error(file, f"its digest is {digest}, expected {manifest.get('digest')!r}")
    try:
        files = build(_Manifest, manifest, others=True).files
    except ConfigError as error:
        raise damage_error(file, f"it is not what halfstep writes: {error.message}") from None
    in_parts = manifest["format"] == FORMAT_OF_PARTS
    if STATE not in files and not in_parts:
        raise damage_error(file, f"it has no {STATE}")
    others = [name for name in files if not (PART.fullmatch(name) if in_parts else name == STATE)]
    if others:
        raise CheckpointReadError(
            f"`{file}` points to `{sorted(others)[0]}`; a checkpoint is {STATE}, or the files of ranks, in its "
            "own folder, and no other",
            hint="no halfstep wrote it: do not load what you do not trust; remove the folder",
        )
    _check_pieces(file, manifest)
    # A copy may have any name; one that states a step (`step-000500.damaged` too) states which was meant.
    if (named := _FOLDER.match(Path(os.path.abspath(path)).name)) and int(named[1]) != manifest["step"]:
        raise damage_error(path, f"it holds step {manifest['step']}, expected the step in its name")
    return manifest


def table(arrays: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
    """Returns the manifest's table of tensors."""
    return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape, *_) in arrays.items()}


def write_manifest(partial: Path, own: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the manifest and flushes it and the folder; returns it."""
    if taken := [key for key in meta if key in OWN_KEYS]:
        raise ValueError(f"`{taken[0]}` is the checkpoint's own key and cannot be in meta")
    try:
        # Read back, so that the digest is of what a reader will see (a tuple becomes a list).
        manifest: dict[str, Any] = json.loads(json.dumps({**own, **meta}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointWriteError(f"the manifest of step {own['step']} is not JSON: {error}") from None
    manifest["digest"] = table_digest(manifest)
    (partial / MANIFEST).write_bytes(_as_text(manifest))
    flush(partial / MANIFEST)
    flush(partial)
    return manifest


def _as_text(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n"


def _check_same(target: Path, written: Mapping[str, Any]) -> Mapping[str, Any]:
    manifest = read_manifest(target)
    there, here = manifest["files"], written["files"]
    if there.keys() != here.keys():
        raise CheckpointWriteError(
            f"`{target}` is there already, written by another number of processes",
            hint="it is complete: resume from it; or remove it, to save this step again",
        )
    for name, entry in here.items():
        if there[name] != entry:
            raise CheckpointWriteError(
                f"`{target}` is there already with other tensors: its SHA-256 is {there[name]['sha256']}, this "
                f"one's {entry['sha256']}",
                hint="another run wrote it: choose another folder with `--out`, or remove it",
            )
    return manifest


def num_rows(shape: Sequence[int]) -> int:
    """Returns how many rows a tensor has; one without dimensions is one row."""
    return shape[0] if shape else 1


def rows_in_files(entry: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Returns which rows of a tensor each file holds: the first, and the one after the last."""
    return entry.get("rows") or {entry.get("file", STATE): (0, num_rows(entry["shape"]))}


def cover_all_rows(ranges: Iterable[Sequence[int]], rows: int) -> bool:
    """Whether ranges of rows are all rows of a tensor, each once."""
    end = 0
    for each in sorted(map(tuple, ranges)):
        if len(each) != 2 or each[0] != end:
            return False
        end = each[1]
    return end == rows


def _pieces(manifest: Mapping[str, Any]) -> dict[str, dict[str, Piece]]:
    """Returns what each file holds."""
    there: dict[str, dict[str, Piece]] = {file: {} for file in manifest["files"]}
    for name, entry in manifest["tensors"].items():
        for file, (start, stop) in rows_in_files(entry).items():
            shape = (stop - start, *entry["shape"][1:]) if entry["shape"] else ()
            there[file][name] = Piece(start, stop, shape, entry["dtype"])
    return there


def _check_pieces(file: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a table of tensors with rows that are in no file, or in two."""
    for name, entry in manifest["tensors"].items():
        held, shape = rows_in_files(entry), entry["shape"]
        fits = cover_all_rows(held.values(), num_rows(shape)) and bool(shape or not entry.get("rows"))
        if not fits or any(each not in manifest["files"] for each in held):
            raise damage_error(file, f"it does not say where all rows of tensor `{name}` are")
        if entry["dtype"] not in DTYPES:
            raise damage_error(file, f"tensor `{name}` has dtype {entry['dtype']}")


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders of checkpoints, complete or not, in the order of their steps."""
    entries = folder.iterdir() if folder.is_dir() else []
    return sorted((path for path in entries if _FOLDER.fullmatch(path.name) and path.is_dir()), key=parse_step)


def parse_step(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def check_complete(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files have the sizes that it states."""
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise damage_error(path, f"`{name}` is missing") from None
        if size != entry["bytes"]:
            raise damage_error(path / name, f"it has {size} bytes, expected {entry['bytes']}")
    return manifest


def _refuse_pickles(path: Path) -> None:
    for entry in sorted(path.iterdir()):
        if entry.suffix.lower() in PICKLES:
            raise CheckpointReadError(
                f"`{entry}` is a pickle, which runs code when it is loaded, and is not part of a checkpoint",
                hint="remove it: a checkpoint is safetensors and JSON",
            )


def _is_intact(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all(describe_file(path / name) == entry for name, entry in files.items())
    except (DamagedCheckpointError, OSError):
        return False
