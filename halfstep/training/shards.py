"""Token shards: files of uint16 tokens behind a header of 256 int32 words, all little-endian.

    word 0    magic, 20240520                  then, from byte 1024:
    word 1    version, 1                       tokens, two bytes each
    word 2    number of tokens
    others    unused

Shards are memory-mapped: opening a thousand of them reads a thousand headers. What cannot be checked by
header and size is checked when it is read: a token beyond the vocabulary, which on an accelerator would be an
access outside the embedding, is an error that names shard and offset. The first 2^26 tokens are checked
before the run begins, so that a wrong tokenizer is found at once.

A shard with the word `val` (or `valid`, `validation`) in its name is held out. When none is, the last share
of the tokens is held out, from the next document on if it begins within reach: document starts are marked by
GPT-2's <|endoftext|>, 50256.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from halfstep.training.corpus import Corpus, DataError, TokenArray

MAGIC, VERSION = 20240520, 1
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
DOCUMENT_START = 50256

SCANNED_AT_ONCE = 1 << 22
SCANNED_AT_LOAD = 1 << 26
BOUNDARY_REACH = 1 << 20
SAMPLED_PAGES, PAGE = 16, 4096

_HELD_OUT = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Shard:
    """A part of one file's tokens; `first` is the offset of tokens[0] in the file."""

    path: Path
    tokens: NDArray[np.uint16]
    first: int = 0

    def part(self, low: int, high: int) -> "Shard":
        """Tokens low to high of this part."""
        return Shard(self.path, self.tokens[low:high], self.first + low)


@final
class ShardedTokens:
    """Shards that read like one array. A slice is checked against the vocabulary before it is handed out."""

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
        parts = [self._checked(shard) for shard in self._parts(low, high)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def part(self, low: int, high: int) -> "ShardedTokens":
        """Tokens low to high, still mapped and not read."""
        return ShardedTokens(list(self._parts(low, high)), self.vocabulary)

    def scan(self, limit: int) -> None:
        """Checks the first `limit` tokens against the vocabulary, a chunk at a time."""
        for low in range(0, min(limit, len(self)), SCANNED_AT_ONCE):
            self[low : min(low + SCANNED_AT_ONCE, limit)]

    def _parts(self, low: int, high: int) -> Iterator[Shard]:
        index = bisect_right(self._starts, low) - 1
        while low < high:
            start, end = self._starts[index], self._starts[index + 1]
            yield self.shards[index].part(low - start, min(high, end) - start)
            low, index = end, index + 1

    def _checked(self, shard: Shard) -> TokenArray:
        if self.vocabulary <= 0xFFFF and int(shard.tokens.max()) >= self.vocabulary:
            at = int(shard.tokens.argmax())
            raise DataError(
                f"`{shard.path}` holds token {int(shard.tokens[at])} at offset {shard.first + at}, and the "
                f"vocabulary has {self.vocabulary} tokens, 0 to {self.vocabulary - 1}",
                hint="set model.vocabulary to that of the tokenizer the shards were made with",
            )
        return shard.tokens


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
    if version != VERSION:
        raise DataError(
            f"shard `{path}` has version {version}, expected {VERSION} (uint16 tokens)",
            hint="write the shards again in version 1",
        )
    if num_tokens < 1:
        raise DataError(f"shard `{path}` says it holds {num_tokens} tokens", hint="leave empty shards out")
    expected = HEADER_BYTES + 2 * num_tokens
    if size != expected:
        fault = "truncated" if size < expected else "longer than its header says"
        raise DataError(
            f"shard `{path}` is {fault}: it has {size} bytes, expected {expected} for {num_tokens} tokens",
            hint="fetch or write it again",
        )
    return Shard(path, np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(num_tokens,)))


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


def cutting_point(tokens: ShardedTokens, share: float) -> int:
    """Where the held-out tail begins: at the document that starts next, when one does within reach."""
    size = max(1, round(share * len(tokens)))
    at = max(1, len(tokens) - size)
    reach = min(BOUNDARY_REACH, size // 2)
    starts = np.flatnonzero(tokens[at : at + reach] == DOCUMENT_START)
    return at + int(starts[0]) if len(starts) else at


def shards_digest(shards: Sequence[Shard], num_train: int) -> str:
    """The identity of shards: names, sizes, sampled pages (first and last among them), and the split."""
    identity = blake2b(digest_size=16)
    for shard in shards:
        num_bytes = 2 * len(shard.tokens)
        identity.update(f"{shard.path.name}\0{num_bytes}\0".encode())
        last = max(0, num_bytes - PAGE)
        for place in {round(last * page / (SAMPLED_PAGES - 1)) // 2: None for page in range(SAMPLED_PAGES)}:
            identity.update(shard.tokens[place : place + PAGE // 2].tobytes())
    identity.update(str(num_train).encode())
    return identity.hexdigest()
