"""Checksums: no token of a damaged chunk is handed out, and each chunk is read for it once."""

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import threading
import zlib

import numpy as np
import pytest

from halfstep.training.data import shards
from halfstep.training.data.index import read_index, read_verified, seal, write_index
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack import blocks
from halfstep.training.data.pack import pack as packing
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.packed import verify
from halfstep.training.data.shards import CHUNK, Shard
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.data.types import DamagedDataError

REQUEST = PackRequest(validation=0.2, shard_tokens=20_000)
SHARD, SIDECAR = "train_000001.bin", "train_000001.crc"  # of 41,024 bytes: three chunks, the last one short
# One place in each chunk that opening does not look at, then the first and the last byte of each.
UNSEEN = [8_000, 20_000, 34_000]
PLACES = [*UNSEEN, 0, 100, 1_024, 16_383, 16_384, 32_767, 32_768, 41_023]


def packed(source, out, meter=None, request=REQUEST):
    return pack(find_sources([source]), out, BytesTokenizer(), request, workers=0, meter=meter)


def corpus_of(folder):
    return load_corpus(str(folder), 0.1, 256)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def by_slice(tokens, start, length):
    return tokens[start : start + length]


def by_rows(tokens, start, length):
    out = np.empty((1, length), dtype=np.int32)
    tokens.read_into(out, [start])
    return out[0]


READERS = [by_slice, by_rows]


