"""Files that are whole or absent: flushed before they get their name, and the name flushed after it."""

import os

import pytest

from halfstep.training import files
from halfstep.training.files import make_folder, write_whole
from tests.training.runs import full


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
