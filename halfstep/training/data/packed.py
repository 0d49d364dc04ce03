"""Packed data as a corpus: opened by its index, mapped, and not read.

What is checked is what costs next to nothing (`halfstep.training.data.index` says what that is), so that a set of
any size opens in the time its headers take. That the model's vocabulary holds the tokenizer's needs no look at the
tokens. Damage that opening does not see is found when it is first read (`halfstep.training.data.checksums`).

Held out is what was packed as such; where nothing was, the last share of the tokens, as of any shards.

`verify` reads all: a shard is asked for its size and its SHA-256, and where that fails the digests of its regions
of 16 MiB name those that changed, and checksums the 16 KiB in them. What is outside is what was packed. The files
of checksums are asked too.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.checksums import Granules
from halfstep.training.data.corpus import Corpus, DataError
from halfstep.training.data.index import (
    GRANULE,
    MEND,
    TOKEN_BYTES,
    Index,
    ShardRecord,
    page_digest,
    read_index,
    read_regions,
    read_sums,
    region_digest,
)
from halfstep.training.data.shards import HEADER_BYTES, Shard, ShardedTokens, cutting_point, open_shard
from halfstep.training.data.token_bytes import TokenBytes
from halfstep.training.data.tokenizers import Tokenizer, check_saved, open_saved


def packed_corpus(folder: Path, share: float, vocabulary: int) -> Corpus:
    """The corpus in a folder that was packed."""
    index = read_index(folder)
    _check_vocabulary(folder, index, vocabulary)
    check_saved(folder, index.tokenizer)
    check_names(folder, index)
    train = ShardedTokens([open_listed(folder, record) for record in index.train.shards], vocabulary)
    validation = ShardedTokens([open_listed(folder, record) for record in index.val.shards], vocabulary)
    digest = index.digest
    if not len(validation):
        at = cutting_point(train, share, index.tokenizer.separator)
        digest = f"{digest}/{at}"
        train, validation = train.part(0, at), train.part(at, len(train))
    told = f"{len(train):,} tokens to learn from, {len(validation):,} held out, tokenizer {index.tokenizer.name}"
    return Corpus(
        train=train,
        validation=validation,
        description=f"{len(index.shards)} packed shards `{folder}`: {told}",
        digest=digest,
        bytes_per_token=_bytes_per_token(index),
        num_documents=index.train.documents + index.val.documents,
        token_bytes=read_token_bytes(folder, index),
    )


def packed_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that a folder was packed with."""
    return open_saved(folder, read_index(folder).tokenizer)


def read_token_bytes(folder: Path, index: Index) -> TokenBytes | None:
    """The bytes by token that were written with the shards."""
    if index.token_bytes is None:
        return None
    path = folder / TOKEN_BYTES
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror or error}", hint=MEND) from None
    if hashlib.sha256(content).hexdigest() != index.token_bytes:
        raise DataError(
            f"`{path}` was changed after it was written: its SHA-256 is not the index's",
            hint=MEND,
        )
    return TokenBytes.from_npy(content, str(path))


def _bytes_per_token(index: Index) -> float | None:
    """Of held-out text, or of all where none is apart: an average, exact over all of it."""
    if index.tokenizer.kind == "bytes":
        return 1.0
    side = index.val if index.val.tokens else index.train
    size = side.text_bytes if side.token_bytes is None else side.token_bytes
    return size / side.tokens


def _check_vocabulary(folder: Path, index: Index, vocabulary: int) -> None:
    if index.tokenizer.vocabulary > vocabulary:
        raise DataError(
            f"`{folder}` was packed with the tokenizer {index.tokenizer.name} of {index.tokenizer.vocabulary} "
            f"tokens, and model.vocabulary is {vocabulary}",
            hint=f"use `--set model.vocabulary={-(-index.tokenizer.vocabulary // 128) * 128}`, or pack with a "
            "tokenizer that fits",
        )


def check_names(folder: Path, index: Index) -> None:
    """Refuses a shard that the index does not list: it may be of another packing."""
    if stray := _stray(folder, index):
        raise DataError(
            f"`{folder / stray[0]}` is not in the index of its folder",
            hint="remove it, or pack into another folder",
        )


def _stray(folder: Path, index: Index) -> list[str]:
    listed = {record.name for record in index.shards}
    return sorted(path.name for path in folder.glob("*.bin") if path.name not in listed)