def test_each_shard_has_a_checksum_for_every_16_kib(original):
    index = read_index(original)
    assert len(index.train.shards) > 2
    assert index.val.shards
    for record in index.shards:
        content = (original / record.name).read_bytes()
        sums = [zlib.crc32(content[at : at + 16_384]) for at in range(0, len(content), 16_384)]
        found = (original / record.name).with_suffix(".crc").read_bytes()
        assert found == struct.pack(f"<{len(sums)}I", *sums)
        assert record.sums == hashlib.sha256(found).hexdigest()


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_checksum_does_not_depend_on_how_the_shard_was_read(source, original, tmp_path, chunks, monkeypatch):
    monkeypatch.setattr("halfstep.training.data.shards.CHUNKS_AT_ONCE", chunks)
    packed(source, tmp_path / "out")
    for path in original.glob("*.crc"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_shard_has_its_checksums_before_it_has_its_name(source, tmp_path, monkeypatch):
    replace, seen = os.replace, []

    def renamed(old, new):
        if str(new).endswith(".bin"):
            assert os.path.exists(str(new).replace(".bin", ".crc"))
            seen.append(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", renamed)
    packed(source, tmp_path / "out")
    assert len(seen) > 3


class Killed(BaseException):
    """Like a kill: nothing catches it."""


def test_resuming_removes_checksums_written_after_the_last_commit(source, original, tmp_path, monkeypatch):
    """Also those of the growing shard, and of a side that had come further."""
    monkeypatch.setattr(blocks, "BLOCK", 6_000)
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", 0.0)
    out = tmp_path / "out"

    def meter(*_):
        if SHARD in (out / "packing.json").read_text():
            raise Killed

    with pytest.raises(Killed):
        packed(source, out, meter)
    state = read_verified(out / "packing.json", packing.State)
    growing = len(state.sides["train"].shards)
    assert state.sides["train"].tokens
    stale = [f"train_{growing:06d}.crc", f"train_{growing:06d}.crc.partial", "train_000077.crc", "val_000077.crc"]
    for name in stale:
        (out / name).write_bytes(b"stale")
    kept = (out / SIDECAR).stat().st_mtime_ns
    with pytest.raises(Killed):
        packed(source, out, lambda *_: (_ for _ in ()).throw(Killed))
    assert not [name for name in stale if (out / name).exists()]
    packed(source, out)
    assert files(out) == files(original)
    assert (out / SIDECAR).stat().st_mtime_ns == kept


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("at", PLACES)
def test_damage_anywhere_is_named_when_its_chunk_is_read(flip, folder, at, read):
    tokens = corpus_of(folder).train
    flip(folder / SHARD, at)
    low = at // 16_384 * 16_384
    high = min(low + 16_384, 41_024)
    first, last = (max(0, byte - 1_024) // 2 for byte in (low, high))
    for start in range(0, 20_000 - 50, 50):
        if start + 50 <= first or start >= last:
            assert len(read(tokens, 20_000 + start, 50)) == 50
            continue
        with pytest.raises(DamagedDataError) as caught:
            read(tokens, 20_000 + start, 50)
        assert caught.value.message == (
            f"shard `{folder / SHARD}` is damaged between bytes {low:,} and {high:,} (tokens {first:,} to "
            f"{last:,}): its checksum differs from the packed data"
        )
        assert f"`halfstep data verify {folder}`" in caught.value.hint


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["train_000000.bin", SHARD])
def test_a_window_on_two_shards_needs_both(flip, folder, name, read):
    tokens = corpus_of(folder).train
    flip(folder / name, 41_000 if name != SHARD else 2_000)
    with pytest.raises(DamagedDataError, match=f"{name}` is damaged"):
        read(tokens, 19_990, 20)


def test_a_verified_chunk_is_not_read_again(flip, folder, monkeypatch):
    """By design: verifying once costs nothing afterwards. A new run finds later damage."""
    tokens, counted = corpus_of(folder).train, []
    crc32 = zlib.crc32
    monkeypatch.setattr(shards, "crc32", lambda content: counted.append(len(content)) or crc32(content))
    assert (len(tokens[20_000:40_000]), counted) == (20_000, [16_384, 16_384, 8_256])
    flip(folder / SHARD, UNSEEN[1])
    assert len(tokens[20_000:40_000]) == len(by_rows(tokens, 20_000, 20_000)) == 20_000
    assert len(tokens.part(25_000, 30_000)[:]) == 5_000
    assert len(counted) == 3
    with pytest.raises(DamagedDataError, match="is damaged between bytes 16,384 and 32,768"):
        corpus_of(folder).train[20_000:40_000]


def test_a_damaged_chunk_is_refused_every_time_and_its_tokens_are_called_damage(flip, folder):
    tokens = corpus_of(folder).train
    flip(folder / SHARD, UNSEEN[1])
    for _ in range(3):
        with pytest.raises(DamagedDataError):
            tokens[20_000:40_000]
    flip(folder / SHARD, UNSEEN[1])  # put back
    assert len(tokens[20_000:40_000]) == 20_000
    tokens = corpus_of(folder).train
    flip(folder / SHARD, 20_001)  # the upper byte of a token
    for read in READERS:
        with pytest.raises(DamagedDataError, match="is damaged between bytes 16,384 and 32,768"):
            read(tokens, 20_000 + 9_488, 1)


def test_parts_of_a_shard_share_their_verifier(flip, source, tmp_path):
    packed(source, tmp_path / "out", request=PackRequest(validation=0, shard_tokens=100_000))
    corpus = corpus_of(tmp_path / "out")
    (train,), (held_out,) = corpus.train.shards, corpus.validation.shards
    assert train.verifier is held_out.verifier is not None
    flip(tmp_path / "out" / "train_000000.bin", 20_000)
    assert len(corpus.validation[:]) == len(held_out.tokens)  # which are in other chunks
    with pytest.raises(DamagedDataError, match=r"train_000000\.bin` is damaged between bytes 16,384 and 32,768"):
        corpus.train[:]
    corpus = corpus_of(tmp_path / "out")
    flip(tmp_path / "out" / "train_000000.bin", 1_024 + 2 * held_out.first + 4_000)
    with pytest.raises(DamagedDataError, match=r"train_000000\.bin` is damaged"):
        corpus.validation[2_000:2_001]


@pytest.mark.parametrize("read", READERS)
def test_a_shard_truncated_while_it_is_read_is_found(folder, read, monkeypatch):
    """After its length was asked, and before its chunks are read: they reach further than the tokens."""
    tokens, check = corpus_of(folder).train, Shard.check_size

    def checked(shard):
        check(shard)
        if shard.path.name == SHARD:
            os.truncate(shard.path, 2_000)

    monkeypatch.setattr(Shard, "check_size", checked)
    with pytest.raises(DamagedDataError, match=r"train_000001\.bin` was truncated while it was in use"):
        read(tokens, 35_000, 50)


def test_threads_that_read_at_once_read_the_same(folder):
    tokens, found = corpus_of(folder).train, {}

    def read(number):
        found[number] = np.concatenate([tokens[low : low + 100] for low in range(0, 60_000, 100)])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[number], tokens[:60_000]) for number in range(4))


