"""From sources to documents: every kind of file, in order, from any position on, and faults by file and line."""

import gzip
import json
import os
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from halfstep.core.errors import how_to_install
from halfstep.training.data.pack import blocks as reading
from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import documents
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.types import DataContentError, DataError, PackingError

TEXTS = [f"document {n}: " + "word " * (n % 7) + "é" * (n % 3) + "\n" * (n % 2) for n in range(60)]


def files_of(*given, only=None):
    return [file for source in find_sources([str(each) for each in given], only) for file in source.files]


def read(*given, start=None, field="text", validation=0.0, skipped=None, only=None):
    found = []
    for block in blocks(files_of(*given, only=only), start or Position(), field):
        found += [
            each.text for each in documents(block, field, validation, Counter() if skipped is None else skipped)
        ]
    return found


def jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    return path


def arrow_table(texts=TEXTS):
    return pytest.importorskip("pyarrow").table({"id": list(range(len(texts))), "text": texts})


def write_parquet(path):
    table = arrow_table()
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def write_arrow(path, *, stream):
    table = arrow_table()
    import pyarrow as arrow

    new = arrow.ipc.new_stream if stream else arrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_zst(path):
    with pytest.importorskip("pyarrow").CompressedOutputStream(str(path), "zstd") as file:
        file.write(jsonl(path.with_suffix(".plain")).read_bytes())
    return path


def write_gz(path):
    path.write_bytes(gzip.compress(jsonl(path.with_suffix(".plain")).read_bytes()))
    return path


