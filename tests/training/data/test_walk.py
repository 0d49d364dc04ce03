"""Walking a folder: each link once, no runs or packed data, and nothing that never ends."""

import os
import signal
import socket

import pytest

from halfstep.training.data.index import seal
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.types import DataContentError, DataNotFoundError
from halfstep.training.data.walk import walk
from halfstep.training.files import RunLock
from tests.training.runs import raising


def prose(seed):
    return "".join(f"line {n} of text {seed}, with words\n" for n in range(20 + seed))


def refused(source):
    with pytest.raises(DataContentError) as caught:
        load_corpus(str(source), 0.1, 256)
    return caught.value


def read(folder):
    """What is read of a folder, by relative names: the same when it is packed."""
    found = [path.relative_to(folder).as_posix() for path in walk(folder).files]
    assert found == [file.name for file in find_sources([str(folder)])[0].files]
    return found


def test_links_are_followed_and_nothing_is_read_twice(tree, tmp_path):
    folder = tree(tmp_path / "own", {"b.txt": prose(1), "sub/c.txt": prose(2)})
    digest = load_corpus(str(folder), 0.3, 256).digest
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "a-copy").symlink_to("sub")
    (folder / "a.txt").symlink_to("b.txt")
    assert read(folder) == ["b.txt", "sub/c.txt"]  # files of the folder itself keep their names
    assert load_corpus(str(folder), 0.3, 256).digest == digest
    other = tree(tmp_path / "other", {"d.txt": prose(3), "deep/e.txt": prose(4), "deep/f.txt": prose(5)})
    (folder / "z").symlink_to(other)
    (folder / "y").symlink_to(other)
    (folder / "x.txt").symlink_to(other / "deep" / "e.txt")
    (other / "deep" / "back").symlink_to(folder)
    (other / "deep" / "again").symlink_to(other)
    assert read(folder) == ["b.txt", "sub/c.txt", "x.txt", "y/d.txt", "y/deep/f.txt"]
    assert "(5 texts" in load_corpus(str(folder), 0.3, 256).description
    os.link(folder / "b.txt", folder / "hard.txt")  # a file of its own, as it has always been
    assert "hard.txt" in read(folder)


def test_a_linked_folder_reads_like_a_real_one(tree, tmp_path):
    whole = tree(tmp_path / "whole", {f"{n % 3}/{n}.txt": prose(n) for n in range(12)})
    linked = tree(tmp_path / "linked", {})
    linked.mkdir()
    for n in range(3):
        (linked / str(n)).symlink_to(whole / str(n))
    digests = [load_corpus(str(folder), 0.3, 256).digest for folder in (whole, linked)]
    assert digests[0] == digests[1]
    (tmp_path / "way").symlink_to(linked)
    assert load_corpus(str(tmp_path / "way"), 0.3, 256).digest == digests[0]


