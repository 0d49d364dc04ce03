"""How well a model predicts held-out text, beside how well pairs of tokens do.

The loss is the mean of -ln p(token) over held-out tokens, in nats a token, and says little without the tokenizer.
Bits per byte compare models with different tokenizers:

    sum of -log2 p(token)  /  bytes of the very tokens that were predicted

The bytes are counted token by token (data/token_bytes.py), as the batches go by; where those of one
token are not known, by the average over all held-out text. The yardstick is the order-1 conditional entropy of the
same tokens, in bits per byte too where bytes are known: what a model would need that knows the token before, and
this text's own pair counts. With a large vocabulary most pairs come once, and their own counts know too much: then
it is a bound that no model reaches.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from numpy.typing import NDArray

from halfstep.config.run import RunConfig
from halfstep.training.data.batches import TokenBatch, bigram_bits, validation_batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """What was measured on held-out text."""

    loss: float
    tokens: int
    bits_per_byte: float | None  # None where the bytes of tokens are not known
    bigram_bits: float  # per byte, or per token where bytes are not known

    @property
    def ratio(self) -> float | None:
        """Held-out bits per byte over the bigram entropy of the same tokens per byte."""
        return (
            None if self.bits_per_byte is None or not self.bigram_bits else self.bits_per_byte / self.bigram_bits
        )

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"held-out loss {self.loss:.4f}{bits} (bigram {self.bigram_bits:.4f})"


def evaluate(
    session: Session,
    corpus: Corpus,
    config: RunConfig,
    *,
    averaged: bool = True,
    is_over: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Predicts the held-out text that the configuration asks for; with averages of the weights where there are.

    When `is_over` says so, it ends where it is, and what it found is worth nothing.
    """
    counted = _Counted(corpus, takewhile(lambda _: not is_over(), _batches(corpus, config)))
    total, count = session.evaluate(counted, averaged=averaged)
    loss = total / count if count else math.nan
    bits = total / math.log(2) / counted.bytes if counted.bytes else None
    return Evaluation(loss, count, bits, bigram_of(corpus, config))


class _Counted:
    """Batches as they go by, and how many bytes their targets stand for; 0 where that is not known."""

    def __init__(self, corpus: Corpus, batches: Iterator[TokenBatch]):
        self.bytes = 0.0
        self._corpus, self._batches = corpus, batches

    def __iter__(self) -> Iterator[TokenBatch]:
        for batch in self._batches:
            self.bytes += _num_bytes(self._corpus, batch[:, :-1], batch[:, 1:])
            yield batch


def _num_bytes(corpus: Corpus, before: NDArray[Any], tokens: NDArray[Any]) -> float:
    """What some held-out tokens stand for, each after the one before it."""
    if corpus.token_bytes is not None:
        return corpus.token_bytes.count(before, tokens)
    return tokens.size * (corpus.bytes_per_token or 0.0)


def check_held_out(corpus: Corpus, config: RunConfig) -> None:
    """Refuses held-out text that is too short to look at, before anything is trained."""
    _batches(corpus, config)


def _batches(corpus: Corpus, config: RunConfig) -> Iterator[TokenBatch]:
    return validation_batches(
        corpus.validation,
        context=config.model.context,
        batch=config.training.batch,
        limit_tokens=config.training.validation_tokens,
        name=f"held-out text of `{config.data.source}`",
    )


def bigram_of(corpus: Corpus, config: RunConfig) -> float:
    """The yardstick on the tokens that `evaluate` looks at: per byte, or per token where bytes are not known."""
    context, available = config.model.context, len(corpus.validation) - 1
    windows = max(1, min(config.training.validation_tokens, available) // context)
    key = corpus.digest, windows * context
    if key not in _bigrams:  # every look at the same text asks, and counting pairs takes a second a million
        tokens = corpus.validation[: windows * context + 1]
        size = _num_bytes(corpus, tokens[:-1], tokens[1:])
        _bigrams.clear()
        _bigrams[key] = bigram_bits(tokens) * (len(tokens) - 1) / (size or len(tokens) - 1)
    return _bigrams[key]


_bigrams: dict[tuple[str, int], float] = {}
