"""Token shards: read in place as one line of tokens, split, identified, and damage named."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.training.data import shards
from halfstep.training.data.batches import Batches
from halfstep.training.data.load import load_corpus
from halfstep.training.data.shards import Shard, ShardedTokens, open_shard
from halfstep.training.data.types import DamagedDataError, DataError, DataNotFoundError, VocabularyError
from tests.refusals import refuses

START = 50256


def write_shard(path, tokens, *, magic=20240520, version=1, count=None, tail=b""):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    kind = "<u4" if version == 2 else "<u2"
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=kind).tobytes() + tail)
    return path


def numbers(seed, size, high=50000):
    return np.random.default_rng(seed).integers(0, high, size).astype(np.uint16)


def test_shards_with_val_in_their_name_are_held_out(tmp_path):
    for name, seed in {"web_train_000002": 2, "web_train_000001": 1, "web_val_000000": 0}.items():
        write_shard(tmp_path / f"{name}.bin", numbers(seed, 1000 + seed))
    corpus = load_corpus(str(tmp_path), 0.1, 50257)
    assert np.array_equal(corpus.train[:], np.concatenate([numbers(1, 1001), numbers(2, 1002)]))
    assert np.array_equal(corpus.validation[:], numbers(0, 1000))
    assert corpus.train[:5].dtype == np.uint16
    assert corpus.bytes_per_token is None
    assert "3 token shards" in corpus.description
    assert "2,003 tokens to train on, 1,000 held out" in corpus.description
    assert load_corpus(f"{tmp_path}/*.bin", 0.1, 50257).digest == corpus.digest
    with refuses(DataError, "data.validation = 0.3 changes nothing: .* such as `web_val_000000.bin`", "leave"):
        load_corpus(str(tmp_path), 0.3, 50257)


@pytest.mark.parametrize(
    ("name", "held_out"),
    [("val.bin", True), ("x_val_1.bin", True), ("VALID-0.bin", True), ("a.validation.bin", True),
     ("interval_0.bin", False), ("medieval.bin", False), ("values.bin", False)],
)  # fmt: skip
def test_val_is_a_word(tmp_path, name, held_out):
    write_shard(tmp_path / name, numbers(1, 100))
    write_shard(tmp_path / "train.bin", numbers(2, 300))
    assert (len(load_corpus(str(tmp_path), 0.1, 50257).validation) == 100) == held_out


def test_otherwise_the_tail_is_held_out_from_a_document_within_reach_on(tmp_path):
    tokens = numbers(3, 1000)
    tokens[[100, 920, 930]] = START
    corpus = load_corpus(str(write_shard(tmp_path / "a.bin", tokens)), 0.1, 50257)
    assert np.array_equal(corpus.train[:], tokens[:920])
    assert np.array_equal(corpus.validation[:], tokens[920:])
    tokens = numbers(3, 1000)
    tokens[[899, 950]] = START  # one before the cut, one past half of the tail
    corpus = load_corpus(str(write_shard(tmp_path / "a.bin", tokens)), 0.1, 50257)
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)


def test_the_cut_may_fall_into_any_shard_and_batches_come_out_of_them(tmp_path):
    tokens = numbers(4, 900)
    for n in range(3):
        write_shard(tmp_path / f"{n}.bin", tokens[n * 300 : (n + 1) * 300])
    corpus = load_corpus(str(tmp_path), 0.5, 50257)
    assert np.array_equal(corpus.train[:], tokens[:450])
    assert np.array_equal(corpus.validation[:], tokens[450:])
    assert np.array_equal(corpus.train[290:310], tokens[290:310])
    tokens = numbers(1, 5000)
    for n in range(5):
        write_shard(tmp_path / f"{n}.bin", tokens[n * 1000 : (n + 1) * 1000])
    corpus = load_corpus(str(tmp_path), 0.2, 50257)
    args = {"context": 7, "batch": 3, "micro_batches": 2, "seed": 1}
    sharded, plain = Batches(corpus.train, **args), Batches(tokens[:4000], **args)
    assert all(np.array_equal(sharded.at(step), plain.at(step)) for step in range(120))


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6), st.integers(-3, 40), st.integers(-3, 40))
def test_shards_slice_like_one_array(parts, low, high):
    whole = np.concatenate([np.array(part, dtype=np.uint16) for part in parts] or [np.empty(0, np.uint16)])
    tokens = ShardedTokens([Shard(None, np.array(part, dtype=np.uint16)) for part in parts], 10)
    assert len(tokens) == len(whole)
    assert np.array_equal(tokens[low:high], whole[low:high])
    assert tokens[low:high].dtype == np.uint16
    low, high, _ = slice(low, high).indices(len(whole))
    part = tokens.part(low, max(low, high))
    assert np.array_equal(part[:], whole[low:high])


def test_shards_are_mapped_not_read(tmp_path):
    corpus = load_corpus(str(write_shard(tmp_path / "a.bin", numbers(1, 5000))), 0.1, 50257)
    tokens = corpus.train.shards[0].tokens
    while isinstance(tokens, np.ndarray):
        assert not tokens.flags.writeable
        tokens = tokens.base
    assert isinstance(tokens.obj if isinstance(tokens, memoryview) else tokens, mmap.mmap)
    with pytest.raises(ValueError, match="cannot have a step"):
        corpus.train[::2]


@pytest.mark.parametrize(("version", "bad"), [(1, 600), (2, 2**31 + 5)])
def test_a_token_past_the_scan_is_found_when_it_is_read_alone_or_in_a_batch(tmp_path, monkeypatch, version, bad):
    monkeypatch.setattr(shards, "SCANNED_AT_LOAD", 100)
    monkeypatch.setattr(shards, "SCANNED_AT_ONCE", 30)
    tokens = numbers(1, 3000, high=500).astype(np.uint32)
    tokens[2000] = bad
    write_shard(tmp_path / "train.bin", tokens, version=version)
    write_shard(tmp_path / "val.bin", numbers(2, 200, high=500))
    train = load_corpus(str(tmp_path), 0.1, 512).train
    assert len(train[1900:2000]) == 100
    feed = Batches(train, context=9, batch=4, micro_batches=1, seed=0)
    for read in (lambda: train[1990:2010], lambda: [feed.at(step) for step in range(83)]):
        with pytest.raises(VocabularyError, match=rf"train\.bin` contains token {bad} at offset 2000"):
            read()
    tokens[99] = 601
    write_shard(tmp_path / "train.bin", tokens, version=version)
    with pytest.raises(VocabularyError, match=r"token 601 at offset 99"):
        load_corpus(str(tmp_path), 0.1, 512)


def test_version_2_has_four_bytes_per_token(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 200_000, 3000)
    corpus = load_corpus(str(write_shard(tmp_path / "a.bin", tokens, version=2)), 0.1, 200_000)
    assert corpus.train[:].dtype == np.uint32
    assert np.array_equal(np.concatenate([corpus.train[:], corpus.validation[:]]), tokens)
    assert corpus.train.locate(2500) == (str(tmp_path / "a.bin"), 2500)
    tokens[1234] = 2**31
    write_shard(tmp_path / "a.bin", tokens, version=2)
    with pytest.raises(
        VocabularyError, match=rf"token {2**31} at offset 1234, but the vocabulary has only 200000"
    ):
        load_corpus(str(tmp_path), 0.1, 200_000)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    with pytest.raises(DamagedDataError, match=r"truncated: it has 13022 bytes, expected 13024 for 3000 tokens"):
        load_corpus(str(tmp_path), 0.1, 200_000)


def test_the_digest_sees_names_sizes_the_split_and_pages(tmp_path):
    tokens = numbers(1, 40_000)

    def digest(name="a.bin", tokens=tokens, share=0.1):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write_shard(folder / name, tokens)
        return load_corpus(str(folder), share, 50257).digest

    same = [digest(), digest()]
    assert same[0] == same[1]
    changed = [digest("b.bin"), digest(tokens=tokens[:-1]), digest(share=0.2)]
    for place in (0, len(tokens) - 1, 2047):  # the first page and the last are always read
        other = tokens.copy()
        other[place] ^= 1
        changed.append(digest(tokens=other))
    assert len({*same, *changed}) == 1 + len(changed)


def refused(path, vocabulary=50257):
    with pytest.raises(DataError) as caught:
        load_corpus(str(path), 0.1, vocabulary)
    assert path.name in caught.value.message
    return caught.value.message


@pytest.mark.prove
def test_every_truncation_is_found(tmp_path):
    path = write_shard(tmp_path / "a.bin", numbers(1, 20))
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        assert f"truncated: it has {size} bytes" in refused(path)
    path.write_bytes(good + b"\0")
    assert "longer than its header says: it has 1065 bytes, expected 1064 for 20 tokens" in refused(path)


def test_wrong_headers_and_shards_that_cannot_be_opened_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, numbers(1, 20), magic=20240801)
    assert "magic number is 20240801, expected 20240520" in refused(path)
    write_shard(path, numbers(1, 20), version=7)
    assert "version 7, expected 1" in refused(path)
    write_shard(path, [], count=0)
    assert "0 tokens" in refused(path)
    write_shard(path, [1], count=-1)
    assert "-1 tokens" in refused(path)
    assert "no shard to train on" in refused(write_shard(tmp_path / "val.bin", numbers(1, 100)))


def test_a_bad_shard_and_one_that_cannot_be_opened_are_named(tmp_path):
    for n in range(4):
        write_shard(tmp_path / f"{n}.bin", numbers(n, 50), count=51 if n == 2 else None)
    with pytest.raises(DamagedDataError, match=r"2\.bin` is truncated"):
        load_corpus(str(tmp_path), 0.1, 50257)
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(DataNotFoundError, match=r"cannot read shard `.*a\.bin`"):
        open_shard(tmp_path / "a.bin")