def test_dangling_links_are_counted(tree, tmp_path):
    tree(tmp_path, {"a.txt": prose(1), "b.txt": prose(2), ".hidden": "x"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / ".gone").symlink_to(tmp_path / "nowhere")  # passed over by its name
    assert read(tmp_path) == ["a.txt", "b.txt"]
    assert "(2 texts, 2 dangling links skipped)" in load_corpus(str(tmp_path), 0.3, 256).description
    assert "(2 texts, 1 dangling link skipped)" in load_corpus(f"{tmp_path}/*.txt", 0.3, 256).description
    assert "no text in files" in refused(tmp_path / "gone.txt").message


class TooLateError(Exception):
    """Something waits that should not."""


@pytest.fixture
def within_seconds():
    before = signal.signal(signal.SIGALRM, raising(TooLateError))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_and_sockets_are_skipped_and_counted(tree, tmp_path, monkeypatch, within_seconds):
    tree(tmp_path, {"a.txt": prose(1), "b.txt": prose(2), "pipe.bin/x": "text of a folder"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "way").symlink_to(tmp_path / "pipe")  # the same one
    (tmp_path / "null").symlink_to("/dev/null")
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket")
    assert "(2 texts, 4 special files skipped)" in load_corpus(f"{tmp_path}/*[!n]", 0.3, 256).description
    assert "has the name of a token shard but is not a file" in refused(tmp_path).message
    (tmp_path / "pipe.bin").rename(tmp_path / "sub")
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/x"]
    assert "(3 texts, 3 special files skipped)" in load_corpus(str(tmp_path), 0.3, 256).description
    os.mkfifo(tmp_path / "pipe.bin")
    assert "has the name of a token shard but is not a file" in refused(tmp_path).message
    assert "has the name of a token shard but is not a file" in refused(tmp_path / "pipe.bin").message
    server.close()


RUNS = {
    "": {"run.toml": "steps = 3", "events.jsonl": '{"event": "start"}', "report.html": "<p>"},
    "saved": {"run.toml": "steps = 3", "checkpoints/step-000003/manifest.json": "{}"},
    "begun": {"run.toml": "steps = 3", "lock": '{"pid": 1}'},
}


@pytest.mark.parametrize("place", ["runs/one", "a/deep/place"])
@pytest.mark.parametrize("kind", RUNS)
def test_run_folders_are_skipped(tree, tmp_path, kind, place):
    tree(tmp_path, {f"{n}.txt": prose(n) for n in range(5)})
    before = load_corpus(str(tmp_path), 0.3, 256)
    tree(tmp_path / place, RUNS[kind] | {"wandb/deeper/log.txt": "x"})
    (tmp_path / "newest").symlink_to(tmp_path / place)  # counted once
    (tmp_path / "page").symlink_to(tmp_path / place / "run.toml")
    (tmp_path / "logs").symlink_to(tmp_path / place / "wandb")
    after = load_corpus(str(tmp_path), 0.3, 256)
    assert after.digest == before.digest
    assert "(5 texts, 1 run folder skipped)" in after.description
    assert read(tmp_path) == [f"{n}.txt" for n in range(5)]
    assert find_sources([str(tmp_path)])[0].skipped == {"run folder": 1}
    matched = load_corpus(f"{tmp_path}/**/*.[tj]*", 0.3, 256)
    assert matched.digest == load_corpus(f"{tmp_path}/*.txt", 0.3, 256).digest
    assert "(5 texts, 1 run folder skipped)" in matched.description
    assert find_sources([f"{tmp_path}/**/*.[tj]*"])[0].skipped == {"run folder": 1}
    (spelled,) = find_sources([f"{tmp_path / place}/**/*.txt"])
    assert [file.name for file in spelled.files] == ["log.txt"]
    assert "is a run folder" in refused(tmp_path / place).message
    assert refused(tmp_path / "newest").message.startswith(f"`{tmp_path / 'newest'}` is a run folder")
    with pytest.raises(DataContentError):
        find_sources([str(tmp_path / place)])
    tree(tmp_path / "only" / "runs", RUNS[kind])
    assert "only` (0 texts, 1 run folder skipped)" in refused(tmp_path / "only").message
    with pytest.raises(DataNotFoundError, match=r"holds no file \(skipped: 1 run folder\)"):
        find_sources([str(tmp_path / "only")])


def test_folders_that_only_look_like_runs_are_text(tree, tmp_path):
    tree(
        tmp_path, {"one/run.toml": "a = 1", "two/events.jsonl": "{}", "three/checkpoints/x": "y", "four/lock": "z"}
    )
    assert len(read(tmp_path)) == 4
    assert "(3 texts" in load_corpus(str(tmp_path), 0.3, 256).description  # JSONL is not text


@pytest.mark.parametrize("partial", [False, True])
def test_a_folder_that_holds_only_a_lock_is_skipped(tree, tmp_path, partial):
    tree(tmp_path, {f"{n}.txt": prose(n) for n in range(5)})
    before = load_corpus(str(tmp_path), 0.3, 256)
    folder = tree(tmp_path / "packed", {"packing.json.partial": "{"} if partial else {})
    folder.mkdir(exist_ok=True)
    RunLock(folder).release()
    error = refused(folder)
    assert "did not finish" in error.message
    with pytest.raises(DataContentError):
        find_sources([str(folder)])
    assert load_corpus(str(tmp_path), 0.3, 256).digest == before.digest
    assert find_sources([str(tmp_path)])[0].skipped == {"packed folder": 1}


@pytest.mark.parametrize("name", ["index.json", "packing.json"])
def test_packed_folders_are_skipped(tree, tmp_path, name):
    tree(tmp_path, {f"{n}.txt": prose(n) for n in range(5)} | {"site/index.json": "[]", "site/a.bin": b"\0"})
    before = load_corpus(str(tmp_path), 0.3, 256)
    assert "(6 texts" in before.description  # an index and a *.bin of its own
    tree(tmp_path / "sub" / "packed", {name: seal({}), "tokenizer.json": "{}", "train_000000.bin": b"\0"})
    after = load_corpus(str(tmp_path), 0.3, 256)
    assert after.digest == before.digest
    assert "1 packed folder skipped" in after.description
    assert find_sources([str(tmp_path)])[0].skipped == {"packed folder": 1}


def test_unreadable_folders_are_counted(tree, tmp_path, monkeypatch):
    tree(tmp_path, {"a.txt": prose(1), "b.txt": prose(2), "sub/c.txt": prose(3)})
    real = os.scandir

    def scandir(path):
        if os.path.basename(path) == "sub":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "(2 texts, 1 unreadable skipped)" in load_corpus(str(tmp_path), 0.3, 256).description
