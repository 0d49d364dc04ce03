"""The folder of an export: complete under its name or not there; it replaces nothing but an earlier export.

    RUN/export/hf-bf16/
        model.safetensors, config.json, ...     what the target writes
        export.json                             {"halfstep": version, "to": "hf", "format": "bf16",
                                                 "step": ..., "policy": ..., "data": ...,      where it is from
                                                 "score": {...},                               before and after
                                                 "files": {name: {"sha256": ..., "bytes": ...}}}

Files are written into `NAME.partial` next to it, which is renamed once the export was loaded back and scored.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.config.reading import MOST_TABLE, open_regular, parse_json, read_bytes
from halfstep.core.errors import HalfstepError
from halfstep.training import paths
from halfstep.training.files import PARTIAL, flush, make_folder, os_errors, write_whole


class ExportError(HalfstepError):
    """A model that cannot be exported."""


def check_place(place: Path, home: Path) -> None:
    """Refuses to write over anything but an earlier export, or into a run's checkpoints."""
    hint = "name another folder with --out"
    where, saved = (Path(os.path.realpath(each)) for each in (place, home / paths.CHECKPOINTS))
    if saved == where or saved in where.parents:
        raise ExportError(f"`{place}` is among the run's checkpoints", hint=hint)
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise ExportError(f"`{place}` exists, and is no folder", hint=hint)
    if place.is_dir() and (other := _foreign(place)):
        raise ExportError(f"`{place}` holds `{other}`, which no export wrote", hint=f"{hint}, or move it away")
    if home not in place.parents and not place.parent.is_dir():
        raise ExportError(
            f"`{place}` cannot be written: there is no folder `{place.parent}`", hint=f"make it, or {hint}"
        )


@contextmanager
def partial(place: Path, size: int) -> Iterator[Path]:
    """Yields an empty folder to write at least `size` bytes into, and removes what is left of it in the end."""
    folder = place.with_name(place.name + PARTIAL)
    with os_errors(ExportError, f"`{place}` cannot be written"):
        make_folder(place.parent)
        shutil.rmtree(folder, ignore_errors=True)  # left by a kill
        folder.mkdir()
    try:
        if (free := shutil.disk_usage(folder).free) < size:
            raise ExportError(
                f"`{place}` cannot be written: it takes at least {size:,} bytes, and {free:,} are free there",
                hint="free some, or name another folder with --out",
            )
        with os_errors(ExportError, f"`{place}` cannot be written"):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path, place: Path, record: Mapping[str, Any]) -> int:
    """Describes the files of a written folder, gives it its name, and returns how many bytes it has."""
    files = {str(file.relative_to(folder)): _describe(file) for file in _files(folder)}
    for name in files:
        flush(folder / name)
    table = {**record, "files": files}
    write_whole(folder / paths.EXPORT_RECORD, json.dumps(table, indent=1, ensure_ascii=False).encode() + b"\n")
    older = place.with_name(f"{place.name}.older{PARTIAL}")
    shutil.rmtree(older, ignore_errors=True)
    if place.exists():
        os.rename(place, older)
    os.rename(folder, place)
    flush(place.parent)
    shutil.rmtree(older, ignore_errors=True)
    return sum(file["bytes"] for file in files.values())


def _foreign(place: Path) -> str:
    """Returns a file in a folder that no export wrote; empty if there is none."""
    try:
        record = parse_json(read_bytes(place / paths.EXPORT_RECORD, MOST_TABLE))
        known = {*record["files"], paths.EXPORT_RECORD}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    others = (str(file.relative_to(place)) for file in _files(place))
    return next((name for name in others if name not in known), "")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def _describe(file: Path) -> dict[str, Any]:
    with open_regular(file) as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"sha256": sha256, "bytes": file.stat().st_size}
