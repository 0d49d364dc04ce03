"""Reads files as blocks of about a mebibyte, in order; every block says where the next begins, to resume there.

    texts      small files of a folder, each one document
    pieces     part of a long text: a file that was named, or one larger than a mebibyte
    lines      whole lines of a JSONL file
    rows       texts of a table

A long text has no documents, yet some of it must be held out. It is cut at blank lines into pieces of about 4 KiB
whose sides are decided one by one; neighbors on the same side stay together, so that separators stand only where
text was taken out, and at the end of a block.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast

from halfstep.config.reading import open_regular, read_bytes
from halfstep.config.schema import Count
from halfstep.training.data.pack.sources import SourceFile
from halfstep.training.data.text import end_of_piece
from halfstep.training.data.tokenizer_base import import_optional
from halfstep.training.data.types import DataContentError, DataError

BLOCK = 1 << 20
LONG = 1 << 20
# How far beyond a mebibyte a block of a long text may extend in order to end at a blank line.
REACH = 1 << 16
ROWS_AT_ONCE = 256
# A few bytes of gzip can hold a line of gigabytes, and a line is in memory several times over.
MOST_LINE = 1 << 26
NEWLINE = b"\n"

Payload: TypeAlias = bytes | tuple[bytes, ...] | tuple[str | None, ...]


@dataclass(frozen=True)
class Position:
    """Where a block begins: the file, the byte or row in it, and the line."""

    file: Count = 0
    offset: Count = 0
    line: Count = 1


@dataclass(frozen=True)
class Block:
    """Some text, and what errors about it must name. `at` is the byte, line or row it begins at."""

    kind: Literal["texts", "pieces", "lines", "rows"]
    name: str
    at: int
    payload: Payload
    after: Position
    done: int  # bytes of all sources up to its end, for the progress display
    held_out: bool  # as a whole, whatever its documents are


def blocks(files: Sequence[SourceFile], start: Position, field: str) -> Iterator[Block]:
    """Yields all blocks from a position on."""
    before = [0, *accumulate(file.size for file in files)]
    number, offset, line = start.file, start.offset, start.line
    while number < len(files):
        file = files[number]
        if _is_small_text(file, file.held_out):
            block = _texts(files, number, before)
            yield block
            number = block.after.file
            continue
        read = {"text": _pieces, "jsonl": _lines, "parquet": _rows, "arrow": _rows}[file.kind]
        yield from read(file, Position(number, offset, line), before[number], field)
        number, offset, line = number + 1, 0, 1


def _is_small_text(file: SourceFile, held_out: bool) -> bool:
    return file.kind == "text" and not file.named and file.size <= LONG and file.held_out == held_out


def _texts(files: Sequence[SourceFile], first: int, before: Sequence[int]) -> Block:
    texts: list[bytes] = []
    size, number = 0, first
    held_out = files[first].held_out
    while number < len(files) and size < BLOCK and _is_small_text(files[number], held_out):
        with _named_errors(files[number].path):
            texts.append(read_bytes(files[number].path, 2 * LONG))
        size, number = size + max(1, len(texts[-1])), number + 1
    return Block("texts", str(files[first].path), 0, tuple(texts), Position(number), before[number], held_out)


def _pieces(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    if not start.offset and not file.named and not is_text(file.path):
        # A block of one document that is skipped, as small files that are not text are.
        done = before + file.size
        yield Block("texts", str(file.path), 0, (b"\0",), Position(start.file + 1), done, file.held_out)
        return
    with _named_errors(file.path), open_regular(file.path) as opened:
        offset, last = start.offset, False
        while not last:
            opened.seek(offset)
            content = opened.read(BLOCK + REACH + 1)
            if not (end := end_of_piece(content, BLOCK, BLOCK + REACH)):
                return
            last = end == len(content)
            at, offset = offset, offset + end
            after = Position(start.file + 1) if last else Position(start.file, offset)
            yield Block("pieces", str(file.path), at, content[:end], after, before + offset, file.held_out)


def _lines(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    with _named_errors(file.path), open_regular(file.path) as raw:
        if (opened := _decompressed(raw, file.path)) is raw:
            raw.seek(start.offset)
        else:
            _skip(opened, start.offset)
        offset, line = start.offset, start.line
        # Not beyond the known size: a file that is being written may never end. `pack` refuses it afterwards.
        while (opened is not raw or offset < file.size) and (content := opened.read(BLOCK)):
            content += _rest_of_line(opened, f"`{file.path}`:{line + content.count(NEWLINE)}")
            at, offset, line = line, offset + len(content), line + content.count(NEWLINE)
            done = before + min(raw.tell() if opened is not raw else offset, file.size)
            after = Position(start.file, offset, line)
            yield Block("lines", str(file.path), at, content, after, done, file.held_out)


def _rows(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    """Yields rows, counted from 0. A block ends after the row that fills it."""
    arrow = import_optional("pyarrow", f"reading `{file.path}`")
    with _named_errors(file.path, arrow.ArrowException):
        total, columns = _open_table(file, field, start.offset, arrow)
        texts: list[str | None] = []
        size, row = 0, start.offset
        for column in columns:
            for text in _read_texts(file.path, column, row):
                texts.append(text)
                size, row = size + len(text or ""), row + 1
                if size >= BLOCK or row == total:
                    after = Position(start.file, row) if row < total else Position(start.file + 1)
                    done = before + file.size * row // total
                    first = row - len(texts)
                    yield Block("rows", str(file.path), first, tuple(texts), after, done, file.held_out)
                    texts, size = [], 0


def _open_table(file: SourceFile, field: str, first: int, arrow: Any) -> tuple[int, Iterator[Any]]:
    """Returns the number of rows of a table, and its text column from row `first` on, in parts."""
    if file.kind == "parquet":
        table = import_optional("pyarrow.parquet", f"reading `{file.path}`").ParquetFile(file.path)
        _check_column(file.path, table.schema_arrow, field, arrow)
        ends = [*accumulate(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups))]
        left = [group for group, end in enumerate(ends) if end > first]  # no other group is read
        row = ends[left[0] - 1] if left and left[0] else 0
        batches = table.iter_batches(ROWS_AT_ONCE, row_groups=left, columns=[field]) if left else ()
        return (ends or [0])[-1], _drop_rows((batch.column(0) for batch in batches), first - row)
    mapped = arrow.memory_map(str(file.path))
    if bytes(mapped.read(6)) == b"ARROW1":  # an arrow file has one of two forms
        opened = arrow.ipc.open_file(mapped)
        batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
    else:
        mapped.seek(0)
        opened = arrow.ipc.open_stream(mapped)
        batches = list(opened)
    _check_column(file.path, opened.schema, field, arrow)
    parts = (
        batch.column(field)[low : low + ROWS_AT_ONCE]
        for batch in batches
        for low in range(0, batch.num_rows, ROWS_AT_ONCE)
    )
    return sum(batch.num_rows for batch in batches), _drop_rows(parts, first)


def _drop_rows(columns: Iterable[Any], number: int) -> Iterator[Any]:
    for column in columns:
        if number < len(column):
            yield column[number:]
        number = max(0, number - len(column))


def _read_texts(path: Path, rows: Any, first: int) -> Iterator[str | None]:
    """Yields the texts of some rows, validated: a damaged file may hold wrong offsets or invalid UTF-8.

    One by one: rows of a dictionary may be the same long text a thousand times.
    """
    try:
        rows.validate(full=True)
        for number, row in enumerate(rows, first):
            value = getattr(row, "value", row)  # of a dictionary
            if value.is_valid and value.as_buffer().size > MOST_LINE:
                raise _too_long_error(f"`{path}`, row {number}")
            yield cast("str | None", value.as_py())
    except ValueError as error:  # includes ArrowInvalid
        where = f"`{path}`, rows {first} to {first + len(rows) - 1}"
        raise DataContentError(f"{where}: {error}", hint="download or write it again") from None


def _check_column(path: Path, schema: Any, field: str, arrow: Any) -> None:
    if field not in schema.names:
        raise missing_field_error(f"`{path}`", field, schema.names)
    kind = schema.field(field).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (
        arrow.types.is_string(inner) or arrow.types.is_large_string(inner) or arrow.types.is_string_view(inner)
    ):
        raise DataContentError(
            f"`{path}`: column `{field}` is {kind}, not text", hint="choose another with --field"
        )


def missing_field_error(where: str, field: str, names: Sequence[str]) -> DataError:
    """Returns the error for a record without the requested field."""
    shown = ", ".join(f"`{name}`" for name in list(names)[:10]) or "none"
    return DataContentError(
        f"{where}: there is no field `{field}`; the fields are {shown}",
        hint="name the text field with --field (data pack), or rename it",
    )


def is_text(path: Path) -> bool:
    """Whether a file decodes as UTF-8 and holds no NUL byte; stops at the first byte that does not fit."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _named_errors(path), open_regular(path) as opened:
        try:
            while content := opened.read(BLOCK):
                if b"\0" in content:
                    return False
                decoder.decode(content)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    name = path.name.lower()  # as `file_kind` reads it
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        arrow = import_optional("pyarrow", f"decompressing `{path}`")
        return io.BufferedReader(arrow.CompressedInputStream(raw, "zstd"), BLOCK)
    return raw


