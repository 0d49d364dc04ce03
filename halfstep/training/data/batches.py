"""Which tokens an update sees: a pure function of seed and step.

The text is cut into W = (length - 1) // context windows of context + 1 tokens at stride context: neighbors
share one token, the last target of one and the first input of the next, so every token but the first is a
target in exactly one window. Update s (counted from 0) takes, with B windows an update, the places

    p = s * B, ..., s * B + B - 1        epoch e = p // W,   window = order_e[p % W]

of one endless sequence, in which each epoch is a new order of all windows. An epoch that ends inside an
update continues with the next. So a resumed run needs the number of updates and nothing else: no window is
repeated and none is left out. With R ranks each takes its R-th part of the same B windows, so a run may also go
on with another number of them.

There are two orders, and the number of windows decides which; a checkpoint says which it was (`order`):

    sorted   up to 2^20 windows: the stable argsort of W words of Philox keyed by (seed, epoch). Sorting words,
             rather than asking numpy's Generator to shuffle, keeps it the same across numpy's versions: they
             promise the words, not the shuffle.
    keyed    beyond: a permutation that gives the place of one window without those of the others, so that a set
             of any size costs no memory and no time to sort (`halfstep.training.data.permutation`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.corpus import DataError, Tokens
from halfstep.training.data.permutation import Permutation
from halfstep.training.data.shards import ShardedTokens

TokenBatch: TypeAlias = NDArray[np.int32]

SORTED_AT_MOST = 1 << 20

_COUNTED_AT_ONCE = 1 << 20
_DENSE_VOCABULARY = 4096
_WORD = (1 << 64) - 1


class Position(TypedDict):
    """Where in the data a run stands, for checkpoints."""

    epoch: int  # whole passes over the windows
    window: int  # windows taken of the pass after those
    tokens: int  # targets seen in all
    order: str  # of the windows of a pass: sorted or keyed


class Place(TypedDict):
    """Where windows begin, for reports of faults."""

    file: str  # a shard's path, or what errors call the text
    offsets: list[int]  # in tokens


@final
class Batches:
    """The batches of a run. `name` is what errors call the text."""

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
            raise DataError(
                f"an update of {batch} x {micro_batches} = {self.windows_per_step} sequences is more than "
                f"{name} holds: {len(tokens)} tokens are {self.num_windows} sequences of {context}",
                hint="lower training.batch or training.micro_batches, or give more text",
            )

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> TokenBatch:
        """The tokens of the update after `step` updates, as (micro_batches, batch, context + 1).

        Inputs are [..., :-1] and targets [..., 1:]. int32 holds every vocabulary in half of int64's bytes;
        a framework that wants int64 for targets widens them on the device. One of several ranks gets its part:
        whole micro-batches where their number allows, else rows of each.
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
        """Which windows of an update are a rank's, as (micro_batches, batch) of it."""
        micro, batch, _ = self.shape
        if not 0 <= rank < ranks:
            raise ValueError(f"there is no rank {rank} of {ranks}")
        windows = np.arange(self.windows_per_step, dtype=np.int64).reshape(micro, batch)
        if micro % ranks == 0:
            return np.split(windows, ranks)[rank]
        if batch % ranks == 0:
            return np.split(windows, ranks, axis=1)[rank]
        raise DataError(
            f"{micro} micro-batches of {batch} sequences cannot be shared by {ranks} ranks",
            hint="make training.micro_batches or training.batch a multiple of the number of ranks",
        )

    def locate(self, step: int) -> list[Place]:
        """Where the windows of the update after `step` updates begin, file by file."""
        found = dict[str, list[int]]()
        locate = getattr(self.tokens, "locate", None) or (lambda start: (self.name, start))
        for start in self._starts(step).tolist():
            file, offset = locate(start)
            found.setdefault(file, []).append(offset)
        return [{"file": file, "offsets": offsets} for file, offsets in found.items()]

    def position(self, step: int) -> Position:
        """Where a run stands after `step` updates."""
        taken = step * self.windows_per_step
        epoch, window = divmod(taken, self.num_windows)
        return {"epoch": epoch, "window": window, "tokens": taken * self.context, "order": self.order}

    def check_position(self, found: Mapping[str, Any]) -> None:
        """Refuses to go on from a position that was counted in another order than this one."""
        order = found.get("order", "sorted")  # what there was before it was written down
        if order != self.order:
            raise DataError(
                f"the run took its data in the order `{order}`, and this version of halfstep would go on in "
                f"`{self.order}`: windows would be repeated and left out",
                hint="go on with the version of halfstep that began the run, or start anew with --out",
            )

    def _starts(self, step: int) -> NDArray[np.int64]:
        """Where the windows of an update begin."""
        first = step * self.windows_per_step
        places = np.arange(first, first + self.windows_per_step, dtype=np.int64)
        epochs, indices = np.divmod(places, self.num_windows)
        windows = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == epoch
            windows[chosen] = self._order(epoch)[indices[chosen]]
        return windows * self.context

    def _order(self, epoch: int) -> NDArray[np.int64] | Permutation:
        cached = self._cached  # read once: `locate` is called while a thread makes batches of another epoch
        if cached is None or cached[0] != epoch:
            generator = np.random.Philox(key=np.array([self.seed & _WORD, epoch], dtype=np.uint64))
            if self.order == "keyed":
                cached = epoch, Permutation(self.num_windows, generator)
            else:
                cached = epoch, np.argsort(generator.random_raw(self.num_windows), kind="stable")
            self._cached = cached
        return cached[1]


