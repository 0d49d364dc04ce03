"""Checkpoints: whole or absent, verified on load, and read without running any code.

    RUN/checkpoints/step-000500/
        state.safetensors      every tensor, bit for bit
        manifest.json          what they are, what wrote them, and the digests that prove both

**Whole or absent.** A save writes into a sibling folder `step-000500.partial`, flushes files and folder to
the disk, renames the folder, and flushes the parent. A rename is one act: whenever the process or the machine
dies, `step-NNNNNN` either is not there or is complete, and earlier ones were never touched. What a killed
save left is removed by the next one. Removing renames first too, so a half-deleted folder never looks like a
checkpoint. One run writes to a folder at a time (lock.py).

**Verified.** The manifest is

    {"format": 1, "step": 500,
     "files": {"state.safetensors": {"sha256": ..., "bytes": ...}},
     "tensors": {name: {"dtype": "BF16", "shape": [...]}},
     ...,                                     what the caller adds: policy, config, data position, versions
     "digest": ...}                           SHA-256 of all the rest, as JSON with sorted keys and no spaces

so a change of any bit that means something, in either file, is found and named. A resumed run that is wrong
in one bit is worse than one that stops. A damaged newest checkpoint is an error too: the one before it is taken
only where the user allows it, and the damaged one is then set aside as `step-NNNNNN.damaged`, never removed.

**No code.** Nothing here unpickles. A manifest that names another file than `state.safetensors`, and a pickle that
lies in the folder, are refused by name.

Loading holds the file and its tensors (arrays.py) in memory at once.

Everywhere here, `folder` is the folder of checkpoints, RUN/checkpoints.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.training.checkpoints.arrays import DTYPES, Array
from halfstep.training.checkpoints.arrays import CheckpointError as CheckpointError
from halfstep.training.checkpoints.arrays import DamagedCheckpointError as DamagedCheckpointError
from halfstep.training.files import PICKLES, flush, write_whole

FORMAT = 1
STATE, MANIFEST = "state.safetensors", "manifest.json"
OWN_KEYS = ("format", "step", "files", "tensors", "digest")

_FOLDER = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(partial|removed)")


def save(folder: Path, step: int, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> Path:
    """Writes a run's checkpoint of a step, and returns its folder.

    Saving the same tensors for the same step again changes nothing, not even the manifest; other tensors for
    a step that is there are an error.
    """
    target = folder / f"step-{step:06d}"
    partial = target.with_name(f"{target.name}.partial")
    try:
        if not folder.parent.is_dir():
            raise CheckpointError(
                f"checkpoint `{target}` cannot be written: `{folder.parent}` was moved or removed",
                hint="move the run folder back: the next save is the next try",
            )
        if not folder.is_dir():
            folder.mkdir()
            flush(folder.parent)
        remove_leftovers(folder)
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


def latest(folder: Path, *, allow_older: bool = False) -> Path | None:
    """The checkpoint with the highest step, or None; one that is not complete is an error, unless that is allowed.

    Complete is: a manifest that verifies, and files of the sizes it says. What is inside them, `load` checks.
    """
    found = step_folders(folder)
    while allow_older and len(found) > 1 and not is_complete(found[-1]):
        found.pop()
    if found:
        check_complete(found[-1])
    return found[-1] if found else None


def newest_manifest(folder: Path, *, allow_older: bool) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of a folder that has some, and its manifest; with `allow_older`, one that reads."""
    first: DamagedCheckpointError | None = None
    for path in reversed(step_folders(folder)):
        try:
            return path, read_manifest(path)
        except DamagedCheckpointError as error:
            first = first or error
            if not allow_older:
                break
    assert first is not None
    raise first


def load_latest(
    folder: Path, *, allow_older: bool = False
) -> tuple[dict[str, Array], dict[str, Any], list[DamagedCheckpointError]] | None:
    """The newest checkpoint, verified, or None where there is none, and what was passed over to get there.

    With `allow_older`, damaged ones are set aside until one is whole; when none is, the newest one's error stands.
    """
    passed: list[DamagedCheckpointError] = []
    damaged: list[Path] = []
    for path in reversed(step_folders(folder)):
        try:
            arrays, manifest = load(path)
        except DamagedCheckpointError as error:
            if not allow_older:
                raise
            passed.append(error)
            damaged.append(path)
            continue
        for bad in damaged:
            set_aside(bad)
        return arrays, manifest, passed
    if passed:
        raise passed[0]
    return None


def load_newest(folder: Path) -> tuple[Path, dict[str, Array], dict[str, Any]] | None:
    """The newest checkpoint of a run that may be going on, and where it is; None where there is none.

    One that is pruned while it is read gives way to the one that pruned it.
    """
    while found := step_folders(folder):
        try:
            return found[-1], *load(found[-1])
        except (CheckpointError, FileNotFoundError):
            if found[-1].exists():
                raise
    return None


