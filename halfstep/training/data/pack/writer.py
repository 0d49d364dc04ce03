"""Writes token shards so that a killed packing can resume.

A side of a packing (train, val) is one sequence of tokens, cut into shards of exactly the requested size; only the
last may be smaller. The growing shard is `NAME.bin.partial`, with a header that says it holds no tokens. A full
shard gets its header, digests, checksum file, and finally its name. `commit` flushes what was written and returns
the state to resume from. `resume` discards whatever was written after that.
"""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.schema import Count
from halfstep.training.data.index import ShardRecord, SideRecord
from halfstep.training.data.shards import HEADER_BYTES, header, read_digests
from halfstep.training.data.tokenizer_base import TokenBytes
from halfstep.training.data.types import DamagedDataError, TokenArray
from halfstep.training.files import PARTIAL, flush, write_whole


@dataclass(frozen=True)
class SideState:
    """Where a killed packing resumes a side: its full shards, then what the growing one holds."""

    shards: tuple[ShardRecord, ...]
    tokens: Count
    documents: Count
    bytes: Count | None
    text_bytes: Count
    last: Count


class ShardWriter:
    """Writes the shards of one side."""

    def __init__(
        self, folder: Path, side: str, dtype: np.dtype[np.unsignedinteger], size: int, table: TokenBytes | None
    ):
        self.folder, self.side, self.dtype, self.size, self.table = folder, side, dtype, size, table
        self.text_bytes = 0
        self._done: list[ShardRecord] = []
        self._tokens, self._documents = 0, 0  # of the growing shard
        self._bytes: int | None = None if table is None else 0
        self._last = 0  # the token before the next one
        self._file: Any = None

    def append(self, tokens: TokenArray, starts: NDArray[np.int64]) -> bool:
        """Adds tokens; documents begin at `starts` among them. Returns whether a shard is full now."""
        low, done = 0, len(self._done)
        while low < len(tokens):
            high = min(len(tokens), low + self.size - self._tokens)
            self._write(tokens[low:high], int(np.count_nonzero((starts >= low) & (starts < high))))
            low = high
            if self._tokens == self.size:
                self._finish()
        return len(self._done) > done

    def commit(self, *, final: bool = False) -> SideState:
        """Makes everything so far durable and returns the state to resume from. `final` ends the growing shard."""
        if self._file is not None:
            if final:
                self._finish()
            else:
                self._flush()
        flush(self.folder)
        return SideState(
            tuple(self._done), self._tokens, self._documents, self._bytes, self.text_bytes, self._last
        )

    def resume(self, state: SideState) -> None:
        """Continues from the state that a commit returned."""
        self._done = list(state.shards)
        self._tokens, self._documents, self._bytes = state.tokens, state.documents, state.bytes
        self.text_bytes, self._last = state.text_bytes, state.last
        for record in self._done:
            self._check_size(self.folder / record.name, record.tokens, exact=True)
        growing = self._name(len(self._done))
        for path in sorted(self.folder.glob(f"{self.side}_*")):
            self._undo(path, growing)
        if self._tokens:
            path = self.folder / (growing + PARTIAL)
            self._check_size(path, self._tokens, exact=False)
            os.truncate(path, HEADER_BYTES + self._tokens * self.dtype.itemsize)
            self._file = open(path, "ab")  # noqa: SIM115

    def close(self) -> None:
        """Closes the growing shard."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._tokens + sum(each.tokens for each in self._done)

    def record(self) -> SideRecord:
        """Returns what was written, after the final commit."""
        sizes = [record.bytes for record in self._done]
        return SideRecord(
            tokens=self.num_tokens,
            documents=sum(record.documents for record in self._done),
            text_bytes=self.text_bytes,
            token_bytes=None if self.table is None else sum(size or 0 for size in sizes),
            shards=tuple(self._done),
        )

    def _undo(self, path: Path, growing: str) -> None:
        """Undoes what was named or begun after the commit; the growing shard loses its name and checksums."""
        name = path.name.removesuffix(PARTIAL)
        if Path(name).stem < Path(growing).stem:
            return
        if name != growing or not self._tokens:
            path.unlink()
        elif path.name == growing:
            os.replace(path, path.with_name(growing + PARTIAL))

    def _write(self, tokens: TokenArray, documents: int) -> None:
        if self._file is None:
            path = self.folder / (self._name(len(self._done)) + PARTIAL)
            self._file = open(path, "wb")  # noqa: SIM115
            self._file.write(header(0, self.dtype))
        self._file.write(tokens.tobytes())
        if self.table is not None and self._bytes is not None:
            before = np.concatenate([np.array([self._last], dtype=tokens.dtype), tokens[:-1]])
            self._bytes += self.table.count(before, tokens)
        self._last = int(tokens[-1])
        self._tokens, self._documents = self._tokens + len(tokens), self._documents + documents

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _finish(self) -> None:
        """Gives the growing shard its header, its checksums and its name."""
        self._flush()
        self.close()
        path = self.folder / self._name(len(self._done))
        partial = path.with_name(path.name + PARTIAL)
        with open(partial, "r+b") as file:
            file.write(header(self._tokens, self.dtype))
            file.flush()
            os.fsync(file.fileno())
        whole, checksums = read_digests(partial)
        sums = checksums.tobytes()
        about = (self._tokens, self._bytes, self._documents)
        record = ShardRecord(path.name, *about, whole, sha256(sums).hexdigest())
        write_whole(self.folder / record.checksum_file, sums)  # first: a shard with a name can be read
        os.replace(partial, path)
        self._done.append(record)
        self._tokens, self._documents = 0, 0
        self._bytes = None if self.table is None else 0

    def _name(self, number: int) -> str:
        return f"{self.side}_{number:06d}.bin"

    def _check_size(self, path: Path, tokens: int, *, exact: bool) -> None:
        expected = HEADER_BYTES + tokens * self.dtype.itemsize
        size = path.stat().st_size if path.is_file() else 0
        if size < expected or (exact and size != expected):
            raise DamagedDataError(
                f"`{path}` has {size} bytes, but the interrupted packing left {expected}",
                hint=f"remove the folder `{self.folder}` and pack again",
            )