def open_listed(folder: Path, record: ShardRecord) -> Shard:
    """A shard of the index, checked as far as that costs no reading of it."""
    path = folder / record.name
    if not path.is_file():
        raise DataError(f"shard `{path}` is missing; the index lists it", hint=MEND)
    shard = open_shard(path)
    if len(shard.tokens) != record.tokens:
        raise DataError(
            f"shard `{path}` holds {len(shard.tokens)} tokens, and the index says {record.tokens}",
            hint=MEND,
        )
    if page_digest(path) != record.pages:
        raise DataError(
            f"shard `{path}` is not the one that was packed: pages of it differ",
            hint=f"{MEND}; `halfstep data verify {folder}` says what is damaged, and where",
        )
    if not record.sums:
        return shard  # packed before there were checksums
    assert shard.mapped is not None
    return replace(shard, granules=Granules(folder, record, shard.mapped))


# --- every byte ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was packed; `first` and `last` are bytes of the file where they are known."""

    file: str
    what: str
    first: int | None = None
    last: int | None = None


def verify(folder: Path, told: Callable[[int, int], object] = lambda done, total: None) -> list[Damage]:
    """What is damaged in a folder of packed data; `told` is called with bytes read and bytes in all."""
    index = read_index(folder)
    found = list(_beside(folder, index))
    present = [record for record in index.shards if (folder / record.name).is_file()]
    found += [Damage(record.name, "is missing") for record in index.shards if record not in present]
    total, before = sum((folder / record.name).stat().st_size for record in present), 0
    for record in present:
        size = (folder / record.name).stat().st_size
        found += _shard(folder / record.name, record, lambda done, before=before: told(before + done, total))  # type: ignore[misc]
        before += size
    return found + [Damage(name, "is not in the index") for name in _stray(folder, index)]


def _beside(folder: Path, index: Index) -> Iterator[Damage]:
    for name, check in (
        (index.tokenizer.file or "", lambda: check_saved(folder, index.tokenizer)),
        (TOKEN_BYTES, lambda: read_token_bytes(folder, index)),
    ):
        try:
            check()
        except DataError as error:
            yield Damage(name, error.message)
    for record in index.shards:
        if record.sums:
            try:
                read_sums(folder, record)
            except DataError as error:
                yield Damage(record.sidecar, error.message)


def _shard(path: Path, record: ShardRecord, told: Callable[[int], object]) -> Iterator[Damage]:
    try:
        tokens = len(open_shard(path).tokens)
        if tokens != record.tokens:
            yield Damage(path.name, f"holds {tokens} tokens, and the index says {record.tokens}")
    except DataError as error:
        yield Damage(path.name, error.message)
    whole, changed, done, number = hashlib.sha256(), list[Damage](), 0, 0
    sums = _sums(path.parent, record)
    for number, content in enumerate(read_regions(path), 1):
        whole.update(content)
        first, done = done, done + len(content)
        expected = record.regions[number - 1] if number <= len(record.regions) else None
        if region_digest(content) != expected:
            spans = _narrowed(content, first, sums)
            changed += [Damage(path.name, _region(path, record, low, high), low, high) for low, high in spans]
        told(done)
    if number < len(record.regions):
        changed.append(Damage(path.name, f"ends at byte {done}", done, None))
    if changed or whole.hexdigest() != record.sha256:
        yield from changed or [Damage(path.name, "its SHA-256 is not the index's")]


def _sums(folder: Path, record: ShardRecord) -> NDArray[np.uint32]:
    """The checksums of a shard's granules; none where they are lost, which is told elsewhere."""
    try:
        return np.frombuffer(read_sums(folder, record) if record.sums else b"", dtype="<u4")
    except (DataError, ValueError):
        return np.empty(0, dtype="<u4")


def _narrowed(content: bytes, first: int, sums: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """From where to where a region that begins at byte `first` is damaged, as far as checksums of granules say."""
    end, spans = first + len(content), list[tuple[int, int]]()
    if not first % GRANULE:
        for low in range(first, end, GRANULE):
            granule, number = content[low - first : low - first + GRANULE], low // GRANULE
            if number < len(sums) and crc32(granule) != sums[number]:
                begin = spans.pop()[0] if spans and spans[-1][1] == low else low
                spans.append((begin, low + len(granule)))
    return spans or [(first, end)]


def _region(path: Path, record: ShardRecord, first: int, last: int) -> str:
    size = max(1, round((path.stat().st_size - HEADER_BYTES) / max(1, record.tokens)))
    low, high = (max(0, byte - HEADER_BYTES) // size for byte in (first, last))
    return f"is damaged between bytes {first:,} and {last:,} (tokens {low:,} to {min(high, record.tokens):,})"
