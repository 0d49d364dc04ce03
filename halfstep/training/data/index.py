"""The index of packed data: its shards, what they were made from, and the digests that prove both.

    DIR/index.json            this index
    DIR/train_000000.bin      token shards (shards.py describes the format); val_* are held out
    DIR/train_000000.crc      CRC-32 of each chunk of the shard (checksums.py)
    DIR/tokenizer.json        the tokenizer (or tokenizer.model, tokenizer.tiktoken.json; none for bytes)
    DIR/token_bytes.npy       the bytes that each token stands for, if they are known

Opening packed data must not read it, so it is checked at three levels:

    every opening             digest, tokenizer, names and sizes of all shards, their headers, four pages of each
    first read of tokens      the checksum of each chunk that holds them
    `halfstep data verify`    every byte, against the SHA-256 of each shard; regions and chunks locate the damage

It holds no times and no paths but the sources as given: packing the same text twice gives the same bytes.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.training.data.tokenizer_base import TokenizerIdentity
from halfstep.training.data.types import DataError
from halfstep.training.files import os_errors, write_whole

FORMAT = 1
# The first entry of a sealed file: a folder of text may well hold an unrelated index.json.
MARK = "halfstep packed data"
INDEX, STATE, TOKEN_BYTES = "index.json", "packing.json", "token_bytes.npy"
RESTORE = "copy it back, or run the same `halfstep data pack` again to restore it"
_PACK_AGAIN = "copy it back, or remove the folder and pack again"
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class ShardRecord:
    """One shard."""

    name: str
    tokens: int
    bytes: int | None  # the text its tokens stand for, if known
    documents: int  # that begin in it
    sha256: str
    pages: str
    regions: tuple[str, ...]
    sums: str = ""  # the SHA-256 of its checksum file; empty if packed by a version without checksums

    @property
    def checksum_file(self) -> str:
        """The name of the file that holds the shard's checksums."""
        return str(Path(self.name).with_suffix(".crc"))


@dataclass(frozen=True)
class SideRecord:
    """All shards of a side. `text_bytes` counts the UTF-8 of its documents as they were read."""

    tokens: int
    documents: int
    text_bytes: int
    token_bytes: int | None
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class Index:
    """What a folder of packed data holds."""

    version: str  # of halfstep
    tokenizer: TokenizerIdentity
    packing: Mapping[str, Any]  # the request: sources, field, only, validation, shard_tokens
    skipped: Mapping[str, int]  # how many files and documents were left out, by reason
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
    content = sealed({key: value for key, value in dataclasses.asdict(index).items() if key != "digest"})
    write_whole(folder / INDEX, content)
    return dataclasses.replace(index, digest=json.loads(content)["digest"])


def read_index(folder: Path) -> Index:
    """Reads the index of a folder; refuses one that was edited or damaged."""
    path = folder / INDEX
    if not path.is_file() and (folder / STATE).is_file():
        raise DataError(
            f"the packing in `{folder}` is not finished",
            hint="run the same `halfstep data pack` again to resume it",
        )
    table = unsealed(path)
    try:
        parts = {field.name: table[field.name] for field in dataclasses.fields(Index)}
        for side in ("train", "val"):
            parts[side] = SideRecord(**{**table[side], "shards": shard_records(table[side]["shards"], path)})
        parts["tokenizer"] = TokenizerIdentity(**table["tokenizer"])
        if parts["tokenizer"].file is not None:
            _check_name(parts["tokenizer"].file, path)
        return Index(**parts)
    except (KeyError, TypeError) as error:
        raise DataError(f"`{path}` lacks a part of an index: {error}", hint=_PACK_AGAIN) from None


def is_packed(folder: Path) -> bool:
    """Whether `halfstep data pack` wrote a folder, or began to."""
    return ((folder / INDEX).is_file() and any(folder.glob("*.bin"))) or is_marked(folder)


def is_marked(folder: Path) -> bool:
    """Whether a folder holds a file that marks it as packed data, finished or not."""
    for name in (INDEX, STATE):
        with suppress(OSError), open(folder / name, "rb") as file:
            if MARK.encode() in file.read(64):
                return True
    return False


def sealed(table: Mapping[str, Any]) -> bytes:
    """Returns a table as JSON that contains a digest of itself."""
    marked = {"kind": MARK, "format": FORMAT, **table}
    return json.dumps({**marked, "digest": _digest(marked)}, indent=1).encode() + b"\n"


def unsealed(path: Path) -> dict[str, Any]:
    """Reads a sealed table and checks its digest."""
    with os_errors(DataError, f"cannot read `{path}`", "name a folder that `halfstep data pack` wrote"):
        content = path.read_bytes()
    try:
        table = json.loads(content)
    except ValueError as error:
        raise DataError(f"`{path}` is not JSON: {error}", hint=_PACK_AGAIN) from None
    if not isinstance(table, dict) or table.get("digest") != _digest(table):
        raise DataError(f"`{path}` was changed after it was written: its digest is wrong", hint=_PACK_AGAIN)
    if table.get("format") != FORMAT:
        raise DataError(
            f"`{path}` has format {table.get('format')}; this version of halfstep reads format {FORMAT}",
            hint="use the version of halfstep that wrote it, or pack into another folder",
        )
    return table


def _digest(table: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shard_records(tables: Iterable[Mapping[str, Any]], path: Path) -> tuple[ShardRecord, ...]:
    """Builds the records of shards from the JSON at a path."""
    records = tuple(ShardRecord(**{**table, "regions": tuple(table["regions"])}) for table in tables)
    for record in records:
        _check_name(record.name, path)
    return records


def _check_name(name: str, path: Path) -> None:
    if not _NAME.fullmatch(name):
        raise DataError(
            f"`{path}` points to `{name}`, which is not a file in its own folder",
            hint="halfstep did not write this index: do not use data you do not trust; remove the folder",
        )
