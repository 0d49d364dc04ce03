"""Checkpoints: exact, whole or absent after a death at any call, and damage anywhere is named."""

import builtins
import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import DTYPES, latest, load, load_newest, save
from halfstep.training.checkpoints.tensors import (
    CheckpointError,
    CheckpointReadError,
    CheckpointWriteError,
    DamagedCheckpointError,
)
from halfstep.training.checkpoints.writer import Retention, prune
from tests.training.runs import raising

META = {"policy": "bf16-mixed", "config": {"betas": (0.9, 0.95)}, "data": {"position": {"epoch": 0}}}


def arrays_of(seed, names=("blocks.0.weight", "step")):
    big = np.random.default_rng(seed).standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    return {names[0]: Stored("BF16", (3, 5), big.tobytes()), names[1]: Stored("I64", (), np.int64(seed).tobytes())}


def same(found, expected):
    return found.keys() == expected.keys() and all(
        (found[k].dtype, found[k].shape, bytes(found[k].data))
        == (expected[k].dtype, expected[k].shape, bytes(expected[k].data))
        for k in expected
    )


@st.composite
def any_array(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype][1]
    return Stored(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@settings(max_examples=25, deadline=None)
@given(
    arrays=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != "__metadata__"),
        any_array(),
        max_size=5,
    ),
    step=st.integers(0, 10**7),
    meta=st.dictionaries(
        st.text().filter(lambda k: k not in checkpoint.OWN_KEYS),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    ),
)
def test_everything_comes_back_bit_for_bit(tmp_path_factory, arrays, step, meta):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    path = save(folder, step, arrays, meta)
    assert path == folder / f"step-{step:06d}"
    assert latest(folder) == path
    found, manifest = load(path)
    assert same(found, arrays)
    assert manifest["step"] == step
    assert {key: manifest[key] for key in meta} == meta


