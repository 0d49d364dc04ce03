"""The SHA-256 of a shard's file, and the checksums that are verified before its tokens are used.

    whole file    SHA-256, in the index
    chunk         16 KiB each, from byte 0 (the last may be short): CRC-32, little-endian, in a file of their own

A flipped byte is a token like any other, and a run would silently learn from it. So before tokens are handed out,
the checksum of every chunk that holds them is verified, once: verifying every time would read eight times the data
that is used. The checksum file is read when the shard is first touched; it and the table take 5 bytes per chunk.
Threads may verify concurrently; at worst, both read the same chunk.
"""

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import MOST_TABLE, open_regular, read_bytes
from halfstep.training.data.index import RESTORE, ShardRecord
from halfstep.training.data.tokenizer_base import TokenizerIdentity
from halfstep.training.data.types import DamagedDataError
from halfstep.training.files import os_errors

CHUNK = 1 << 14
CHUNKS_AT_ONCE = 64  # that a pass over a whole file reads


@dataclass(frozen=True)
class Digests:
    """What a pass over a whole file computes."""

    sha256: str
    chunks: bytes  # the checksums of its chunks: the content of the checksum file

    @property
    def sums(self) -> str:
        """The SHA-256 of the checksum file."""
        return hashlib.sha256(self.chunks).hexdigest()


def digests(path: Path) -> Digests:
    """Computes the SHA-256 of a file and the checksums of its chunks in one pass."""
    whole, sums = hashlib.sha256(), list[int]()
    for content in read_blocks(path):
        whole.update(content)
        sums += checksums_of(content)
    return Digests(whole.hexdigest(), np.array(sums, dtype="<u4").tobytes())


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of a file, several whole chunks at a time."""
    with open_regular(path) as file:
        while content := file.read(CHUNKS_AT_ONCE * CHUNK):
            yield content


def checksums_of(content: bytes) -> list[int]:
    """Returns the checksum of each chunk of `content`, which begins at the start of a chunk."""
    return [crc32(content[low : low + CHUNK]) for low in range(0, len(content), CHUNK)]


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


class ChunkVerifier:
    """Verifies the chunks of one shard, each once."""

    def __init__(self, folder: Path, record: ShardRecord, mapped: mmap.mmap):
        self._folder, self._record, self._mapped = folder, record, mapped
        self._checksums: NDArray[np.uint32] = np.empty(0, dtype="<u4")  # read on first use
        self._verified = bytearray()  # 1 per verified chunk; empty until the checksums are read

    def is_verified(self, begin: int, end: int) -> bool:
        """Whether all chunks of bytes begin to end are verified."""
        first, last = begin // CHUNK, -(-end // CHUNK)  # inlined: this runs twice per window
        return self._verified.count(1, first, last) == last - first

    def bytes_to_read(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the byte range to read in order to use bytes begin to end: whole chunks until verified."""
        if self.is_verified(begin, end):
            return begin, end
        chunks = _chunks(begin, end)
        return chunks.start * CHUNK, min(chunks.stop * CHUNK, len(self._mapped))

    def find_damage(self, begin: int, end: int) -> tuple[int, int] | None:
        """Verifies the chunks of bytes begin to end; returns the byte range of the first damaged one."""
        if not self._verified:
            checksums, number = read_checksums(self._folder, self._record), len(_chunks(0, len(self._mapped)))
            if len(checksums) != number:
                raise DamagedDataError(
                    f"`{self._folder / self._record.checksum_file}` holds {len(checksums)} checksums, but its "
                    f"shard has {number} chunks",
                    hint=RESTORE,
                )
            self._checksums, self._verified = checksums, bytearray(number)
        verified, content = self._verified, memoryview(self._mapped)
        for number in _chunks(begin, end):
            if not verified[number]:
                low = number * CHUNK
                chunk = content[low : low + CHUNK]
                if crc32(chunk) != self._checksums[number]:
                    return low, low + len(chunk)
                verified[number] = 1
        return None


def _chunks(begin: int, end: int) -> range:
    return range(begin // CHUNK, -(-end // CHUNK))
