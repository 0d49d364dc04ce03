"""Tokenizers: text goes in and comes back, specials in text are text, and the bytes of tokens add up."""

import base64
import io
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.errors import how_to_install
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizer_base import BytesTokenizer, TokenBytes
from halfstep.training.data.tokenizers import HuggingFace, SentencePiece, Tiktoken, open_saved, open_tokenizer
from halfstep.training.data.types import DamagedDataError, DataError, TokenizerError
from tests.training.runs import raising

TEXTS = ["def f(x):\n    return x * 2\n", "the quick brown fox — naïve café 🙂", "  two  spaces\t\n\n", "a", ""]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "far", "def", "self"]


@pytest.fixture(scope="module")
def bpe():
    """A small byte-level tokenizer.json, as the content of its file."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return tokenizer.to_str().encode()


@pytest.fixture(scope="module")
def sentencepiece_model():
    library = pytest.importorskip("sentencepiece")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, 6)) for _ in range(200)]
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def tiktoken_content():
    ranks = [[base64.b64encode(bytes([n])).decode(), n] for n in range(256)]
    ranks += [[base64.b64encode(word).decode(), 256 + n] for n, word in enumerate([b"th", b"the", b" f"])]
    written = {"name": "mini", "pattern": r"\s?\w+|\s+|[^\s\w]+", "special": {"<|endoftext|>": 259},
               "ranks": ranks}  # fmt: skip
    return json.dumps(written).encode()


def total_bytes(tokenizer, text):
    """The bytes of a text's tokens after a separator, by the table."""
    tokens = tokenizer.encode([text])[0].astype(np.int64)
    first = np.array([tokenizer.separator] if tokenizer.separator is not None else [0])
    return tokenizer.token_bytes.count(np.concatenate([first, tokens[:-1]])[: len(tokens)], tokens)


def check_round_trip(tokenizer, text):
    tokens = tokenizer.encode([text])[0]
    assert tokenizer.decode(tokens.tolist()) == text.encode()
    assert total_bytes(tokenizer, text) == len(text.encode())
    assert not len(tokens) or int(tokens.max()) < tokenizer.vocabulary
    assert tokenizer.separator not in tokens.tolist()


@given(st.text(max_size=60) | st.sampled_from(TEXTS))
def test_bytes_are_bytes(text):
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode([text])[0].tolist() == list(text.encode())
    check_round_trip(tokenizer, text)
    assert (tokenizer.vocabulary, tokenizer.separator, tokenizer.identity().file) == (256, None, None)


@given(text=st.text(max_size=60) | st.sampled_from([*TEXTS, "x<|endoftext|>y"]))
def test_a_byte_level_tokenizer_gives_every_text_back(bpe, text):
    check_round_trip(HuggingFace("t", bpe, 0), text)


@given(text=st.text(alphabet="abc défou🙂 ", max_size=40))
def test_sentencepiece_does_not_count_the_space_it_adds(sentencepiece_model, text):
    tokenizer = SentencePiece("m", sentencepiece_model, 1)
    assert tokenizer.adds_space
    assert total_bytes(tokenizer, text) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text.encode()


@given(text=st.text(max_size=60) | st.sampled_from([*TEXTS, "the <|endoftext|> fox"]))
def test_a_tiktoken_encoding_comes_back_from_its_file(text):
    pytest.importorskip("tiktoken")
    tokenizer = Tiktoken("tiktoken:mini", tiktoken_content(), 259)
    check_round_trip(tokenizer, text)
    assert (tokenizer.vocabulary, tokenizer.token_bytes.length[[256, 257, 259]].tolist()) == (260, [2, 3, 0])


