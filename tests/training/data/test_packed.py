"""Packed data: opened by its index in no time, and every kind of damage found, at opening or by `verify`."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
import zlib

import numpy as np
import pytest

from halfstep.core.errors import printable
from halfstep.training.data import index as shardindex
from halfstep.training.data.batches import Batches
from halfstep.training.data.index import Index, Packing, ShardRecord, SideRecord, read_index, write_index
from halfstep.training.data.load import load_corpus
from halfstep.training.data.packed import verify
from halfstep.training.data.shards import CHUNK, header
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.data.types import DamagedDataError, DataError
from tests.refusals import refuses


def refused(folder, vocabulary=256):
    with pytest.raises(DataError) as caught:
        load_corpus(str(folder), 0.1, vocabulary)
    return caught.value


def test_it_is_mapped_and_identified_by_its_index_and_may_be_linked_or_moved(folder):
    error = refused(folder, 255)
    assert "tokenizer bytes, which has 256 tokens, but model.vocabulary is 255" in error.message
    assert "model.vocabulary=256" in error.hint
    assert len(load_corpus(str(folder), 0.1, 50304).train)
    elsewhere = folder.parent / "disk.bin"
    (folder / "train_000001.bin").rename(elsewhere)
    (folder / "train_000001.bin").symlink_to(elsewhere)
    assert len(load_corpus(str(folder), 0.1, 256).train)
    assert not verify(folder)
    corpus = load_corpus(str(folder), 0.1, 256)
    index = read_index(folder)
    assert corpus.digest == index.digest
    assert (len(corpus.train), len(corpus.validation)) == (index.train.tokens, index.val.tokens)
    assert all(shard.mapped is not None for shard in corpus.train.shards)
    assert index.train.documents + index.val.documents == 400
    assert "packed shards" in corpus.description
    with refuses(DataError, "data.validation = 0.3 changes nothing: .* was packed with held-out text", "leave"):
        load_corpus(str(folder), 0.3, 256)
    assert corpus.train.locate(20_005) == (str(folder / "train_000001.bin"), 5)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert load_corpus(str(moved), 0.1, 256).digest == index.digest


def edit(path):
    path.write_text(path.read_text().replace('"documents": ', '"documents": 1', 1))


OPENING = {
    "missing": (lambda f, flip: (f / "train_000001.bin").unlink(), r"train_000001.bin` is missing"),
    "truncated": (lambda f, flip: os.truncate(f / "train_000001.bin", 3000), r"train_000001.bin` is truncated"),
    "shortened": (lambda f, flip: (f / "train_000001.bin").write_bytes(header(2, np.dtype("<u2")) + bytes(4)),
                  r"train_000001.bin` holds 2 tokens, but the index says 20000"),
    "header": (lambda f, flip: flip(f / "train_000001.bin", 0), r"train_000001.bin` is not a token shard"),
    "stray": (lambda f, flip: shutil.copy(f / "train_000000.bin", f / "train_000099.bin"),
              r"train_000099.bin` is not in the index"),
    "index": (lambda f, flip: edit(f / "index.json"), r"index.json` was changed"),
    "table": (lambda f, flip: flip(f / "token_bytes.npy", 200), r"token_bytes.npy` was changed"),
}  # fmt: skip


@pytest.mark.parametrize("damage", OPENING)
def test_damage_is_named_at_opening_or_by_verify(flip, folder, damage):
    does, said = OPENING[damage]
    does(folder, flip)
    error = refused(folder)
    assert re.search(said.replace(".", r"\."), error.message), error.message
    if damage == "index":
        with pytest.raises(DamagedDataError):
            verify(folder)
    else:
        assert verify(folder)


def test_verify_does_not_read_on_where_a_shard_is_longer_than_what_was_packed(folder):
    os.truncate(folder / "train_000001.bin", 2**40)  # sparse: a terabyte that takes no room
    read = []
    assert {each.file for each in verify(folder, lambda done, _: read.append(done))} == {"train_000001.bin"}
    assert read[-1] < 2**24


def test_a_swapped_shard_is_found_when_it_is_read_and_by_verify(folder):
    shutil.copy(folder / "train_000000.bin", folder / "train_000001.bin")
    with pytest.raises(DamagedDataError, match="train_000001"):
        load_corpus(str(folder), 0.1, 300).train[20_000:20_050]
    assert [each.file for each in verify(folder)] == ["train_000001.bin"]


@pytest.mark.parametrize("place", range(0, 41_024, 1_637))
def test_verify_finds_every_flipped_byte_and_names_its_chunk(flip, folder, place):
    flip(folder / "train_000001.bin", place)
    found = [each for each in verify(folder) if each.first is not None]
    low = place // CHUNK * CHUNK
    assert [(each.file, each.first, each.last) for each in found] == [
        ("train_000001.bin", low, min(low + CHUNK, 41_024))
    ]


def test_an_index_of_a_newer_format_is_refused(folder, monkeypatch):
    index = read_index(folder)
    with monkeypatch.context() as patch:
        patch.setattr(shardindex, "FORMAT", 2)
        write_index(folder, index)
    assert "has format 2; this version of halfstep reads format 1" in refused(folder).message


@pytest.mark.parametrize(
    "name", ["../outside/x.bin", "/x.bin", "sub/x.bin", "..", "", "train\0.bin", "./train_000001.bin"]
)
@pytest.mark.parametrize("what", ["shard", "tokenizer"])
def test_an_index_that_points_out_of_its_folder_is_refused(folder, name, what):
    index = read_index(folder)
    if what == "shard":
        first, second, *others = index.train.shards
        moved = folder.parent / "outside" / "x.bin"
        moved.parent.mkdir()
        (folder / second.name).rename(moved)
        shards = (first, dataclasses.replace(second, name=name), *others)
        changed = dataclasses.replace(index, train=dataclasses.replace(index.train, shards=shards))
    else:
        changed = dataclasses.replace(index, tokenizer=dataclasses.replace(index.tokenizer, file=name))
    write_index(folder, changed)
    error = refused(folder)
    assert f"index.json` points to `{printable(name)}`, which is not a file in its own folder" in error.message
    with pytest.raises(DamagedDataError):
        verify(folder)


def test_a_folder_of_text_may_hold_an_unrelated_index(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"pages": ["a", "b"]}) + "\n" * 300)
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 30)
    assert load_corpus(str(tmp_path), 0.3, 256).bytes_per_token == 1.0


def sums_of_holes(path):
    """The checksums of a shard of zeros, whose chunks are all alike but for the first and the last."""
    with open(path, "rb") as file:
        first, hole = zlib.crc32(file.read(CHUNK)), zlib.crc32(bytes(CHUNK))
    whole, rest = divmod(path.stat().st_size, CHUNK)
    return np.array([first] + [hole] * (whole - 1) + [zlib.crc32(bytes(rest))], dtype="<u4").tobytes()


def test_ten_gigabytes_open_at_once_and_cost_no_memory(tmp_path):
    """Opens 50 sparse shards of 100 M tokens, and takes a batch, in under a second.

    Their checksums are true: the batch is the first to touch its chunks, and every file of them is read for it.
    """
    resource = pytest.importorskip("resource")
    records, tokens = [], 100_000_000
    first = tmp_path / "train_000000.bin"
    first.write_bytes(header(tokens, np.dtype("<u2")))
    os.truncate(first, 1024 + 2 * tokens)
    sums = sums_of_holes(first)
    for number in range(50):
        path = tmp_path / f"train_{number:06d}.bin"
        path.write_bytes(header(tokens, np.dtype("<u2")))
        os.truncate(path, 1024 + 2 * tokens)
        path.with_suffix(".crc").write_bytes(sums)
        records.append(ShardRecord(path.name, tokens, tokens, 1, "", hashlib.sha256(sums).hexdigest()))
    side = SideRecord(50 * tokens, 50, 50 * tokens, 50 * tokens, tuple(records))
    nothing = SideRecord(0, 0, 0, 0, ())
    write_index(
        tmp_path, Index("0", BytesTokenizer().identity(), Packing((), "text", None, 0, 1), {}, None, side, nothing)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    corpus = load_corpus(str(tmp_path), 0.001, 256)
    feed = Batches(corpus.train, context=1024, batch=32, micro_batches=16, seed=0)
    batch = feed.at(0)
    assert time.perf_counter() - started < 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert batch.shape == (16, 32, 1025)
    assert feed.order == "keyed"
    touched = 512 * 17 * 4096  # a fault maps up to 16 pages: of a window's, or of those of its chunks
    assert grown < touched + 4 * batch.nbytes + (1 << 24), grown


@pytest.mark.parametrize("state", ["index.json", "packing.json"])
def test_packed_shards_are_not_read_without_their_index(folder, tmp_path, state):
    if state == "packing.json":
        (folder / "index.json").rename(folder / state)
    for source in (f"{folder}/*.bin", f"{folder}/train_*.bin", folder / "train_000000.bin", f"{tmp_path}/*/*.bin"):
        error = refused(source)
        assert "without the index" in error.message
        assert f"`--set data.source={folder}`" in error.hint
    others = tmp_path / "others"
    others.mkdir()
    (others / "a.bin").write_bytes((folder / "train_000000.bin").read_bytes())
    assert "without the index" in refused(f"{tmp_path}/*/*.bin").message  # one folder of ours is enough
    (folder / state).unlink()  # shards of unknown origin
    assert load_corpus(f"{folder}/*.bin", 0.1, 256).bytes_per_token is None
    (folder / "index.json").write_text("{}")  # an unrelated index
    assert load_corpus(f"{folder}/*.bin", 0.1, 256).bytes_per_token is None
