"""Token shards: files of tokens behind a header of 256 int32 words, all little-endian.

    word 0    magic, 20240520                  then, from byte 1024:
    word 1    version, 1 or 2                  tokens, two bytes each (version 1) or four (version 2)
    word 2    number of tokens
    others    unused

Version 1 is what others write too; version 2 is for vocabularies beyond 65,536, and ours alone.

Shards are memory-mapped: opening a thousand of them reads a thousand headers. Windows are read in random order, so
the kernel is told to read nothing around them (it may read megabytes ahead, for two kilobytes), and which windows
come next is told before they are read, so that a disk brings a batch at once and not window after window.

What cannot be checked by header and size is checked when it is read: a token beyond the vocabulary, which on an
accelerator would be an access outside the embedding, is an error that names shard and offset. The first 2^26
tokens are checked before the run begins, so that a wrong tokenizer is found at once. Of packed shards, the bytes
themselves are checked before their tokens are handed out (`halfstep.training.data.checksums`).

A folder that `halfstep data pack` wrote has an index, and is opened by packed.py. Without one, a
shard with the word `val` (or `valid`, `validation`) in its name is held out. When none is, the last share
of the tokens is held out, from the next document on if it begins within reach: document starts are marked by
GPT-2's <|endoftext|>, 50256.
"""

import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.checksums import Granules
from halfstep.training.data.corpus import Corpus, DataError, TokenArray

MAGIC = 20240520
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
DOCUMENT_START = 50256

SCANNED_AT_ONCE = 1 << 22
READ_AT_ONCE = 1 << 16  # bytes from which on a slice is asked for before it is read
SCANNED_AT_LOAD = 1 << 26
BOUNDARY_REACH = 1 << 20
SAMPLED_PAGES, PAGE = 16, 4096