OTHER = "its SHA-256 differs from the index"
LOST = {
    "missing": (lambda path: path.unlink(), "No such file or directory"),
    "damaged": (lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]), OTHER),
    "cut short": (lambda path: os.truncate(path, 8), OTHER),
    "emptied": (lambda path: os.truncate(path, 0), OTHER),
    "grown": (lambda path: os.truncate(path, 16), OTHER),
    "of another": (lambda path: shutil.copy(path.with_name("train_000000.crc"), path), OTHER),
}  # fmt: skip


@pytest.mark.parametrize("damage", LOST)
def test_lost_checksums_are_named_when_their_shard_is_first_read(folder, damage):
    does, said = LOST[damage]
    does(folder / SIDECAR)
    tokens = corpus_of(folder).train
    assert len(tokens[:20_000]) == 20_000  # other shards have theirs
    for read in READERS:
        with pytest.raises(DamagedDataError) as caught:
            read(tokens, 30_000, 50)
        assert f"`{folder / SIDECAR}`" in caught.value.message
        assert said in caught.value.message


def listing(folder, **changed):
    index = read_index(folder)
    first, second, *others = index.train.shards
    shards = (first, dataclasses.replace(second, **changed), *others)
    write_index(folder, dataclasses.replace(index, train=dataclasses.replace(index.train, shards=shards)))


def test_a_wrong_number_of_checksums_is_refused(folder):
    os.truncate(folder / SIDECAR, 8)
    listing(folder, sums=hashlib.sha256((folder / SIDECAR).read_bytes()).hexdigest())
    with pytest.raises(DamagedDataError, match=r"train_000001\.crc` holds 2 checksums, .* 3 chunks"):
        corpus_of(folder).train[38_000:38_001]


def test_data_packed_before_checksums_existed_is_still_read(flip, folder, source):
    table = json.loads((folder / "index.json").read_bytes())
    for side in ("train", "val"):
        for record in table[side]["shards"]:
            del record["sums"]
    table = {key: value for key, value in table.items() if key not in ("kind", "format", "digest")}
    (folder / "index.json").write_bytes(seal(table))
    for path in folder.glob("*.crc"):
        path.unlink()
    assert verify(folder) == []
    packed(source, folder, lambda *_: pytest.fail("read again"))
    flip(folder / SHARD, UNSEEN[1])
    tokens = corpus_of(folder).train
    assert all(len(read(tokens, 29_000, 500)) == 500 for read in READERS)


def test_verify_says_where_to_the_chunk(flip, folder):
    def spans():
        return [(damage.first, damage.last) for damage in verify(folder) if damage.first is not None]

    size = (folder / SHARD).stat().st_size
    flip(folder / SHARD, 0)
    flip(folder / SHARD, size - 1)
    assert spans() == [(0, CHUNK), (2 * CHUNK, size)]
    flip(folder / SHARD, CHUNK)
    assert spans() == [(0, size)]  # neighbors are one
    flip(folder / SHARD, 0)
    assert spans() == [(CHUNK, size)]
    (folder / SIDECAR).unlink()
    assert [(each.file, each.first) for each in verify(folder)] == [(SIDECAR, None), (SHARD, None)]
