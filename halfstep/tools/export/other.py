"""A model that another library runs, asked for what a session of ours is asked for: losses, and logits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
MOST = 2**26  # logits at once: 256 MiB


class OtherModel:
    """A function from tokens (rows, tokens) to the logits of each next one."""

    def __init__(self, forward: Callable[[NDArray[np.int64]], Floats], context: int, vocabulary: int):
        self._forward, self._context, self._vocabulary = forward, context, vocabulary

    def evaluate(self, batches: Iterable[NDArray[Any]], *, averaged: bool = True) -> tuple[float, int]:
        """Returns the sum of losses and the number of tokens."""
        total, count = 0.0, 0
        for batch in batches:
            rows = max(1, MOST // (batch.shape[1] * self._vocabulary))
            for start in range(0, len(batch), rows):
                tokens = batch[start : start + rows].astype(np.int64)
                total += _loss(self._forward(tokens[:, :-1]), tokens[:, 1:])
                count += tokens[:, 1:].size
        return total, count

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Returns the logits of the token after the given ones."""
        logits: Floats = self._forward(np.array([tokens[-self._context :]], np.int64))[0, -1]
        return logits


def _loss(logits: Floats, targets: NDArray[np.int64]) -> float:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return float((np.log(np.exp(shifted).sum(axis=-1, dtype=np.float64)) - chosen).sum(dtype=np.float64))
