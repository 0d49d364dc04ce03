"""A finished packing that lost files: the same command makes them again, bit for bit, and touches nothing else."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from halfstep.training.data.corpus import hash_share
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack import blocks
from halfstep.training.data.pack import pack as packing
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.data.tokenizers import open_tokenizer
from halfstep.training.data.types import DataError

WORDS = ["the", "quick", "brown", "fox", "jumps", "naïve", "🙂", "def", "return"]


def texts():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 40))) + f" {n}" for n in range(120)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of many blocks."""
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


def packed(source, out, tokenizer=None, workers=0, meter=None):
    asked = PackRequest(validation=0.2, shard_tokens=700)
    return pack(find_sources([source]), out, tokenizer or BytesTokenizer(), asked, workers=workers, meter=meter)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder):
    """Every file and its content, but for the lock, which says who wrote."""
    return {path.name: digest(path) for path in folder.iterdir() if path.name != "lock"}


class Killed(BaseException):
    """As a kill: nothing catches it."""


def after(number):
    seen = []

    def meter(*_):
        seen.append(1)
        if len(seen) == number:
            raise Killed

    return meter


LOST = {
    "shard": lambda out: (out / "train_000002.bin").unlink(),
    "last shard": lambda out: max(out.glob("val_*.bin")).unlink(),
    "several": lambda out: [(out / name).unlink() for name in ("train_000000.bin", "train_000003.bin")],
    "cut short": lambda out: os.truncate(out / "train_000001.bin", 1100),
    "grown": lambda out: os.truncate(out / "train_000001.bin", 5000),
    "first page": lambda out: overwrite(out / "train_000001.bin", 1500),
    "table": lambda out: overwrite(out / "token_bytes.npy", 200),
    "no table": lambda out: (out / "token_bytes.npy").unlink(),
    "tokenizer": lambda out: overwrite(out / "tokenizer.json", 9),
    "no tokenizer": lambda out: (out / "tokenizer.json").unlink(),
    "all": lambda out: [path.unlink() for path in out.iterdir() if path.name not in ("index.json", "lock")],
}  # fmt: skip


def overwrite(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "workers"), [*((each, 0) for each in LOST), ("shard", 1), ("all", 1)])
def test_what_was_lost_of_a_finished_packing_is_made_again(
    source, tmp_path, damage, workers, tokenizer_file, monkeypatch
):
    out, tokenizer = tmp_path / "out", open_tokenizer(tokenizer_file)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "__version__", "0.0.1")  # an index of an earlier halfstep stays as it is
        index = packed(source, out, tokenizer)
    before = files(out)
    LOST[damage](out)
    with pytest.raises(DataError):
        load_corpus(str(out), 0.1, 300)
    kept = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if before.get(path.name) == digest(path)}
    assert packed(source, out, tokenizer, workers=workers) == index
    assert files(out) == before
    assert load_corpus(str(out), 0.1, 300).digest == index.digest
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept  # what was whole is not touched


def test_no_more_is_read_than_what_was_lost_needs(source, tmp_path):
    packed(source, tmp_path / "out")
    (tmp_path / "out" / "train_000000.bin").unlink()
    seen = []
    packed(source, tmp_path / "out", meter=lambda done, total, tokens: seen.append((done, total)))
    assert seen[-1][0] < seen[-1][1] / 2


def test_a_mending_that_was_killed_is_done_again(source, tmp_path):
    packed(source, tmp_path / "out")
    before = files(tmp_path / "out")
    (tmp_path / "out" / "train_000002.bin").unlink()
    with pytest.raises(Killed):
        packed(source, tmp_path / "out", meter=after(2))
    assert not (tmp_path / "out" / "train_000002.bin").exists()
    packed(source, tmp_path / "out")
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize("moves", [True, False])
def test_what_cannot_be_made_again_is_told(source, tmp_path, moves):
    """A text is known by its size and ends; with `moves`, a document in its middle changed its side too."""
    out, lines = tmp_path / "out", Path(source).read_text().splitlines(keepends=True)
    packed(source, out)
    for path in out.glob("*.bin"):
        path.unlink()
    number = next(n for n in range(50, 120) if "the" in texts()[n] and changes_side(texts()[n]) == moves)
    lines[number] = lines[number].replace("the", "THE")
    Path(source).write_text("".join(lines))
    for _ in range(2):
        with pytest.raises(DataError, match=r"_\d+\.bin` is lost and cannot be restored") as caught:
            packed(source, out)
        assert f"remove the folder `{out}` and pack again" in caught.value.hint
        assert not list(out.glob("*.partial"))
    assert (out / "train_000000.bin").exists()


def changes_side(text):
    sides = {hash_share(f"{each}\n".encode()) < 0.2 for each in (text, text.replace("the", "THE"))}
    return len(sides) == 2


def test_a_finished_packing_with_a_stray_shard_or_a_damaged_index_says_what_to_do(source, tmp_path):
    out = tmp_path / "out"
    packed(source, out)
    shutil.copy(out / "train_000000.bin", out / "train_000099.bin")
    with pytest.raises(DataError, match=r"train_000099\.bin` is not in the index"):
        packed(source, out)
    (out / "train_000099.bin").unlink()
    overwrite(out / "index.json", 900)
    with pytest.raises(DataError) as caught:
        packed(source, out)
    assert caught.value.hint == "copy it back, or remove the folder and pack again"
