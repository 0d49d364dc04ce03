"""Token shards: files of tokens behind a header of 256 int32 words, all little-endian.

    word 0    magic, 20240520                  then, from byte 1024:
    word 1    version, 1 or 2                  tokens, two bytes each (version 1) or four (version 2)
    word 2    number of tokens                 (version 2, for vocabularies beyond 65,536, is halfstep's own)

Windows are read in random order, so the kernel is asked not to read ahead (it may read megabytes around two
kilobytes), and all windows of a batch are announced before the first is read.

A flipped byte is a token like any other, and a run would silently learn from it. So before tokens of packed data
are handed out, the checksum of every chunk of 16 KiB that holds them is verified, once: verifying every time would
read eight times the data that is used. Threads may verify concurrently; at worst, both read the same chunk.

A token beyond the vocabulary, which on an accelerator would be an access outside the embedding, is an error that
names shard and offset. The first 2^26 tokens are checked before the run begins: a wrong tokenizer is found at
once.

Without an index (packed.py), a shard with `val` (or `valid`, `validation`) as a word in its name is held out. If
there is none, the last share of the tokens is, starting at the next document if one begins nearby.
"""

import hashlib
import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import open_regular
from halfstep.config.run import DataConfig
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.index import RESTORE, ShardRecord, read_checksums
from halfstep.training.data.types import (
    DamagedDataError,
    DataContentError,
    DataNotFoundError,
    HeldOutError,
    TokenArray,
    VocabularyError,
)
from halfstep.training.files import os_errors

MAGIC = 20240520
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
DOCUMENT_START = 50256

CHUNK = 1 << 14  # bytes that one checksum is of
CHUNKS_AT_ONCE = 64  # that a pass over a whole file reads

SCANNED_AT_ONCE = 1 << 22
READ_AT_ONCE = 1 << 16  # slices of at least this many bytes are announced before they are read
SCANNED_AT_LOAD = 1 << 26
BOUNDARY_REACH = 1 << 20
SAMPLED_PAGES, PAGE = 16, 4096

_HELD_OUT = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)


