"""Text as documents of bytes: the standard library, a file, a folder, a glob.

Relative paths alone decide which files are read, and in which order, so that two machines read the same tokens:

    stdlib      every *.py of the running Python's standard library, without its tests, installed packages, and
                _sysconfigdata, which differs from build to build
    a folder    every text file below it, as walk.py finds them; a glob: every text file that it matches
    a file      cut into documents at blank lines, about 4 KiB each, so that some of it can be held out

Records (JSONL, tables, datasets) are not text: a run would learn the markup around their texts too. A file is text
if it decodes as UTF-8 and holds no NUL byte. Nothing is put between documents, because bytes that nobody wrote
would count in bits per byte; only a file without a newline at its end gets one.
"""

import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from halfstep.config.reading import fits_in_memory, read_bytes
from halfstep.training.data.types import DataContentError, DataError, DataSizeError, Document
from halfstep.training.data.walk import (
    DESCRIPTIONS,
    UNREADABLE,
    Walked,
    describe_skipped,
    file_kind,
    has_splits,
    is_dataset,
    select_files,
    walk,
)
from halfstep.training.files import os_errors

STDLIB = "stdlib"
PIECE = 4096
# With fewer pieces than this, a share of 10 % may well hold out nothing: small files are cut finer.
MIN_PIECES = 16

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")


def stdlib_documents() -> tuple[list[Document], str]:
    """Reads the text that every Python installation carries; returns the documents and their description."""
    root = Path(sysconfig.get_path("stdlib"))
    what = f"the standard library of Python {platform.python_version()}"
    if not (paths := library_paths(root)):
        raise DataContentError(
            f"this Python has no standard library as text in `{root}`",
            hint="name a text file or a folder of text with `--set data.source=PATH`",
        )
    return _read_several(Walked(paths, {}), root, what, STDLIB)


def library_paths(root: Path) -> list[Path]:
    """Lists the text of a standard library, without its tests and installed packages."""
    return [
        path
        for path in walk(root, ignore=_NOT_LIBRARY).files
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]


def folder_documents(folder: Path) -> tuple[list[Document], str]:
    """Reads every text below a folder."""
    if is_dataset(folder) or has_splits(folder):
        raise _records_error(f"`{folder}` is a Hugging Face dataset", str(folder))
    return _read_several(walk(folder), folder, f"folder `{folder}`", str(folder))


def glob_documents(paths: list[Path], pattern: str) -> tuple[list[Document], str]:
    """Reads every text among the matches of a glob."""
    return _read_several(select_files(paths, Path(pattern).expanduser()), None, f"files `{pattern}`", pattern)


def file_documents(path: Path) -> tuple[list[Document], str]:
    """Reads one text and cuts it into documents."""
    if (kind := file_kind(path)) != "text":
        raise _records_error(f"`{path}` is {DESCRIPTIONS[kind]}", str(path))
    _check_size([path], str(path))
    with os_errors(DataContentError, f"cannot read `{path}`", "name a text file, a folder of text, or shards"):
        content = _read(path)
    if isinstance(content, str):
        is_compressed = path.suffix.lower() in (".gz", ".zst")
        otherwise = "token shards must be named `*.bin`; convert other text to UTF-8"
        raise DataContentError(
            f"`{path}` is {content}; it must be UTF-8 text",
            hint="decompress it, for example with gunzip or unzstd" if is_compressed else otherwise,
        )
    if not content.strip():
        raise DataContentError(f"`{path}` is empty", hint="provide a file with text in it")
    documents = [Document(str(path), piece, str(path)) for piece in cut(content)]
    return documents, f"file `{path}` in {len(documents)} pieces"


def cut(content: bytes) -> list[bytes]:
    """Cuts a text into pieces of about 4 KiB that end at a blank line, else a line, else between characters."""
    size = max(1, min(PIECE, len(content) // MIN_PIECES))
    pieces, start = [], 0
    while start < len(content):
        end = end_of_piece(content, start + size, start + 2 * size)
        pieces.append(content[start:end])
        start = end
    return pieces


def end_of_piece(content: bytes, low: int, high: int) -> int:
    """Returns where a piece that must end in [low, high] ends; the end of the text if that comes first."""
    if high >= len(content):
        return len(content)
    for boundary in (_BLANK_LINE, _LINE_END):
        if match := boundary.search(content, low, high):
            return match.end()
    while high > low and content[high] & 0xC0 == 0x80:  # inside a character
        high -= 1
    return high


def _read_texts(paths: Iterable[Path], root: Path | None) -> tuple[list[Document], Counter[str]]:
    """Reads the texts among some files; also returns how many others there were, by kind."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        try:
            content = _read(path)
        except OSError:
            content = UNREADABLE
        if isinstance(content, str):
            skipped[content] += 1
        elif content:
            name = path.relative_to(root).as_posix() if root else str(path)
            documents.append(Document(name, content if content.endswith(b"\n") else content + b"\n", str(path)))
    return documents, skipped


def _read_several(walked: Walked, root: Path | None, what: str, source: str) -> tuple[list[Document], str]:
    kinds = Counter(file_kind(path) for path in walked.files)
    if kinds and "text" not in kinds:
        contents = " and ".join(DESCRIPTIONS[kind] for kind in sorted(kinds))
        raise _records_error(f"`{source}` holds {contents}", source)
    texts = [path for path in walked.files if file_kind(path) == "text"]
    _check_size(texts, source)
    documents, unread = _read_texts(texts, root)
    records = Counter({DESCRIPTIONS[kind]: number for kind, number in kinds.items() if kind != "text"})
    skipped = describe_skipped(unread + Counter(walked.skipped) + records)
    counts = [f"{len(documents)} texts", *(f"{each} skipped" for each in skipped)]
    description = f"{what} ({', '.join(counts)})"
    if not documents:
        raise DataContentError(
            f"there is no text in {description}",
            hint="text is any UTF-8 file that is not empty; dot files are ignored",
        )
    return documents, description


def _check_size(paths: Iterable[Path], source: str) -> None:
    """Refuses text, before it is read, that memory cannot hold three times: as files, documents, and joined."""
    size = 0
    for path in paths:
        with suppress(OSError):  # it is skipped, and counted
            size += path.stat().st_size
    if not fits_in_memory(3 * size):
        raise DataSizeError(
            f"`{source}` holds {size:,} bytes of text, which a run reads into memory three times over",
            hint=f"`halfstep data pack {source} --tokenizer bytes --out packed` makes shards, read in parts",
        )


def _records_error(problem: str, source: str) -> DataError:
    return DataContentError(
        f"{problem}, but a run reads text or token shards",
        hint=f"`halfstep data pack {source} --tokenizer bytes --out packed` makes token shards of it, for "
        "`--set data.source=packed`; `halfstep data pack --help` names other tokenizers",
    )


def _read(path: Path) -> bytes | str:
    content = read_bytes(path, path.stat().st_size)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "binary"
    return "binary" if b"\0" in content else content
