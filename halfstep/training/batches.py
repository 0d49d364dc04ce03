"""Which tokens an update sees: a pure function of seed and step.

The text is cut into W = (length - 1) // context windows of context + 1 tokens at stride context: neighbors
share one token, the last target of one and the first input of the next, so every token but the first is a
target in exactly one window. Update s (counted from 0) takes, with B windows an update, the places

    p = s * B, ..., s * B + B - 1        epoch e = p // W,   window = order_e[p % W]

of one endless sequence, in which each epoch is a new order of all windows. An epoch that ends inside an
update continues with the next. So a resumed run needs the number of updates and nothing else: no window is
repeated and none is left out.

The order is the stable argsort of W words of Philox keyed by (seed, epoch). Sorting words, rather than asking
numpy's Generator to shuffle, keeps it the same across numpy's versions: they promise the words, not the
shuffle.
"""

from collections.abc import Iterator
from typing import TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray

from halfstep.training.corpus import DataError, Tokens

TokenBatch: TypeAlias = NDArray[np.int32]

_COUNTED_AT_ONCE = 1 << 20
_DENSE_VOCABULARY = 4096
_WORD = (1 << 64) - 1


class Position(TypedDict):
    """Where in the data a run stands, for checkpoints."""

    epoch: int  # whole passes over the windows
    window: int  # windows taken of the pass after those
    tokens: int  # targets seen in all


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
        self.tokens, self.context, self.seed = tokens, context, seed
        self.shape = (micro_batches, batch, context + 1)
        self.num_windows = _count_windows(tokens, context, name)
        self.windows_per_step = batch * micro_batches
        self._cached: tuple[int, NDArray[np.int64]] | None = None  # the order of the last epoch asked for
        if self.windows_per_step > self.num_windows:
            raise DataError(
                f"an update of {batch} x {micro_batches} = {self.windows_per_step} sequences is more than "
                f"{name} holds: {len(tokens)} tokens are {self.num_windows} sequences of {context}",
                hint="lower training.batch or training.micro_batches, or give more text",
            )

    def at(self, step: int) -> TokenBatch:
        """The tokens of the update after `step` updates, as (micro_batches, batch, context + 1).

        Inputs are [..., :-1] and targets [..., 1:]. int32 holds every vocabulary in half of int64's bytes;
        a framework that wants int64 for targets widens them on the device.
        """
        first = step * self.windows_per_step
        places = range(first, first + self.windows_per_step)
        out = np.empty((len(places), self.context + 1), dtype=np.int32)
        for row, place in enumerate(places):
            epoch, index = divmod(place, self.num_windows)
            start = int(self._order(epoch)[index]) * self.context
            out[row] = self.tokens[start : start + self.context + 1]
        return out.reshape(self.shape)

    def position(self, step: int) -> Position:
        """Where a run stands after `step` updates."""
        taken = step * self.windows_per_step
        epoch, window = divmod(taken, self.num_windows)
        return {"epoch": epoch, "window": window, "tokens": taken * self.context}

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._cached is None or self._cached[0] != epoch:
            generator = np.random.Philox(key=np.array([self.seed & _WORD, epoch], dtype=np.uint64))
            self._cached = epoch, np.argsort(generator.random_raw(self.num_windows), kind="stable")
        return self._cached[1]


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
