"""What a run reads: training tokens and held-out tokens, with no document on both sides.

    u(document) = blake2b(content) / 2^64   in [0, 1)        held out  <=>  u < share

Equal documents land on the same side, so a copy of a training text never tests the model. If all land on one side,
which happens with few, the other side gets those with the smallest u (held out) or the largest u (training). Apart
from that, with a larger share, what was held out stays held out.

Or the user has held out a text already: then it is held out, and all of the source, which must not hold it, is
trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from halfstep.training.data.tokenizer_base import TokenBytes
from halfstep.training.data.types import DataError, Document, HeldOutError, Tokens, VocabularyError

BYTES = 256
UNUSED = 8  # times as many tokens as the data can have: a vocabulary that was meant for other data


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    train: Tokens
    validation: Tokens
    description: str  # one line, for people
    digest: str  # identifies both sides: a run resumes only on data with the same digest
    bytes_per_token: float | None  # of held-out text: 1 for bytes, None for shards of an unknown tokenizer
    token_bytes: TokenBytes | None = None  # the length of each token, if known and not always 1
    held_out_digest: str = ""  # identifies the held-out side alone, of text
    vocabulary: int | None = None  # how many tokens there can be; None for shards of an unknown tokenizer

    def warnings(self, vocabulary: int) -> list[str]:
        """Says if most tokens of a model's vocabulary are in no such data."""
        if self.vocabulary is None or vocabulary < UNUSED * self.vocabulary:
            return []
        kind = "is read as bytes, which" if self.vocabulary == BYTES else "has tokens that"
        return [
            f"the data {kind} are {self.vocabulary:,} of the model's {vocabulary:,}: all others stay untrained "
            "(pack the text with the model's tokenizer, `halfstep data pack`, or "
            f"--set model.vocabulary={self.vocabulary})"
        ]


def hash_share(content: bytes) -> float:
    """Returns u: where in [0, 1) a document's content falls."""
    # 53 bits of the digest: more do not fit a float, and rounding up could give exactly 1.
    return (int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 11) / 2**53


def split(documents: Sequence[Document], share: float, source: str) -> tuple[list[Document], list[Document]]:
    """Returns the training and the held-out documents, each in the given order, neither empty."""
    shares = [hash_share(document.content) for document in documents]
    if len(set(shares)) < 2:
        number = "one document" if len(documents) == 1 else f"{len(documents)} equal documents"
        raise HeldOutError(
            f"`{source}` holds {number}: nothing can be held out without training on it",
            hint="provide more text: at least two different documents",
        )
    # Always holding out the smallest and never the largest changes nothing unless a side is empty.
    smallest, largest = min(shares), max(shares)
    held_out = [u == smallest or (u < share and u != largest) for u in shares]
    train = [document for document, held in zip(documents, held_out, strict=True) if not held]
    validation = [document for document, held in zip(documents, held_out, strict=True) if held]
    return train, validation


def check_not_trained_on(corpus: Corpus, train: Sequence[Document], held_out: Sequence[Document]) -> None:
    """Refuses a text to hold out that the text to train on holds too."""
    texts = {document.content for document in train}
    if (
        all(document.content in texts for document in held_out)
        or corpus.validation[:].tobytes().strip() in corpus.train[:].tobytes()
    ):
        raise overlap_error(f"`{held_out[0].name}`", "all of it is in the training text too")


def overlap_error(name: str, why: str) -> DataError:
    """Returns the error for a text that would be on both sides."""
    return HeldOutError(
        f"{name} is to be held out, but {why}",
        hint="hold out a text that data.source does not hold (move it elsewhere), or a share, such as 0.1",
    )


def from_sides(
    to_train: Sequence[Document], held_out: Sequence[Document], description: str, vocabulary: int
) -> Corpus:
    """Builds a corpus whose tokens are bytes and whose sides are documents joined together."""
    for document in [*to_train, *held_out] if vocabulary < BYTES else ():
        data = np.frombuffer(document.content, dtype=np.uint8)
        if (largest := int(data.max())) >= vocabulary:
            raise VocabularyError(
                f"`{document.name}` contains byte {largest} at offset {int(data.argmax())}, but the "
                f"vocabulary has only {vocabulary} tokens, 0 to {vocabulary - 1}",
                hint="text is read as bytes: use `--set model.vocabulary=256`",
            )
    joined = (b"".join(each.content for each in side) for side in (to_train, held_out))
    train, validation = (np.frombuffer(side, dtype=np.uint8) for side in joined)
    identity = blake2b(digest_size=16)
    for side in (train, validation):
        identity.update(len(side).to_bytes(8, "little"))
        identity.update(side.tobytes())
    return Corpus(
        train=train,
        validation=validation,
        description=f"{description}: {len(train):,} bytes to train on, {len(validation):,} held out",
        digest=identity.hexdigest(),
        bytes_per_token=1.0,
        held_out_digest=blake2b(validation.tobytes(), digest_size=16).hexdigest(),
        vocabulary=BYTES,
    )
