"""Packed data as a corpus: opened by its index, mapped, and not read (index.py lists what each level checks).

Opening does not look at tokens: the tokenizer must fit the model's vocabulary. The packed held-out side is held
out; if there is none, the last share of the tokens, as with any shards. `verify` reads everything.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data import checksums
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.index import RESTORE, TOKEN_BYTES, Index, ShardRecord, read_index
from halfstep.training.data.shards import HEADER_BYTES, Shard, ShardedTokens, check_unused, open_shard, split_tail
from halfstep.training.data.token_bytes import TokenBytes
from halfstep.training.data.types import DataError


def packed_corpus(folder: Path, share: float, vocabulary: int) -> Corpus:
    """Opens the corpus in a folder of packed data."""
    index = read_index(folder)
    _check_vocabulary(folder, index, vocabulary)
    checksums.read_tokenizer_file(folder, index.tokenizer)
    check_names(folder, index)
    train = ShardedTokens([open_listed(folder, record) for record in index.train.shards], vocabulary)
    validation = ShardedTokens([open_listed(folder, record) for record in index.val.shards], vocabulary)
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
        num_documents=index.train.documents + index.val.documents,
        token_bytes=read_token_bytes(folder, index),
    )


def read_token_bytes(folder: Path, index: Index) -> TokenBytes | None:
    """Reads the table of token lengths that was written with the shards."""
    if index.token_bytes is None:
        return None
    path = folder / TOKEN_BYTES
    return TokenBytes.from_npy(checksums.read_listed(path, index.token_bytes), str(path))


def _bytes_per_token(index: Index) -> float | None:
    """Returns the exact average over the held-out text, or over all text if none is held out."""
    if index.tokenizer.kind == "bytes":
        return 1.0
    side = index.val if index.val.tokens else index.train
    size = side.text_bytes if side.token_bytes is None else side.token_bytes
    return size / side.tokens


def _check_vocabulary(folder: Path, index: Index, vocabulary: int) -> None:
    if index.tokenizer.vocabulary > vocabulary:
        raise DataError(
            f"`{folder}` was packed with the tokenizer {index.tokenizer.name}, which has "
            f"{index.tokenizer.vocabulary} tokens, but model.vocabulary is {vocabulary}",
            hint=f"use `--set model.vocabulary={-(-index.tokenizer.vocabulary // 128) * 128}`, or pack with a "
            "tokenizer that fits",
        )


def check_names(folder: Path, index: Index) -> None:
    """Refuses a shard that the index does not list: it may belong to another packing."""
    if unlisted := _unlisted(folder, index):
        raise DataError(
            f"`{folder / unlisted[0]}` is not in the index of its folder",
            hint="remove it, or pack into another folder",
        )


def _unlisted(folder: Path, index: Index) -> list[str]:
    listed = {record.name for record in index.shards}
    return sorted(path.name for path in folder.glob("*.bin") if path.name not in listed)


def open_listed(folder: Path, record: ShardRecord) -> Shard:
    """Opens a shard of the index, with all checks that do not read it."""
    path = folder / record.name
    if not path.is_file():
        raise DataError(f"shard `{path}` is missing; the index lists it", hint=RESTORE)
    shard = open_shard(path)
    if len(shard.tokens) != record.tokens:
        raise DataError(
            f"shard `{path}` holds {len(shard.tokens)} tokens, but the index says {record.tokens}", hint=RESTORE
        )
    if checksums.page_digest(path) != record.pages:
        raise DataError(
            f"shard `{path}` is not the one that was packed: some of its pages differ",
            hint=f"{RESTORE}; `halfstep data verify {folder}` says what is damaged, and where",
        )
    if not record.sums:
        return shard  # packed by a version without checksums
    assert shard.mapped is not None
    return replace(shard, verifier=checksums.ChunkVerifier(folder, record, shard.mapped))


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
    checks: list[tuple[str, Callable[[], object]]] = [
        (index.tokenizer.file or "", lambda: checksums.read_tokenizer_file(folder, index.tokenizer)),
        (TOKEN_BYTES, lambda: read_token_bytes(folder, index)),
    ]
    for record in index.shards:
        if record.sums:
            checks.append((record.checksum_file, lambda record=record: checksums.read_checksums(folder, record)))  # type: ignore[misc]
    for name, check in checks:
        try:
            check()
        except DataError as error:
            yield Damage(name, error.message)


def _verify_shard(path: Path, record: ShardRecord, read: Callable[[int], object]) -> Iterator[Damage]:
    try:
        tokens = len(open_shard(path).tokens)
        if tokens != record.tokens:
            yield Damage(path.name, f"holds {tokens} tokens, but the index says {record.tokens}")
    except DataError as error:
        yield Damage(path.name, error.message)
    whole, damage, end, number = sha256(), list[Damage](), 0, 0
    try:
        sums = checksums.read_checksums(path.parent, record)
    except DataError:  # reported as damage of the checksum file
        sums = np.empty(0, dtype="<u4")
    for number, content in enumerate(checksums.read_regions(path), 1):
        whole.update(content)
        first, end = end, end + len(content)
        expected = record.regions[number - 1] if number <= len(record.regions) else None
        if checksums.region_digest(content) != expected:
            spans = _narrow_down(content, first, sums)
            damage += [Damage(path.name, _describe_span(path, record, *span), *span) for span in spans]
        read(len(content))
        if expected is None:
            break  # the file is longer than what was packed, perhaps by a lot
    if number < len(record.regions):
        damage.append(Damage(path.name, f"ends at byte {end}", end, None))
    if damage or whole.hexdigest() != record.sha256:
        yield from damage or [Damage(path.name, "its SHA-256 differs from the index")]


def _narrow_down(content: bytes, first: int, sums: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Returns the damaged byte ranges of a region that begins at byte `first`, as precisely as chunks allow."""
    end, spans = first + len(content), list[tuple[int, int]]()
    for low in range(first, end, checksums.CHUNK):
        chunk, number = content[low - first : low - first + checksums.CHUNK], low // checksums.CHUNK
        if number < len(sums) and crc32(chunk) != sums[number]:
            begin = spans.pop()[0] if spans and spans[-1][1] == low else low
            spans.append((begin, low + len(chunk)))
    return spans or [(first, end)]


def _describe_span(path: Path, record: ShardRecord, first: int, last: int) -> str:
    size = max(1, round((path.stat().st_size - HEADER_BYTES) / max(1, record.tokens)))
    low, high = (max(0, byte - HEADER_BYTES) // size for byte in (first, last))
    return f"is damaged between bytes {first:,} and {last:,} (tokens {low:,} to {min(high, record.tokens):,})"