def test_metaspace_and_malformed_byte_tokens_are_read_from_their_decoder():
    library = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "</s>": 1, "\u2581": 2, "a": 3, "b": 4, "\u2581a": 5, "<0xC3>": 6, "<0xA9>": 7}
    options = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    llama = library.Tokenizer(library.models.BPE(vocabulary, [("\u2581", "a")], **options))
    normal, undo = library.normalizers, library.decoders
    llama.normalizer = normal.Sequence([normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")])
    steps = [undo.Replace("\u2581", " "), undo.ByteFallback(), undo.Fuse(), undo.Strip(" ", 1, 0)]
    llama.decoder = undo.Sequence(steps)
    llama.add_special_tokens(["<unk>", "</s>"])
    tokenizer = HuggingFace("m", llama.to_str().encode(), 1)
    assert tokenizer.pieces == [b"", b"", b" ", b"a", b"b", b" a", b"\xc3", b"\xa9"]
    for text in ("ab", "a b", "é a", " a"):
        check_round_trip(tokenizer, text)
    tokenizer = library.Tokenizer(library.models.BPE({"<0xzz>": 0, "<0x0A>": 1, "\u2581a": 2, "</s>": 3}, []))
    tokenizer.decoder = library.decoders.Metaspace()
    assert HuggingFace("t", tokenizer.to_str().encode(), None).pieces == [b"<0xzz>", b"\n", b" a", b"</s>"]


def test_no_text_spells_a_special_token_of_a_unigram_model(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in "abs</>")]
    tokenizer = library.Tokenizer(library.models.Unigram(words, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    tokenizer.decoder = library.decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(str(tmp_path))
    assert (found.separator, found.vocabulary) == (1, 9)
    check_round_trip(found, "a</s>b")
    # What is unknown has no bytes, but the space after it was written.
    assert total_bytes(found, "a? b") == len("a b")


def test_a_packed_folder_keeps_its_separator(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bpe)
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 9)
    without = open_tokenizer(str(tmp_path / "tokenizer.json"), "none")
    pack(
        find_sources([str(tmp_path / "text.txt")]), tmp_path / "out", without, PackRequest(validation=0), workers=0
    )
    for spec in (tmp_path / "out", tmp_path / "out" / "index.json"):
        assert open_tokenizer(str(spec)).separator is None
        assert open_tokenizer(str(spec), "<|endoftext|>").separator == 0


def test_wordpiece_tokens_have_no_known_bytes():
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "far": 2, "##away": 3}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = HuggingFace("w", words.to_str().encode(), 1)
    assert tokenizer.pieces is tokenizer.token_bytes is None
    assert tokenizer.encode(["faraway far"])[0].tolist() == [2, 3, 2]
    assert tokenizer.decode([2, 3, 2]) == b"faraway far"


def test_a_saved_tokenizer_opens_as_the_same(bpe, sentencepiece_model, tmp_path):
    pytest.importorskip("tiktoken")
    for tokenizer in (
        HuggingFace("a", bpe, 0),
        SentencePiece("b", sentencepiece_model, 1),
        Tiktoken("c", tiktoken_content(), 259),
        BytesTokenizer(),
    ):
        folder = tmp_path / tokenizer.kind
        folder.mkdir()
        tokenizer.save(folder)
        again = open_saved(folder, tokenizer.identity())
        assert again.identity() == tokenizer.identity()
        assert again.encode(TEXTS)[0].tolist() == tokenizer.encode(TEXTS)[0].tolist()


def test_a_saved_tokenizer_that_changed_is_refused_and_none_cuts_pads_or_adds(bpe, tmp_path):
    tokenizer = HuggingFace("a", bpe, 0)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bpe + b" ")
    with pytest.raises(DamagedDataError, match=r"tokenizer\.json` was changed after it was written"):
        open_saved(tmp_path, tokenizer.identity())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DamagedDataError, match=r"cannot read .*tokenizer\.json`"):
        open_saved(tmp_path, tokenizer.identity())
    library = pytest.importorskip("tokenizers")
    odd = library.Tokenizer.from_str(bpe.decode())
    odd.enable_truncation(3)
    odd.enable_padding(length=50)
    odd.post_processor = library.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    (tmp_path / "tokenizer.json").write_text(odd.to_str())
    check_round_trip(open_tokenizer(str(tmp_path)), "the quick brown fox jumps over lazy dogs")


