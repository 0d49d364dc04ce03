"""How well a model predicts held-out text, compared with pairs of tokens.

The loss is the mean of -ln p(token), in nats per token, and depends on the tokenizer; bits per byte do not
(data/tokenizer_base.py). If the bytes of one token are unknown, they are counted by the average over all held-out
text. The yardstick is the order-1 conditional entropy of the same tokens: what a model would need that knows the
previous token and this text's own pair counts. With a large vocabulary most pairs occur once: no model reaches
that bound.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from numpy.typing import NDArray

from halfstep.config.run import RunConfig
from halfstep.training.data.batches import TokenBatch, bigram_bits, validation_readers
from halfstep.training.data.corpus import Corpus
from halfstep.training.job import Job


@dataclass(frozen=True)
class Evaluation:
    """What was measured on held-out text."""

    loss: float
    tokens: int
    bits_per_byte: float | None  # None if the bytes of tokens are unknown
    bigram_bits: float  # per byte, or per token if bytes are unknown

    @property
    def ratio(self) -> float | None:
        """Held-out bits per byte over the bigram entropy of the same tokens per byte."""
        return (
            None if self.bits_per_byte is None or not self.bigram_bits else self.bits_per_byte / self.bigram_bits
        )

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"held-out loss {self.loss:.4f}{bits} (bigram {self.bigram_bits:.4f})"


class Evaluates(Protocol):
    """A model that predicts text: a session, or what another library loaded."""

    def evaluate(self, batches: Iterable[TokenBatch], *, averaged: bool = True) -> tuple[float, int]:
        """Returns the sum of losses and the number of tokens."""


def evaluate(
    session: Evaluates,
    corpus: Corpus,
    config: RunConfig,
    *,
    averaged: bool = True,
    is_over: Callable[[], object] = lambda: None,
    job: Job | None = None,
) -> Evaluation:
    """Predicts held-out text, with averaged weights if there are any. Once `is_over`, it stops early.

    The processes of a job take turns at its batches. Sums are added in the order of ranks: all get the same.
    """
    job, size = job or Job(), 0.0  # the bytes that all targets stand for; 0 if unknown
    batches = held_out_batches(corpus, config)

    def counted() -> Iterator[TokenBatch]:
        nonlocal size
        for read in takewhile(lambda _: not is_over(), batches[job.rank :: job.ranks]):
            batch = read()
            size += _num_bytes(corpus, batch[:, :-1], batch[:, 1:])
            yield batch

    total, count = session.evaluate(counted(), averaged=averaged)
    if job.ranks > 1:
        if 0 < len(batches) % job.ranks <= job.rank and not is_over():
            # All make the same number of passes: where weights are sharded, each pass needs every process.
            session.evaluate([batches[0]()], averaged=averaged)
        rows = job.gather([total, count, size], "adding up the held-out loss")
        total, count, size = (sum(column) for column in zip(*rows, strict=True))
    bits = total / math.log(2) / size if size else None
    return Evaluation(total / count if count else math.nan, count, bits, bigram_entropy(corpus, config))


def _num_bytes(corpus: Corpus, before: NDArray[Any], tokens: NDArray[Any]) -> float:
    if corpus.token_bytes is not None:
        return corpus.token_bytes.count(before, tokens)
    return tokens.size * (corpus.bytes_per_token or 0.0)


def held_out_batches(corpus: Corpus, config: RunConfig) -> Sequence[Callable[[], TokenBatch]]:
    """Returns a function for each batch of held-out text, which reads it; refuses text that is too short."""
    return validation_readers(
        corpus.validation,
        context=config.model.context,
        batch=config.training.batch,
        limit_tokens=config.training.validation_tokens,
        name=config.data.held_out,
    )


def bigram_entropy(corpus: Corpus, config: RunConfig) -> float:
    """Returns the yardstick on the tokens that `evaluate` predicts, per byte (per token if unknown)."""
    context, available = config.model.context, len(corpus.validation) - 1
    windows = max(1, min(config.training.validation_tokens, available) // context)
    key = corpus.digest, windows * context
    if key not in _bigrams:  # every evaluation asks, and counting takes a second per million tokens
        tokens = corpus.validation[: windows * context + 1]
        size = _num_bytes(corpus, tokens[:-1], tokens[1:])
        _bigrams.clear()
        _bigrams[key] = bigram_bits(tokens) * (len(tokens) - 1) / (size or len(tokens) - 1)
    return _bigrams[key]


_bigrams: dict[tuple[str, int], float] = {}
