"""What a step allocates and frees, in order; the peak and what was alive then; and what the allocator reserves.

`reserved` replays the same events through the rules of torch's caching allocator: sizes are rounded up to 512
bytes; up to 1 MiB comes out of segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, anything larger has a
segment of its own, rounded to 2 MiB; the smallest free block that is large enough is used, and split.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

KIB, MIB = 2**10, 2**20
ROUND, SMALL, MIDDLE = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUND = 2 * MIB, 20 * MIB, 2 * MIB


class Allocation(NamedTuple):
    """A piece of memory."""

    nbytes: int
    phase: str  # forward, backward, update or setup
    shape: tuple[int, ...]


def rounded(nbytes: int) -> int:
    """Returns what the allocator counts for so many bytes."""
    return -(-nbytes // ROUND) * ROUND


@dataclass
class Ledger:
    """Allocations, and events in their order: +key for one that was made, -key for one that was freed."""

    allocations: dict[int, Allocation] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)

    def allocate(self, nbytes: int, phase: str, shape: tuple[int, ...] = ()) -> int:
        """Notes an allocation; returns its key."""
        key = len(self.allocations) + 1
        self.allocations[key] = Allocation(rounded(nbytes), phase, shape)
        self.events.append(key)
        return key

    def free(self, key: int) -> None:
        """Notes that an allocation is freed."""
        self.events.append(-key)

    def passing(self, nbytes: int, phase: str) -> None:
        """Notes memory that a kernel needs while it runs."""
        self.free(self.allocate(nbytes, phase))

    def at_peak(self) -> list[int]:
        """Returns the keys that are alive when the most bytes are."""
        now = most = place = 0
        for i, event in enumerate(self.events):
            size = self.allocations[abs(event)].nbytes
            now += size if event > 0 else -size
            if now > most:
                most, place = now, i
        live: dict[int, None] = {}
        for event in self.events[: place + 1]:
            if event > 0:
                live[event] = None
            else:
                live.pop(-event, None)
        return list(live)

    def by_role(self, role: Callable[[int, Allocation], str]) -> dict[str, int]:
        """Returns the bytes of each role at the peak."""
        found: Counter[str] = Counter()
        for key in self.at_peak():
            found[role(key, self.allocations[key])] += self.allocations[key].nbytes
        return dict(found)

    def reserved(self) -> int:
        """Returns what torch's allocator takes from the device for these events."""
        blocks: dict[int, tuple[bool, int, int]] = {}
        pools = {True: _Pool(), False: _Pool()}
        for event in self.events:
            if event > 0:
                size = self.allocations[event].nbytes
                blocks[event] = (size <= SMALL, *pools[size <= SMALL].take(size))
            elif -event in blocks:
                small, start, size = blocks.pop(-event)
                pools[small].give(start, size)
        return sum(pool.total for pool in pools.values())


class _Pool:
    """Segments of memory with free blocks; each segment's addresses are far from those of the next."""

    def __init__(self) -> None:
        self.total, self._next = 0, 0
        self.free: dict[int, int] = {}  # first address of a free block -> its size

    def take(self, size: int) -> tuple[int, int]:
        fitting = [(length, start) for start, length in self.free.items() if length >= size]
        if fitting:
            length, start = min(fitting)
            del self.free[start]
        else:
            length = _segment(size)
            start, self._next = self._next, self._next + 2 * length
            self.total += length
        left = length - size
        if left >= (ROUND if size <= SMALL else SMALL + 1):  # what is smaller stays with the block
            self.free[start + size] = left
            return start, size
        return start, length

    def give(self, start: int, size: int) -> None:
        while (after := self.free.pop(start + size, None)) is not None:
            size += after
        for other, length in self.free.items():
            if other + length == start:
                self.free[other] = length + size
                return
        self.free[start] = size


def _segment(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIDDLE else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
