"""The index of packed data: what its shards are, what made them, and the digests that prove both.

    DIR/index.json            this
    DIR/train_000000.bin      token shards, as `halfstep.training.data.shards` describes them; val_* are held out
    DIR/train_000000.crc      CRC-32 of each granule (16 KiB from byte 0 on, the last maybe short), little-endian
    DIR/tokenizer.json        the tokenizer (or tokenizer.model, tokenizer.tiktoken.json; bytes have none)
    DIR/token_bytes.npy       the bytes that each token stands for, where they are known

Opening packed data must cost no reading of it, so what the index says is checked in three ways. At every opening:
its own digest, the names and sizes of all shards, their headers, four pages of each, the tokenizer; a shard that
is missing, cut short, or in the place of another is found in milliseconds. When tokens are first read: the
checksum of each granule they lie in (checksums.py). When asked (`halfstep data verify`): every
byte, against the SHA-256 of the whole shard, and where that fails against the digests of its regions of 16 MiB,
which say where the damage is.

The index holds no times and no paths but the sources' names as they were given, so that packing the same text
twice gives the same bytes.
"""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from zlib import crc32

from halfstep.training.data.corpus import DataError
from halfstep.training.data.tokenizers import PACKED_INDEX, Identity
from halfstep.training.files import write_whole

FORMAT = 1
# Stands at the beginning of what is sealed: a folder of text may well hold an index.json of its own.
MARK = "halfstep packed data"
INDEX, STATE, TOKEN_BYTES = PACKED_INDEX, "packing.json", "token_bytes.npy"
REGION, GRANULE = 1 << 24, 1 << 14
PAGE, SAMPLED = 4096, 4
_NAME = re.compile(r"\w[\w.-]*")
MEND = "copy it back, or give the same `halfstep data pack` again: it makes what is lost again"
_ANEW = "copy it back, or remove the folder and pack again"


@dataclass(frozen=True)
class ShardRecord:
    """One shard. `bytes` is the text its tokens stand for, None where that is not known.

    `sums` is the SHA-256 of the file with its granules' checksums; "" where it was packed before there were any.
    """

    name: str
    tokens: int
    bytes: int | None
    documents: int  # that begin in it
    sha256: str
    pages: str
    regions: tuple[str, ...]
    sums: str = ""

    @property
    def sidecar(self) -> str:
        """The name of the file with the checksums."""
        return str(Path(self.name).with_suffix(".crc"))


@dataclass(frozen=True)
class SideRecord:
    """All shards of a side. `text_bytes` is the UTF-8 of its documents as they were read."""

    tokens: int
    documents: int
    text_bytes: int
    token_bytes: int | None
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class Index:
    """What packed data is."""

    version: str  # of halfstep
    tokenizer: Identity
    packing: Mapping[str, Any]  # what was asked for: sources, field, only, validation, shard_tokens
    skipped: Mapping[str, int]  # files and documents that are not in it, by what they were
    token_bytes: str | None  # SHA-256 of the table
    train: SideRecord
    val: SideRecord
    digest: str = ""

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """Those of both sides."""
        return self.train.shards + self.val.shards


def write_index(folder: Path, index: Index) -> Index:
    """Writes the index; the digest it was given comes back with it."""
    written = sealed({key: value for key, value in dataclasses.asdict(index).items() if key != "digest"})
    write_whole(folder / INDEX, written)
    return dataclasses.replace(index, digest=json.loads(written)["digest"])


def read_index(folder: Path) -> Index:
    """The index of a folder; one that was changed by hand or by damage is refused."""
    path = folder / INDEX
    if not path.is_file() and (folder / STATE).is_file():
        raise DataError(
            f"the packing of `{folder}` is not finished",
            hint="run the same `halfstep data pack` again: it goes on",
        )
    table = unsealed(path)
    try:
        return Index(
            version=table["version"],
            tokenizer=_tokenizer(table["tokenizer"], path),
            packing=table["packing"],
            skipped=table["skipped"],
            token_bytes=table["token_bytes"],
            train=_side(table["train"], path),
            val=_side(table["val"], path),
            digest=table["digest"],
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"`{path}` lacks what an index holds: {error}", hint=_ANEW) from None


def is_packed(folder: Path) -> bool:
    """Whether a folder is what `halfstep data pack` wrote, or has begun to write."""
    if (folder / INDEX).is_file() and any(folder.glob("*.bin")):
        return True
    return is_marked(folder)


def is_marked(folder: Path) -> bool:
    """Whether a folder says of itself that it is packed data, begun or finished."""
    return any(_has_mark(folder / name) for name in (INDEX, STATE))