def write_dataset(folder):
    """What `save_to_disk` leaves."""
    folder.mkdir()
    write_arrow(folder / "data-00000-of-00001.arrow", stream=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return folder


KINDS = {
    "jsonl": lambda at: jsonl(at / "a.jsonl"),
    "gz": lambda at: write_gz(at / "a.jsonl.gz"),
    "zst": lambda at: write_zst(at / "a.jsonl.zst"),
    "parquet": lambda at: write_parquet(at / "a.parquet"),
    "arrow stream": lambda at: write_arrow(at / "a.arrow", stream=True),
    "arrow file": lambda at: write_arrow(at / "a.arrow", stream=False),
    "dataset": lambda at: write_dataset(at / "saved"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_its_documents_in_order_from_every_block_on(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 200)
    path = KINDS[kind](tmp_path)
    assert read(path) == TEXTS
    found, seen = list(blocks(files_of(path), Position(), "text")), 0
    assert len(found) > 5
    for block in found:  # a packing can resume after any of them
        seen += len(list(documents(block, "text", 0.0, Counter())))
        assert read(path, start=block.after) == TEXTS[seen:]
    done = [block.done for block in found]
    assert done == sorted(done)
    assert done[-1] == sum(file.size for file in files_of(path))


def test_files_of_a_folder_are_documents_by_their_relative_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 100)
    for name, text in {
        "b.txt": "B",
        "a/z.py": "Z\n",
        "a/b.md": "é" * 40,
        ".hidden": "no",
        "empty.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "latin").write_bytes(b"\xe9")
    skipped = Counter()
    assert read(tmp_path, skipped=skipped) == ["é" * 40, "Z\n", "B"]
    assert skipped == {"binary": 2, "empty": 1}
    assert read(tmp_path, only="*.py") == ["Z\n"]
    jsonl(tmp_path / "c.jsonl", ["record"])
    assert read(tmp_path, only="*.[jt]*") == ["B", "record"]  # each file by its own name


def test_a_long_text_is_cut_and_neighbors_on_one_side_stay_together(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 20_000)
    monkeypatch.setattr(reading, "REACH", 2_000)
    text = "".join(f"line {n} é{'x' * (n % 50)}\n" + "\n" * (n % 9 == 0) for n in range(3000))
    path = tmp_path / "book.txt"
    path.write_text(text)
    assert "".join(read(path)) == text
    found = list(blocks(files_of(path), Position(), "text"))
    assert all(block.payload.endswith(b"\n\n") for block in found[:-1])
    sided = [each for block in found for each in documents(block, "text", 0.3, Counter())]
    assert "".join(each.text for each in sided) == text
    assert 0.1 < sum(len(each.text) for each in sided if each.held_out) / len(text) < 0.5
    for block in found:
        sides = [each.held_out for each in documents(block, "text", 0.3, Counter())]
        assert all(one != other for one, other in pairwise(sides))  # no cut that is not needed
        assert read(path, start=block.after) == read(path)[1 + found.index(block) :]


def test_a_long_binary_file_in_a_folder_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONG", 100)
    monkeypatch.setattr(reading, "BLOCK", 100)
    (tmp_path / "program").write_bytes(b"text " * 60 + b"\0" + b"text " * 60)
    (tmp_path / "words").write_bytes(b"text\n\n" * 60)
    skipped = Counter()
    assert "".join(read(tmp_path, skipped=skipped)) == "text\n\n" * 60
    assert skipped == {"binary": 1}


def refused(*given, **options):
    with pytest.raises(DataError) as caught:
        read(*given, **options)
    return caught.value


BROKEN = {
    "json": (b'{"text": "a"}\n\n{"text": \n', "is not JSON", 3),
    "object": (b'{"text": "a"}\n[1]\n', "is not a JSON object", 2),
    "field": (b'{"text": "a"}\n{"txt": "b", "id": 1}\n', "no field `text`; the fields are `txt`, `id`", 2),
    "type": (b'{"text": "a"}\n{"text": 3}\n', "`text` is int, not text", 2),
    "null": (b'{"text": null}\n', "`text` is null, not text", 1),
    "utf-8": (b'{"text": "a"}\n{"text": "\xe9"}\n', "byte 10 of the line: not UTF-8", 2),
    "surrogate": (
        b'{"text": "a"}\n{"text": "b\\ud800"}\n',
        "character 1 of `text` is half of a surrogate pair",
        2,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_line_is_named_by_file_and_number(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 4)  # a line a block: the number is counted over blocks
    content, said, line = BROKEN[fault]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    error = refused(path)
    assert error.message.startswith(f"`{path}`:{line}")
    assert said in error.message


def test_damage_is_named_by_file_and_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 1000)
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 500 + b"\xff" + b"line\n" * 9)
    assert refused(path).message == f"`{path}`, byte 2500: not UTF-8"
    path.write_bytes(b"line\n" * 500 + b"\0" + b"line\n" * 9)
    assert "byte 2500 is NUL" in refused(path).message
    path = write_gz(tmp_path / "b.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-20])
    assert f"`{path}` is damaged" in refused(path).message


def test_tables_without_text_are_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    expected = f"`{path}`: there is no field `content`; the fields are `id`, `text`"
    assert refused(path, field="content").message == expected
    assert "column `id` is int64, not text" in refused(path, field="id").message
    table = arrow_table(["a", None])
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path)
    assert f"`{path}`, row 1: `text` is null, not text" in refused(path).message
    path.write_bytes(b"PAR1 nothing")
    assert f"`{path}` is damaged" in refused(path).message


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_invalid_utf8_in_a_table_is_named_by_its_rows(kind, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = pyarrow.py_buffer(np.array([0, 2, 4, 6], dtype="<i4").tobytes())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"ab\xff\xfecd")])
    table, path = pyarrow.table({"text": column}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    assert f"`{path}`, rows 0 to 2: Invalid UTF8 sequence" in refused(path).message


def test_offsets_of_a_damaged_table_are_not_followed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table, path = arrow_table(["some text", "and more"]), tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    content = path.read_bytes()
    ends = np.array([9, 17], dtype="<i4").tobytes()
    assert content.count(ends) == 1
    path.write_bytes(content.replace(ends, np.array([-9, 17], dtype="<i4").tobytes()))
    assert f"`{path}`, rows 0 to 1" in refused(path).message


def test_suffixes_ignore_case_and_names_may_be_invalid_utf8(tmp_path):
    small, large = write_gz(tmp_path / "a.jsonl.gz"), tmp_path / "A.JSONL.GZ"
    large.write_bytes(small.read_bytes())
    found = [
        [block.payload for block in blocks(find_sources([str(path)])[0].files, Position(), "text")]
        for path in (small, large)
    ]
    assert found[0] == found[1]
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("text\n")
    assert find_sources([str(tmp_path)])[0].digest()


def test_a_stream_that_cannot_be_decompressed_is_damaged(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"this is no zstd" * 9)
    assert f"`{path}` is damaged" in refused(path).message


def test_tables_need_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refused(tmp_path / "a.parquet")
    assert "needs the package `pyarrow`" in error.message
    assert error.hint == how_to_install("data")


def test_a_dataset_of_splits_asks_for_one(tmp_path):
    write_dataset(tmp_path / "train")
    (tmp_path / "dataset_dict.json").write_text("{}")
    error = refused(tmp_path)
    assert "several splits: train" in error.message
    assert str(tmp_path / "train") in error.hint
    (tmp_path / "train" / "data-00000-of-00001.arrow").unlink()
    assert "lacks `data-00000-of-00001.arrow`" in refused(tmp_path / "train").message


def test_missing_and_empty_sources_are_refused(tmp_path):
    (tmp_path / "words.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    error = refused(tmp_path / "wrods.txt")
    assert "does not exist" in error.message
    assert error.hint == "did you mean `words.txt`?"
    assert "is empty" in refused(tmp_path / "empty.txt").message
    error = refused(tmp_path, only="*.py")
    assert "holds no file that matches --only `*.py`" in error.message
    assert "--only" in error.hint
    (tmp_path / "a.bin").write_bytes(b"x")
    assert "packed already" in refused(tmp_path / "a.bin").message
    assert "no source is given" in refused().message


def test_a_file_is_named_once(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to("a.txt")
    for given in (("a.txt", "a.txt"), ("sub", "sub/b.txt"), ("a.txt", "link.txt"), ("sub", "*/b.txt")):
        with pytest.raises(PackingError) as caught:
            find_sources([str(tmp_path / each) for each in given])
        assert all(f"`{tmp_path / each}`" in caught.value.message for each in given)
    assert len(find_sources([str(tmp_path / "a.txt"), str(tmp_path / "sub")])) == 2


def test_a_source_is_recognized_in_another_place(tmp_path):
    def digest(folder, **files):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        return find_sources([str(tmp_path / folder)])[0].digest()

    first = digest("one", a="A" * 9000, b="B")
    assert first == digest("two", a="A" * 9000, b="B")
    assert len({first, digest("three", a="A" * 9000, c="B"), digest("four", a="A" * 9000, b="C"),
                digest("five", a="A" * 8999 + "x", b="B"), digest("six", a="A" * 9001, b="B")}) == 5  # fmt: skip


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reading, "BLOCK", 1000)
    monkeypatch.setattr(reading, "MOST_LINE", 5000)
    content = b'{"text": "a"}\n' * 100 + b'{"text": "' + b"x" * 10_000 + b'"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataContentError, match=rf"{name}`:101 is longer than"):
        read(tmp_path / name)
    monkeypatch.setattr(reading, "MOST_LINE", 20_000)
    assert len(read(tmp_path / name)) == 101


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_a_row_without_end_is_refused(tmp_path, monkeypatch, kind):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = arrow.array(
        ["a", None, "x" * 10_000, "b"], arrow.string() if kind == "dictionary" else getattr(arrow, kind)()
    )
    column = texts.dictionary_encode() if kind == "dictionary" else texts
    parquet.write_table(arrow.table({"text": column}), tmp_path / "rows.parquet")
    (block,) = blocks(files_of(tmp_path / "rows.parquet"), Position(), "text")
    assert block.payload == ("a", None, "x" * 10_000, "b")
    monkeypatch.setattr(reading, "MOST_LINE", 5000)
    with pytest.raises(DataContentError, match=r"rows\.parquet`, row 2 is longer than"):
        list(blocks(files_of(tmp_path / "rows.parquet"), Position(), "text"))
