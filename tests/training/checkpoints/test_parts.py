"""Checkpoints of several ranks: one file each, whole or absent for all, read by any number of ranks."""

import errno
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from halfstep.core.state_format import Part, Stored
from halfstep.training.checkpoints import checkpoint, parts, tensors
from halfstep.training.checkpoints.checkpoint import load, load_newest
from halfstep.training.checkpoints.parts import save_part
from halfstep.training.checkpoints.tensors import (
    CheckpointError,
    CheckpointReadError,
    CheckpointWriteError,
    DamagedCheckpointError,
)
from halfstep.training.checkpoints.writer import Retention, prune
from tests.training.checkpoints.test_checkpoint import Killed, Mortal, rewrite

WHOLE = {
    "model.w": np.arange(10 * 3, dtype=np.float32).reshape(10, 3),
    "model.bias": np.arange(2, dtype=np.float32),  # fewer rows than ranks
    "model.empty": np.zeros((0, 4), np.float32),
    "applied": np.int32(7),
}
NAMES = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}


def stored(array):
    return Stored(NAMES[array.dtype], array.shape, array.tobytes())


def share(count, rank, ranks):
    """The rows of one rank, as torch's `chunk` makes them: the last ranks may have none."""
    size = -(-count // ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


def part_of(rank, ranks, seed=0):
    made = {}
    for name, array in WHOLE.items():
        if not array.shape:
            made |= {name: stored(array)} if rank == 0 else {}
            continue
        start, stop = share(len(array), rank, ranks)
        if start < stop or (rank == 0 and not len(array)):
            made[name] = Part(stored(array[start:stop] + np.float32(seed)), start, len(array))
    return made


def save_all(folder, step=5, ranks=4, token="a", seed=0, arrays=part_of, meta=None):
    """Saves on all ranks, each in a thread of its own; returns what each returned or raised."""

    def one(rank):
        given = arrays(rank, ranks) if arrays is not part_of else part_of(rank, ranks, seed)
        try:
            about = (folder, step, lambda: given, meta or {"policy": "fp32"})
            return save_part(*about, rank=rank, ranks=ranks, token=token)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def numbers(arrays):
    return {name: bytes(record.data) for name, record in arrays.items()}


def test_each_rank_writes_a_file_and_one_process_reads_whole_tensors(tmp_path):
    target = tmp_path / "step-000005"
    assert save_all(tmp_path) == [target] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000005"]
    files = [f"state-0000{rank}-of-00004.safetensors" for rank in (1, 2, 3, 4)]
    assert sorted(entry.name for entry in target.iterdir()) == ["manifest.json", *files]
    found, manifest = load(target)
    assert (manifest["format"], manifest["step"], manifest["policy"]) == (4, 5, "fp32")
    assert manifest["tensors"]["model.w"] == {
        "dtype": "F32",
        "shape": [10, 3],
        "rows": {files[0]: [0, 3], files[1]: [3, 6], files[2]: [6, 9], files[3]: [9, 10]},
    }
    assert manifest["tensors"]["applied"] == {"dtype": "I32", "shape": [], "file": files[0]}
    assert found == {name: stored(array) for name, array in WHOLE.items()}
    assert checkpoint.verify(target) == manifest
    assert checkpoint.is_checkpoint(target)
    assert checkpoint.is_checkpoint(target.rename(tmp_path / "best"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_any_number_of_ranks_reads_its_rows(tmp_path, ranks):
    save_all(tmp_path)
    checkpoint.save(tmp_path, 6, {name: stored(array) for name, array in WHOLE.items()}, {})
    for path in (tmp_path / "step-000005", tmp_path / "step-000006"):
        for rank in range(ranks):

            def rows(name, shape, rank=rank):
                return share(shape[0], rank, ranks) if shape else None

            for name, record in load(path, rows)[0].items():
                array = WHOLE[name]
                start, stop = share(len(array), rank, ranks) if array.shape else (0, 1)
                assert record == stored(array[start:stop] if array.shape else array), (name, rank)


def test_a_rank_reads_the_files_that_hold_its_rows_and_no_others(tmp_path):
    path = save_all(tmp_path)[0]
    damaged = path / "state-00004-of-00004.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    wanted = {"model.w": (0, 5), "model.bias": (0, 2), "model.empty": (0, 0)}
    found, _ = load(path, lambda name, shape: wanted.get(name))
    assert found["model.w"] == stored(WHOLE["model.w"][:5])
    for act in (lambda: load(path), lambda: checkpoint.verify(path)):
        with pytest.raises(DamagedCheckpointError, match=r"state-00004.*SHA-256 is [0-9a-f]{64}, expected"):
            act()


def test_damage_of_any_part_is_named_and_passed_over_only_if_allowed(tmp_path):
    save_all(tmp_path, step=1)
    path = save_all(tmp_path, step=2, token="b")[0]
    for file in sorted(path.glob("state-*")):
        good = file.read_bytes()
        flipped = bytes([good[0] ^ 1]) + good[1:], good[:-1] + bytes([good[-1] ^ 1])
        for bad in (good[:-1], good + b"x", *flipped, None):
            file.unlink() if bad is None else file.write_bytes(bad)
            with pytest.raises(DamagedCheckpointError, match=file.name):
                load(path)
            assert load_newest(tmp_path, allow_older=True).path.name == "step-000001"
            os.rename(tmp_path / "step-000002.damaged", path)
            file.write_bytes(good)
    assert numbers(load(path)[0]) == numbers(load(tmp_path / "step-000001")[0])


@pytest.mark.parametrize(
    "change",
    [
        {"rows": {"state-00001-of-00004.safetensors": [0, 3]}},
        {"rows": {"state-00001-of-00004.safetensors": [0, 3], "state-00002-of-00004.safetensors": [2, 10]}},
        {"rows": {"state-00001-of-00004.safetensors": [0]}},
        {"rows": {"../state-00001-of-00004.safetensors": [0, 10]}},
        {"rows": {}, "file": "/etc/passwd"},
        {"dtype": "F4"},
    ],
)
def test_a_table_whose_rows_do_not_make_tensors_is_refused(tmp_path, change):
    path = save_all(tmp_path)[0]
    table = checkpoint.read_manifest(path)["tensors"]
    table["model.w"] |= change
    rewrite(path, tensors=table)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json.*`model\.w`"):
        load(path)


def test_the_file_of_one_process_is_refused_among_those_of_ranks(tmp_path):
    path = save_all(tmp_path)[0]
    files = checkpoint.read_manifest(path)["files"]
    rewrite(path, files=files | {"state.safetensors": {"sha256": "", "bytes": 0}})
    with pytest.raises(CheckpointReadError, match=r"points to `state\.safetensors`"):
        load(path)


def test_what_a_killed_job_left_is_never_part_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PATIENCE", 0.05)
    for rank in (1, 2, 3):  # rank 0 is killed before it writes
        with pytest.raises(CheckpointWriteError, match="not completed by rank 0"):
            save_part(tmp_path, 5, partial(part_of, rank, 4, 9), {}, rank=rank, ranks=4, token="killed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000005.partial-killed"]
    assert load_newest(tmp_path) is None
    monkeypatch.setattr(parts, "PATIENCE", 10)
    assert save_all(tmp_path, token="next") == [tmp_path / "step-000005"] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000005"]
    assert load(tmp_path / "step-000005")[0]["model.w"] == stored(WHOLE["model.w"])


@pytest.mark.prove
def test_a_death_of_rank_0_at_any_call_leaves_nothing_or_all(tmp_path, monkeypatch):
    def attempt(folder, fatal):
        part = folder / "step-000005.partial-a"
        part.mkdir(parents=True)
        parts._write_part(part, part_of(1, 2), 1, 2)  # rank 1 is done
        with monkeypatch.context() as patch:
            mortal = Mortal(patch, fatal)
            save_part(folder, 5, lambda: part_of(0, 2), {}, rank=0, ranks=2, token="a")
        return len(mortal.trace)

    whole = {name: stored(array) for name, array in WHOLE.items()}
    total = attempt(tmp_path / "lives", None)
    assert total >= 15
    for fatal in range(total):
        folder = tmp_path / f"death-{fatal}"
        with pytest.raises(Killed):
            attempt(folder, fatal)
        found = load_newest(folder)
        assert found is None or found.arrays == whole
        assert save_all(folder, ranks=2, token="next") == [folder / "step-000005"] * 2
        assert [entry.name for entry in folder.iterdir()] == ["step-000005"]
        assert load(folder / "step-000005")[0] == whole


def test_a_rank_takes_the_memory_of_its_rows(tmp_path):
    rows = np.zeros((1024, 2048), np.float32)  # 8 MiB

    def half(rank, ranks):
        return {"model.w": Part(stored(rows[512 * rank : 512 * (rank + 1)]), 512 * rank, 1024)}

    path = save_all(tmp_path, ranks=2, arrays=half)[0]
    tracemalloc.start()
    load(path, lambda name, shape: (256, 640))  # 3 MiB, of both files
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 3 * 2**20 <= peak < 3 * 2**20 + 2**20 + 2**17  # what is hashed is read 1 MiB at a time


def test_a_silent_rank_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PATIENCE", 0.2)
    with pytest.raises(CheckpointWriteError, match="rank 1 has written nothing"):
        save_part(tmp_path, 5, lambda: part_of(0, 2), {}, rank=0, ranks=2, token="a")
    assert load_newest(tmp_path) is None


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_whose_disk_is_full_fails_the_save_for_all_and_the_next_one_succeeds(tmp_path, monkeypatch, bad):
    save_all(tmp_path, step=1)
    real = tensors.flush

    def full(path):
        if path.name == f"state-0000{bad + 1}-of-00004.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "flush", full)
        errors = save_all(tmp_path, step=2, token="b")
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "No space left" in errors[bad].message
    if bad:
        assert "rank 2 failed: checkpoint" in errors[0].message
    assert all("No space" in e.message or "given up by rank 0" in e.message for e in errors)
    left = tmp_path / "step-000002.partial-b.failed"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "step-000001", left]
    assert prune(tmp_path, Retention()) == []
    assert save_all(tmp_path, step=2, token="c") == [tmp_path / "step-000002"] * 4
    assert not left.exists()


def test_a_rank_without_memory_is_named(tmp_path):
    def no_memory():
        raise MemoryError

    def read(rank):
        return no_memory if rank == 1 else lambda: part_of(rank, 2)

    with ThreadPoolExecutor(2) as pool:
        place = (tmp_path, 5)
        made = [pool.submit(save_part, *place, read(rank), {}, rank=rank, ranks=2, token="a") for rank in (0, 1)]
    with pytest.raises(CheckpointWriteError, match="rank 1 failed: no memory left"):
        made[0].result()


def test_rows_are_not_saved_as_if_they_were_all(tmp_path):
    with pytest.raises(ValueError, match=r"`model\.w` has 5 of 10 rows: ranks save their parts together"):
        checkpoint.save(tmp_path, 5, part_of(0, 2), {})
    path = checkpoint.save(tmp_path, 5, part_of(0, 1), {})
    assert load(path)[0]["model.w"] == stored(WHOLE["model.w"])


def test_a_folder_that_rank_0_does_not_see_is_named(tmp_path):
    (tmp_path / "step-000005.partial-a").mkdir()
    note = {"file": {"sha256": "", "bytes": 3}, "tensors": {}}
    (tmp_path / "step-000005.partial-a" / "state-00002-of-00002.json").write_text(json.dumps(note))
    with pytest.raises(CheckpointWriteError, match="does not see what rank 1 wrote"):
        save_part(tmp_path, 5, lambda: part_of(0, 2), {}, rank=0, ranks=2, token="a")


def test_ranks_that_do_not_fit_each_other_are_refused(tmp_path):
    def other(rank, ranks):
        made = part_of(rank, ranks)
        if rank == 1:
            made["model.w"] = Part(made["model.w"], 2, 10)
        return made

    first, second = save_all(tmp_path, ranks=2, arrays=other)
    assert "rows of `model.w`" in first.message
    assert "given up" in second.message
    first, _ = save_all(tmp_path, ranks=2, token="b", arrays=lambda rank, ranks: part_of(0, 1))
    assert "rows of `applied`" in first.message


def test_a_rank_without_anything_to_write_writes_no_file(tmp_path):
    """Copies of shards (HSDP): one copy writes."""
    path = save_all(tmp_path, arrays=lambda rank, ranks: part_of(rank, 2) if rank < 2 else {})[3]
    names = [f"state-0000{rank}-of-00004.safetensors" for rank in (1, 2)]
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", *names]
    assert load(path)[0]["model.w"] == stored(WHOLE["model.w"])


def test_saving_a_step_again_changes_nothing_and_other_tensors_are_an_error(tmp_path):
    path = save_all(tmp_path)[0]
    assert save_all(tmp_path, token="b") == [path] * 4
    first, *rest = save_all(tmp_path, token="c", seed=1)
    assert "already with other tensors" in first.message
    assert all("given up" in error.message for error in rest)
    assert "another number of processes" in save_all(tmp_path, ranks=2, token="d")[0].message
    assert load(path)[0]["model.w"] == stored(WHOLE["model.w"])
