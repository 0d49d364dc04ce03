"""Bits per byte are the same for every tokenizer that says the same, and right on the very tokens predicted."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from halfstep.config.run import DataConfig
from halfstep.training.data.batches import bigram_bits
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizer_base import TokenBytes
from halfstep.training.data.tokenizers import open_tokenizer
from halfstep.training.evaluation import bigram_entropy, evaluate

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "far", "away"]


def config(context=16, batch=3, validation_tokens=10**9):
    return SimpleNamespace(
        model=SimpleNamespace(context=context),
        training=SimpleNamespace(batch=batch, validation_tokens=validation_tokens),
        data=DataConfig("here"),
    )


class Model:
    """A session that gives each target the nats that a function says."""

    def __init__(self, nats):
        self.nats = nats

    def evaluate(self, batches, *, averaged=True):
        total, count = 0.0, 0
        for batch in batches:
            total, count = total + float(self.nats(batch[:, :-1], batch[:, 1:]).sum()), count + batch[:, 1:].size
        return total, count


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """One text by bytes and by a BPE."""
    pytest.importorskip("tokenizers")
    from halfstep.training.data.pack.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 20)) + "\n"}) for _ in range(300)]
    (folder / "t.jsonl").write_text("\n".join(lines))
    source = find_sources([str(folder / "t.jsonl")])
    train_tokenizer(source, folder / "tokenizer.json", 290, validation=0.2)
    for name in ("bytes", str(folder / "tokenizer.json")):
        tokenizer = open_tokenizer(name)
        pack(source, folder / "packed" / tokenizer.kind, tokenizer, PackRequest(validation=0.2), workers=0)
    return {kind: load_corpus(str(folder / "packed" / kind), 0.1, 512) for kind in ("bytes", "tokenizer.json")}


def test_bits_per_byte_are_right_with_every_tokenizer_and_so_is_the_yardstick(corpora):
    for corpus in corpora.values():
        lengths = corpus.token_bytes.length
        for tokens in (64, 800, 10**9):
            found = evaluate(
                Model(lambda _, y, n=lengths: n[y] * math.log(256)), corpus, config(validation_tokens=tokens)
            )
            assert found.bits_per_byte == pytest.approx(8.0, rel=1e-12)
    corpus = corpora["tokenizer.json"]
    found = evaluate(Model(lambda _, y: np.full(y.shape, math.log(290))), corpus, config())
    tokens = corpus.validation[: found.tokens + 1]
    size = int(corpus.token_bytes.length[tokens[1:]].sum())
    assert found.bits_per_byte == pytest.approx(found.tokens * math.log2(290) / size, rel=1e-12)
    assert size < corpora["bytes"].bytes_per_token * len(corpora["bytes"].validation) + 1
    assert int(np.count_nonzero(tokens == 0)) > 30  # they cost bits, and stand for no bytes
    by_bytes = evaluate(Model(lambda _, y: np.full(y.shape, math.log(256))), corpora["bytes"], config())
    assert by_bytes.bits_per_byte == pytest.approx(8.0, rel=1e-12)
    tokens = corpus.validation[: ((len(corpus.validation) - 1) // 16) * 16 + 1]
    size = int(corpus.token_bytes.length[tokens[1:]].sum())
    found = evaluate(Model(lambda _, y: np.ones(y.shape)), corpus, config())
    assert found.bigram_bits == pytest.approx(bigram_bits(tokens) * (len(tokens) - 1) / size)
    assert found.bigram_bits == bigram_entropy(corpus, config())  # remembered
    assert bigram_entropy(corpus, config(validation_tokens=160)) != found.bigram_bits
    assert found.ratio == pytest.approx(found.bits_per_byte / found.bigram_bits)


def test_shards_without_a_tokenizer_have_no_bits_per_byte_and_an_added_space_is_no_byte():
    tokens = np.arange(200, dtype=np.uint16) % 50
    unknown = Corpus(tokens, tokens, "", "unknown", None)
    found = evaluate(Model(lambda _, y: np.ones(y.shape)), unknown, config())
    assert found.bits_per_byte is None
    assert found.ratio is None
    assert found.bigram_bits == 0.0
    average = Corpus(tokens, tokens, "", "average", 2.5)
    found = evaluate(Model(lambda _, y: np.ones(y.shape)), average, config())
    assert found.bits_per_byte == pytest.approx(1 / math.log(2) / 2.5)
    table = TokenBytes.of([b"", b" ab", b"c"], adds_space=True, separator=0)
    tokens = np.array([0, 1, 1, 2, 0, 1, 2], dtype=np.uint16)
    corpus = Corpus(tokens, tokens, "", "space", 1.0, table)
    found = evaluate(Model(lambda _, y: np.ones(y.shape)), corpus, config(context=2))
    assert found.bits_per_byte == pytest.approx(6 / math.log(2) / (2 + 3 + 1 + 0 + 2 + 1))
