"""From a source to a corpus: what is read, in which order, which side it falls on, and what is refused."""

import gzip
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.config.load import load
from halfstep.training.data.corpus import hash_share, split
from halfstep.training.data.load import load_corpus
from halfstep.training.data.text import cut, stdlib_documents
from halfstep.training.data.types import (
    DataContentError,
    DataError,
    DataNotFoundError,
    DataSizeError,
    Document,
    HeldOutError,
    VocabularyError,
)
from halfstep.training.evaluation import held_out_batches
from tests.refusals import refuses

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "far", "away"]


def prose(seed, lines=40):
    rng = np.random.default_rng(seed)
    return "".join(" ".join(rng.choice(WORDS, 8)) + f" {seed}.{n}\n" + "\n" * (n % 5 == 4) for n in range(lines))


contents = st.lists(st.binary(min_size=1, max_size=6), min_size=2, max_size=30).filter(lambda c: len(set(c)) > 1)
shares = st.floats(0, 0.5, exclude_min=True)


@given(contents, shares)
def test_the_sides_are_disjoint_whole_and_not_empty(found, share):
    documents = [Document(str(n), content) for n, content in enumerate(found)]
    train, validation = split(documents, share, "here")
    assert sorted(train + validation) == sorted(documents)
    assert train
    assert validation
    assert not {d.content for d in train} & {d.content for d in validation}
    for side in (train, validation):
        assert [int(d.name) for d in side] == sorted(int(d.name) for d in side)  # the given order
    below = [d for d in documents if hash_share(d.content) < share]
    if 0 < len(below) < len(documents):
        assert validation == below


def test_if_all_fall_on_one_side_the_outermost_moves_and_the_share_is_kept_on_average():
    names = sorted((f"{n}".encode() for n in range(200)), key=hash_share)
    low = [Document("", content) for content in names if hash_share(content) < 0.4]
    high = [Document("", content) for content in names if hash_share(content) > 0.6]
    assert split(low, 0.5, "here") == ([low[-1]], low[:-1])
    assert split(high, 0.5, "here") == (high[1:], [high[0]])
    assert split([*high, high[0]], 0.5, "here") == (high[1:], [high[0], high[0]])  # copies stay together
    held_out = len(split([Document("", f"{n}".encode()) for n in range(20_000)], 0.1, "here")[1])
    assert abs(held_out - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5  # five standard deviations
    assert hash_share(b"") == hash_share(b"") != hash_share(b"\n")


@pytest.mark.parametrize(("number", "said"), [(1, "holds one document"), (3, "holds 3 equal documents")])
def test_what_cannot_be_split_is_refused(number, said):
    with pytest.raises(HeldOutError, match=f"`here` {said}"):
        split([Document(str(n), b"same") for n in range(number)], 0.1, "here")


def test_the_standard_library_is_a_corpus_without_tests_and_installed_packages():
    corpus = load_corpus("stdlib", 0.1, 256)
    assert corpus.train.dtype == corpus.validation.dtype == np.uint8
    assert len(corpus.train) > 10 * 0.5e6
    assert len(corpus.validation) > 1e5
    assert corpus.bytes_per_token == 1.0
    assert "Python 3." in corpus.description
    # A line of a module that every Python has must be on one side, and on one side only.
    assert sum([b"def shuffle(self, x):" in side.tobytes() for side in (corpus.train, corpus.validation)]) == 1
    assert corpus.digest == load_corpus("stdlib", 0.1, 256).digest != load_corpus("stdlib", 0.2, 256).digest
    names = [document.name for document in stdlib_documents()[0]]
    assert "random.py" in names
    assert "json/decoder.py" in names
    assert names == sorted(names)
    for part in ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"):
        assert not any(part in Path(name).parts for name in names)
    assert not any("_sysconfigdata" in name for name in names)


@pytest.mark.parametrize(("vocabulary", "warned"), [(256, False), (1024, False), (50304, True), (151936, True)])
def test_a_vocabulary_far_larger_than_the_data_needs_is_a_warning(tmp_path, vocabulary, warned):
    (tmp_path / "text").write_text("some text\n\n" * 3 + "other text")
    warnings = load_corpus(str(tmp_path / "text"), 0.1, vocabulary).warnings(vocabulary)
    assert bool(warnings) == warned
    assert all(f"are 256 of the model's {vocabulary:,}" in each for each in warnings)


def test_a_python_without_library_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataContentError):
        load_corpus("stdlib", 0.1, 256)


