"""Files that are whole or absent: written beside their place, flushed to the disk, and renamed.

A rename is one act. Whenever the process or the machine dies, the name either is not there (or still means the
file before) or means all of the new one. The folder is flushed too: a rename lives in it.
"""

import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole, in place of the one that may be there."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)  # what a death left, or a link to elsewhere
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk it is the first thing to go
        raise
    flush(path.parent)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Makes a folder and those it lies in, each name on the disk before anything is put there."""
    missing = [here for here in (path, *path.parents) if not here.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for made in reversed(missing):
        with suppress(PermissionError):  # names may be made where none may be read
            flush(made.parent)


def flush(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