def validation_batches(
    tokens: Tokens, *, context: int, batch: int, limit_tokens: int, name: str = "the held-out text"
) -> Iterator[TokenBatch]:
    """Held-out windows in order, (batch, context + 1) each, the last batch maybe smaller.

    Whole windows only, and one at least: limit_tokens // context of them, as far as there are so many. Each
    target is predicted once.
    """
    num_windows = min(_count_windows(tokens, context, name), max(1, limit_tokens // context))
    return _windows(tokens, context, batch, num_windows)


def bigram_bits(tokens: Tokens) -> float:
    """The bits a token costs when the one before it is known, by this very text's own pair counts.

        H = - sum over pairs ab of  c(ab) / N * log2( c(ab) / c(a) )        c(a) = sum over b of c(ab)

    N is the number of pairs. A model that predicts that text with fewer bits has learned more than which
    token follows which. H is 0 for texts of fewer than two tokens.
    """
    num_pairs = len(tokens) - 1
    if num_pairs < 1:
        return 0.0
    spans = [slice(low, low + _COUNTED_AT_ONCE) for low in range(0, len(tokens), _COUNTED_AT_ONCE)]
    vocabulary = 1 + max(int(tokens[span].max()) for span in spans)
    pairs, counts = (_dense_pairs if vocabulary <= _DENSE_VOCABULARY else _sparse_pairs)(tokens, vocabulary)
    before = pairs // vocabulary
    totals = np.bincount(before, weights=counts, minlength=vocabulary)
    return float(-np.sum(counts * np.log2(counts / totals[before])) / num_pairs) + 0.0  # + 0: never -0.0


def _dense_pairs(tokens: Tokens, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each pair ab that occurs, as a * vocabulary + b, and how often; by a table of all pairs."""
    table = np.zeros(vocabulary**2, dtype=np.int64)
    for chunk in _pairs(tokens, vocabulary):
        table += np.bincount(chunk, minlength=len(table))
    pairs = np.flatnonzero(table)
    return pairs, table[pairs]


def _sparse_pairs(tokens: Tokens, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same, by sorting: memory grows with the pairs that occur, not with all that could."""
    pairs, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for chunk in _pairs(tokens, vocabulary):
        new, number = np.unique(chunk, return_counts=True)
        pairs, inverse = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        merged = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(merged, inverse, np.concatenate([counts, number]))
        counts = merged
    return pairs, counts


def _pairs(tokens: Tokens, vocabulary: int) -> Iterator[NDArray[np.int64]]:
    for low in range(0, len(tokens) - 1, _COUNTED_AT_ONCE):
        chunk = tokens[low : low + _COUNTED_AT_ONCE + 1].astype(np.int64)
        yield chunk[:-1] * vocabulary + chunk[1:]


def _windows(tokens: Tokens, context: int, batch: int, num_windows: int) -> Iterator[TokenBatch]:
    for first in range(0, num_windows, batch):
        starts = [window * context for window in range(first, min(first + batch, num_windows))]
        yield np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int32)


def _count_windows(tokens: Tokens, context: int, name: str) -> int:
    if len(tokens) < context + 1:
        raise DataError(
            f"{name} is shorter than one sequence: it has {len(tokens)} tokens, a sequence needs "
            f"{context + 1} (the context of {context} and one to predict)",
            hint="give more text, lower model.context, or change data.validation",
        )
    return (len(tokens) - 1) // context