def test_any_buffer_can_be_saved_and_the_manifest_lists_what_is_there(tmp_path):
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    data = load(save(tmp_path, 1, {"w": Stored("F32", (3, 4), memoryview(numbers))}, {}))[0]["w"].data
    back = np.frombuffer(data, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(back, numbers)
    assert back.flags.writeable
    path = save(tmp_path, 7, arrays_of(1), META)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    content = (path / "state.safetensors").read_bytes()
    assert manifest["format"] == 3
    assert manifest["files"] == {
        "state.safetensors": {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    }
    assert manifest["tensors"]["blocks.0.weight"] == {"dtype": "BF16", "shape": [3, 5]}
    assert manifest["config"] == {"betas": [0.9, 0.95]}
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "state.safetensors"]


class Killed(BaseException):
    """The process died. No code of the process can act on it."""


class Mortal:
    """Wraps the calls that change the disk: the process dies before call `fatal`, and stays dead."""

    def __init__(self, monkeypatch, fatal):
        self.fatal, self.trace = fatal, []
        for name in ("mkdir", "rename", "fsync", "unlink", "rmdir", "open"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        # A file is written in two halves, and the process may die between them.
        real_serialize, real_open = safetensors.serialize_file, builtins.open

        def serialize(specs, file, metadata):
            self.call("create", file)
            real_serialize(specs, file, metadata)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            self.call("write", file)
            file.write_bytes(whole)

        monkeypatch.setattr(safetensors, "serialize_file", serialize)

        def opened(path, mode="r", *args, **kwargs):
            if "w" not in mode:
                return real_open(path, mode, *args, **kwargs)
            self.call("create", path)
            file = real_open(path, mode, *args, **kwargs)
            write = file.write

            class Torn:
                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    file.close()

                def write(_, data):  # noqa: N805 - self is the Mortal
                    write(data[: len(data) // 2])
                    file.flush()
                    self.call("write", path)
                    write(data[len(data) // 2 :])

                def __getattr__(_, name):  # noqa: N805
                    return getattr(file, name)

            return Torn()

        monkeypatch.setattr(builtins, "open", opened)

    def call(self, name, target):
        if self.fatal is not None and len(self.trace) >= self.fatal:
            raise Killed
        self.trace.append((name, target))

    def wrap(self, name, real):
        def wrapped(target, *args, **kwargs):
            self.call(name, target)
            return real(target, *args, **kwargs)

        return wrapped


def calls_of(monkeypatch, act):
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, None)
        act()
    return mortal.trace


def test_a_death_at_any_call_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    def fresh(name):
        folder = tmp_path / name / "checkpoints"
        folder.parent.mkdir()
        save(folder, 1, arrays_of(1), META)
        (folder / "step-000007.partial").mkdir()
        (folder / "step-000007.partial" / "state.safetensors").write_bytes(b"half")
        return folder

    counted = fresh("count")
    trace = calls_of(monkeypatch, lambda: save(counted, 2, arrays_of(2), META))
    assert {name for name, _ in trace} == {"mkdir", "rename", "fsync", "unlink", "rmdir", "open", "create",
                                           "write"}  # fmt: skip
    outcomes = set()
    for fatal in range(len(trace)):
        folder = fresh(f"death-{fatal}")
        with monkeypatch.context() as patch:
            Mortal(patch, fatal)
            with pytest.raises(Killed):
                save(folder, 2, arrays_of(2), META)
        found = latest(folder)
        step = 2 if found.name == "step-000002" else 1
        outcomes.add(step)
        assert same(load(found)[0], arrays_of(step))
        # The next save cleans up and succeeds, whatever was left.
        save(folder, 3, arrays_of(3), META)
        names = sorted(entry.name for entry in folder.iterdir())
        assert names == ["step-000001", *(["step-000002"] if step == 2 else []), "step-000003"]
        assert same(load(latest(folder))[0], arrays_of(3))
    assert outcomes == {1, 2}  # some deaths come after the rename


def test_a_death_while_pruning_leaves_only_whole_checkpoints(tmp_path, monkeypatch):
    def fresh(name):
        for step in (1, 2, 3):
            save(tmp_path / name, step, arrays_of(step), META)
        return tmp_path / name

    counted = fresh("count")
    total = len(calls_of(monkeypatch, lambda: prune(counted, Retention(1))))
    assert total >= 6
    for fatal in range(total):
        folder = fresh(f"death-{fatal}")
        with monkeypatch.context() as patch:
            Mortal(patch, fatal)
            with pytest.raises(Killed):
                prune(folder, Retention(1))
        for path in folder.glob("step-??????"):
            assert same(load(path)[0], arrays_of(int(path.name[-1])))
        save(folder, 4, arrays_of(4), META)
        assert all(len(entry.name) == len("step-000000") for entry in folder.iterdir())


def test_files_and_folders_are_on_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to see what is flushed")
    rename = os.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *args: (synced.append("RENAME"), rename(*args)))
    save(tmp_path / "checkpoints", 5, arrays_of(5), META)
    assert synced == [
        tmp_path.name,  # a new folder's own name lives in its parent
        "state.safetensors",
        "manifest.json",
        "step-000005.partial",
        "RENAME",
        "checkpoints",
    ]


@pytest.mark.parametrize("name", ["mkdir", "rename", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_is_an_error_of_ours_and_leaves_no_trace(tmp_path, monkeypatch, name, code):
    save(tmp_path, 1, arrays_of(1), META)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, raising(OSError(code, os.strerror(code), "some/place")))
        with pytest.raises(CheckpointWriteError, match=f"step-000002.*{os.strerror(code)}.*some/place"):
            save(tmp_path, 2, arrays_of(2), META)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def test_an_error_of_the_writer_or_a_folder_that_cannot_be_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "serialize_file", raising(safetensors.SafetensorError("no space left")))
    with pytest.raises(CheckpointWriteError, match=r"no space left.*state\.safetensors"):
        save(tmp_path, 2, arrays_of(2), META)
    assert list(tmp_path.iterdir()) == []
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file")
    with pytest.raises(CheckpointWriteError):
        save(blocked, 1, arrays_of(1), META)


@pytest.fixture
def read_only():
    """A folder that this process may not write to; root may write anywhere, and is nobody meanwhile."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # others may not enter tmp_path
        os.chmod(folder, 0o555)
        if user == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)


def test_a_folder_without_permission_is_named(read_only):
    with pytest.raises(CheckpointWriteError, match=f"`{read_only}.*Permission denied"):
        save(read_only, 1, arrays_of(1), META)


@pytest.mark.prove
def test_a_flipped_bit_of_any_byte_of_the_manifest_is_found_or_means_nothing(tmp_path):
    path = save(tmp_path, 3, arrays_of(3), {"policy": "fp32", "rate": 1e-05})
    file = path / "manifest.json"
    good, whole = file.read_bytes(), load(path)[1]
    harmless = 0
    for place in range(len(good)):
        for bit in (place % 8, 5):  # bit 5 makes an e of 1e-05 an E, which means the same
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            file.write_bytes(bad)
            try:
                found = checkpoint.read_manifest(path)
            except CheckpointError as error:
                found = error.message
            assert found == whole or str(path) in found, (place, bit)
            harmless += found == whole
    assert 1 <= harmless <= 2


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_every_truncation_is_found_and_passed_over_only_if_allowed(tmp_path, name):
    first = save(tmp_path, 1, arrays_of(1), META)
    path = save(tmp_path, 2, arrays_of(2), META)
    good = (path / name).read_bytes()
    # The final newline of the manifest is not part of its meaning.
    for size in range(len(good) - (name == "manifest.json")):
        (path / name).write_bytes(good[:size])
        with pytest.raises(DamagedCheckpointError, match=name):
            load(path)
        if size % 16 == 0:
            with pytest.raises(DamagedCheckpointError, match=f"step-000002.*{name}"):
                latest(tmp_path)
            assert load_newest(tmp_path, allow_older=True).path == first
            os.rename(tmp_path / "step-000002.damaged", path)
    (path / name).write_bytes(good + b"x")
    with pytest.raises(DamagedCheckpointError, match=name):
        load(path)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path, 1, arrays_of(1), META)
    (path / name).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"step-000001.*{name}.* is missing"):
        load(path)
    for allowed in (False, True):  # there is no other to go back to
        with pytest.raises(DamagedCheckpointError, match=f"step-000001.*{name}.* is missing"):
            load_newest(tmp_path, allow_older=allowed)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_damaged_newest_one_is_passed_over_only_if_allowed(tmp_path, name):
    for step in (1, 2, 3):
        save(tmp_path, step, arrays_of(step), META)
    for step in (2, 3):
        bad = bytearray((tmp_path / f"step-00000{step}" / name).read_bytes())
        bad[len(bad) // 2] ^= 4
        (tmp_path / f"step-00000{step}" / name).write_bytes(bad)
    with pytest.raises(DamagedCheckpointError, match=f"step-000003/{name}") as caught:
        load_newest(tmp_path)
    assert "--allow-older" in caught.value.hint
    assert len(list(tmp_path.glob("step-??????"))) == 3  # nothing was touched
    found = load_newest(tmp_path, allow_older=True)
    assert found.manifest["step"] == 1
    assert same(found.arrays, arrays_of(1))
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["step-000001", "step-000002.damaged", "step-000003.damaged"]
    assert bytes(bad) == (tmp_path / "step-000003.damaged" / name).read_bytes()
    # A second time, next to the first.
    save(tmp_path, 3, arrays_of(3), META)
    (tmp_path / "step-000003" / name).unlink()
    assert load_newest(tmp_path, allow_older=True).manifest["step"] == 1
    assert (tmp_path / "step-000003.damaged-2").is_dir()


def rewrite(path, **changes):
    """A manifest that verifies and yet says something else."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    manifest["digest"] = checkpoint.table_digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_another_format_is_refused_by_number_even_by_latest(tmp_path):
    save(tmp_path, 1, arrays_of(1), META)
    path = save(tmp_path, 2, arrays_of(2), META)
    rewrite(path, format=1)
    for act in (lambda: load(path), lambda: latest(tmp_path)):
        with pytest.raises(CheckpointReadError, match="has format 1, this halfstep reads formats 3 and 4"):
            act()


def test_a_table_that_disagrees_with_the_file_is_named(tmp_path):
    path = save(tmp_path, 1, arrays_of(1), META)
    rewrite(path, tensors={"step": {"dtype": "I64", "shape": []}})
    with pytest.raises(DamagedCheckpointError, match=r"tensor `blocks\.0\.weight` .*BF16.* expected absent"):
        load(path)
    table = checkpoint.table(arrays_of(1))
    table["blocks.0.weight"]["dtype"] = "F16"
    rewrite(path, tensors=table)
    with pytest.raises(DamagedCheckpointError, match=r"BF16.*expected .*F16"):
        load(path)


def test_a_manifest_that_names_other_files_is_refused(tmp_path):
    path = save(tmp_path, 1, arrays_of(1), META)
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewrite(path, files=files | {"../../secret": {"sha256": "", "bytes": 0}})
    with pytest.raises(CheckpointReadError, match=r"points to `\.\./\.\./secret`.*in its own folder"):
        load(path)
    rewrite(path, files={"other.safetensors": files["state.safetensors"]})
    with pytest.raises(DamagedCheckpointError, match=r"has no state\.safetensors"):
        load(path)


@pytest.mark.parametrize(
    "odd",
    [
        {"files": 3},
        {"files": None},
        {"files": ["state.safetensors"]},
        {"files": {"state.safetensors": 3}},
        {"files": {"state.safetensors": {"bytes": 1}}},
        {"files": {"/etc/passwd": {"sha256": "", "bytes": 0}}},
        {"tensors": 3},
        {"step": "1"},
        {"step": None},
    ],
)
def test_a_manifest_that_no_halfstep_wrote_is_an_error_of_ours(tmp_path, odd):
    path = save(tmp_path, 1, arrays_of(1), META)
    rewrite(path, **odd)
    with pytest.raises(DamagedCheckpointError, match="step-000001"):
        load(path)


def test_a_checkpoint_that_was_moved_and_linked_is_read_and_pruned_as_a_link(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "other disk"
    path = save(folder, 1, arrays_of(1), META)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert same(load(path)[0], arrays_of(1))
    save(folder, 2, arrays_of(2), META)
    assert prune(folder, Retention(1)) == [path]
    assert [entry.name for entry in folder.iterdir()] == ["step-000002"]
    assert (elsewhere / "state.safetensors").exists()  # what its owner moved is his


@pytest.mark.parametrize("ending", [".partial", ".partial-3f2a-1", ".partial-3f2a-1.failed", ".removed"])
def test_a_checkpoint_that_is_being_written_is_refused(tmp_path, ending):
    path = save(tmp_path, 2, arrays_of(2), META)
    path = path.rename(path.with_name(path.name + ending))
    with pytest.raises(CheckpointReadError):
        load(path)


def test_a_leftover_that_cannot_be_removed_hinders_no_save(tmp_path, monkeypatch):
    left = tmp_path / "step-000001.removed"
    left.mkdir()
    (left / ".nfs0001").write_text("open elsewhere")
    real = checkpoint.shutil.rmtree

    def rmtree(path, *args, **options):
        if path == left:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        real(path, *args, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    assert same(load(save(tmp_path, 2, arrays_of(2), META))[0], arrays_of(2))


def test_who_may_read_is_what_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1, arrays_of(1), META)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert modes == {"state.safetensors": 0o640, "manifest.json": 0o640}


def test_a_renamed_folder_is_refused_and_one_without_a_step_is_read_by_its_manifest(tmp_path, monkeypatch):
    path = save(tmp_path, 1, arrays_of(1), META)
    moved = path.rename(path.with_name("step-000009"))
    with pytest.raises(DamagedCheckpointError, match="holds step 1"):
        load(moved)
    with pytest.raises(DamagedCheckpointError, match="holds step 1"):
        load(moved.rename(path.with_name("step-000009.damaged")))
    moved = save(tmp_path, 1, arrays_of(1), META).rename(tmp_path / "best")
    assert same(load(moved)[0], arrays_of(1))
    assert latest(tmp_path) is None  # it is not a checkpoint of the run, and is not resumed from
    monkeypatch.chdir(moved)
    assert load(Path("."))[1]["step"] == 1


def test_saving_a_step_twice_and_over_a_damaged_one(tmp_path):
    path = save(tmp_path, 1, arrays_of(1), META)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert save(tmp_path, 1, arrays_of(1), META) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(CheckpointWriteError, match="step-000001` is there already with other tensors"):
        save(tmp_path, 1, arrays_of(2), META)
    assert same(load(path)[0], arrays_of(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    (path / "state.safetensors").write_bytes(b"torn")
    save(tmp_path, 1, arrays_of(1), META)
    assert same(load(path)[0], arrays_of(1))
    assert (tmp_path / "step-000001.damaged" / "state.safetensors").read_bytes() == b"torn"


def test_latest_is_by_number_and_ignores_what_is_none(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (999_999, 1_000_000, 5):
        save(tmp_path, step, arrays_of(0), META)
    (tmp_path / "step-8888888").write_text("")
    (tmp_path / "step-9999999.partial").mkdir()
    shutil.copytree(tmp_path / "step-000005", tmp_path / "step-000005-copy")
    assert latest(tmp_path).name == "step-1000000"


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path):
    with pytest.raises(CheckpointWriteError, match="dtype `C64`"):
        save(tmp_path, 1, {"w": Stored("C64", (1,), bytes(8))}, {})
    with pytest.raises(CheckpointWriteError, match=r"`w` .*has 7 bytes, expected 8"):
        save(tmp_path, 1, {"w": Stored("F32", (2,), bytes(7))}, {})
    with pytest.raises(CheckpointWriteError):
        save(tmp_path, 1, {}, {"loss": float("nan")})
    with pytest.raises(ValueError, match="`tensors` is the checkpoint's own"):
        save(tmp_path, 1, {}, {"tensors": {}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["optimizer.pt", "model.pth", "pytorch_model.bin", "state.PKL"])
def test_a_pickle_next_to_the_state_is_refused_by_name(tmp_path, name):
    path = save(tmp_path, 1, arrays_of(1), META)
    (path / name).write_bytes(b"")
    for act in (lambda: load(path), lambda: load_newest(tmp_path, allow_older=True)):
        with pytest.raises(CheckpointReadError, match=f"{name}` is a pickle, which runs code"):
            act()


def test_pickles_are_not_read(tmp_path):
    import pickle

    path = save(tmp_path, 1, arrays_of(1), META)
    content = pickle.dumps(print)
    (path / "state.safetensors").write_bytes(content)
    rewrite(
        path, files={"state.safetensors": {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
    )
    with pytest.raises(DamagedCheckpointError, match="does not read as safetensors"):
        load(path)
