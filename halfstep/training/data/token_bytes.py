"""How many bytes of text each token stands for, which makes bits per byte correct for every tokenizer.

    bits per byte = sum of -log2 p(token)  /  sum of bytes(token)        over exactly the predicted tokens
    bytes(token | before) = length[token] - (space[token] and boundary[before])

A token that stands for no text (a separator or other special token) has 0 bytes. Sentencepiece tokenizers put a
space before the first word of a text, whose first token is one byte shorter than its piece: `space` marks the
pieces that begin with such a space, `boundary` the separator, after which a text begins. (Some add none to a text
that starts with one; such a text counts one byte too few.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.types import DataError, TokenArray


@dataclass(frozen=True)
class TokenBytes:
    """The length table of a tokenizer, indexed by token."""

    length: NDArray[np.int32]
    space: NDArray[np.bool_]
    boundary: NDArray[np.bool_]

    @classmethod
    def of(cls, pieces: Sequence[bytes], adds_space: bool, separator: int | None) -> "TokenBytes":
        """Builds the table from the text of each token; `adds_space`: the tokenizer starts a text with a space."""
        length = np.array([len(piece) for piece in pieces], dtype=np.int32)
        space = np.array([adds_space and piece.startswith(b" ") for piece in pieces], dtype=np.bool_)
        boundary = np.zeros(len(pieces), dtype=np.bool_)
        if separator is not None:
            boundary[separator] = True
        return cls(length, space, boundary)

    def count(self, before: TokenArray, tokens: TokenArray) -> int:
        """Returns the bytes of `tokens`; `before` holds the token that precedes each, in the same shape."""
        total = int(self.length[tokens].sum(dtype=np.int64))
        if self.space.any():
            total -= int(np.count_nonzero(self.space[tokens] & self.boundary[before]))
        return total

    def to_npy(self) -> bytes:
        """Returns the table as a .npy file with three rows: length, space, boundary."""
        file = BytesIO()
        np.save(file, np.stack([self.length, self.space, self.boundary]).astype("<i4"), allow_pickle=False)
        return file.getvalue()

    @classmethod
    def from_npy(cls, content: bytes, name: str) -> "TokenBytes":
        """Reads the table from the content of a .npy file."""
        try:
            table = np.load(BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"`{name}` is not a table of token lengths: {error}", hint="pack again") from None
        if table.ndim != 2 or table.shape[0] != 3 or table.dtype != np.dtype("<i4"):
            raise DataError(
                f"`{name}` holds {table.dtype} of shape {list(table.shape)}, expected int32 with three rows",
                hint="pack again",
            )
        return cls(table[0], table[1].astype(np.bool_), table[2].astype(np.bool_))
