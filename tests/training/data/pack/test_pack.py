"""Packing: the same bytes whatever the workers and however often it was killed; never two packings in a folder."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest

from halfstep.training.data.corpus import hash_share
from halfstep.training.data.index import read_index
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack import blocks
from halfstep.training.data.pack import pack as packing
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sides, find_sources
from halfstep.training.data.pack.writer import ShardWriter
from halfstep.training.data.packed import verify
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.data.tokenizers import open_tokenizer
from halfstep.training.data.types import (
    DamagedDataError,
    DataContentError,
    DataError,
    DataNotFoundError,
    HeldOutError,
    PackingError,
)
from halfstep.training.files import LockedError
from tests.refusals import refuses
from tests.training.runs import full

WORDS = ["the", "quick", "brown", "fox", "jumps", "naïve", "🙂", "def", "return"]
REQUEST = PackRequest(validation=0.2, shard_tokens=700)


def texts(number=120):
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 40))) + f" {n}" for n in range(number)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of many blocks. Nothing is flushed: what the tests kill is a process, not the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(blocks, "BLOCK", 800)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    pytest.importorskip("tokenizers")
    from halfstep.training.data.pack.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("\n\n".join(texts()))
    train_tokenizer(find_sources([str(folder / "text.txt")]), folder / "tokenizer.json", 300)
    return str(folder / "tokenizer.json")


def packed(source, out, tokenizer=None, request=REQUEST, workers=0, meter=None):
    return pack(find_sources([source]), out, tokenizer or BytesTokenizer(), request, workers=workers, meter=meter)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder):
    """Every file and its digest, except the lock, which names the writing process."""
    return {path.name: sha256(path) for path in folder.iterdir() if path.name != "lock"}


def test_the_packed_tokens_are_the_text_split_by_document(source, tmp_path, tokenizer_file):
    tokenizer = open_tokenizer(tokenizer_file)
    index = packed(source, tmp_path / "out", tokenizer)
    corpus = load_corpus(str(tmp_path / "out"), 0.1, 300)
    for side, held_out in ((corpus.train, False), (corpus.validation, True)):
        wanted = [text for text in texts() if (hash_share(text.encode() + b"\n") < 0.2) == held_out]
        tokens = side[:]
        starts = np.flatnonzero(tokens == tokenizer.separator)
        assert starts[0] == 0
        assert [tokenizer.decode(part[1:]).decode() for part in np.split(tokens, starts[1:])] == wanted
    assert index.train.documents + index.val.documents == len(texts())
    for side in (index.train, index.val):
        assert side.text_bytes == side.token_bytes == sum(shard.bytes for shard in side.shards)
        assert [shard.tokens for shard in side.shards[:-1]] == [700] * (len(side.shards) - 1)
        assert side.documents == sum(shard.documents for shard in side.shards)
    assert len(index.train.shards) > 2
    assert not (tmp_path / "out" / "packing.json").exists()


def test_packed_bytes_hold_out_the_same_documents_as_text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n, text in enumerate(texts()):
        (folder / f"{n:03}.txt").write_text(text + "\n" * (n % 2))
    packed(str(folder), tmp_path / "out")
    one, other = load_corpus(str(folder), 0.2, 256), load_corpus(str(tmp_path / "out"), 0.1, 256)
    for side in ("train", "validation"):
        assert np.array_equal(getattr(one, side)[:], getattr(other, side)[:])
    assert other.bytes_per_token == 1.0


def test_workers_change_nothing_and_a_finished_packing_is_left_alone(source, tmp_path, tokenizer_file):
    tokenizer = open_tokenizer(tokenizer_file)
    packed(source, tmp_path / "none", tokenizer)
    packed(source, tmp_path / "two", tokenizer, workers=2)
    assert files(tmp_path / "none") == files(tmp_path / "two")
    first = packed(source, tmp_path / "out")
    before = files(tmp_path / "out")
    assert packed(source, tmp_path / "out", meter=lambda *_: pytest.fail("read again")) == first
    assert files(tmp_path / "out") == before


class Killed(BaseException):
    """Like a kill: nothing catches it."""


def after(number):
    seen = []

    def meter(*_):
        seen.append(1)
        if len(seen) == number:
            raise Killed

    return meter


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_packing_stopped_anywhere_ends_in_the_same_bytes(source, tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", seconds)
    whole = packed(source, tmp_path / "whole")
    out, stops = tmp_path / "out", 0
    for number in [1, 2, 1, 3, 2, 7, 5, 1, 4, 30]:
        try:
            packed(source, out, meter=after(number))
            break
        except Killed:
            stops += 1
            with pytest.raises(DataNotFoundError):
                load_corpus(str(out), 0.1, 256)
    assert stops > 5
    assert packed(source, out) == whole
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize("instant", ["rename", "state", "index"])
def test_a_kill_at_every_write_loses_nothing(source, tmp_path, monkeypatch, instant):
    """The n-th call of what makes a file last is the last one, for every n."""
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", 0.0)
    packed(source, tmp_path / "whole")
    module, name = {"rename": (os, "replace"), "state": (packing, "write_whole"), "index": (os, "fsync")}[instant]
    real, number, finished = getattr(module, name), 1, False
    while not finished:
        number += 1 + number // 2
        calls = []

        def dying(*arguments, calls=calls, number=number):
            calls.append(1)
            if len(calls) == number:
                raise Killed
            return real(*arguments)

        out = tmp_path / f"out{number}"
        monkeypatch.setattr(module, name, dying)
        try:
            packed(source, out)
            finished = True
        except Killed:
            pass
        monkeypatch.setattr(module, name, real)
        packed(source, out)
        assert files(out) == files(tmp_path / "whole")
        shutil.rmtree(out)
    assert number > 10


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("change", ["tokenizer", "text", "validation", "shard_tokens", "field"])
def test_a_folder_with_another_packing_is_refused_and_what_differs_is_named(
    source, tmp_path, change, finished, tokenizer_file, monkeypatch
):
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", 0.0)
    out = tmp_path / "out"
    try:
        packed(source, out, meter=None if finished else after(3))
    except Killed:
        assert not finished
    before, request, tokenizer = files(out), dict(vars(REQUEST)), None
    if change == "tokenizer":
        tokenizer, said = (
            open_tokenizer(tokenizer_file),
            "the tokenizer's kind was bytes and is now tokenizer.json",
        )
    elif change == "text":
        with open(source, "a") as file:
            file.write('{"text": "more"}\n')
        said = f"source `{source}` (bytes) was "
    else:
        request[change] = {"validation": 0.3, "shard_tokens": 800, "field": "body"}[change]
        said = f"--{change.replace('_', '-')} was {getattr(REQUEST, change)} and is now {request[change]}"
    with pytest.raises(PackingError) as caught:
        packed(source, out, tokenizer, PackRequest(**request))
    assert said in caught.value.message
    assert files(out) == before


def test_a_packing_without_tokens_does_not_block_the_next(source, tmp_path, tokenizer_file):
    with pytest.raises(DataContentError, match="no field `body`"):
        packed(source, tmp_path / "out", open_tokenizer(tokenizer_file), PackRequest(field="body"))
    packed(source, tmp_path / "out")
    packed(source, tmp_path / "straight")
    assert files(tmp_path / "out") == files(tmp_path / "straight")


def test_after_a_full_disk_the_packing_can_be_resumed(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_flush", full)
        with pytest.raises(PackingError, match="out` stopped: No space left on device"):
            packed(source, tmp_path / "out")
    packed(source, tmp_path / "out")
    packed(source, tmp_path / "straight")
    assert files(tmp_path / "out") == files(tmp_path / "straight")


def test_a_source_that_grows_while_it_is_packed_is_named(source, tmp_path):
    def grow(done, total, tokens):
        with open(source, "a") as file:
            file.write('{"text": "more"}\n')

    with pytest.raises(PackingError, match=r"text\.jsonl` changed while it was packed: it had \d+ bytes"):
        packed(source, tmp_path / "out", meter=grow)


def test_requests_that_cannot_work_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(PackingError, match="out` is inside the source"):
        packed(str(tmp_path), tmp_path / "sub" / "out")
    assert not (tmp_path / "sub").exists()
    for wrong in ({"validation": 0.6}, {"validation": -0.1}, {"shard_tokens": 0}, {"shard_tokens": 2**31}):
        with pytest.raises(DataError, match=next(iter(wrong)).replace("_", "-")):
            PackRequest(**wrong)


def test_a_folder_that_is_being_packed_is_locked(source, tmp_path):
    refused = []

    def meter(*_):
        with pytest.raises(LockedError, match="out` is in use"):
            packed(source, tmp_path / "out")
        refused.append(1)

    first = packed(source, tmp_path / "out", meter=meter)
    assert refused
    assert packed(source, tmp_path / "out") == first


@pytest.mark.parametrize("names", [("thesis.tex",), ("lock", "thesis.tex"), ("index.json", "a.bin")])
def test_a_folder_with_files_of_others_is_refused_and_left_as_it_was(source, tmp_path, names):
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(
        DataError, match=r"holds other files, such as `thesis\.tex`" if "thesis.tex" in names else "index"
    ):
        packed(source, tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(names, "{}")


def test_a_shard_damaged_before_the_packing_resumes_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", 0.0)
    with pytest.raises(Killed):
        packed(source, tmp_path / "out", meter=after(6))
    os.truncate(tmp_path / "out" / "train_000000.bin", 1100)
    with pytest.raises(DamagedDataError, match=r"train_000000\.bin` has 1100 bytes, but the .* packing left 2424"):
        packed(source, tmp_path / "out")


def test_an_empty_side_says_which_share_would_do(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(5)))
    smallest = min(hash_share(f"text {n}\n".encode()) for n in range(5))
    with pytest.raises(HeldOutError, match=r"no document falls into the held-out share of 0\.01") as caught:
        packed(str(path), tmp_path / "out", request=PackRequest(validation=0.01))
    suggested = float(re.search(r"`--validation (\S+)` leaves text on both sides", caught.value.hint)[1])
    assert smallest < suggested < smallest * 1.01
    assert not (tmp_path / "out").exists()  # so that the share that is enough can be asked for at once
    index = packed(str(path), tmp_path / "all", request=PackRequest(validation=0))
    assert (index.train.documents, index.val.tokens) == (5, 0)
    corpus = load_corpus(str(tmp_path / "all"), 0.25, 256)
    assert len(corpus.train) + len(corpus.validation) == index.train.tokens
    assert corpus.digest != load_corpus(str(tmp_path / "all"), 0.5, 256).digest
    for n in range(5):
        path.write_text(json.dumps({"text": f"one short document {n}"}))
        with pytest.raises(HeldOutError) as caught:
            packed(str(path), tmp_path / "one", request=PackRequest(validation=1e-9))
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataContentError, match=r"the sources hold no text \(skipped: 1 empty\)"):
        packed(str(path), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", ['{"text": "one"}\n', '{"text": ""}\n', '{"text": 3}\n', '{"body": "x"}\n'])
def test_a_refused_packing_leaves_nothing(content, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text(content)
    with pytest.raises(DataError):
        packed(str(path), tmp_path / "new" / "deep" / "out", request=PackRequest(validation=1e-9))
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError):
        packed(str(path), tmp_path / "there", request=PackRequest(validation=1e-9))
    assert list((tmp_path / "there").iterdir()) == []  # a folder that was there stays


def three_records(seed):
    return "".join(json.dumps({"text": f"{seed} {n}"}) + "\n" for n in range(3))


@pytest.mark.parametrize(
    ("name", "made", "validation"),
    [
        ("a.jsonl", three_records, 1e-6),
        ("a.jsonl", three_records, 0.5),
        ("a.txt", lambda seed: f"{seed} " + "word " * 400, 1e-6),
    ],
)
@pytest.mark.prove
def test_the_suggested_share_is_enough(tmp_path, name, made, validation):
    """Of documents and of the pieces of a text, whichever side is empty."""
    suggested = 0
    for seed in range(60):
        path, out = tmp_path / name, tmp_path / f"out{seed}"
        path.write_text(made(seed))
        try:
            packed(str(path), out, request=PackRequest(validation=validation))
        except DataError as error:
            share = re.search(r"`--validation (0\.\d+)` leaves text on both sides", error.hint)
        else:
            continue
        if share:
            suggested += 1
            index = packed(str(path), out, request=PackRequest(validation=float(share[1])))
            assert index.train.tokens
            assert index.val.tokens
    assert suggested > 2


def test_what_is_not_a_file_is_counted_and_changes_nothing(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n, text in enumerate(texts(20)):
        (folder / f"{n:03}.txt").write_text(text)
    (folder / "image").write_bytes(b"\0")
    request = PackRequest(validation=0.3)
    first = packed(str(folder), tmp_path / "one", request=request)
    assert first.skipped == {"binary": 1}
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "run.toml").write_text("")
    (folder / "runs" / "a" / "events.jsonl").write_text("")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    second = packed(str(folder), tmp_path / "two", request=request)
    assert second.skipped == {"binary": 1, "run folder": 1, "dangling link": 1, "special file": 1}
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert packed(str(folder), tmp_path / "one", request=request) == second
    assert read_index(tmp_path / "two") == first


def test_a_large_vocabulary_takes_four_bytes_per_token(source, tmp_path):
    class Wide(BytesTokenizer.__base__):
        kind, file = "bytes", None

        def encode(self, found):
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 70_000 for text in found]

        def _pieces(self):
            return None

    assert packed(source, tmp_path / "out", Wide("wide", b"", 80_000, 79_999)).train.token_bytes is None
    tokens = load_corpus(str(tmp_path / "out"), 0.1, 80_000).train[:]
    assert tokens.dtype == np.uint32
    assert set(np.unique(tokens[tokens != 79_999]) - 70_000) <= set(range(256))
    header = np.fromfile(tmp_path / "out" / "train_000000.bin", dtype="<i4", count=3)
    assert header.tolist() == [20240520, 2, 700]
    assert read_index(tmp_path / "out").tokenizer.vocabulary == 80_000
    unread = load_corpus(str(tmp_path / "out"), 0.1, 80_000).train
    overwrite(tmp_path / "out" / "train_000001.bin", 1_024 + 4 * 300)
    with pytest.raises(DamagedDataError, match=r"between bytes 0 and 3,824 \(tokens 0 to 700\)"):
        unread[700:1_400]


# What opening packed data finds (test_packed.py) is refused here too.
LOST = {
    "shard": lambda out: (out / "train_000002.bin").unlink(),
    "table": lambda out: overwrite(out / "token_bytes.npy", 200),
    "no tokenizer": lambda out: (out / "tokenizer.json").unlink(),
}


def overwrite(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("damage", LOST)
def test_a_finished_packing_that_lost_a_file_is_refused_and_left_as_it_is(
    source, tmp_path, damage, tokenizer_file
):
    out, tokenizer = tmp_path / "out", open_tokenizer(tokenizer_file)
    packed(source, out, tokenizer)
    LOST[damage](out)
    before = files(out)
    for _ in range(2):
        with pytest.raises(DamagedDataError):
            packed(source, out, tokenizer)
    assert files(out) == before
    assert verify(out)


def test_a_text_of_ones_own_is_held_out_whole(source, tmp_path, monkeypatch):
    """The same bytes after a kill, and another text is another packing."""
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"text": f"held out {n}"}) + "\n" for n in range(60)))
    sources, held_out = find_sides([source], str(valid))
    request = PackRequest(validation=held_out, shard_tokens=700)

    def run(out):
        return pack(sources, out, BytesTokenizer(), request, workers=0)

    index = run(tmp_path / "out")
    corpus = load_corpus(str(tmp_path / "out"), 0.1, 256)
    assert corpus.train[:].tobytes().decode("utf-16-le").encode("latin-1").decode() == "\n".join([*texts(), ""])
    assert (index.train.documents, index.val.documents) == (120, 60)
    assert index.packing.validation.given == str(valid)
    before = files(tmp_path / "out")
    with monkeypatch.context() as patched:
        taken, real = [], packing._Packing._append

        def take(self, block, encoded):
            real(self, block, encoded)
            taken.append(block.held_out)
            self._commit()
            if block.held_out:
                raise KeyboardInterrupt

        patched.setattr(packing._Packing, "_append", take)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "other")
    assert taken[-1] is True
    assert len(taken) > 2
    run(tmp_path / "other")
    assert files(tmp_path / "other") == before
    with pytest.raises(PackingError, match=r"--validation was .*valid.jsonl and is now 0.2"):
        packed(source, tmp_path / "out")
    valid.write_text(json.dumps({"text": "another"}) + "\n")
    with pytest.raises(PackingError, match=rf"source `{valid}` \(bytes\) was"):
        pack(sources, tmp_path / "out", BytesTokenizer(),
             PackRequest(validation=find_sides([source], str(valid))[1], shard_tokens=700), workers=0)  # fmt: skip
    with refuses(DataError, "valid.jsonl` is to be held out, but source .* holds it too", "move it"):
        find_sides([str(tmp_path)], str(valid))
    valid.write_text(json.dumps({"text": ""}) + "\n")
    empty = PackRequest(validation=find_sides([source], str(valid))[1])
    with pytest.raises(HeldOutError):
        pack(sources, tmp_path / "empty", BytesTokenizer(), empty, workers=0)
    assert not (tmp_path / "empty").exists()
