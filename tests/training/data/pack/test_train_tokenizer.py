"""A new tokenizer: the same file for the same text, any text encoded, nothing learned from what is held out."""

import json

import numpy as np
import pytest

from halfstep.training.data.corpus import hash_share
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizers import open_tokenizer
from halfstep.training.data.types import DataContentError, PackingError

pytest.importorskip("tokenizers")

from halfstep.training.data.pack.train_tokenizer import train_tokenizer


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return find_sources([str(path)])


def texts():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(60)]
    return [" ".join(rng.choice(words, 40)) for _ in range(100)]


def test_it_is_reproducible_and_complete(tmp_path):
    source, calls = write(tmp_path / "a.jsonl", texts()), []
    assert train_tokenizer(source, tmp_path / "one.json", 400, meter=lambda *seen: calls.append(seen)) == 400
    train_tokenizer(source, tmp_path / "two.json", 400)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert calls[-1][0] == calls[-1][1] == source[0].num_bytes
    tokenizer = open_tokenizer(str(tmp_path / "one.json"))
    assert (tokenizer.vocabulary, tokenizer.separator) == (400, 0)
    odd = "".join(map(chr, range(0x20, 0x300))) + "🙂\n\t\r"
    assert tokenizer.decode(tokenizer.encode([odd])[0].tolist()) == odd.encode()
    assert len(tokenizer.encode([texts()[0]])[0]) < len(texts()[0]) / 2


def test_it_has_not_seen_what_is_held_out(tmp_path):
    held_out = [text for text in texts() if hash_share(text.encode() + b"\n") < 0.3]
    assert 10 < len(held_out) < 60
    changed = [text if text not in held_out else text + " zzzz" * 50 for text in texts()]
    # The changed ones may change sides; only those that stay out are kept.
    changed = [text for text in changed if "zzzz" not in text or hash_share(text.encode() + b"\n") < 0.3]
    write(tmp_path / "a.jsonl", texts())
    train_tokenizer(write(tmp_path / "a.jsonl", texts()), tmp_path / "a.json", 350, validation=0.3)
    train_tokenizer(write(tmp_path / "b.jsonl", changed), tmp_path / "b.json", 350, validation=0.3)
    assert any("zzzz" in text for text in changed)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_impossible_requests_are_refused(tmp_path):
    source = write(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(PackingError, match=r"--vocabulary is 256, but the bytes and .* alone take 257"):
        train_tokenizer(source, tmp_path / "t.json", 256)
    with pytest.raises(DataContentError):
        train_tokenizer(write(tmp_path / "b.jsonl", [""]), tmp_path / "t.json", 300)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(PackingError):
        train_tokenizer(source, tmp_path / "t.json", 300)
