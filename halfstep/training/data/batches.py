"""Which tokens each update sees: a pure function of seed and step.

The text is cut into W = (length - 1) // context windows of context + 1 tokens at stride context: neighbors share
one token, so every token but the first is a target in exactly one window. With B windows per update, update s
(counted from 0) takes the places

    p = s * B, ..., s * B + B - 1        epoch e = p // W,   window = order_e[p % W]

of one endless sequence, in which each epoch is a new order of all windows. So a resumed run repeats and omits no
window, with any number of ranks. A checkpoint records which of two orders was used:

    sorted   up to 2^20 windows: the stable argsort of W words of Philox keyed by (seed, epoch). numpy guarantees
             the words across versions, but not its shuffle.
    keyed    beyond: a permutation that takes no memory and no time to sort (`Permutation`)

A thread makes them ahead of time (`Prefetch`).
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.config.run import RunConfig
from halfstep.training.data.shards import ShardedTokens
from halfstep.training.data.types import DataMismatchError, DataSizeError, Tokens

T = TypeVar("T")
TokenBatch: TypeAlias = NDArray[np.int32]

SORTED_AT_MOST = 1 << 20

_COUNTED_AT_ONCE = 1 << 20
_WORD = (1 << 64) - 1


class Position(TypedDict):
    """The position of a run in its data, for checkpoints."""

    epoch: int  # complete passes over the windows
    window: int  # windows taken from the current pass
    tokens: int  # targets seen in total
    order: str  # of the windows in a pass: sorted or keyed


class Place(TypedDict):
    """Where windows begin, for reports of problems."""

    file: str  # a shard's path, or the name of the text in errors
    offsets: list[int]  # in tokens


class Batches:
    """The batches of a run. Errors call the text `name`."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        context: int,
        batch: int,
        micro_batches: int,
        seed: int,
        name: str = "the training text",
    ):
        self.tokens, self.context, self.seed, self.name = tokens, context, seed, name
        self.shape = (micro_batches, batch, context + 1)
        self.num_windows = _count_windows(tokens, context, name)
        self.windows_per_step = batch * micro_batches
        self.order = "sorted" if self.num_windows <= SORTED_AT_MOST else "keyed"
        self._cached: tuple[int, NDArray[np.int64] | Permutation] | None = None  # of the last epoch asked for
        if self.windows_per_step > self.num_windows:
            raise DataSizeError(
                f"an update needs {batch} x {micro_batches} = {self.windows_per_step} sequences, but {name} has "
                f"only {self.num_windows}: {len(tokens)} tokens in sequences of {context}",
                hint="lower training.batch or training.micro_batches, or provide more text",
            )

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> TokenBatch:
        """Returns the tokens of the update after `step` updates, as int32 (micro_batches, batch, context + 1).

        Each of several ranks gets its share: whole micro-batches if they divide evenly, else rows of each.
        """
        mine = self.rows(rank, ranks)
        starts = self._starts(step)[mine].ravel().tolist()
        out = np.empty((len(starts), self.context + 1), dtype=np.int32)
        if isinstance(self.tokens, ShardedTokens):
            self.tokens.read_into(out, starts)
        else:
            for row, start in enumerate(starts):
                out[row] = self.tokens[start : start + self.context + 1]
        return out.reshape(*mine.shape, self.context + 1)

    def rows(self, rank: int, ranks: int) -> NDArray[np.int64]:
        """Returns the windows of an update that belong to a rank, as (micro_batches, batch)."""
        micro, batch, _ = self.shape
        windows = np.arange(self.windows_per_step, dtype=np.int64).reshape(micro, batch)
        if micro % ranks == 0:
            return np.split(windows, ranks)[rank]
        if batch % ranks == 0:
            return np.split(windows, ranks, axis=1)[rank]
        if ranks > micro * batch:
            raise DataSizeError(
                f"an update has {micro} x {batch} = {micro * batch} sequences, which is fewer than {ranks} ranks",
                hint="raise training.batch, or start fewer processes",
            )
        fewer = next(n for n in range(ranks - 1, 0, -1) if micro % n == 0 or batch % n == 0)
        multiple = f"make training.batch or training.micro_batches a multiple of {ranks}"
        raise DataSizeError(
            f"{micro * batch} sequences, in micro-batches of {batch}, cannot be divided among {ranks} ranks",
            hint=f"{multiple}, or start {fewer} processes",
        )

    def locate(self, step: int, rank: int = 0, ranks: int = 1, micro_batch: int | None = None) -> list[Place]:
        """Returns where the windows of the update after `step` updates begin, by file; a rank's own, or only those
        of one of its micro-batches."""
        places = dict[str, list[int]]()
        locate = getattr(self.tokens, "locate", None) or (lambda start: (self.name, start))
        rows = self.rows(rank, ranks)
        for start in self._starts(step)[rows if micro_batch is None else rows[micro_batch]].ravel().tolist():
            file, offset = locate(start)
            places.setdefault(file, []).append(offset)
        return [{"file": file, "offsets": offsets} for file, offsets in places.items()]

    def position(self, step: int) -> Position:
        """Returns the position of a run after `step` updates."""
        taken = step * self.windows_per_step
        epoch, window = divmod(taken, self.num_windows)
        return {"epoch": epoch, "window": window, "tokens": taken * self.context, "order": self.order}

    def check_position(self, position: Mapping[str, Any]) -> None:
        """Refuses to resume from a position that was counted in a different order."""
        order = position.get("order", "sorted")  # the only one before it was recorded
        if order != self.order:
            raise DataMismatchError(
                f"the run read its data in the order `{order}`, but this version of halfstep would continue in "
                f"`{self.order}`: it would repeat some windows and omit others",
                hint="resume with the version of halfstep that started the run, or start a new run with --out",
            )

    def _starts(self, step: int) -> NDArray[np.int64]:
        first = step * self.windows_per_step
        places = np.arange(first, first + self.windows_per_step, dtype=np.int64)
        epochs, indices = np.divmod(places, self.num_windows)
        windows = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == epoch
            windows[chosen] = self._order(epoch)[indices[chosen]]
        return windows * self.context

    def _order(self, epoch: int) -> "NDArray[np.int64] | Permutation":
        cached = self._cached  # read once: a prefetch thread may be working on another epoch
        if cached is None or cached[0] != epoch:
            generator = np.random.Philox(key=np.array([self.seed & _WORD, epoch], dtype=np.uint64))
            if self.order == "keyed":
                cached = epoch, Permutation(self.num_windows, generator)
            else:
                cached = epoch, np.argsort(generator.random_raw(self.num_windows), kind="stable")
            self._cached = cached
        return cached[1]


