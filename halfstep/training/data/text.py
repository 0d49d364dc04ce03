"""Text as documents of bytes: the standard library, a file, a folder, a glob.

Which files, and in which order, is decided by their relative paths alone, so that two machines with the same
files read the same tokens:

    stdlib      every *.py of the running Python's standard library, without its tests and what is installed
                beside it, and without _sysconfigdata, which differs from build to build
    a folder    every file below it that is text, as `halfstep.training.data.walk` finds them
    a glob      every file it matches that is text
    a file      cut into documents at blank lines, about 4 KiB each, so that some of it can be held out

Records (JSONL, tables, datasets) are no text, and neither is a folder or a glob of nothing else: what is written
around their texts would be learned too. `halfstep data pack` reads them.

A file is text when it decodes as UTF-8 and holds no NUL byte. Others are skipped and counted in the
description, as is what the walk leaves out; a file that is given by name must be text. Nothing stands between two
documents, which would be bytes nobody wrote in a count of bits per byte; only a file that does not end its last
line gets a newline, so that it does not run into the next. The pieces of one file get nothing and add up to it.
"""

import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from halfstep.training.data.corpus import DataError, Document
from halfstep.training.data.file_kinds import NAMES, has_splits, is_compressed, is_dataset, kind_of
from halfstep.training.data.walk import Walked, regular, walk
from halfstep.training.data.walk import told as words

PIECE = 4096
# Fewer pieces than this, and a share of 10 % may well hold out nothing: small files are cut finer.
MIN_PIECES = 16

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def stdlib_documents() -> tuple[list[Document], str]:
    """The text that every Python installation carries."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = library_paths(root)
    if not paths:
        raise DataError(
            f"this Python keeps no standard library as text in `{root}`",
            hint="name a text file or a folder of text with `--set data.source=PATH`",
        )
    documents, skipped = read_texts(paths, root)
    return documents, _described(f"the standard library of Python {platform.python_version()}", documents, skipped)


def library_paths(root: Path) -> list[Path]:
    """The text of a standard library, without its tests and what is installed beside it."""
    return [
        path
        for path in walk(root, skip=_NOT_LIBRARY).files
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]


def folder_documents(folder: Path) -> tuple[list[Document], str]:
    """Every text below a folder."""
    if is_dataset(folder) or has_splits(folder):
        raise _records(f"`{folder}` is a Hugging Face dataset", str(folder))
    return _several(walk(folder), folder, f"folder `{folder}`", str(folder))


def glob_documents(paths: list[Path], pattern: str) -> tuple[list[Document], str]:
    """Every text among what a glob matched."""
    return _several(regular(paths, Path(pattern).expanduser()), None, f"files `{pattern}`", pattern)


def file_documents(path: Path) -> tuple[list[Document], str]:
    """One text, cut into documents."""
    if (kind := kind_of(path)) != "text":
        raise _records(f"`{path}` is {NAMES[kind]}", str(path))
    content = _read(path)
    if isinstance(content, str):
        otherwise = "token shards must be named `*.bin`; convert other text to UTF-8"
        raise DataError(
            f"`{path}` is {content}; it must be UTF-8 text",
            hint="unpack it, as by gunzip or unzstd" if is_compressed(path) else otherwise,
        )
    if not content.strip():
        raise DataError(f"`{path}` is empty", hint="give a file with text in it")
    documents = [Document(f"{path}", piece) for piece in cut(content)]
    return documents, f"file `{path}` in {len(documents)} pieces"


def cut(content: bytes) -> list[bytes]:
    """A text in pieces of about 4 KiB, which end at a blank line, else a line, else between characters."""
    size = max(1, min(PIECE, len(content) // MIN_PIECES))
    pieces, start = [], 0
    while start < len(content):
        end = end_of_piece(content, start + size, start + 2 * size)
        pieces.append(content[start:end])
        start = end
    return pieces


def read_texts(paths: Iterable[Path], root: Path | None) -> tuple[list[Document], dict[str, int]]:
    """The texts among some files, and how many of the others there were, by what they are."""
    documents: list[Document] = []
    skipped: dict[str, int] = {}
    for path in paths:
        content = _read(path)
        if isinstance(content, str):
            skipped[content] = skipped.get(content, 0) + 1
        elif content:
            name = path.relative_to(root).as_posix() if root else str(path)
            documents.append(Document(name, content if content.endswith(b"\n") else content + b"\n"))
    return documents, skipped


def _several(found: Walked, root: Path | None, told: str, source: str) -> tuple[list[Document], str]:
    kinds = Counter(kind_of(path) for path in found.files)
    if kinds and "text" not in kinds:
        raise _records(f"`{source}` holds {' and '.join(NAMES[kind] for kind in sorted(kinds))}", source)
    documents, unread = read_texts([path for path in found.files if kind_of(path) == "text"], root)
    records = Counter({NAMES[kind]: number for kind, number in kinds.items() if kind != "text"})
    skipped = Counter(unread) + Counter(found.skipped) + records
    if not documents:
        raise DataError(
            f"there is no text in {_described(told, documents, skipped)}",
            hint="text is any UTF-8 file that is not empty; dot files are passed over",
        )
    return documents, _described(told, documents, skipped)


def _records(told: str, source: str) -> DataError:
    return DataError(
        f"{told}, and a run reads text or token shards",
        hint=f"`halfstep data pack {source} --tokenizer bytes --out packed` makes token shards of it, for "
        "`--set data.source=packed`; `halfstep data pack --help` names other tokenizers",
    )


def _read(path: Path) -> bytes | str:
    """A file's text, or in one word what else it is."""
    try:
        content = path.read_bytes()
    except OSError:
        return "unreadable"
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "binary"
    return content


def _described(told: str, documents: list[Document], skipped: Mapping[str, int]) -> str:
    counts = [f"{len(documents)} texts", *(f"{each} skipped" for each in words(skipped))]
    return f"{told} ({', '.join(counts)})"


def end_of_piece(content: bytes, low: int, high: int) -> int:
    """Where a piece that must end in [low, high] ends, or the end of the text where that comes first."""
    if high >= len(content):
        return len(content)
    for boundary in (_BLANK_LINE, _LINE_END):
        if found := boundary.search(content, low, high):
            return found.end()
    while high > low and content[high] & 0xC0 == 0x80:  # inside a character
        high -= 1
    return high


_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")