def note(path: Path, **facts: Any) -> None:
    """Adds to the manifest of a checkpoint what was found out after it was saved."""
    if taken := [key for key in facts if key in OWN_KEYS]:
        raise ValueError(f"`{taken[0]}` is the checkpoint's own key and cannot be noted")
    manifest = {**read_manifest(path), **facts}
    try:
        write_whole(path / MANIFEST, _as_text({**manifest, "digest": _digest(manifest)}))
    except OSError as error:
        raise CheckpointError(f"`{path / MANIFEST}` cannot be written: {error.strerror or error}") from None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is none any more and can still be looked at."""
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
    try:
        os.rename(path, removed)
        _remove(removed)
    except OSError as error:
        raise CheckpointError(f"checkpoint `{path}` cannot be removed: {error.strerror or error}") from None


def remove_leftovers(folder: Path) -> None:
    """Removes what killed saves and prunes left; what cannot be, as a file open on NFS, hinders no save."""
    for entry in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            with suppress(OSError):
                _remove(entry)


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one: its owner moved it to another disk, and keeps it there."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's folder, verified by its own digest."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint `{path}`", hint="name a folder that holds one")
    file = path / MANIFEST
    _refuse_pickles(path)
    try:
        manifest = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"it is not JSON ({error})") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(file, "it states no `format`")
    if manifest["format"] != FORMAT:
        if _digest({**manifest, "format": FORMAT}) == manifest.get("digest"):
            raise _damaged(file, f"it states format {manifest['format']!r}, and was written as {FORMAT}")
        raise CheckpointError(
            f"`{file}` has format {manifest['format']!r}, this halfstep reads format {FORMAT}",
            hint="load it with the halfstep that wrote it: `pip install --upgrade halfstep` if that is newer",
        )
    if (found := _digest(manifest)) != manifest.get("digest"):
        raise _damaged(file, f"its digest is {found}, expected {manifest.get('digest')!r}")
    if missing := [key for key in OWN_KEYS if key not in manifest]:
        raise _damaged(file, f"it says nothing of {', '.join(sorted(missing))}")
    files = manifest["files"]
    if not isinstance(manifest["tensors"], dict) or not _describes_files(files):
        raise _damaged(file, "its tables of files and tensors are not what halfstep writes")
    if STATE not in files:
        raise _damaged(file, f"it says nothing of {STATE}")
    if others := set(files) - {STATE}:
        raise CheckpointError(
            f"`{file}` points to `{sorted(others)[0]}`; a checkpoint is {STATE} in its own folder, and no other",
            hint="no halfstep wrote it: do not load what you do not trust; remove the folder",
        )
    # A copy may have any name; one that says a step (`step-000500.damaged` too) says which was meant to be here.
    if (named := _FOLDER.match(Path(os.path.abspath(path)).name)) and int(named[1]) != manifest["step"]:
        raise _damaged(path, f"it holds step {manifest['step']}, expected the step in its name")
    return manifest


def _describes_files(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(told, dict) and told.keys() == {"sha256", "bytes"} for told in files.values()
    )


def table(arrays: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """The manifest's table of tensors."""
    return {name: {"dtype": array.dtype, "shape": list(array.shape)} for name, array in arrays.items()}


def _write_files(partial: Path, step: int, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Both files, flushed to the disk; returns the manifest."""
    _write_state(partial / STATE, arrays)
    # safetensors lets the owner alone read what it writes; here the umask decides, as for the folder.
    os.chmod(partial / STATE, partial.stat().st_mode & 0o666)
    flush(partial / STATE)
    manifest = _manifest(step, _describe_file(partial / STATE), arrays, meta)
    with open(partial / MANIFEST, "wb") as file:
        file.write(_as_text(manifest))
        file.flush()
        os.fsync(file.fileno())
    flush(partial)
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


def _as_text(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n"


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


def step_folders(folder: Path) -> list[Path]:
    """The folders of checkpoints, complete or not, in the order of their steps."""
    found = folder.iterdir() if folder.is_dir() else []
    return sorted((path for path in found if _FOLDER.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has a manifest that verifies, and files of the sizes it says."""
    try:
        check_complete(path)
    except (DamagedCheckpointError, OSError):
        return False
    return True


def check_complete(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files have the sizes that it says."""
    manifest = read_manifest(path)
    for name, told in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise _damaged(path, f"`{name}` is missing") from None
        if size != told["bytes"]:
            raise _damaged(path / name, f"it has {size} bytes, expected {told['bytes']}")
    return manifest


def _refuse_pickles(path: Path) -> None:
    for entry in sorted(path.iterdir()):
        if entry.suffix.lower() in PICKLES:
            raise CheckpointError(
                f"`{entry}` is a pickle, which runs code when it is loaded, and is no part of a checkpoint",
                hint="remove it: a checkpoint is safetensors and JSON",
            )


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
        if error.errno == errno.EIO:  # the disk gave up on a block
            raise _damaged(file, "the disk cannot read it (I/O error)") from None
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror or error}") from None


def _damaged(place: Path, said: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"`{place}` is damaged: {said}",
        hint="restore it; --resume --allow-older goes on from the one before it; to read another, name its folder",
    )
