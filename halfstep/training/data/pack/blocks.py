"""From files to blocks of about a mebibyte, in order; and from a block to its documents.

One process reads, in the order of the sources; many turn blocks into tokens. So a block is cheap to make (a read,
a count of lines, a column) and holds what a worker needs, and every block says where the next begins. A pack that
goes on seeks there; which blocks there are never depends on who reads them.

    texts      small files of a folder, each one document
    pieces     a part of a long text: a file that was named, or one of more than a mebibyte
    lines      whole lines of a JSONL file
    rows       texts of a table

A long text has no documents of its own, and some of it must be held out. It is cut at blank lines, in pieces of
about 4 KiB, whose sides are decided one by one; neighbors on one side stay together, so that a separator stands
only where text was taken out, and at the end of a block.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast

from halfstep.training.data.corpus import DataError
from halfstep.training.data.pack.sources import SourceFile
from halfstep.training.data.text import end_of_piece
from halfstep.training.data.tokenizers import needed

BLOCK = 1 << 20
LONG = 1 << 20
# How far beyond a mebibyte a block of a long text may go to end at a blank line.
REACH = 1 << 16
ROWS_AT_ONCE = 256

Payload: TypeAlias = bytes | tuple[bytes, ...] | tuple[str | None, ...]


@dataclass(frozen=True)
class Position:
    """Where a block begins: in which file, at which byte or row of it, and on which line."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Block:
    """Some text, with what a message about it must say. `at` is the byte, line or row it begins at."""

    kind: Literal["texts", "pieces", "lines", "rows"]
    name: str
    at: int
    payload: Payload
    after: Position
    done: int  # bytes of all sources up to its end, for the progress


def blocks(files: Sequence[SourceFile], start: Position, field: str) -> Iterator[Block]:
    """All blocks from a position on."""
    before = [0, *accumulate(file.size for file in files)]
    number, offset, line = start.file, start.offset, start.line
    while number < len(files):
        file = files[number]
        if file.kind == "text" and not file.named and file.size <= LONG:
            block = _texts(files, number, before)
            yield block
            number = block.after.file
            continue
        read = {"text": _pieces, "jsonl": _lines, "parquet": _rows, "arrow": _rows}[file.kind]
        yield from read(file, Position(number, offset, line), before[number], field)
        number, offset, line = number + 1, 0, 1


def _texts(files: Sequence[SourceFile], first: int, before: Sequence[int]) -> Block:
    texts: list[bytes] = []
    size, number = 0, first
    while number < len(files) and size < BLOCK:
        file = files[number]
        if file.kind != "text" or file.named or file.size > LONG:
            break
        content = _content(file.path)
        texts.append(content)
        size, number = size + max(1, len(content)), number + 1
    return Block("texts", str(files[first].path), 0, tuple(texts), Position(number), before[number])


