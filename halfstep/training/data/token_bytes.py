"""How many bytes of text a token stands for, which makes bits per byte right for every tokenizer.

    bits per byte = sum of -log2 p(token)  /  sum of bytes(token)        over the very tokens that were predicted

A token that stands for no text (a separator, any special token) is 0 bytes long: predicting it costs bits and
gains none. Tokenizers of the sentencepiece kind put a space before the first word of a text that was not there;
the first token of such a text is one byte shorter than its piece:

    bytes(token | before) = length[token] - (space[token] and boundary[before])

`space` marks pieces that begin with a space where the tokenizer puts one there by itself, `boundary` the
separator, after which a text begins. (Some put none before a text that begins with a space of its own; such a text
counts a byte too few.) Where the tokenizer gives every text back, as byte-level ones
do, the bytes of all tokens of a text add up to the text; `halfstep data pack` adds up both and says so if they
differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.corpus import DataError, TokenArray


@dataclass(frozen=True)
class TokenBytes:
    """The table of a tokenizer, by token."""

    length: NDArray[np.int32]
    space: NDArray[np.bool_]
    boundary: NDArray[np.bool_]

    @classmethod
    def of(cls, pieces: Sequence[bytes], adds_space: bool, separator: int | None) -> "TokenBytes":
        """From the text of each token; `adds_space` where the tokenizer puts a space before a text.

        Not every token without text is a boundary: after an unknown word a space is one that was written.
        """
        length = np.array([len(piece) for piece in pieces], dtype=np.int32)
        space = np.array([adds_space and piece.startswith(b" ") for piece in pieces], dtype=np.bool_)
        boundary = np.zeros(len(pieces), dtype=np.bool_)
        if separator is not None:
            boundary[separator] = True
        return cls(length, space, boundary)

    def count(self, before: TokenArray, tokens: TokenArray) -> int:
        """Bytes of the tokens, each after the one before it; arrays of one shape."""
        total = int(self.length[tokens].sum(dtype=np.int64))
        if self.space.any():
            total -= int(np.count_nonzero(self.space[tokens] & self.boundary[before]))
        return total

    def to_npy(self) -> bytes:
        """The table as a .npy file of three rows: length, space, boundary."""
        file = BytesIO()
        np.save(file, np.stack([self.length, self.space, self.boundary]).astype("<i4"), allow_pickle=False)
        return file.getvalue()

    @classmethod
    def from_npy(cls, content: bytes, name: str) -> "TokenBytes":
        """The table back from the content of a file."""
        try:
            table = np.load(BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(
                f"`{name}` is no table of bytes by token: {error}", hint="pack the data again"
            ) from None
        if table.ndim != 2 or table.shape[0] != 3 or table.dtype != np.dtype("<i4"):
            raise DataError(
                f"`{name}` holds {table.dtype} of shape {list(table.shape)}, expected int32 of three rows",
                hint="pack the data again",
            )
        return cls(table[0], table[1].astype(np.bool_), table[2].astype(np.bool_))