_HELD_OUT = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Shard:
    """A part of one file's tokens; `first` is the offset of tokens[0] in the file."""

    path: Path
    tokens: NDArray[Any]  # uint16 or uint32
    first: int = 0
    mapped: mmap.mmap | None = None
    granules: Granules | None = None  # what is known of the file's bytes; None where no checksums were packed

    def part(self, low: int, high: int) -> "Shard":
        """Tokens low to high of this part."""
        return replace(self, tokens=self.tokens[low:high], first=self.first + low)

    def check(self) -> None:
        """Refuses a file that was cut short since it was mapped: reading past its end would kill the process."""
        if self.mapped is not None and (now := self.mapped.size()) < (size := len(self.mapped)):
            raise DataError(
                f"shard `{self.path}` was cut short while it was in use: it has {now} bytes, and had {size}",
                hint="put it back as it was, then go on with --resume",
            )

    def expect(self, low: int, high: int) -> None:
        """Says that tokens low to high are read soon; returns at once."""
        if self.mapped is not None and hasattr(self.mapped, "madvise"):
            begin, end = self._span(low, high)
            if self.granules is not None:
                begin, end = self.granules.to_read(begin, end)
            aligned = begin - begin % mmap.PAGESIZE
            self.mapped.madvise(mmap.MADV_WILLNEED, aligned, end - aligned)

    def prove(self, low: int, high: int) -> None:
        """Refuses tokens low to high where the bytes around them are not what was packed."""
        if self.granules is None:
            return
        begin, end = self._span(low, high)
        if self.granules.are_good(begin, end):
            return
        self.check()  # it may be shorter than when it was asked, and granules reach further than the tokens
        if damage := self.granules.find_damage(begin, end):
            first, last = (max(0, byte - HEADER_BYTES) // self.tokens.itemsize for byte in damage)
            raise DataError(
                f"shard `{self.path}` is damaged between bytes {damage[0]:,} and {damage[1]:,} "
                f"(tokens {first:,} to {last:,}): its checksum is not the one it was packed with",
                hint="copy it back, or remove it and give the same `halfstep data pack` again: it makes what is "
                f"lost again; `halfstep data verify {self.path.parent}` says what else is damaged",
            )

    def _span(self, low: int, high: int) -> tuple[int, int]:
        """The bytes of the file that tokens low to high are."""
        size = self.tokens.itemsize
        return HEADER_BYTES + (self.first + low) * size, HEADER_BYTES + (self.first + high) * size


@final
class ShardedTokens:
    """Shards that read like one array. A slice is checked before it is handed out: bytes, then vocabulary."""

    def __init__(self, shards: Sequence[Shard], vocabulary: int):
        self.shards = tuple(shard for shard in shards if len(shard.tokens))
        self.vocabulary = vocabulary
        self._starts = [0, *accumulate(len(shard.tokens) for shard in self.shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, span: slice, /) -> TokenArray:
        low, high, stride = span.indices(len(self))
        if stride != 1:
            raise ValueError("a slice of shards has no step")
        parts = [self._checked(*part) for part in self._parts(low, high)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def part(self, low: int, high: int) -> "ShardedTokens":
        """Tokens low to high, still mapped and not read."""
        parts = [self.shards[index].part(first, end) for index, first, end in self._parts(low, high)]
        return ShardedTokens(parts, self.vocabulary)

    def locate(self, place: int) -> tuple[str, int]:
        """The file that holds a token, and the token's offset in it."""
        index = bisect_right(self._starts, place) - 1
        shard = self.shards[index]
        return str(shard.path), shard.first + place - self._starts[index]

    def read_into(self, out: NDArray[Any], starts: Sequence[int]) -> None:
        """Fills the rows of `out` with the tokens that begin at `starts`.

        All are asked for before the first is read, and checked at once: half of the time of a slice a row.
        """
        length = out.shape[1]
        for start in starts:
            for index, low, high in self._parts(start, start + length):
                self.shards[index].check()
                self.shards[index].expect(low, high)
        for row, start in zip(out, starts, strict=True):
            index = bisect_right(self._starts, start) - 1
            low = start - self._starts[index]
            tokens = self.shards[index].tokens[low : low + length]
            self.shards[index].prove(low, low + len(tokens))
            row[:] = tokens if len(tokens) == length else self[start : start + length]
        if int(out.min()) < 0 or int(out.max()) >= self.vocabulary:  # below 0: a uint32 beyond int32
            for start in starts:
                self[start : start + length]  # says which, and where

    def scan(self, limit: int) -> None:
        """Checks the first `limit` tokens against the vocabulary, a chunk at a time."""
        for low in range(0, min(limit, len(self)), SCANNED_AT_ONCE):
            self[low : min(low + SCANNED_AT_ONCE, limit)]

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Which shards tokens low to high are in, and from where to where."""
        index = bisect_right(self._starts, low) - 1
        while low < high:
            start, end = self._starts[index], self._starts[index + 1]
            yield index, low - start, min(high, end) - start
            low, index = end, index + 1

    def _checked(self, index: int, low: int, high: int) -> TokenArray:
        self.shards[index].check()
        tokens = self.shards[index].tokens[low:high]
        if tokens.nbytes >= READ_AT_ONCE:
            self.shards[index].expect(low, high)
        self.shards[index].prove(low, high)
        if self.vocabulary < 1 << 8 * tokens.itemsize and int(tokens.max()) >= self.vocabulary:
            at, shard = int(tokens.argmax()), self.shards[index]
            raise DataError(
                f"`{shard.path}` holds token {int(tokens[at])} at offset {shard.first + low + at}, and the "
                f"vocabulary has {self.vocabulary} tokens, 0 to {self.vocabulary - 1}",
                hint="set model.vocabulary to that of the tokenizer the shards were made with; if it is that, the "
                "shard is damaged, and `halfstep data verify` says where",
            )
        return tokens


def header(num_tokens: int, dtype: np.dtype[Any]) -> bytes:
    """The 1,024 bytes before the tokens of a shard."""
    words = np.zeros(HEADER_WORDS, dtype="<i4")
    words[:3] = MAGIC, next(version for version, known in DTYPES.items() if known == dtype), num_tokens
    return words.tobytes()


def open_shard(path: Path) -> Shard:
    """A shard, mapped; its header must agree with its size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"shard `{path}` cannot be read: {error.strerror or error}") from None
    if len(raw) < HEADER_BYTES:
        raise DataError(
            f"shard `{path}` is truncated: it has {size} bytes, and its header alone {HEADER_BYTES}",
            hint="fetch or write it again",
        )
    magic, version, num_tokens = (int(word) for word in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataError(
            f"`{path}` is no token shard: its magic number is {magic}, expected {MAGIC}",
            hint="a shard starts with 256 int32 words: 20240520, 1, the number of tokens",
        )
    if version not in DTYPES:
        raise DataError(
            f"shard `{path}` has version {version}, expected 1 (uint16 tokens) or 2 (uint32 tokens)",
            hint="write the shards again in version 1 or 2",
        )
    if num_tokens < 1:
        raise DataError(f"shard `{path}` says it holds {num_tokens} tokens", hint="leave empty shards out")
    dtype = DTYPES[version]
    expected = HEADER_BYTES + dtype.itemsize * num_tokens
    if size != expected:
        fault = "truncated" if size < expected else "longer than its header says"
        raise DataError(
            f"shard `{path}` is {fault}: it has {size} bytes, expected {expected} for {num_tokens} tokens",
            hint="fetch or write it again",
        )
    return _mapped(path, num_tokens, dtype)


def _mapped(path: Path, num_tokens: int, dtype: np.dtype[Any]) -> Shard:
    """The tokens in place. Windows are read in random order, so the kernel is told not to read around them."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_RANDOM)
    # Not np.memmap: a slice of one is one too, which costs ten times as much as a slice of an array.
    tokens = np.frombuffer(mapped, dtype=dtype, count=num_tokens, offset=HEADER_BYTES)
    return Shard(path, tokens, mapped=mapped)


def shards_corpus(paths: Sequence[Path], share: float, vocabulary: int, source: str) -> Corpus:
    """The corpus that some shards make, in the order of their names."""
    shards = [open_shard(path) for path in sorted(paths)]
    held_out = [shard for shard in shards if _HELD_OUT.search(shard.path.name)]
    others = [shard for shard in shards if not _HELD_OUT.search(shard.path.name)]
    if not others:
        raise DataError(
            f"`{source}` has no shard to learn from: `{held_out[0].path.name}` is held out by its name",
            hint="add training shards, or rename it without `val`",
        )
    train = ShardedTokens(others, vocabulary)
    if held_out:
        validation = ShardedTokens(held_out, vocabulary)
    else:
        at = cutting_point(train, share)
        train, validation = train.part(0, at), train.part(at, len(train))
    for side in (train, validation):
        side.scan(SCANNED_AT_LOAD)
    return Corpus(
        train=train,
        validation=validation,
        description=(
            f"{len(shards)} token shards `{source}`: {len(train):,} tokens to learn from, "
            f"{len(validation):,} held out"
        ),
        digest=shards_digest(shards, len(train)),
        bytes_per_token=None,
        num_documents=None,
    )


def cutting_point(tokens: ShardedTokens, share: float, separator: int | None = DOCUMENT_START) -> int:
    """Where the held-out tail begins: at the document that starts next, when one does within reach."""
    size = max(1, round(share * len(tokens)))
    at = max(1, len(tokens) - size)
    reach = min(BOUNDARY_REACH, size // 2)
    starts = np.flatnonzero(tokens[at : at + reach] == separator) if separator is not None else np.empty(0)
    return at + int(starts[0]) if len(starts) else at


def shards_digest(shards: Sequence[Shard], num_train: int) -> str:
    """The identity of shards: names, sizes, sampled pages (first and last among them), and the split."""
    identity = blake2b(digest_size=16)
    for shard in shards:
        itemsize = shard.tokens.itemsize
        num_bytes = itemsize * len(shard.tokens)
        identity.update(f"{shard.path.name}\0{num_bytes}\0".encode())
        last = max(0, num_bytes - PAGE)
        for place in {round(last * page / (SAMPLED_PAGES - 1)) // itemsize: None for page in range(SAMPLED_PAGES)}:
            identity.update(shard.tokens[place : place + PAGE // itemsize].tobytes())
    identity.update(str(num_train).encode())
    return identity.hexdigest()