def _rest_of_line(opened: IO[bytes], where: str) -> bytes:
    rest = opened.readline(MOST_LINE)
    if len(rest) == MOST_LINE and not rest.endswith(NEWLINE):
        raise _too_long_error(where)
    return rest


def _too_long_error(where: str) -> DataError:
    return DataContentError(
        f"{where} is longer than {MOST_LINE >> 20} MiB: it is one document, read as a whole",
        hint="split it into several, or name a file of plain text, which may be of any size",
    )


def _skip(opened: IO[bytes], count: int) -> None:
    while count:
        count -= len(opened.read(min(count, BLOCK))) or count


@contextmanager
def _named_errors(path: Path, damage: type[Exception] = EOFError) -> Iterator[None]:
    """Names the file in errors about reading or decompressing it; `damage` is another error of a broken file."""
    try:
        yield
    except DataError:
        raise
    except (EOFError, zlib.error, OSError, damage) as error:
        # An OSError without a number is not the system's: gzip and pyarrow raise it for a broken stream.
        if isinstance(error, OSError) and error.errno is not None:
            raise DataContentError(
                f"cannot read `{path}`: {error.strerror}", hint="check its permissions"
            ) from None
        raise DataContentError(
            f"`{path}` is damaged, or not what its name says: {error}", hint="download or write it again"
        ) from None
