"""Restores lost or damaged files of a finished packing, when the same `halfstep data pack` runs again.

It looks at what opening looks at (index.py) and at the checksum files; other damage is repaired once the file is
removed. The sources are encoded again up to the end of the last lost shard, which gets its name if its SHA-256
matches the index. Intact shards and the index stay untouched: a run can resume on repaired data. Checksums are
computed again after the shard's SHA-256 was compared: those of a damaged shard would hide the damage forever.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import IO

from halfstep.training.data.checksums import Digests, digests, read_checksums, read_tokenizer_file
from halfstep.training.data.index import TOKEN_BYTES, Index, ShardRecord, SideRecord
from halfstep.training.data.pack.encode import SIDES, Encoded, token_type
from halfstep.training.data.packed import open_listed, read_token_bytes
from halfstep.training.data.shards import header
from halfstep.training.data.tokenizer_base import Tokenizer
from halfstep.training.data.types import DataError
from halfstep.training.files import PARTIAL, flush, write_whole


def repair_tables(folder: Path, index: Index, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer, the table of token lengths and checksums again if they differ from the index."""
    try:
        read_tokenizer_file(folder, index.tokenizer)
    except DataError:
        tokenizer.save(folder)
    try:
        read_token_bytes(folder, index)
    except DataError:
        table = tokenizer.token_bytes
        content = b"" if table is None else table.to_npy()
        if hashlib.sha256(content).hexdigest() != index.token_bytes:
            raise _cannot_restore(folder, folder / TOKEN_BYTES) from None
        write_whole(folder / TOKEN_BYTES, content)
    for record in index.shards:
        path = folder / record.name
        if not _has_checksums(folder, record) and path.is_file():
            computed = digests(path)
            if computed.sha256 == record.sha256:
                _write_checksums(folder, record, computed)


def _write_checksums(folder: Path, record: ShardRecord, computed: Digests) -> None:
    path = folder / record.checksum_file
    if computed.sums != record.sums:
        raise _cannot_restore(folder, path)
    write_whole(path, computed.chunks)


def _has_checksums(folder: Path, record: ShardRecord) -> bool:
    try:
        return not record.sums or len(read_checksums(folder, record)) > 0
    except DataError:
        return False


def find_lost_shards(folder: Path, index: Index) -> list[ShardRecord]:
    """Returns the shards that opening would refuse, and those whose checksums could not be restored from them."""
    return [record for record in index.shards if not _is_intact(folder, record)]


def repair_shards(folder: Path, index: Index, lost: list[ShardRecord], encoded: Iterable[Encoded]) -> None:
    """Writes lost shards again from the blocks of the sources, and stops reading after the last lost one."""
    dtype = token_type(index.tokenizer.vocabulary)
    todo = {side: _spans(record, lost) for side, record in zip(SIDES, (index.train, index.val), strict=True)}
    position, files = dict.fromkeys(SIDES, 0), dict[str, IO[bytes]]()
    try:
        for block in encoded:
            for side, spans in todo.items():
                tokens = block.sides[side].tokens
                first, position[side] = position[side], position[side] + len(tokens)
                while spans and spans[0][0] < position[side]:
                    low, high, record = spans[0]
                    if record.name not in files:
                        files[record.name] = open(folder / (record.name + PARTIAL), "wb")  # noqa: SIM115
                        files[record.name].write(header(record.tokens, dtype))
                    files[record.name].write(tokens[max(0, low - first) : high - first].tobytes())
                    if position[side] < high:
                        break
                    _finish(folder, record, files[record.name])
                    del files[record.name]
                    spans.popleft()
            if not any(todo.values()):
                return
    finally:
        for file in files.values():
            file.close()
            os.unlink(file.name)
    raise _cannot_restore(folder, next(folder / each.name for each in lost if not _is_intact(folder, each)))


def _spans(side: SideRecord, lost: list[ShardRecord]) -> deque[tuple[int, int, ShardRecord]]:
    ends = accumulate(record.tokens for record in side.shards)
    spans = ((end - record.tokens, end, record) for end, record in zip(ends, side.shards, strict=True))
    return deque(span for span in spans if span[2] in lost)


def _finish(folder: Path, record: ShardRecord, file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    computed = digests(Path(file.name))
    if computed.sha256 != record.sha256:
        raise _cannot_restore(folder, folder / record.name)
    if not _has_checksums(folder, record):
        _write_checksums(folder, record, computed)
    file.close()
    os.replace(file.name, folder / record.name)
    flush(folder)


def _is_intact(folder: Path, record: ShardRecord) -> bool:
    try:
        open_listed(folder, record)
    except DataError:
        return False
    return _has_checksums(folder, record)


def _cannot_restore(folder: Path, path: Path) -> DataError:
    return DataError(
        f"`{path}` is lost and cannot be restored: the sources or the tokenizer's package now give other bytes",
        hint=f"copy it back, or remove the folder `{folder}` and pack again, for new runs",
    )
