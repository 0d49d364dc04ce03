"""What a tokenizer is to the rest of halfstep, and the one that needs no library: bytes.

Text stays text: a document that mentions `<|endoftext|>` is encoded letter by letter and never becomes the
separator, and no tokenizer adds tokens or truncates a text. The file that `save` writes identifies a tokenizer by
its SHA-256, and is enough to open it again.

`TokenBytes` says how many bytes of text each token stands for, which makes bits per byte correct for every
tokenizer:

    bits per byte = sum of -log2 p(token)  /  sum of bytes(token)        over exactly the predicted tokens
    bytes(token | before) = length[token] - (space[token] and boundary[before])

A token that stands for no text (a separator or other special token) has 0 bytes. Sentencepiece tokenizers put a
space before the first word of a text, whose first token is one byte shorter than its piece: `space` marks the
pieces that begin with such a space, `boundary` the separator, after which a text begins. (Some add none to a text
that starts with one; such a text counts one byte too few.)
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from halfstep.config.schema import Count
from halfstep.core.errors import how_to_install
from halfstep.training.data.types import DamagedDataError, TokenArray, TokenizerError
from halfstep.training.files import write_whole


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
            raise DamagedDataError(
                f"`{name}` is not a table of token lengths: {error}", hint="pack again"
            ) from None
        if table.ndim != 2 or table.shape[0] != 3 or table.dtype != np.dtype("<i4"):
            raise DamagedDataError(
                f"`{name}` holds {table.dtype} of shape {list(table.shape)}, expected int32 with three rows",
                hint="pack again",
            )
        return cls(table[0], table[1].astype(np.bool_), table[2].astype(np.bool_))


NO_SEPARATOR = "none"


@dataclass(frozen=True)
class TokenizerIdentity:
    """What the index records about a tokenizer."""

    kind: str
    name: str  # as given; it does not have to match
    file: str | None  # in the folder of the index; None for bytes
    sha256: str | None
    vocabulary: Count
    separator: Count | None  # the token before each document


class Tokenizer(ABC):
    """Converts texts to tokens and back."""

    kind: ClassVar[str]
    file: ClassVar[str | None]  # the name of the file that `save` writes

    def __init__(self, name: str, content: bytes, vocabulary: int, separator: int | None):
        self.name, self.content, self.vocabulary, self.separator = name, content, vocabulary, separator

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Returns the tokens of each text."""

    @cached_property
    def pieces(self) -> list[bytes] | None:
        """The bytes that each token stands for, empty for special tokens; None if they are unknown."""
        return self._pieces()

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The length of each token in bytes, or None if it is unknown."""
        return None if self.pieces is None else TokenBytes.of(self.pieces, self.adds_space, self.separator)

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer starts a text with a space; determined by a trial."""
        first = self.encode(["a"])[0][:1]
        return self.pieces is not None and len(first) == 1 and self.pieces[int(first[0])].startswith(b" ")

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Returns the text of some tokens; tokens that only pad the vocabulary have none."""
        if self.pieces is None:
            return self._decode(list(tokens))
        text = b"".join(self.pieces[token] if token < len(self.pieces) else b"" for token in tokens)
        return text[1:] if self.adds_space and text.startswith(b" ") else text

    def identity(self) -> TokenizerIdentity:
        """Returns what the index records."""
        digest = hashlib.sha256(self.content).hexdigest() if self.file else None
        return TokenizerIdentity(self.kind, self.name, self.file, digest, self.vocabulary, self.separator)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's file into a folder."""
        if self.file is not None:
            write_whole(folder / self.file, self.content)

    @abstractmethod
    def _pieces(self) -> list[bytes] | None:
        """Computes `pieces`."""

    def _decode(self, tokens: list[int]) -> bytes:
        """Decodes without `pieces`."""
        raise NotImplementedError


class BytesTokenizer(Tokenizer):
    """Each byte is a token. There is no separator, which would be a byte that nobody wrote."""

    kind, file = "bytes", None

    def __init__(self) -> None:
        super().__init__("bytes", b"", 256, None)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Returns the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def _pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)]


def import_optional(package: str, purpose: str) -> ModuleType:
    """Imports an optional package, or says how to install it."""
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise TokenizerError(
            f"{purpose} needs the package `{package.partition('.')[0]}`, which is not installed",
            hint=how_to_install("data"),
        ) from None
