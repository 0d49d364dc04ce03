"""What a run reads: tokens to learn from and tokens held out, with no document on both sides.

A document's content decides its side, so neither its name nor its neighbors nor the order of reading matters:

    u(document) = blake2b(content) / 2^64   in [0, 1)        held out  <=>  u < share

Equal documents have equal u and fall on the same side, whatever they are called: a copy of a training text is
never what the model is tested on. When all documents fall on one side, as a few documents may, the other
side gets those with the smallest u (held out) or the largest (training), so that both sides exist.

Which documents are held out depends on nothing but them and the share, and the sets are nested: with a larger
share, what was held out stays held out (but for that last rule).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.training.data.token_bytes import TokenBytes

TokenArray: TypeAlias = NDArray[Any]  # one-dimensional; uint8, uint16 or uint32


class DataError(HalfstepError):
    """Data that is missing, damaged, too short, or does not fit the model."""


class Tokens(Protocol):
    """A line of tokens: a numpy array, or shards that read like one. Slices without a step are enough."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> TokenArray: ...


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    train: Tokens
    validation: Tokens
    description: str  # one line, for people
    digest: str  # the identity of both sides: a run resumes only on data of the same digest
    bytes_per_token: float | None  # of held-out text: 1 for bytes; None for shards, whose tokenizer is unknown
    num_documents: int | None  # None for shards: counting would read them all
    token_bytes: "TokenBytes | None" = None  # the bytes of each token, where they are known and not all 1


class Document(NamedTuple):
    """A text and the name it is called by in errors."""

    name: str
    content: bytes


def hash_share(content: bytes) -> float:
    """u: where in [0, 1) a document's content falls."""
    # 53 bits of the digest: more do not fit a float, and rounding up could give exactly 1.
    return (int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 11) / 2**53


def split(documents: Sequence[Document], share: float, source: str) -> tuple[list[Document], list[Document]]:
    """The documents to learn from and those held out, each in the given order, neither empty."""
    shares = [hash_share(document.content) for document in documents]
    if len(set(shares)) < 2:
        said = "holds one document" if len(documents) == 1 else f"holds {len(documents)} equal documents"
        raise DataError(
            f"`{source}` {said}: nothing can be held out without training on it",
            hint="give more text: two different documents or more",
        )
    # The smallest is always held out and the largest never: this changes nothing unless a side is empty.
    smallest, largest = min(shares), max(shares)
    held_out = [u == smallest or (u < share and u != largest) for u in shares]
    train = [document for document, held in zip(documents, held_out, strict=True) if not held]
    validation = [document for document, held in zip(documents, held_out, strict=True) if held]
    return train, validation


def from_documents(
    documents: Sequence[Document], share: float, vocabulary: int, source: str, description: str
) -> Corpus:
    """A byte-level corpus: a token is a byte, and each side is its documents, one after the other."""
    if vocabulary < 256:
        _check_bytes(documents, vocabulary)
    sides = [_joined(side) for side in split(documents, share, source)]
    identity = blake2b(digest_size=16)
    for side in sides:
        identity.update(len(side).to_bytes(8, "little"))
        identity.update(side.tobytes())
    train, validation = sides
    return Corpus(
        train=train,
        validation=validation,
        description=f"{description}: {len(train):,} bytes to learn from, {len(validation):,} held out",
        digest=identity.hexdigest(),
        bytes_per_token=1.0,
        num_documents=len(documents),
    )


def _joined(documents: Sequence[Document]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(document.content for document in documents), dtype=np.uint8)


def _check_bytes(documents: Sequence[Document], vocabulary: int) -> None:
    for document in documents:
        data = np.frombuffer(document.content, dtype=np.uint8)
        largest = int(data.max())
        if largest >= vocabulary:
            raise DataError(
                f"`{document.name}` holds the byte {largest} at offset {int(data.argmax())}, and the "
                f"vocabulary has {vocabulary} tokens, 0 to {vocabulary - 1}",
                hint="text is read as bytes: use `--set model.vocabulary=256`",
            )
