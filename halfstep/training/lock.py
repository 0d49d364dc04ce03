"""One writer a run folder: a lock that a dead process cannot keep.

Two runs that save to one folder would each prune what the other needs. So a run holds `RUN/lock` by flock(2) from
the moment it opens its folder until it ends. The kernel drops the lock with the process, however it died: after a
kill -9 or a power cut nothing is stale, and no clean-up by hand is needed. The file says who holds it (pid, host,
since when), for the message alone. A run never removes it. A packing that kept nothing removes its own while it
holds it; who had opened that file by then holds a lock on nothing, and is refused like one who came too early.

**Network folders.** On NFS Linux turns flock into a lock of the server, which other machines see; one that a lost
machine held is freed when its lease ends (NFSv4, about 90 seconds). A mount with `local_lock=flock` sees its own
machine alone. Where a filesystem knows no locks at all, the run goes on and a warning says so: refusing would take
the folder from its only user.
"""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import final

from halfstep.core.errors import HalfstepError

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class LockedError(HalfstepError):
    """A run folder that another process writes to."""


@final
class RunLock:
    """The right to write to a run folder, until `release`, until it is forgotten, or until the process ends."""

    def __init__(self, folder: Path):
        self.warning: str | None = None
        path = folder / LOCK
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # a link would lead elsewhere
        self._release = weakref.finalize(self, os.close, descriptor)
        # A process forked from this one would hold it on, and outlive it.
        os.register_at_fork(after_in_child=self._release)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise _in_use(folder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._release()
                raise
            self.warning = (
                f"`{folder}` is on a filesystem without locks ({error.strerror}): nothing stops a second run there"
            )
        if not _is_at(descriptor, path):
            self._release()
            raise _in_use(folder)
        _sign(descriptor)

    def release(self) -> None:
        """Lets others write. Idempotent."""
        self._release()


def is_signed(path: Path) -> bool:
    """Whether a file is a lock of ours, held or not."""
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(1000))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and set(told) == {"pid", "host", "since"}


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(told).encode() + b"\n", 0)
    except OSError:
        pass  # a full disk: the lock holds, and who has it stays unsaid


def _in_use(folder: Path) -> LockedError:
    try:
        told = json.loads((folder / LOCK).read_bytes())
        holder = f"process {told['pid']} on {told['host']} writes to it since {told['since']}"
        hint = f"wait for it, or stop it there with `kill {told['pid']}`: it leaves, and nothing is lost"
    except (OSError, ValueError, TypeError, KeyError):
        holder, hint = "another process writes to it", "wait for it, or stop it: nothing is lost"
    return LockedError(f"`{folder}` is in use: {holder}", hint=f"{hint}; or name another folder by --out")
