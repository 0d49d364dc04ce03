"""How well a model predicts held-out text, beside how well pairs of tokens do.

The loss is the mean of -ln p(token) over held-out tokens. With n bytes a token, that is loss / ln 2 / n bits
per byte, which compares models with different tokenizers. The yardstick is the order-1 conditional entropy of
the very text that was predicted: what a model would need that knows the token before, and this text's own pair
counts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.config.run import RunConfig
from halfstep.training.batches import TokenBatch
from halfstep.training.data import Corpus, bigram_bits, validation_batches
from halfstep.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """What was measured on held-out text."""

    loss: float
    tokens: int
    bits_per_byte: float | None  # None where the bytes of a token are not known
    bigram_bits: float

    @property
    def ratio(self) -> float | None:
        """Held-out bits per byte over the bigram entropy of the same text; of bytes, as that is."""
        return (
            None if self.bits_per_byte is None or not self.bigram_bits else self.bits_per_byte / self.bigram_bits
        )

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"held-out loss {self.loss:.4f}{bits} (bigram {self.bigram_bits:.4f})"


def evaluate(session: Session, corpus: Corpus, config: RunConfig) -> Evaluation:
    """Predicts the held-out text that the configuration asks for."""
    total, count = session.evaluate(_batches(corpus, config))
    loss = total / count
    per_token = corpus.bytes_per_token
    bits = None if per_token is None else loss / math.log(2) / per_token
    return Evaluation(loss, count, bits, bigram_of(corpus, config))


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
    """The yardstick on the tokens that `evaluate` looks at."""
    context, available = config.model.context, len(corpus.validation) - 1
    windows = max(1, min(config.training.validation_tokens, available) // context)
    return bigram_bits(corpus.validation[: windows * context + 1])