def test_a_file_is_cut_into_documents_that_add_up_to_it_and_has_two_sides(tmp_path):
    text = prose(0, 4000)
    path = tmp_path / "book.txt"
    path.write_text(text)
    corpus = load_corpus(str(path), 0.1, 256)
    assert len(corpus.train) + len(corpus.validation) == len(text)
    assert int(re.search(r"in (\d+) pieces", corpus.description)[1]) > 20
    assert 0.01 < len(corpus.validation) / len(text) < 0.3
    assert str(path) in corpus.description
    pieces = cut(text.encode())
    assert all(piece.endswith(b"\n\n") for piece in pieces[:-1])
    assert all(4096 <= len(piece) <= 8192 for piece in pieces[:-1])
    pieces = cut(b"one line of many, none of them blank\r\n" * 3000)
    assert len(pieces) > 10
    assert all(piece.endswith(b"\n") for piece in pieces)
    path = tmp_path / "note.txt"
    path.write_text(prose(1, 20))
    corpus = load_corpus(str(path), 0.1, 256)
    assert len(corpus.train)
    assert len(corpus.validation)


@given(st.binary(max_size=300) | st.text(alphabet="aé🙂\n\r", max_size=300).map(str.encode))
def test_pieces_add_up_and_end_between_characters(content):
    pieces = cut(content)
    assert b"".join(pieces) == content
    assert all(pieces)
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    size = max(1, len(content) // 16)
    if size >= 4:  # a character has up to four bytes: below that it may not fit a piece
        for piece in pieces:
            piece.decode()
    assert all(len(piece) >= size for piece in pieces[:-1])


def test_a_folder_reads_text_in_order_of_paths_and_counts_the_rest(tree, tmp_path):
    files = {f"{n % 3}/doc{n}.md": f"document {n}" for n in range(30)}
    tree(tmp_path, files | {"é.txt": "naïve\n", "empty.txt": ""})
    tree(
        tmp_path,
        {"a.png": b"\x89PNG\xff\xfe", "b.dat": b"text\0text", ".git/config": "x", "__pycache__/m.txt": "y"},
    )
    corpus = load_corpus(str(tmp_path), 0.2, 256)
    expected = {**{name: f"{text}\n".encode() for name, text in files.items()}, "é.txt": "naïve\n".encode()}
    assert "31 texts, 2 binary skipped" in corpus.description
    whole = corpus.train.tobytes() + corpus.validation.tobytes()
    assert sorted(whole.splitlines(keepends=True)) == sorted(expected.values())
    ordered = [expected[name] for name in sorted(expected)]
    for side in (corpus.train.tobytes(), corpus.validation.tobytes()):
        places = [ordered.index(line) for line in side.splitlines(keepends=True)]
        assert places == sorted(places)


def test_the_digest_is_of_the_content(tree, tmp_path):
    one = tree(tmp_path / "one", {f"{n}.txt": prose(n) for n in range(9)})
    same = tree(tmp_path / "same", {f"{n}.txt": prose(n) for n in range(9)})
    other = tree(tmp_path / "other", {f"{n}.txt": prose(n + (n == 8) * 100) for n in range(9)})
    digests = [load_corpus(str(path), 0.2, 256).digest for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    (same / "8.txt").write_text(prose(8).replace("8.39", "8.93"))  # of the same length
    assert load_corpus(str(same), 0.2, 256).digest != digests[0]


def test_a_glob_reads_what_it_matches(tree, tmp_path):
    tree(tmp_path, {"a.txt": prose(1), "b.txt": prose(2), "sub/c.txt": prose(3), "d.md": prose(4)})
    assert "(2 texts" in load_corpus(f"{tmp_path}/*.txt", 0.1, 256).description
    assert "(3 texts" in load_corpus(f"{tmp_path}/**/*.txt", 0.1, 256).description


def test_bytes_beyond_the_vocabulary_name_the_file_and_the_place(tree, tmp_path):
    tree(tmp_path, {"a.txt": "plain", "b.txt": "na\u00efve"})
    with pytest.raises(VocabularyError, match=r"`b\.txt` contains byte 195 at offset 2, but .* only 128"):
        load_corpus(str(tmp_path), 0.1, 128)
    (tmp_path / "b.txt").write_text("naive")
    assert "(2 texts" in load_corpus(str(tmp_path), 0.1, 128).description


def refused(source):
    with pytest.raises(DataError) as caught:
        load_corpus(str(source), 0.1, 256)
    return caught.value


def test_a_missing_source_gets_the_nearest_name(tree, tmp_path, monkeypatch):
    tree(tmp_path, {"shakespeare.txt": "x"})
    error = refused(tmp_path / "shakespear.txt")
    assert "shakespear.txt" in error.message
    assert error.hint.startswith("did you mean `shakespeare.txt`?")
    assert f"in `{Path.cwd()}`" not in error.message
    monkeypatch.chdir(tmp_path)
    assert refused("stdlb").hint.startswith("did you mean `stdlib`?")
    assert "no file matches" in refused(f"{tmp_path}/*.bin").message
    assert "is empty" in refused("").message
    assert "there is no file or folder" in refused("nowhere/at/all.txt").message
    with pytest.raises(DataNotFoundError):
        load_corpus("x" * 5000, 0.1, 256)


@pytest.mark.parametrize("source", ["texts/book.txt", "texts/*.txt", "stdlb"])
def test_a_missing_source_says_where_it_was_searched_and_how_to_name_it(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(source)
    assert error.message.endswith(f"`{source}` in `{tmp_path}`")
    assert "`--set data.source=PATH` (train)" in error.hint
    assert "`--data PATH` (eval, sample, artifact)" in error.hint


def test_empty_binary_and_compressed_sources_are_named(tree, tmp_path):
    tree(tmp_path, {"empty.txt": "", "blank.txt": "\n \n", "image.png": b"\xff\xd8\xff", "only/x.png": b"\xff"})
    assert "empty.txt` is empty" in refused(tmp_path / "empty.txt").message
    assert "blank.txt` is empty" in refused(tmp_path / "blank.txt").message
    assert "image.png` is binary; it must be UTF-8 text" in refused(tmp_path / "image.png").message
    assert "only` (0 texts, 1 binary skipped)" in refused(tmp_path / "only").message
    (tmp_path / "void").mkdir()
    assert "no text" in refused(tmp_path / "void").message
    tree(tmp_path, {"book.txt.gz": gzip.compress(prose(1).encode())})
    assert "decompress it" in refused(tmp_path / "book.txt.gz").hint


def test_shards_are_never_read_as_text(tree, tmp_path):
    tree(tmp_path, {"README.md": prose(1), "notes.txt": prose(2), "train.bin": prose(3)})
    assert "train.bin` is not a token shard" in refused(tmp_path).message
    assert "train.bin` is not a token shard" in refused(tmp_path / "train.bin").message
    mixed = refused(f"{tmp_path}/*")
    assert "train.bin" in mixed.message
    assert "matches token shards" in mixed.message


RECORDS = {
    "a.jsonl": (b'{"text": "one"}\n' * 40, "JSONL"),
    "a.ndjson": (b'{"text": "one"}\n' * 40, "JSONL"),
    "a.JSONL": (b'{"text": "one"}\n' * 40, "JSONL"),
    "a.jsonl.gz": (gzip.compress(b'{"text": "one"}\n' * 40), "JSONL"),
    "a.parquet": (b"PAR1\0\0PAR1", "parquet"),
    "a.arrow": (b"ARROW1\0\0", "an arrow table"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_must_be_packed(tree, name, tmp_path):
    content, said = RECORDS[name]
    folder = tree(tmp_path / "data", {name: content, "sub/" + name: content})
    for source, verb in ((folder / name, "is"), (folder, "holds"), (f"{folder}/*.*", "holds")):
        error = refused(source)
        assert f"{verb} {said}, " in error.message
        assert (
            f"`halfstep data pack {source} --tokenizer bytes --out packed` makes token shards of it" in error.hint
        )


def test_records_among_text_are_skipped_and_counted(tree, tmp_path):
    tree(tmp_path, {f"{n}.txt": prose(n) for n in range(3)} | {"b.jsonl": '{"text": "x"}\n', "c.ndjson": "{}\n"})
    corpus = load_corpus(str(tmp_path), 0.1, 256)
    assert "(3 texts, 2 JSONL skipped)" in corpus.description
    assert b"{" not in bytes(np.asarray(corpus.train[:]).astype(np.uint8))


@pytest.mark.parametrize(
    "files",
    [{"state.json": "{}", "dataset_info.json": "{}"}, {"dataset_dict.json": "{}", "train/state.json": "{}"}],
)
def test_a_dataset_must_be_packed(tree, files, tmp_path):
    folder = tree(tmp_path / "ds", files | {"README.md": prose(1)})
    error = refused(folder)
    assert f"`{folder}` is a Hugging Face dataset" in error.message
    assert "`halfstep data pack" in error.hint


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=50), min_size=2, max_size=8), shares)
def test_any_folder_of_text_loads_or_is_refused(tree, tmp_path_factory, texts, share):
    folder = tree(tmp_path_factory.mktemp("data"), {f"{n}.txt": text for n, text in enumerate(texts)})
    try:
        corpus = load_corpus(str(folder), share, 256)
    except DataError:
        assert len({text if text.endswith("\n") else text + "\n" for text in texts if "\0" not in text}) < 2
    else:
        assert len(corpus.train)
        assert len(corpus.validation)


@pytest.fixture
def wikitext(tmp_path):
    """A text to train on and one to hold out, as WikiText comes."""
    for name, start in (("train", 0), ("valid", 1000)):
        lines = (f"line {i} of {name}" for i in range(start, start + 200))
        (tmp_path / f"{name}.txt").write_text(" \n = Heading = \n" + "\n\n".join(lines))
    return tmp_path


def test_a_text_of_ones_own_is_held_out_and_all_of_the_source_is_trained_on(wikitext):
    train, valid = wikitext / "train.txt", wikitext / "valid.txt"
    corpus = load_corpus(str(train), str(valid), 256)
    assert corpus.train.tobytes() == train.read_bytes()
    assert corpus.validation.tobytes() == valid.read_bytes()
    assert f"and, held out, file `{valid}`" in corpus.description
    again = load_corpus(str(train), f"{wikitext}/val*.txt", 256)  # a glob, a folder: as data.source
    assert again.validation.tobytes().strip() == corpus.validation.tobytes().strip()
    valid.write_text(valid.read_text() + "more")
    assert load_corpus(str(train), str(valid), 256).digest != corpus.digest
    with pytest.raises(DataSizeError, match="held-out text `x` is shorter than one sequence"):
        held_out_batches(corpus, load("tiny", ["data.validation=x", "model.context=100000"]))


def test_a_text_to_hold_out_is_refused_with_the_reason(wikitext, tmp_path):
    train, valid = str(wikitext / "train.txt"), str(wikitext / "valid.txt")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.bin").write_bytes(b"")
    for source, held_out, said in (
        (str(wikitext), valid, f"`{valid}` is to be held out, but `{wikitext}` holds it too"),
        (train, train, f"`{train}` is to be held out, but `{train}` holds it too"),
        (train, str(wikitext / "vald.txt"), "there is no file or folder"),
        (train, "", "data.validation is empty"),
        (train, str(tmp_path / "shards"), "holds token shards, and only text can be held out by name"),
        (str(tmp_path / "shards"), valid, "holds token shards, and data.validation names text to hold out from"),
    ):
        with refuses(DataError, said):
            load_corpus(source, held_out, 256)


def test_a_file_to_hold_out_that_is_trained_on_too_is_refused_by_name(tree, tmp_path):
    texts = tree(tmp_path / "texts", {f"{n}.txt": prose(n) for n in range(4)} | {"val/5.txt": prose(5)})
    (tmp_path / "link").symlink_to(texts / "3.txt")
    for held_out, named in (
        (f"{texts}/[13].txt", texts / "1.txt"),  # two that are not neighbors in the source
        (f"{texts}/val", texts / "val" / "5.txt"),
        (f"{tmp_path}/lin*", tmp_path / "link"),
    ):
        with refuses(DataError, re.escape(f"`{named}` is to be held out, but `{texts}` holds it too"), "0.1"):
            load_corpus(str(texts), held_out, 256)
    with refuses(DataError, "3.txt` is to be held out, but"):
        load_corpus(str(texts / "3.txt"), str(texts), 256)
    copies = tree(tmp_path / "copies", {f"{n}.txt": prose(n) for n in (1, 3)})
    with refuses(DataError, "all of it is in the training text too", "0.1"):
        load_corpus(str(texts), str(copies), 256)
    tree(copies, {"new.txt": prose(9)})  # a text that both happen to hold, such as a license, is no reason
    assert "(5 texts) and, held out, " in load_corpus(str(texts), str(copies), 256).description
