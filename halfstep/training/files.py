"""Durable files, and the lock of a folder.

A file is written under a temporary name, flushed to disk, and renamed, and the folder is flushed, where the rename
is recorded: whenever the machine dies, the name means the old file (or none) or all of the new one.

Two runs that save to one folder would each prune what the other needs. So a run holds `RUN/lock` by flock(2) (the
package `filelock`), which the kernel drops with the process, however it died. The file names the holder for the
error message alone. A run never removes it; a packing that kept nothing does.

On NFS, Linux turns flock into a lock on the server, which other machines see; a lost machine's lock is freed when
its lease ends. A mount with `local_lock=flock` sees its own machine alone. On a filesystem without locks the run
continues with a warning: refusing would take the folder from its only user.
"""

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from halfstep.config.reading import open_regular, parse_json, read_bytes
from halfstep.core.errors import HalfstepError
from halfstep.training.paths import LOCK

PARTIAL = ".partial"
# Files that may be a pickle, which runs code when it is loaded: nothing is read from them.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class LockedError(HalfstepError):
    """A folder that another process writes to."""


@contextmanager
def os_errors(kind: type[HalfstepError], what: str, hint: str | None = None) -> Iterator[None]:
    """Turns an OSError in the block into an error of `kind`: what failed, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}", hint=hint) from None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, replacing any that is there; a reader sees all of the old one or all of the new one."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)  # left by a kill, or a link to somewhere else
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk it is the first thing to go
        raise
    flush(path.parent)


def table_digest(table: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a table without its `digest`, as JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Makes a folder and its missing parents, each name flushed to disk before anything is put there."""
    missing = [here for here in (path, *path.parents) if not here.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for folder in reversed(missing):
        with suppress(PermissionError):  # a folder may be writable and not readable
            flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunLock:
    """The right to write to a folder, until `release`, garbage collection, or the end of the process."""

    def __init__(self, folder: Path):
        self.warning: str | None = None
        self._lock = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise _locked_error(folder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.warning = (
                f"`{folder}` is on a filesystem without locks ({error.strerror}): nothing stops a second run there"
            )

    def release(self) -> None:
        """Lets others write. Idempotent."""
        self._lock.release()


class NoLock(RunLock):
    """The lock of a process that writes nothing to the folder: rank 0 of its job holds the real one."""

    def __init__(self) -> None:
        self.warning = None

    def release(self) -> None:
        """Does nothing."""


def is_lock(path: Path) -> bool:
    """Whether a file is a lock that halfstep wrote, held or not."""
    try:
        with open_regular(path) as file:
            holder = parse_json(file.read(1000))
    except (OSError, ValueError):
        return False
    return isinstance(holder, dict) and set(holder) == {"pid", "host", "since"}


def _write_holder(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # on a full disk the lock still holds; its holder is then unknown
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _locked_error(folder: Path) -> LockedError:
    try:
        holder = parse_json(read_bytes(folder / LOCK, 1000))
        who = f"process {holder['pid']} on {holder['host']} has been writing to it since {holder['since']}"
        hint = f"wait for it, or stop it there with `kill {holder['pid']}`: it saves before it exits"
    except (OSError, ValueError, TypeError, KeyError):
        who, hint = "another process is writing to it", "wait for it, or stop it: it saves before it exits"
    return LockedError(f"`{folder}` is in use: {who}", hint=f"{hint}; or name another folder with --out")
