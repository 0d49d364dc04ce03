"""Packed data as a corpus: opened by its index, mapped, and not read (index.py lists what each level checks).

Opening does not look at tokens: the tokenizer must fit the model's vocabulary. The packed held-out side is held
out; if there is none, the last share of the tokens, as with any shards. `verify` reads everything.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from halfstep.training.data.corpus import Corpus
from halfstep.training.data.index import (
    RESTORE,
    TOKEN_BYTES,
    Index,
    ShardRecord,
    read_checksums,
    read_index,
    read_listed,
    read_tokenizer_file,
)
from halfstep.training.data.shards import (
    CHUNK,
    HEADER_BYTES,
    ChunkVerifier,
    Shard,
    ShardedTokens,
    check_unused,
    open_shard,
    read_digests,
    split_tail,
)
from halfstep.training.data.tokenizer_base import TokenBytes
from halfstep.training.data.types import DamagedDataError, DataError, VocabularyError


def packed_corpus(folder: Path, share: float, vocabulary: int) -> Corpus:
    """Opens the corpus in a folder of packed data."""
    index = read_index(folder)
    _check_vocabulary(folder, index, vocabulary)
    train, validation = (ShardedTokens(shards, vocabulary) for shards in open_shards(folder, index))
    digest = index.digest
    if len(validation):
        check_unused(share, f"`{folder}` was packed with held-out text of its own (`data pack --validation`)")
    else:
        train, validation = split_tail(train, share, index.tokenizer.separator)
        digest = f"{digest}/{len(train)}"
    return Corpus(
        train=train,
        validation=validation,
        description=f"{len(index.shards)} packed shards `{folder}`: {len(train):,} tokens to train on, "
        f"{len(validation):,} held out, tokenizer {index.tokenizer.name}",
        digest=digest,
        bytes_per_token=_bytes_per_token(index),
        token_bytes=read_token_bytes(folder, index),
        vocabulary=index.tokenizer.vocabulary,
    )


def read_token_bytes(folder: Path, index: Index) -> TokenBytes | None:
    """Reads the table of token lengths that was written with the shards."""
    if index.token_bytes is None:
        return None
    path = folder / TOKEN_BYTES
    return TokenBytes.from_npy(read_listed(path, index.token_bytes), str(path))


def _bytes_per_token(index: Index) -> float | None:
    """Returns the exact average over the held-out text, or over all text if none is held out."""
    if index.tokenizer.kind == "bytes":
        return 1.0
    side = index.val if index.val.tokens else index.train
    size = side.text_bytes if side.token_bytes is None else side.token_bytes
    return size / side.tokens


def _check_vocabulary(folder: Path, index: Index, vocabulary: int) -> None:
    if index.tokenizer.vocabulary > vocabulary:
        raise VocabularyError(
            f"`{folder}` was packed with the tokenizer {index.tokenizer.name}, which has "
            f"{index.tokenizer.vocabulary} tokens, but model.vocabulary is {vocabulary}",
            hint=f"use `--set model.vocabulary={-(-index.tokenizer.vocabulary // 128) * 128}`, or pack with a "
            "tokenizer that fits",
        )


def open_shards(folder: Path, index: Index) -> tuple[list[Shard], list[Shard]]:
    """Opens the shards of both sides, with all checks that do not read them.

    Refuses a shard that the index does not list: it may belong to another packing.
    """
    read_tokenizer_file(folder, index.tokenizer)
    if unlisted := _unlisted(folder, index):
        raise DamagedDataError(
            f"`{folder / unlisted[0]}` is not in the index of its folder",
            hint="remove it, or pack into another folder",
        )
    train, val = ([_open_listed(folder, record) for record in side.shards] for side in (index.train, index.val))
    return train, val


def _unlisted(folder: Path, index: Index) -> list[str]:
    listed = {record.name for record in index.shards}
    return sorted(path.name for path in folder.glob("*.bin") if path.name not in listed)


def _open_listed(folder: Path, record: ShardRecord) -> Shard:
    path = folder / record.name
    if not path.is_file():
        raise DamagedDataError(f"shard `{path}` is missing; the index lists it", hint=RESTORE)
    shard = open_shard(path)
    if len(shard.tokens) != record.tokens:
        raise DamagedDataError(
            f"shard `{path}` holds {len(shard.tokens)} tokens, but the index says {record.tokens}", hint=RESTORE
        )
    if not record.sums:
        return shard  # packed by a version without checksums
    assert shard.mapped is not None
    return replace(shard, verifier=ChunkVerifier(folder, record, shard.mapped))


# --- every byte ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A difference from what was packed; `first` and `last` are bytes of the file, if they are known."""

    file: str
    what: str
    first: int | None = None
    last: int | None = None


def verify(folder: Path, progress: Callable[[int, int], object] = lambda done, total: None) -> list[Damage]:
    """Lists the damage in a folder of packed data; calls `progress` with bytes read and total bytes."""
    index = read_index(folder)
    damage = list(_verify_tables(folder, index))
    present = [record for record in index.shards if (folder / record.name).is_file()]
    damage += [Damage(record.name, "is missing") for record in index.shards if record not in present]
    total, done = sum((folder / record.name).stat().st_size for record in present), 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    for record in present:
        damage += _verify_shard(folder / record.name, record, read)
    return damage + [Damage(name, "is not in the index") for name in _unlisted(folder, index)]


def _verify_tables(folder: Path, index: Index) -> Iterator[Damage]:
    yield from _damage_of(index.tokenizer.file or "", lambda: read_tokenizer_file(folder, index.tokenizer))
    yield from _damage_of(TOKEN_BYTES, lambda: read_token_bytes(folder, index))
    for record in index.shards:
        if record.sums:
            yield from _damage_of(record.checksum_file, partial(read_checksums, folder, record))


def _damage_of(file: str, check: Callable[[], object]) -> Iterator[Damage]:
    try:
        check()
    except DataError as error:
        yield Damage(file, error.message)


def _verify_shard(path: Path, record: ShardRecord, progress: Callable[[int], object]) -> Iterator[Damage]:
    try:
        tokens = len(open_shard(path).tokens)
        if tokens != record.tokens:
            yield Damage(path.name, f"holds {tokens} tokens, but the index says {record.tokens}")
    except DataError as error:
        yield Damage(path.name, error.message)
    # Longer than what was packed, in uint32 at most, perhaps by a terabyte: the rest need not be read.
    whole, found = read_digests(path, progress, most=HEADER_BYTES + 4 * record.tokens)
    spans: list[list[int]] = []
    with suppress(DataError):  # reported as damage of the checksum file
        wanted = read_checksums(path.parent, record)
        number = min(len(wanted), len(found))
        for chunk in np.flatnonzero(wanted[:number] != found[:number]).tolist():
            if not spans or spans[-1][1] < chunk:
                spans.append([chunk, chunk])
            spans[-1][1] = chunk + 1
    for first, last in spans:
        span = first * CHUNK, min(last * CHUNK, path.stat().st_size)
        yield Damage(path.name, _describe_span(path, record, *span), *span)
    if not spans and whole != record.sha256:
        yield Damage(path.name, "its SHA-256 differs from the index")


def _describe_span(path: Path, record: ShardRecord, first: int, last: int) -> str:
    size = max(1, round((path.stat().st_size - HEADER_BYTES) / max(1, record.tokens)))
    low, high = (max(0, byte - HEADER_BYTES) // size for byte in (first, last))
    return f"is damaged between bytes {first:,} and {last:,} (tokens {low:,} to {min(high, record.tokens):,})"