def test_the_separator_is_the_end_of_text_by_default(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bpe)
    assert open_tokenizer(str(path)).separator == 0
    assert open_tokenizer(str(path), "none").separator is None
    fox = open_tokenizer(str(path), "the").separator
    assert open_tokenizer(str(path)).pieces[fox] == b"the"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "the"}}))
    assert open_tokenizer(str(tmp_path)).separator == fox  # what the model's own configuration says
    with pytest.raises(TokenizerError, match=r"no token `<\|endoftxt\|>`") as caught:
        open_tokenizer(str(path), "<|endoftxt|>")
    assert "<|endoftext|>" in caught.value.hint


def test_sentencepiece_starts_documents_with_its_beginning_of_sequence(sentencepiece_model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    assert open_tokenizer(str(tmp_path)).separator == 1
    assert open_tokenizer(str(tmp_path / "tokenizer.model"), "</s>").separator == 2
    assert open_tokenizer(str(tmp_path)).name == "tokenizer.model"  # an index holds no path


REFUSED = {
    "absent": ("nowhere.json", "tokenizer `nowhere.json` does not exist"),
    "folder": ("", "holds no tokenizer"),
    "name": ("odd.txt", "does not have the name of a tokenizer"),
    "json": ("broken.json", "`broken.json` is not a valid tokenizer.json"),
    "model": ("broken.model", "`broken.model` is not a sentencepiece model"),
    "encoding": ("tiktoken:gpt3", "tiktoken has no encoding `gpt3`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_tokenizer_is_refused(name, tmp_path, monkeypatch):
    for package in ("tokenizers", "sentencepiece", "tiktoken"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for file in ("odd.txt", "broken.json", "broken.model"):
        (tmp_path / file).write_text("{}")
    spec, said = REFUSED[name]
    with pytest.raises(DataError, match=said):
        open_tokenizer(spec or str(tmp_path))


def test_a_misspelled_name_gets_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.json").write_text("{}")
    for wrong, meant in (("byte", "bytes"), ("token.json", "tokens.json"), ("tiktoken", "tiktoken:gpt2")):
        with pytest.raises(TokenizerError, match=f"tokenizer `{wrong}` does not exist") as caught:
            open_tokenizer(wrong)
        assert caught.value.hint.startswith(f"did you mean `{meant}`?")
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer("nowhere")


def test_a_tokenizer_without_an_end_of_text_asks_for_one(tmp_path):
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a")).to_str())
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(str(path))
    assert "--separator none" in caught.value.hint


def test_tiktoken_without_a_network_says_how_to_get_its_file(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "get_encoding", raising(ConnectionError("no network")))
    with pytest.raises(TokenizerError, match="does not have `gpt2` in its cache and cannot download it") as caught:
        open_tokenizer("tiktoken:gpt2")
    assert "TIKTOKEN_CACHE_DIR" in caught.value.hint


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece", "tiktoken"])
def test_a_missing_package_says_how_to_install_it(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    name = {"tokenizers": "t.json", "sentencepiece": "t.model", "tiktoken": "tiktoken:gpt2"}[package]
    (tmp_path / name).write_text("{}")
    with pytest.raises(TokenizerError, match=f"needs the package `{package}`") as caught:
        open_tokenizer(name if ":" in name else str(tmp_path / name))
    assert caught.value.hint == how_to_install("data")


def test_the_table_round_trips_and_damage_is_refused():
    table = TokenBytes.of([b"", b" the", b"x"], adds_space=True, separator=0)
    again = TokenBytes.from_npy(table.to_npy(), "t.npy")
    assert [again.length.tolist(), again.space.tolist(), again.boundary.tolist()] == [
        [0, 4, 1], [False, True, False], [True, False, False],
    ]  # fmt: skip
    assert again.count(np.array([0, 2]), np.array([1, 1])) == 3 + 4  # after a boundary the space was not written
    with pytest.raises(DamagedDataError, match=r"`t\.npy` is not a table"):
        TokenBytes.from_npy(b"junk", "t.npy")
    odd = io.BytesIO()
    np.save(odd, np.zeros(3))
    with pytest.raises(DamagedDataError, match=r"`t\.npy` holds float64 of shape \[3\]"):
        TokenBytes.from_npy(odd.getvalue(), "t.npy")
