"""Files of a finished packing that were lost or damaged, made again by the same `halfstep data pack`.

What is looked at is what opening looks at: the tokenizer, the table of bytes, and of each shard its header, size
and four pages; and the files of checksums. Damage that only reading or `halfstep data verify` finds is made again
once the file is removed.

A shard is a part of its side's line of tokens, and the index says from where to where. So the sources are encoded
again up to the end of the last shard that is lost; what belongs to lost ones is written, under a name of its own,
and takes its place when its SHA-256 is the one in the index. Shards that are whole are not touched and the index
stays: mended data is the data it was, and a run on it goes on.

Checksums are made again out of their shard, once all of it was compared with its SHA-256: those of a damaged one
would have it taken for whole ever after. Where it is damaged, it is a lost one.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np

from halfstep.training.data.corpus import DataError, TokenArray
from halfstep.training.data.index import TOKEN_BYTES, Digests, Index, ShardRecord, SideRecord, digests, read_sums
from halfstep.training.data.pack.encode import SIDES, Encoded, token_type
from halfstep.training.data.packed import open_listed, read_token_bytes
from halfstep.training.data.shards import header
from halfstep.training.data.tokenizers import Tokenizer, check_saved
from halfstep.training.files import PARTIAL, flush, write_whole


def mend_tables(folder: Path, index: Index, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer, the table of bytes and checksums again where they are not what the index says."""
    try:
        check_saved(folder, index.tokenizer)
    except DataError:
        tokenizer.save(folder)
    try:
        read_token_bytes(folder, index)
    except DataError:
        table = tokenizer.token_bytes
        content = b"" if table is None else table.to_npy()
        if hashlib.sha256(content).hexdigest() != index.token_bytes:
            raise _other(folder, folder / TOKEN_BYTES) from None
        write_whole(folder / TOKEN_BYTES, content)
    for record in index.shards:
        if not _has_sums(folder, record):
            _mend_sums(folder, record)


def _mend_sums(folder: Path, record: ShardRecord) -> None:
    path = folder / record.name
    found = digests(path) if path.is_file() else None
    if found is not None and found.sha256 == record.sha256:
        _write_sums(folder, record, found)


def _write_sums(folder: Path, record: ShardRecord, found: Digests) -> None:
    path = folder / record.sidecar
    if found.sums != record.sums:
        raise _other(folder, path)
    write_whole(path, found.granules)


def _has_sums(folder: Path, record: ShardRecord) -> bool:
    try:
        return not record.sums or bool(read_sums(folder, record))
    except DataError:
        return False


def lost_shards(folder: Path, index: Index) -> list[ShardRecord]:
    """The shards that opening would refuse, and those whose checksums could not be made again out of them."""
    return [record for record in index.shards if not _is_whole(folder, record)]


def mend_shards(folder: Path, index: Index, lost: list[ShardRecord], encoded: Iterable[Encoded]) -> None:
    """Writes lost shards again, out of all blocks of the sources; no more of them are taken than are needed."""
    dtype = token_type(index.tokenizer.vocabulary)
    lines = {
        side: _Line(folder, record, lost, dtype)
        for side, record in zip(SIDES, (index.train, index.val), strict=True)
    }
    try:
        for block in encoded:
            for side, line in lines.items():
                line.take(block.sides[side].tokens)
            if all(line.is_done for line in lines.values()):
                return
    finally:
        for line in lines.values():
            line.close()
    raise _other(folder, next(folder / record.name for record in lost if not _is_whole(folder, record)))


@final
class _Line:
    """The tokens of one side as they go by. Those of lost shards are written, one shard after the other."""

    def __init__(self, folder: Path, side: SideRecord, lost: list[ShardRecord], dtype: np.dtype[Any]):
        ends = accumulate(record.tokens for record in side.shards)
        self._todo = deque(
            (end - record.tokens, end, record)
            for end, record in zip(ends, side.shards, strict=True)
            if record in lost
        )
        self._folder, self._dtype, self._at = folder, dtype, 0
        self._file: Any = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is lost any more."""
        return not self._todo

    def take(self, tokens: TokenArray) -> None:
        """Lets tokens go by."""
        first, self._at = self._at, self._at + len(tokens)
        while self._todo and self._todo[0][0] < self._at:
            low, high, record = self._todo[0]
            self._write(record, tokens[max(0, low - first) : high - first])
            if self._at < high:
                break
            self._finish(record)
            self._todo.popleft()

    def close(self) -> None:
        """Lets go of a shard that did not become whole."""
        if self._file is not None:
            self._file.close()
            os.unlink(self._file.name)
            self._file = None

    def _write(self, record: ShardRecord, tokens: TokenArray) -> None:
        if self._file is None:
            self._file = open(self._folder / (record.name + PARTIAL), "wb")  # noqa: SIM115
            self._file.write(header(record.tokens, self._dtype))
        self._file.write(tokens.tobytes())

    def _finish(self, record: ShardRecord) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        path = self._folder / record.name
        found = digests(Path(self._file.name))
        if found.sha256 != record.sha256:
            raise _other(self._folder, path)
        if not _has_sums(self._folder, record):
            _write_sums(self._folder, record, found)
        self._file.close()
        os.replace(self._file.name, path)
        self._file = None
        flush(self._folder)


def _is_whole(folder: Path, record: ShardRecord) -> bool:
    try:
        open_listed(folder, record)
    except DataError:
        return False
    return _has_sums(folder, record)


def _other(folder: Path, path: Path) -> DataError:
    return DataError(
        f"`{path}` is lost, and cannot be made again: the sources or the tokenizer's package give other bytes now",
        hint=f"copy it back, or remove the folder `{folder}` and pack again, for new runs",
    )