class ChunkVerifier:
    """Verifies the chunks of one shard, each once. A table of one byte per chunk says which were."""

    def __init__(self, folder: Path, record: ShardRecord, mapped: mmap.mmap):
        self._folder, self._record, self._mapped = folder, record, mapped
        self._checksums: NDArray[np.uint32] = np.empty(0, dtype="<u4")  # read on first use
        self._verified = bytearray()  # 1 per verified chunk; empty until the checksums are read

    def is_verified(self, begin: int, end: int) -> bool:
        """Whether all chunks of bytes begin to end are verified."""
        first, last = begin // CHUNK, -(-end // CHUNK)
        return self._verified.count(1, first, last) == last - first

    def find_damage(self, begin: int, end: int) -> tuple[int, int] | None:
        """Verifies the chunks of bytes begin to end; returns the byte range of the first damaged one."""
        if not self._verified:
            checksums, number = read_checksums(self._folder, self._record), -(-len(self._mapped) // CHUNK)
            if len(checksums) != number:
                raise DamagedDataError(
                    f"`{self._folder / self._record.checksum_file}` holds {len(checksums)} checksums, but its "
                    f"shard has {number} chunks",
                    hint=RESTORE,
                )
            self._checksums, self._verified = checksums, bytearray(number)
        verified, content = self._verified, memoryview(self._mapped)
        for number in range(begin // CHUNK, -(-end // CHUNK)):
            if not verified[number]:
                low = number * CHUNK
                chunk = content[low : low + CHUNK]
                if crc32(chunk) != self._checksums[number]:
                    return low, low + len(chunk)
                verified[number] = 1
        return None


def read_digests(
    path: Path, progress: Callable[[int], object] = lambda num_bytes: None, most: int = sys.maxsize
) -> tuple[str, NDArray[np.uint32]]:
    """Returns the SHA-256 of a file and the checksums of its chunks, in one pass; stops beyond `most` bytes.

    Reports the number of bytes of each read.
    """
    whole, sums = hashlib.sha256(), list[int]()
    with open_regular(path) as file:
        while file.tell() <= most and (content := file.read(CHUNKS_AT_ONCE * CHUNK)):
            whole.update(content)
            sums += [crc32(content[low : low + CHUNK]) for low in range(0, len(content), CHUNK)]
            progress(len(content))
    return whole.hexdigest(), np.array(sums, dtype="<u4")


@dataclass(frozen=True)
class Shard:
    """A part of one file's tokens; `first` is the offset of tokens[0] in the file."""

    path: Path
    tokens: NDArray[Any]  # uint16 or uint32
    first: int = 0
    mapped: mmap.mmap | None = None
    verifier: ChunkVerifier | None = None  # None if the shard was packed without checksums

    def part(self, low: int, high: int) -> "Shard":
        """Returns tokens low to high of this part."""
        return replace(self, tokens=self.tokens[low:high], first=self.first + low)

    def check_size(self) -> None:
        """Refuses a file that was truncated since it was mapped: reading past its end would kill the process."""
        if self.mapped is not None and (now := self.mapped.size()) < (size := len(self.mapped)):
            raise DamagedDataError(
                f"shard `{self.path}` was truncated while it was in use: it has {now} bytes and had {size}",
                hint="restore it, then continue with --resume",
            )

    def announce(self, low: int, high: int) -> None:
        """Tells the kernel that tokens low to high are read soon; returns at once."""
        if self.mapped is not None:
            begin, end = self._byte_range(low, high)
            if self.verifier is not None and not self.verifier.is_verified(begin, end):  # it reads whole chunks
                begin, end = begin // CHUNK * CHUNK, min(-(-end // CHUNK) * CHUNK, len(self.mapped))
            aligned = begin - begin % mmap.PAGESIZE
            self.mapped.madvise(mmap.MADV_WILLNEED, aligned, end - aligned)

    def verify(self, low: int, high: int) -> None:
        """Refuses tokens low to high if a chunk that holds them is damaged."""
        if self.verifier is None:
            return
        begin, end = self._byte_range(low, high)
        if self.verifier.is_verified(begin, end):
            return
        self.check_size()  # chunks reach further than the tokens, and the file may have shrunk meanwhile
        if damage := self.verifier.find_damage(begin, end):
            first, last = (max(0, byte - HEADER_BYTES) // self.tokens.itemsize for byte in damage)
            raise DamagedDataError(
                f"shard `{self.path}` is damaged between bytes {damage[0]:,} and {damage[1]:,} "
                f"(tokens {first:,} to {last:,}): its checksum differs from the packed data",
                hint="copy it back, or remove the folder and pack again; "
                f"`halfstep data verify {self.path.parent}` lists all damage",
            )

    def _byte_range(self, low: int, high: int) -> tuple[int, int]:
        size = self.tokens.itemsize
        return HEADER_BYTES + (self.first + low) * size, HEADER_BYTES + (self.first + high) * size


class ShardedTokens:
    """Shards that read like one array. A slice is checked before it is returned: its bytes, then its tokens."""

    def __init__(self, shards: Sequence[Shard], vocabulary: int):
        self.shards = tuple(shard for shard in shards if len(shard.tokens))
        self.vocabulary = vocabulary
        self._starts = [0, *accumulate(len(shard.tokens) for shard in self.shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, span: slice, /) -> TokenArray:
        low, high, stride = span.indices(len(self))
        if stride != 1:
            raise ValueError("a slice of shards cannot have a step")
        parts = [self._checked(*part) for part in self._parts(low, high)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def part(self, low: int, high: int) -> "ShardedTokens":
        """Returns tokens low to high, mapped but not read."""
        parts = [self.shards[index].part(first, end) for index, first, end in self._parts(low, high)]
        return ShardedTokens(parts, self.vocabulary)

    def locate(self, place: int) -> tuple[str, int]:
        """Returns the file that holds a token, and the token's offset in it."""
        index = bisect_right(self._starts, place) - 1
        shard = self.shards[index]
        return str(shard.path), shard.first + place - self._starts[index]

    def read_into(self, out: NDArray[Any], starts: Sequence[int]) -> None:
        """Fills rows with the tokens at `starts`, announced first, checked together: half the time of slicing."""
        length = out.shape[1]
        for start in starts:
            for index, low, high in self._parts(start, start + length):
                self.shards[index].check_size()
                self.shards[index].announce(low, high)
        for row, start in zip(out, starts, strict=True):
            index = bisect_right(self._starts, start) - 1
            low = start - self._starts[index]
            tokens = self.shards[index].tokens[low : low + length]
            self.shards[index].verify(low, low + len(tokens))
            row[:] = tokens if len(tokens) == length else self[start : start + length]
        if int(out.min()) < 0 or int(out.max()) >= self.vocabulary:  # below 0: a uint32 beyond int32
            for start in starts:
                self[start : start + length]  # raises the error that says which and where

    def scan(self, limit: int) -> None:
        """Checks the first `limit` tokens against the vocabulary, chunk by chunk."""
        for low in range(0, min(limit, len(self)), SCANNED_AT_ONCE):
            self[low : min(low + SCANNED_AT_ONCE, limit)]

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        index = bisect_right(self._starts, low) - 1
        while low < high:
            start, end = self._starts[index], self._starts[index + 1]
            yield index, low - start, min(high, end) - start
            low, index = end, index + 1

    def _checked(self, index: int, low: int, high: int) -> TokenArray:
        shard = self.shards[index]
        shard.check_size()
        tokens = shard.tokens[low:high]
        if tokens.nbytes >= READ_AT_ONCE:
            shard.announce(low, high)
        shard.verify(low, high)
        if self.vocabulary < 1 << 8 * tokens.itemsize and int(tokens.max()) >= self.vocabulary:
            at = int(tokens.argmax())
            raise VocabularyError(
                f"`{shard.path}` contains token {int(tokens[at])} at offset {shard.first + low + at}, but the "
                f"vocabulary has only {self.vocabulary} tokens, 0 to {self.vocabulary - 1}",
                hint="set model.vocabulary to the size of the tokenizer the shards were made with; if it is that "
                "already, the shard is damaged, and `halfstep data verify` says where",
            )
        return tokens


def header(num_tokens: int, dtype: np.dtype[Any]) -> bytes:
    """Returns the 1,024 bytes before the tokens of a shard."""
    words = np.zeros(HEADER_WORDS, dtype="<i4")
    words[:3] = MAGIC, next(version for version, known in DTYPES.items() if known == dtype), num_tokens
    return words.tobytes()


def open_shard(path: Path) -> Shard:
    """Maps a shard whose header agrees with its size."""
    with os_errors(DataNotFoundError, f"cannot read shard `{path}`"), open_regular(path) as file:
        size, raw = path.stat().st_size, file.read(HEADER_BYTES)
    again = "download or write it again"
    if len(raw) < HEADER_BYTES:
        header_only = f"it has {size} bytes, and the header alone takes {HEADER_BYTES}"
        raise DamagedDataError(f"shard `{path}` is truncated: {header_only}", hint=again)
    magic, version, num_tokens = (int(word) for word in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataContentError(
            f"`{path}` is not a token shard: its magic number is {magic}, expected {MAGIC}",
            hint="a shard starts with 256 int32 words: 20240520, 1, the number of tokens",
        )
    if version not in DTYPES:
        known = "1 (uint16 tokens) or 2 (uint32 tokens)"
        raise DataContentError(f"shard `{path}` has version {version}, expected {known}", hint=again)
    if num_tokens < 1:
        raise DataContentError(
            f"shard `{path}` holds {num_tokens} tokens by its header", hint="leave empty shards out"
        )
    dtype = DTYPES[version]
    expected = HEADER_BYTES + dtype.itemsize * num_tokens
    if size != expected:
        problem = "truncated" if size < expected else "longer than its header says"
        sizes = f"it has {size} bytes, expected {expected} for {num_tokens} tokens"
        raise DamagedDataError(f"shard `{path}` is {problem}: {sizes}", hint=again)
    with open_regular(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    # Not np.memmap: slicing one costs ten times as much as slicing an array.
    tokens = np.frombuffer(mapped, dtype=dtype, count=num_tokens, offset=HEADER_BYTES)
    return Shard(path, tokens, mapped=mapped)


def shards_corpus(paths: Sequence[Path], share: float, vocabulary: int, source: str) -> Corpus:
    """Builds a corpus from shards, in the order of their names."""
    shards = [open_shard(path) for path in sorted(paths)]
    held_out = [shard for shard in shards if _HELD_OUT.search(shard.path.name)]
    if not (others := [shard for shard in shards if not _HELD_OUT.search(shard.path.name)]):
        raise HeldOutError(
            f"`{source}` has no shard to train on: the name of `{held_out[0].path.name}` marks it as held out",
            hint="add training shards, or rename it without `val`",
        )
    train = ShardedTokens(others, vocabulary)
    if held_out:
        name = held_out[0].path.name
        check_unused(share, f"the shards of `{source}` with `val` in their names are held out, such as `{name}`")
        validation = ShardedTokens(held_out, vocabulary)
    else:
        train, validation = split_tail(train, share)
    for side in (train, validation):
        side.scan(SCANNED_AT_LOAD)
    return Corpus(
        train=train,
        validation=validation,
        description=(
            f"{len(shards)} token shards `{source}`: {len(train):,} tokens to train on, "
            f"{len(validation):,} held out"
        ),
        digest=shards_digest(shards, len(train)),
        bytes_per_token=None,
    )


def check_unused(share: float, why: str) -> None:
    """Refuses a share to hold out of data that has its own held-out side; the default share is not used then."""
    if share != DataConfig.validation:
        default = f"leave data.validation out, or at its default of {DataConfig.validation}"
        raise HeldOutError(f"data.validation = {share:g} changes nothing: {why}", hint=default)


def split_tail(
    tokens: ShardedTokens, share: float, separator: int | None = DOCUMENT_START
) -> tuple[ShardedTokens, ShardedTokens]:
    """Splits off the last share of the tokens, at the next start of a document if one is within reach."""
    size = max(1, round(share * len(tokens)))
    at = max(1, len(tokens) - size)
    if separator is not None:
        starts = np.flatnonzero(tokens[at : at + min(BOUNDARY_REACH, size // 2)] == separator)
        at += int(starts[0]) if len(starts) else 0
    return tokens.part(0, at), tokens.part(at, len(tokens))


def shards_digest(shards: Sequence[Shard], num_train: int) -> str:
    """Identifies shards by names, sizes, sampled pages (including the first and the last), and the split."""
    identity = hashlib.blake2b(digest_size=16)
    for shard in shards:
        itemsize = shard.tokens.itemsize
        num_bytes = itemsize * len(shard.tokens)
        identity.update(f"{shard.path.name}\0{num_bytes}\0".encode())
        last = max(0, num_bytes - PAGE)
        for place in {round(last * page / (SAMPLED_PAGES - 1)) // itemsize: None for page in range(SAMPLED_PAGES)}:
            identity.update(shard.tokens[place : place + PAGE // itemsize].tobytes())
    identity.update(str(num_train).encode())
    return identity.hexdigest()