def _pieces(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    if not start.offset and not file.named and not is_text(file.path):
        # Told like the small ones that are no text: a block of one.
        yield Block("texts", str(file.path), 0, (b"\0",), _next(start), before + file.size)
        return
    with _guarded(file.path), open(file.path, "rb") as opened:
        offset = start.offset
        while True:
            opened.seek(offset)
            content = opened.read(BLOCK + REACH + 1)
            end = end_of_piece(content, BLOCK, BLOCK + REACH)
            if not end:
                return
            last = end == len(content)
            at, offset = offset, offset + end
            after = _next(start) if last else Position(start.file, offset)
            yield Block("pieces", str(file.path), at, content[:end], after, before + offset)
            if last:
                return


def _lines(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    with _guarded(file.path), open(file.path, "rb") as raw:
        opened = _unpacked(raw, file.path)
        if opened is raw:
            raw.seek(start.offset)
        else:
            _skip(opened, start.offset)
        offset, line = start.offset, start.line
        # Not past the size it had: a file that somebody writes to might have no end. `packing` refuses it then.
        while (opened is not raw or offset < file.size) and (content := opened.read(BLOCK)):
            content += opened.readline()
            at, offset, line = line, offset + len(content), line + content.count(b"\n")
            done = before + min(raw.tell() if opened is not raw else offset, file.size)
            yield Block("lines", str(file.path), at, content, Position(start.file, offset, line), done)


def _rows(file: SourceFile, start: Position, before: int, field: str) -> Iterator[Block]:
    """Rows are counted from 0. A block ends after the row with which it reaches its size."""
    columns, total = _columns(file, start.offset, field)
    texts: list[str | None] = []
    size, row = 0, start.offset
    for column in columns:
        for text in column:
            texts.append(text)
            size, row = size + len(text or ""), row + 1
            if size >= BLOCK:
                yield _row_block(file, start, before, row, total, texts)
                texts, size = [], 0
    if texts:
        yield _row_block(file, start, before, row, total, texts)


def _row_block(
    file: SourceFile, start: Position, before: int, row: int, total: int, texts: list[str | None]
) -> Block:
    after = Position(start.file, row) if row < total else _next(start)
    done = before + file.size * row // max(1, total)
    return Block("rows", str(file.path), row - len(texts), tuple(texts), after, done)


def _columns(file: SourceFile, first: int, field: str) -> tuple[Iterator[list[str | None]], int]:
    """The texts of a table from a row on, a batch at a time, and how many rows it has."""
    arrow = needed("pyarrow", f"reading `{file.path}`")
    try:
        if file.kind == "parquet":
            table = needed("pyarrow.parquet", f"reading `{file.path}`").ParquetFile(file.path)
            _check_column(file.path, table.schema_arrow, field, arrow)
            return _parquet_columns(file.path, table, first, field, arrow), table.metadata.num_rows
        batches, total = _arrow_batches(file.path, field, arrow)
        return _arrow_columns(file.path, batches, first, field), total
    except (arrow.ArrowException, OSError) as error:
        raise _broken(file.path, error) from None


def _parquet_columns(path: Path, table: Any, first: int, field: str, arrow: Any) -> Iterator[list[str | None]]:
    groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    skipped = 0
    while groups and skipped + groups[0] <= first:
        skipped += groups.pop(0)
    wanted = list(range(table.num_row_groups - len(groups), table.num_row_groups))
    try:
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=wanted, columns=[field]) if wanted else ():
            rows = batch.column(0)[max(0, first - skipped) :]
            skipped += batch.num_rows
            yield _texts_of(path, rows, skipped - len(rows))
    except (arrow.ArrowException, OSError) as error:
        raise _broken(path, error) from None


def _arrow_batches(path: Path, field: str, arrow: Any) -> tuple[list[Any], int]:
    """The batches of a mapped arrow file, of either form; nothing of them is read yet."""
    mapped = arrow.memory_map(str(path))
    if bytes(mapped.read(6)) == b"ARROW1":
        file = arrow.ipc.open_file(mapped)
        batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    else:
        mapped.seek(0)
        file = arrow.ipc.open_stream(mapped)
        batches = list(file)
    _check_column(path, file.schema, field, arrow)
    return batches, sum(batch.num_rows for batch in batches)


def _arrow_columns(path: Path, batches: list[Any], first: int, field: str) -> Iterator[list[str | None]]:
    skipped = 0
    for batch in batches:
        rows = batch.column(field)
        for low in range(max(0, first - skipped), batch.num_rows, ROWS_AT_ONCE):
            yield _texts_of(path, rows[low : low + ROWS_AT_ONCE], skipped + low)
        skipped += batch.num_rows


def _texts_of(path: Path, rows: Any, first: int) -> list[str | None]:
    """The texts of some rows, checked: offsets of a damaged file may point anywhere, and its bytes be no UTF-8."""
    try:
        rows.validate(full=True)
        return cast("list[str | None]", rows.to_pylist())
    except ValueError as error:  # ArrowInvalid is one
        told = f"rows {first} to {first + len(rows) - 1}"
        raise DataError(f"`{path}`, {told}: {error}", hint="fetch or write it again") from None


def _check_column(path: Path, schema: Any, field: str, arrow: Any) -> None:
    if field not in schema.names:
        raise missing_field(f"`{path}`", field, schema.names)
    found = schema.field(field).type
    inner = found.value_type if arrow.types.is_dictionary(found) else found
    if not (
        arrow.types.is_string(inner) or arrow.types.is_large_string(inner) or arrow.types.is_string_view(inner)
    ):
        raise DataError(f"`{path}`: column `{field}` is {found}, not text", hint="name another by --field")


def missing_field(where: str, field: str, names: Sequence[str]) -> DataError:
    """A record without the field that was asked for."""
    shown = ", ".join(f"`{name}`" for name in list(names)[:10]) or "none"
    return DataError(
        f"{where}: there is no field `{field}`; there are {shown}", hint="name the text by --field NAME"
    )


def is_text(path: Path) -> bool:
    """Whether a file decodes as UTF-8 and holds no NUL byte; stops at the first that does not fit."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _guarded(path), open(path, "rb") as opened:
        try:
            while content := opened.read(BLOCK):
                if b"\0" in content:
                    return False
                decoder.decode(content)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _content(path: Path) -> bytes:
    with _guarded(path):
        return path.read_bytes()


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    name = path.name.lower()  # as `kind_of` reads it
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        arrow = needed("pyarrow", f"unpacking `{path}`")
        return io.BufferedReader(arrow.CompressedInputStream(raw, "zstd"), BLOCK)
    return raw


def _skip(opened: IO[bytes], count: int) -> None:
    while count:
        count -= len(opened.read(min(count, BLOCK))) or count


def _next(position: Position) -> Position:
    return Position(position.file + 1)


def _broken(path: Path, error: BaseException) -> DataError:
    return DataError(f"`{path}` is damaged, or not what its name says: {error}", hint="fetch or write it again")


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """Tells of a file that cannot be read, or cannot be unpacked, by its name."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, error) from None
    except OSError as error:
        if error.errno is None:  # not the system's: what pyarrow says of a stream that it cannot unpack
            raise _broken(path, error) from None
        raise DataError(f"`{path}` cannot be read: {error.strerror}", hint="see to its permissions") from None
