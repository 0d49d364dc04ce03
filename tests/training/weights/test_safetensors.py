"""Files of weights: what is read is what was written, and what is no safetensors is refused with the remedy."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from halfstep.training.weights.safetensors import (
    WeightsError,
    WeightsFileError,
    WeightsFitError,
    digest,
    open_file,
    open_folder,
)
from tests.refusals import refuses

NUMBERS = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


def save_index(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
def test_every_pattern_of_a_half_widens_to_its_own_number(dtype, tmp_path):
    if np.dtype(dtype).itemsize == 2:
        held = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(256, 256)
    else:
        held = NUMBERS
    save_file({"first": np.ones(3, np.float32), "it": held}, tmp_path / "a.safetensors")
    read = open_file(tmp_path / "a.safetensors")["it"].read()
    with np.errstate(invalid="ignore"):  # signaling NaN, on ARM
        expected = held.astype(np.float32)
    assert read.dtype == np.float32
    assert np.array_equal(read, expected, equal_nan=True)
    assert (np.signbit(read) == np.signbit(expected)).all()


def test_tensors_are_read_and_compared_and_what_would_be_rounded_is_refused(tmp_path):
    save_file({"one": np.array(2.5, np.float32), "none": np.zeros((0, 4), np.float32)}, tmp_path / "a.safetensors")
    found = open_file(tmp_path / "a.safetensors")
    assert found["one"].read() == np.float32(2.5)
    assert found["none"].read().shape == (0, 4)
    tensors = {
        "a": NUMBERS, "b": NUMBERS.copy(), "c": NUMBERS.astype(np.float16), "d": NUMBERS.T.copy(), "e": -NUMBERS,
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    found = open_file(tmp_path / "a.safetensors")
    assert [found["a"].equals(found[name]) for name in "bcde"] == [True, False, False, False]
    save_file({"a": np.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsFitError, match=r"`a` in .* is held in F64"):
        open_file(tmp_path / "a.safetensors")["a"].check_format()


def test_the_digest_is_that_of_sha256sum(tmp_path):
    parts = {"b.safetensors": {"x": NUMBERS}, "a.safetensors": {"y": -NUMBERS}}
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    sums = {file: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() for file in sorted(parts)}
    assert digest(open_file(tmp_path / "a.safetensors").values()) == sums["a.safetensors"]
    save_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors"})
    found = open_folder(tmp_path)
    lines = "".join(f"{value}  {file}\n" for file, value in sums.items())
    assert digest(found.values()) == hashlib.sha256(lines.encode()).hexdigest()
    assert (found["y"].read() == -NUMBERS).all()


def test_what_the_index_does_not_name_is_kept(tmp_path):
    save_file({"x": NUMBERS, "z": NUMBERS}, tmp_path / "a.safetensors")
    save_file({"y": -NUMBERS}, tmp_path / "b.safetensors")
    save_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    assert open_folder(tmp_path).keys() == {"x", "y", "z"}


@pytest.mark.parametrize("named", ["a.safetensors", "b.safetensors", None])
def test_a_tensor_in_two_files_is_refused_whichever_the_index_names(named, tmp_path):
    """Readers disagree on which one counts: some follow the index, some take the last."""
    save_file({"x": NUMBERS, "z": NUMBERS}, tmp_path / "a.safetensors")
    save_file({"x": -NUMBERS, "y": NUMBERS}, tmp_path / "b.safetensors")
    save_index(tmp_path, {"z": "a.safetensors", "y": "b.safetensors", **({"x": named} if named else {})})
    with pytest.raises(WeightsFileError, match=r"`x` is in `a\.safetensors` and in `b\.safetensors` of"):
        open_folder(tmp_path)


def saved(path, name="model.safetensors"):
    save_file({"x": NUMBERS}, path / name)
    return path / name


def with_header(header):
    """Writes a file with a header as it is given."""

    def write(path):
        content = header.encode()
        content += b" " * (-len(content) % 8)
        (path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))

    return write


ENTRY = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


def truncated(path):
    file = saved(path)
    file.write_bytes(file.read_bytes()[:-1])


def write(name, content):
    return lambda path: (path / name).write_bytes(content)


def index(weight_map, **shards):
    """An index, next to files of one tensor each."""

    def make(path):
        for name, tensor in shards.items():
            save_file({tensor: NUMBERS}, path / f"{name}.safetensors")
        save_index(path, weight_map)

    return make


A, B = "a.safetensors", "b.safetensors"
# (what the folder holds, what is said, what the hint says)
BROKEN = [
    (write("pytorch_model.bin", b"\x80\x04"), "weights as a pickle, `pytorch_model.bin`", "save_pretrained"),
    (lambda path: None, "holds neither model.safetensors nor", "Hugging Face layout"),
    (lambda path: saved(path, "x.safetensors"), "holds neither model.safetensors", "x.safetensors"),
    (write("model.safetensors", b"PK\x03\x04" + bytes(100)), "does not read as", "looks like a pickle"),
    (write("model.safetensors", b"version https://git-lfs" + b"x" * 90), "does not read as", "git lfs pull"),
    (with_header(f'{{"x": {ENTRY}, "x": {ENTRY}}}'), "`x` stands twice", "damaged"),
    (with_header(f'{{"__metadata__": {{}}, "x": {ENTRY}, "__metadata__": {{}}}}'), "duplicate field", "damaged"),
    (with_header(f'{{"x": {ENTRY[:-1]}, "dtype": "F32"}}}}'), "duplicate field `dtype`", "damaged"),
    (truncated, "does not read as safetensors", "truncated, damaged"),
    (lambda path: (path / "model.safetensors").mkdir(), "is a folder, not a file of weights", "again"),
    (index({"x": "../model.safetensors"}), "puts `x` in `../model.safetensors`", "not followed"),
    (index({"x": "a.bin"}), "is a pickle", "save_pretrained"),
    (index({"x": A}), "no such file", "again"),
    (index({"y": A}, a="x"), "puts `y` in `a.safetensors`, but it is not there", "again"),
    (index({"x": B, "y": A}, a="x", b="y"), "puts `x` in `b.safetensors`, but", "not of the same model"),
    (index({"x": ""}), "puts `x` in ``, which is not a file next to it", "not followed"),
    (index({"x": f"{'n' * 300}.safetensors"}), "names `nnn.*`, and there is no such file", "fetch all files"),
    (lambda path: (path / "model.safetensors").symlink_to("../blobs/abc"), "link to a missing file", "cp -rL"),
    (index({}), "has no `weight_map`", "again"),
]


@pytest.mark.parametrize(("make", "said", "hint"), BROKEN)
def test_what_cannot_be_read_is_refused_with_the_remedy(make, said, hint, tmp_path):
    make(tmp_path)
    with refuses(WeightsError, said, hint):
        open_folder(tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "pt", "PTH", "ckpt"])
def test_a_pickle_is_refused_by_its_name(suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"\x80\x04")
    with pytest.raises(WeightsFileError) as caught:
        open_file(path)
    assert "save_pretrained" in caught.value.hint