def _has_mark(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK.encode() in file.read(64)
    except OSError:
        return False


def sealed(table: Mapping[str, Any]) -> bytes:
    """A table as JSON with the digest of all the rest in it."""
    marked = {"kind": MARK, "format": FORMAT, **table}
    return json.dumps({**marked, "digest": _digest(marked)}, indent=1).encode() + b"\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The table back, if it is what was sealed."""
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"`{path}` cannot be read: {error.strerror or error}",
            hint="name a folder that `halfstep data pack` wrote",
        ) from None
    except ValueError as error:
        raise DataError(f"`{path}` is no JSON: {error}", hint=_ANEW) from None
    if not isinstance(table, dict) or table.get("digest") != _digest(table):
        raise DataError(
            f"`{path}` was changed after it was written: its digest does not fit",
            hint=_ANEW,
        )
    if table.get("format") != FORMAT:
        raise DataError(
            f"`{path}` has format {table.get('format')}, and this halfstep reads {FORMAT}",
            hint="use the version of halfstep that wrote it, or pack into another folder",
        )
    return table


def _digest(table: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shard_records(tables: Iterable[Mapping[str, Any]], path: Path) -> tuple[ShardRecord, ...]:
    """Shards out of the JSON at a path."""
    records = tuple(ShardRecord(**{**table, "regions": tuple(table["regions"])}) for table in tables)
    for record in records:
        _check_name(record.name, path)
    return records


def _side(table: Mapping[str, Any], path: Path) -> SideRecord:
    return SideRecord(**{**table, "shards": shard_records(table["shards"], path)})


def _tokenizer(table: Mapping[str, Any], path: Path) -> Identity:
    identity = Identity(**table)
    if identity.file is not None:
        _check_name(identity.file, path)
    return identity


def _check_name(name: str, path: Path) -> None:
    """Refuses what is no name of a file beside the index."""
    if not _NAME.fullmatch(name):
        raise DataError(
            f"`{path}` points to `{name}`; packed data is the files in its own folder, and no other",
            hint="no halfstep wrote it: do not read what you do not trust; remove the folder",
        )


# --- a shard's digests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digests:
    """Those of a whole file."""

    sha256: str
    regions: tuple[str, ...]
    granules: bytes  # their checksums, as the sidecar holds them

    @property
    def sums(self) -> str:
        """The SHA-256 of the sidecar."""
        return hashlib.sha256(self.granules).hexdigest()


def digests(path: Path) -> Digests:
    """The SHA-256 of a file, a digest of each region of it, and the checksums of its granules, in one pass."""
    whole, regions, granules = hashlib.sha256(), [], _GranuleSums()
    for content in read_regions(path):
        whole.update(content)
        regions.append(region_digest(content))
        granules.update(content)
    return Digests(whole.hexdigest(), tuple(regions), granules.content())


@final
class _GranuleSums:
    """The checksums of a file that comes in pieces of any size."""

    def __init__(self) -> None:
        self._sums = list[int]()
        self._room = 0  # in the granule that the last sum is of

    def update(self, content: bytes) -> None:
        """Goes on with the next piece."""
        rest = memoryview(content)
        while len(rest):
            if not self._room:
                self._sums.append(0)
                self._room = GRANULE
            part, rest = rest[: self._room], rest[self._room :]
            self._sums[-1] = crc32(part, self._sums[-1])
            self._room -= len(part)

    def content(self) -> bytes:
        """What the sidecar holds."""
        return struct.pack(f"<{len(self._sums)}I", *self._sums)


def read_sums(folder: Path, record: ShardRecord) -> bytes:
    """The checksums of a shard's granules, if they are those that the index lists."""
    path = folder / record.sidecar
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror or error}", hint=MEND) from None
    if hashlib.sha256(content).hexdigest() != record.sums:
        raise DataError(f"`{path}` was changed after it was written: its SHA-256 is not the index's", hint=MEND)
    return content


def read_regions(path: Path) -> Iterator[bytes]:
    """A file, a region at a time."""
    with open(path, "rb") as file:
        while content := file.read(REGION):
            yield content


def region_digest(content: bytes) -> str:
    """The digest of one region."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def page_digest(path: Path) -> str:
    """The digest of four pages of a file, the first and the last among them: what a mixed-up shard differs in."""
    identity = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        last = max(0, file.seek(0, 2) - PAGE)
        for sample in range(SAMPLED):
            file.seek(last * sample // (SAMPLED - 1))
            identity.update(file.read(PAGE))
    return identity.hexdigest()