def make_batches(config: RunConfig, tokens: Tokens) -> Batches:
    """Returns the batches of a run, given its training text."""
    training = config.training
    return Batches(
        tokens,
        context=config.model.context,
        batch=training.batch,
        micro_batches=training.micro_batches,
        seed=config.seed,
        name=f"`{config.data.source}`",
    )


def validation_readers(
    tokens: Tokens, *, context: int, batch: int, limit_tokens: int, name: str = "the held-out text"
) -> Sequence[Callable[[], TokenBatch]]:
    """Returns functions that read a batch each: at most limit_tokens // context whole windows, in order.

    A batch has the shape (batch, context + 1).
    """
    num_windows = min(_count_windows(tokens, context, name), max(1, limit_tokens // context))
    starts = range(0, num_windows * context, context)

    def read(first: int) -> TokenBatch:
        rows = [tokens[start : start + context + 1] for start in starts[first : first + batch]]
        return np.stack(rows).astype(np.int32)

    return [partial(read, first) for first in range(0, num_windows, batch)]


def bigram_bits(tokens: Tokens) -> float:
    """Returns the bits per token if the previous token is known, from the pair counts of this same text.

    H = - sum over pairs ab of  c(ab) / N * log2( c(ab) / c(a) )        c(a) = sum over b of c(ab)
    """
    num_pairs = len(tokens) - 1
    if num_pairs < 1:
        return 0.0
    spans = [slice(low, low + _COUNTED_AT_ONCE) for low in range(0, len(tokens), _COUNTED_AT_ONCE)]
    vocabulary = 1 + max(int(tokens[span].max()) for span in spans)
    pairs, counts = _count_pairs(tokens, vocabulary)
    before = pairs // vocabulary
    totals = np.bincount(before, weights=counts, minlength=vocabulary)
    return float(-np.sum(counts * np.log2(counts / totals[before])) / num_pairs) + 0.0  # + 0: never -0.0


def _count_pairs(tokens: Tokens, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns each pair ab that occurs, as a * vocabulary + b in ascending order, and how often it does."""
    pairs, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for low in range(0, len(tokens) - 1, _COUNTED_AT_ONCE):
        chunk = tokens[low : low + _COUNTED_AT_ONCE + 1].astype(np.int64)
        new, number = np.unique(chunk[:-1] * vocabulary + chunk[1:], return_counts=True)
        pairs, inverse = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        merged = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(merged, inverse, np.concatenate([counts, number]))
        counts = merged
    return pairs, counts


def _count_windows(tokens: Tokens, context: int, name: str) -> int:
    if len(tokens) < context + 1:
        raise DataSizeError(
            f"{name} is shorter than one sequence: it has {len(tokens)} tokens, but a sequence needs "
            f"{context + 1} (the context of {context} and one to predict)",
            hint="provide more text, or train with a lower model.context",
        )
    return (len(tokens) - 1) // context


ROUNDS = 12


class Permutation:
    """An order of range(size), keyed by the words of a generator. Index it with an array of places."""

    def __init__(self, size: int, words: np.random.Philox):
        self.size = size
        self.keys = [np.uint64(word) for word in words.random_raw(ROUNDS)]
        self.left = math.isqrt(size - 1) + 1
        self.right = -(-size // self.left)

    def __getitem__(self, places: NDArray[np.int64], /) -> NDArray[np.int64]:
        items = self._permute(places.astype(np.uint64))
        while (outside := items >= self.size).any():
            items[outside] = self._permute(items[outside])
        return items.astype(np.int64)

    def _permute(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self.left), np.uint64(self.right)
        left, right = np.divmod(places, b)
        for even, odd in zip(self.keys[::2], self.keys[1::2], strict=True):
            left = (left + _hash(right ^ even)) % a
            right = (right + _hash(left ^ odd)) % b
        return left * b + right


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the upper 32 bits of splitmix64's finalizer, so that adding a digit does not wrap."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (words ^ (words >> np.uint64(31))) >> np.uint64(32)


POLL_SECONDS = 0.1  # how often a waiting caller checks `is_over`


class Prefetch(Generic[T]):
    """Makes fetch(start), ..., fetch(stop - 1) in a thread, in order, at most `depth` ahead, until closed.

    An exception in fetch is raised in the caller at the place of its item. When `is_over`, the items end, and
    closing does not wait for a fetch.
    """

    def __init__(
        self,
        fetch: Callable[[int], T],
        start: int,
        stop: int,
        depth: int = 2,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self._fetch, self._numbers, self._is_over = fetch, range(start, stop), is_over
        self._items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # None: there are no more
        self._room, self._closed = threading.Semaphore(depth), threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._closed.is_set():
            try:
                item = self._items.get(timeout=POLL_SECONDS)
            except Empty:
                if self._is_over():
                    break
                continue
            if isinstance(item, tuple):
                self._room.release()
                return item[0]
            self._closed.set()
            if item is not None:
                raise item
        raise StopIteration

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for the fetch it is running. Idempotent."""
        self._closed.set()
        self._room.release()  # wakes the thread
        self._items.put(None)  # wakes a caller that waits in another thread
        while self._thread.is_alive() and not self._is_over():
            self._thread.join(POLL_SECONDS)

    def _work(self) -> None:
        try:
            for number in self._numbers:
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._items.put((self._fetch(number),))
            self._items.put(None)
        except BaseException as error:
            self._items.put(error)
