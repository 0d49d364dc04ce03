"""Tokenizers behind one small interface, and how one is found.

    bytes                        a token is a byte; nothing to install, nothing to save
    a tokenizer.json             or a folder that holds one          (package tokenizers)
    a sentencepiece *.model      or a folder that holds one          (package sentencepiece)
    tiktoken:NAME                as tiktoken:gpt2                    (package tiktoken)
    a folder of packed data      the tokenizer it was packed with

Text is text: a document that mentions `<|endoftext|>` is encoded letter by letter and never becomes the separator,
and no tokenizer adds tokens of its own or cuts a text short. A tokenizer is known by the SHA-256 of the file that
`save` writes, from which alone `open_saved` makes it again, on a machine without network too.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import did_you_mean
from halfstep.training.data.corpus import DataError
from halfstep.training.data.token_bytes import TokenBytes
from halfstep.training.files import write_whole

NO_SEPARATOR = "none"
PACKED_INDEX = "index.json"


@dataclass(frozen=True)
class Identity:
    """What a tokenizer is, as an index keeps it."""

    kind: str
    name: str  # what it was called; not part of what must agree
    file: str | None  # beside the index; None for bytes
    sha256: str | None
    vocabulary: int
    separator: int | None  # the token before each document


class Tokenizer(ABC):
    """Texts to tokens and back."""

    kind: ClassVar[str]
    file: ClassVar[str | None]  # what `save` calls the file

    def __init__(self, name: str, content: bytes, vocabulary: int, separator: int | None):
        self.name, self.content, self.vocabulary, self.separator = name, content, vocabulary, separator

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of each text."""

    @cached_property
    def pieces(self) -> list[bytes] | None:
        """The bytes that each token stands for, none for special ones; None where that is not known."""
        return self._pieces()

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The length of each token in bytes, or None where that is not known."""
        return None if self.pieces is None else TokenBytes.of(self.pieces, self.adds_space, self.separator)

    @cached_property
    def adds_space(self) -> bool:
        """Whether a space is put before a text that has none; found out by trying."""
        first = self.encode(["a"])[0][:1]
        return self.pieces is not None and len(first) == 1 and self.pieces[int(first[0])].startswith(b" ")

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The text of some tokens; a token of a padded vocabulary stands for none."""
        if self.pieces is None:
            return self._decode(list(tokens))
        text = b"".join(self.pieces[token] if token < len(self.pieces) else b"" for token in tokens)
        return text[1:] if self.adds_space and text.startswith(b" ") else text

    def identity(self) -> Identity:
        """What it is."""
        digest = hashlib.sha256(self.content).hexdigest() if self.file else None
        return Identity(self.kind, self.name, self.file, digest, self.vocabulary, self.separator)

    def save(self, folder: Path) -> None:
        """Writes its file into a folder, unless the same is there."""
        if self.file is None:
            return
        path = folder / self.file
        if not path.exists() or path.read_bytes() != self.content:
            write_whole(path, self.content)

    @abstractmethod
    def _pieces(self) -> list[bytes] | None:
        """What `pieces` holds."""

    def _decode(self, tokens: list[int]) -> bytes:
        """Text of a tokenizer whose tokens have none of their own."""
        raise NotImplementedError


@final
class BytesTokenizer(Tokenizer):
    """A token is a byte. There is no separator: it would be a byte that nobody wrote."""

    kind, file = "bytes", None

    def __init__(self) -> None:
        super().__init__("bytes", b"", 256, None)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The UTF-8 of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def _pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)]


def open_tokenizer(spec: str, separator: str | None = None) -> Tokenizer:
    """The tokenizer that a command names. `separator` is the text of the token between documents, or `none`."""
    from halfstep.training.data import tokenizer_libraries as kinds

    if spec == BytesTokenizer.kind:
        if separator not in (None, NO_SEPARATOR):
            raise DataError(f"tokenizer `bytes` has no token `{separator}`", hint="leave --separator out")
        return BytesTokenizer()
    if spec.startswith("tiktoken:"):
        return kinds.Tiktoken.by_name(spec.removeprefix("tiktoken:"), separator)
    path = Path(spec).expanduser()
    if path.name == PACKED_INDEX and path.is_file():
        path = path.parent
    if path.is_dir():
        from halfstep.training.data.index import is_packed, read_index

        if separator is None and is_packed(path):
            return open_saved(path, read_index(path).tokenizer)
        path = _in_folder(path)
    if not path.is_file():
        raise DataError(f"there is no tokenizer `{spec}`", hint=did_you_mean(path.name, _names(path), _CHOICES))
    if path.name == kinds.Tiktoken.file:
        return kinds.Tiktoken.read(path, separator)
    if path.suffix == ".json":
        return kinds.HuggingFace.read(path, separator)
    if path.suffix == ".model":
        return kinds.SentencePiece.read(path, separator)
    raise DataError(f"`{path}` is no tokenizer that is known by its name", hint=_CHOICES)


def open_saved(folder: Path, identity: Identity) -> Tokenizer:
    """The tokenizer that packed data was made with, from the file beside it."""
    from halfstep.training.data import tokenizer_libraries as kinds

    if identity.kind == BytesTokenizer.kind:
        return BytesTokenizer()
    known = {kind.kind: kind for kind in (kinds.HuggingFace, kinds.SentencePiece, kinds.Tiktoken)}
    if identity.kind not in known or identity.file is None:
        raise DataError(f"`{folder}` was packed with a tokenizer of the unknown kind `{identity.kind}`")
    content = check_saved(folder, identity)
    return known[identity.kind](identity.name, content, identity.separator)


def check_saved(folder: Path, identity: Identity) -> bytes:
    """The content of the tokenizer's file, which must be what the data was packed with."""
    if identity.file is None:
        return b""
    path = folder / identity.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the tokenizer `{path}` cannot be read: {error.strerror or error}", hint="copy it back, or pack again"
        ) from None
    if hashlib.sha256(content).hexdigest() != identity.sha256:
        raise DataError(
            f"`{path}` is not the tokenizer that the data was packed with: its SHA-256 is not the index's",
            hint="copy the right one back, or pack again",
        )
    return content


def needed(package: str, what: str) -> ModuleType:
    """An optional package, or how to install it."""
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise DataError(
            f"{what} needs the package `{package.partition('.')[0]}`, which is not installed",
            hint="pip install 'halfstep[data]'",
        ) from None


def _names(path: Path) -> list[str]:
    """What a name that leads nowhere may have been meant to be."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    files = [entry.name for entry in beside if entry.suffix in (".json", ".model") or entry.is_dir()]
    return [BytesTokenizer.kind, "tiktoken:gpt2", *files]


def _in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken.json"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"there is no tokenizer in the folder `{folder}`", hint=_CHOICES)


_CHOICES = (
    "a tokenizer is `bytes`, a tokenizer.json, a sentencepiece *.model, a folder with one of them, or "
    "tiktoken:NAME; `halfstep data train-tokenizer` makes one"
)
