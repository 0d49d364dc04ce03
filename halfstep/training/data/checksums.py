"""The granules of a packed shard: 16 KiB of its file each, from byte 0 on, known to be good or not yet.

A byte that flips in the middle of a shard makes a token like any other, so a run would learn from it and nobody
would know. Before tokens are handed out, every granule that they lie in is therefore asked for its CRC-32, once: a
window of 2 KiB then costs reading 16 (which its neighbors need too, sooner or later), and afterwards a look into a
table of one byte a granule. What changes on the disk after a granule was found good is not noticed by this
process: asking each time would read eight times what is used. The next process asks again, and `halfstep data
verify` all.

The file of checksums is read when its shard is first touched, so that opening reads none of them, and must be the
one that the index lists. It and the table take 5 bytes of memory a granule, a 3,000th of the shards touched.

Several threads may ask at once. The worst that happens is that a granule is read by both.
"""

import mmap
from pathlib import Path
from typing import final
from zlib import crc32

import numpy as np

from halfstep.training.data.corpus import DataError
from halfstep.training.data.index import GRANULE, MEND, ShardRecord, read_sums


@final
class Granules:
    """What is known of the bytes of one shard."""

    def __init__(self, folder: Path, record: ShardRecord, mapped: mmap.mmap):
        self._folder, self._record, self._mapped = folder, record, mapped
        self._sums = np.empty(0, dtype="<u4")  # before the first is asked for
        self._good = bytearray()  # 1 by granule

    def are_good(self, begin: int, end: int) -> bool:
        """Whether bytes begin to end lie in granules that were found good."""
        first, last = begin // GRANULE, -(-end // GRANULE)  # no call: this is asked twice a window
        return self._good.count(1, first, last) == last - first

    def to_read(self, begin: int, end: int) -> tuple[int, int]:
        """The bytes to be read before bytes begin to end are: whole granules, unless all are good."""
        if self.are_good(begin, end):
            return begin, end
        first, last = _numbers(begin, end)
        return first * GRANULE, min(last * GRANULE, len(self._mapped))

    def find_damage(self, begin: int, end: int) -> tuple[int, int] | None:
        """From where to where the first granule of bytes begin to end lies that is not what was packed."""
        if not self._good:
            self._sums = self._read()
            self._good = bytearray(len(self._sums))
        good, content = self._good, memoryview(self._mapped)
        for number in range(*_numbers(begin, end)):
            if not good[number]:
                low = number * GRANULE
                granule = content[low : low + GRANULE]
                if crc32(granule) != self._sums[number]:
                    return low, low + len(granule)
                good[number] = 1
        return None

    def _read(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        content = read_sums(self._folder, self._record)
        _, number = _numbers(0, len(self._mapped))
        if len(content) != 4 * number:
            raise DataError(
                f"`{self._folder / self._record.sidecar}` holds {len(content)} bytes, and its shard has {number} "
                "granules of 4 bytes each there",
                hint=MEND,
            )
        return np.frombuffer(content, dtype="<u4")


def _numbers(begin: int, end: int) -> tuple[int, int]:
    """The granules that bytes begin to end lie in, from the first to the one after the last."""
    return begin // GRANULE, -(-end // GRANULE)
