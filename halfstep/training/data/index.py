"""The index of packed data: its shards, what they were made from, and the digests that prove both.

    DIR/index.json            this index
    DIR/train_000000.bin      token shards (shards.py describes the format); val_* are held out
    DIR/train_000000.crc      CRC-32 of each chunk of 16 KiB of the shard, from byte 0 (the last may be short)
    DIR/tokenizer.json        the tokenizer (or tokenizer.model, tokenizer.tiktoken.json; none for bytes)
    DIR/token_bytes.npy       the bytes that each token stands for, if they are known

Opening packed data must not read it, so it is checked at three levels:

    every opening             digest, tokenizer, names and sizes of all shards, their headers
    first read of tokens      the checksum of each chunk that holds them
    `halfstep data verify`    every byte, against the SHA-256 of each shard; chunks locate the damage

It holds no times and no paths but the sources as given: packing the same text twice gives the same bytes.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import MOST_TABLE, open_regular, parse_json, read_bytes
from halfstep.config.schema import Count, Share, build
from halfstep.core.errors import ConfigError
from halfstep.training.data.tokenizer_base import TokenizerIdentity
from halfstep.training.data.types import DamagedDataError, DataNotFoundError
from halfstep.training.files import os_errors, table_digest, write_whole

FORMAT = 1
# The first entry of a sealed file: a folder of text may well hold an unrelated index.json.
MARK = "halfstep packed data"
INDEX, STATE, TOKEN_BYTES = "index.json", "packing.json", "token_bytes.npy"
RESTORE = "copy it back, or remove the folder and pack again"
T = TypeVar("T")
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class ShardRecord:
    """One shard."""

    name: str
    tokens: Count
    bytes: Count | None  # the text its tokens stand for, if known
    documents: Count  # that begin in it
    sha256: str
    sums: str = ""  # the SHA-256 of its checksum file; empty if packed by a version without checksums

    @property
    def checksum_file(self) -> str:
        """The name of the file that holds the shard's checksums."""
        return str(Path(self.name).with_suffix(".crc"))


@dataclass(frozen=True)
class SideRecord:
    """All shards of a side. `text_bytes` counts the UTF-8 of its documents as they were read."""

    tokens: Count
    documents: Count
    text_bytes: Count
    token_bytes: Count | None
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class SourceRecord:
    """A source that was packed, as it was given, and what identifies it."""

    given: str
    files: Count
    bytes: Count
    digest: str


@dataclass(frozen=True)
class Packing:
    """What was requested; a part of it may be None."""

    sources: tuple[SourceRecord, ...]
    field: str
    only: str | None
    validation: Share | SourceRecord  # a share of the documents, or a source that was held out
    shard_tokens: Count


@dataclass(frozen=True)
class Index:
    """What a folder of packed data holds."""

    version: str  # of halfstep
    tokenizer: TokenizerIdentity
    packing: Packing
    skipped: Mapping[str, Count]  # how many files and documents were left out, by reason
    token_bytes: str | None  # SHA-256 of the table
    train: SideRecord
    val: SideRecord
    digest: str = ""

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """The shards of both sides."""
        return self.train.shards + self.val.shards


def write_index(folder: Path, index: Index) -> Index:
    """Writes the index and returns it with its digest."""
    content = seal({key: value for key, value in dataclasses.asdict(index).items() if key != "digest"})
    write_whole(folder / INDEX, content)
    return dataclasses.replace(index, digest=json.loads(content)["digest"])


def read_index(folder: Path) -> Index:
    """Reads the index of a folder; refuses one that was edited or damaged."""
    path = folder / INDEX
    if not path.is_file() and (folder / STATE).is_file():
        raise DataNotFoundError(
            f"the packing in `{folder}` is not finished",
            hint="run the same `halfstep data pack` again to resume it",
        )
    if not path.is_file():
        gone = "is not a folder of packed data" if folder.exists() else "cannot be read: there is no folder"
        raise DataNotFoundError(f"`{folder}` {gone}", hint="name a folder that `halfstep data pack` wrote")
    index = read_verified(path, Index)
    for name in (*(record.name for record in index.shards), index.tokenizer.file):
        if name is not None:
            check_name(name, path)
    return index


def read_listed(path: Path, sha256: str | None) -> bytes:
    """Reads a file of packed data whose SHA-256 the index lists."""
    with os_errors(DamagedDataError, f"cannot read `{path}`", RESTORE):
        content = read_bytes(path, MOST_TABLE)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedDataError(
            f"`{path}` was changed after it was written: its SHA-256 differs from the index", hint=RESTORE
        )
    return content


def read_tokenizer_file(folder: Path, identity: TokenizerIdentity) -> bytes:
    """Returns the content of the tokenizer file that the data was packed with; empty for bytes."""
    return read_listed(folder / identity.file, identity.sha256) if identity.file else b""


def read_checksums(folder: Path, record: ShardRecord) -> NDArray[np.uint32]:
    """Returns the checksums of a shard's chunks."""
    return np.frombuffer(read_listed(folder / record.checksum_file, record.sums), dtype="<u4")


def is_packed(folder: Path) -> bool:
    """Whether `halfstep data pack` wrote a folder, or began to."""
    return ((folder / INDEX).is_file() and any(folder.glob("*.bin"))) or is_marked(folder)


def is_marked(folder: Path) -> bool:
    """Whether a folder holds a file that marks it as packed data, finished or not."""
    for name in (INDEX, STATE):
        with suppress(OSError), open_regular(folder / name) as file:
            if MARK.encode() in file.read(64):
                return True
    return False


def seal(table: Mapping[str, Any]) -> bytes:
    """Returns a table as JSON that contains a digest of itself."""
    marked = {"kind": MARK, "format": FORMAT, **table}
    return json.dumps({**marked, "digest": table_digest(marked)}, indent=1).encode() + b"\n"


def read_verified(path: Path, kind: type[T]) -> T:
    """Reads a sealed table of some kind; checks its digest and its fields."""
    with os_errors(DataNotFoundError, f"cannot read `{path}`", "name a folder that `halfstep data pack` wrote"):
        content = read_bytes(path, MOST_TABLE)
    try:
        table = parse_json(content)
    except ValueError as error:
        raise DamagedDataError(f"`{path}` is not JSON: {error}", hint=RESTORE) from None
    if not isinstance(table, dict) or table.get("digest") != table_digest(table):
        raise DamagedDataError(f"`{path}` was changed after it was written: its digest is wrong", hint=RESTORE)
    if table.get("format") != FORMAT:
        raise DamagedDataError(
            f"`{path}` has format {table.get('format')}; this version of halfstep reads format {FORMAT}",
            hint="use the version of halfstep that wrote it, or pack into another folder",
        )
    try:
        return build(kind, table, others=True)
    except ConfigError as error:
        raise DamagedDataError(f"`{path}` is not what halfstep writes: {error.message}", hint=RESTORE) from None


def check_name(name: str, path: Path) -> None:
    """Refuses a name that points out of the folder of the table that holds it."""
    if not _NAME.fullmatch(name):
        raise DamagedDataError(
            f"`{path}` points to `{name}`, which is not a file in its own folder",
            hint="halfstep did not write this index: do not use data you do not trust; remove the folder",
        )
