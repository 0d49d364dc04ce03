"""Files that are whole or absent, and one writer a folder: a dead one holds nothing."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from halfstep.training import files
from halfstep.training.files import LockedError, RunLock, make_folder, write_whole
from halfstep.training.paths import LOCK
from tests.training.runs import full, raising


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_call_returns(tmp_path, monkeypatch):
    done, names = [], {tmp_path.stat().st_ino: "folder"}
    replace = os.replace

    def flush(descriptor):
        found = os.fstat(descriptor)
        done.append((names.get(found.st_ino, "file"), found.st_size if found.st_ino not in names else None))

    def rename(old, new):
        done.append(("name", None))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write_whole(tmp_path / "a.json", b"whole")
    assert done == [("file", 5), ("name", None), ("folder", None)]
    assert (tmp_path / "a.json").read_bytes() == b"whole"


def test_the_names_of_new_folders_are_on_the_disk_before_anything_in_them(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files, "flush", flushed.append)
    make_folder(tmp_path / "a" / "b" / "c")
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_folder(tmp_path / "a" / "b" / "c")
    assert len(flushed) == 3
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a", exist_ok=False)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_file_before_and_no_other(tmp_path, monkeypatch, name):
    write_whole(tmp_path / "a.json", b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "a.json", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"before"


HOLD = """
import sys, time
from pathlib import Path
from halfstep.training.files import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_with_who_holds_it_if_that_can_be_read(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(LockedError, match=f"in use: process {os.getpid()} on {socket.gethostname()}") as caught:
        RunLock(tmp_path)
    assert f"kill {os.getpid()}" in caught.value.hint
    assert "--out" in caught.value.hint
    lock.release()
    lock.release()
    RunLock(tmp_path).release()
    RunLock(tmp_path)
    RunLock(tmp_path).release()
    lock = RunLock(tmp_path)
    (tmp_path / LOCK).write_text("[1]")
    with pytest.raises(LockedError, match="another process"):
        RunLock(tmp_path)
    lock.release()


def test_a_lock_file_that_was_removed_before_it_was_taken_is_refused(tmp_path, monkeypatch):
    """The last holder left nothing behind: the next may already hold another file of that name."""
    real = fcntl.flock

    def flock(descriptor, how):
        (tmp_path / LOCK).unlink()
        real(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(LockedError, match="in use"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_a_killed_process_frees_it_and_its_file_is_no_obstacle(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"process {process.pid} "):
        RunLock(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()


FORK = """
import os, sys, time
from pathlib import Path
from halfstep.training.files import RunLock
lock = RunLock(Path(sys.argv[1]))
if (brief := os.fork()) == 0:
    sys.exit()  # with all that an exit does
os.waitpid(brief, 0)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


def test_a_fork_of_a_killed_process_holds_nothing_and_its_end_frees_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", FORK, tmp_path], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(LockedError, match=f"process {process.pid} "):
            RunLock(tmp_path)
        process.kill()
        process.wait()
        process.stdout.close()
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_full_disk_holds_the_lock_and_a_filesystem_without_locks_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full)
    lock = RunLock(tmp_path)
    assert lock.warning is None
    with pytest.raises(LockedError, match="another process"):
        RunLock(tmp_path)
    lock.release()

    def fail(code):
        return raising(OSError(code, os.strerror(code)))

    monkeypatch.setattr(fcntl, "flock", fail(errno.ENOLCK))
    assert "without locks" in RunLock(tmp_path).warning
    monkeypatch.setattr(fcntl, "flock", fail(errno.EIO))
    with pytest.raises(OSError, match="error"):
        RunLock(tmp_path)
