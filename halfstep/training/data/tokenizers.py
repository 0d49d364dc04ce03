"""Opens a tokenizer by the name a command gives, or the one that packed data was made with.

    bytes                        each byte is a token; nothing to install, nothing to save
    a tokenizer.json             or a folder that holds one          (package tokenizers)
    a sentencepiece *.model      or a folder that holds one          (package sentencepiece)
    tiktoken:NAME                such as tiktoken:gpt2               (package tiktoken)
    a folder of packed data      the tokenizer it was packed with

The three libraries are reduced to what packing, sampling and bits per byte need. How a library writes its
vocabulary shows what a token stands for:

    byte-level      each of 256 characters stands for a byte (GPT-2, Llama 3, Qwen, ...)
    metaspace       a space is written U+2581, a byte <0xNN> (Llama 2, Gemma, sentencepiece itself)
    tiktoken        the bytes themselves

Of other kinds of tokenizer.json (WordPiece) the bytes of tokens are unknown: bits per byte use the average. To add
a library, implement `Tokenizer` here and list it in `_LIBRARIES`.
"""

import base64
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import MOST_TOKENIZER, parse_json, read_bytes
from halfstep.core.errors import did_you_mean, one_of
from halfstep.training.data.index import INDEX, is_packed, read_index, read_tokenizer_file
from halfstep.training.data.tokenizer_base import (
    NO_SEPARATOR,
    BytesTokenizer,
    Tokenizer,
    TokenizerIdentity,
    import_optional,
)
from halfstep.training.data.types import TokenizerError
from halfstep.training.files import os_errors

# The names of the end-of-text token, in the order they are tried.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<s>", "<bos>", "[SEP]")

_SPACE = "\u2581"
_UNSPELLABLE = "\uffff"  # not a character, so it occurs in no text


class LibraryTokenizer(Tokenizer):
    """A tokenizer that a library reads from a file; `what` and `remedy` are of the error if it cannot."""

    package: ClassVar[str]
    what: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, name: str, content: bytes, separator: int | None):
        library = import_optional(self.package, f"tokenizer `{name}`")
        with _no_panic(name):
            try:
                vocabulary = self._open(library, content)
            except Exception as error:  # the libraries have no error class
                raise TokenizerError(f"`{name}` is not a {self.what}: {error}", hint=self.remedy) from None
        super().__init__(name, content, vocabulary, separator)

    @classmethod
    def read(cls, path: Path, separator: str | None) -> Self:
        """Opens a file. Without a `separator`, the tokenizer's own end of text is used."""
        with os_errors(TokenizerError, f"cannot read `{path}`", "name the file of a tokenizer"):
            content = read_bytes(path, MOST_TOKENIZER)
        tokenizer = cls(str(path), content, None)
        tokenizer.choose_separator(separator, path)
        tokenizer.name = path.name  # an index holds no paths
        return tokenizer

    def choose_separator(self, requested: str | None, path: Path | None = None) -> None:
        """Sets the token that separates documents: the requested one, or the first default that exists."""
        tokens = self._tokens()
        if requested == NO_SEPARATOR:
            return
        for name in self._default_separators(path) if requested is None else (requested,):
            if name in tokens:
                self.separator = tokens[name]
                return
        if requested is None:
            raise TokenizerError(
                f"tokenizer `{self.name}` has no known end-of-text token",
                hint=f"name the token that starts each document: --separator TOKEN, or --separator {NO_SEPARATOR}",
            )
        raise TokenizerError(
            f"tokenizer `{self.name}` has no token `{requested}`",
            hint=did_you_mean(requested, tokens, f"--separator {NO_SEPARATOR} puts nothing between documents"),
        )

    @property
    def separator_name(self) -> str | None:
        """The text of the separator."""
        return next((name for name, number in self._tokens().items() if number == self.separator), None)

    @abstractmethod
    def _open(self, library: Any, content: bytes) -> int:
        """Opens the content of the file; returns the number of tokens."""

    @abstractmethod
    def _tokens(self) -> Mapping[str, int]:
        """Returns the tokens that can separate documents, by name."""

    def _default_separators(self, path: Path | None) -> Sequence[str]:
        return END_OF_TEXT


class HuggingFace(LibraryTokenizer):
    """A tokenizer.json."""

    kind, file, package = "tokenizer.json", "tokenizer.json", "tokenizers"
    what, remedy = "valid tokenizer.json", "`halfstep data train-tokenizer` trains a new one"

    def _open(self, library: Any, content: bytes) -> int:
        self._written: dict[str, Any] = parse_json(content)
        self._tokenizer = library.Tokenizer.from_str(_unspellable(self._written) or content.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # in a text they are text
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocabulary = {token.removeprefix(_UNSPELLABLE): number for token, number in tokens.items()}
        return 1 + max(self._vocabulary.values(), default=-1)

    def _tokens(self) -> Mapping[str, int]:
        return self._vocabulary

    def _default_separators(self, path: Path | None) -> Sequence[str]:
        """Prefers the end of text that the tokenizer_config.json in the same folder names."""
        try:
            config = parse_json(read_bytes((path or Path()).parent / "tokenizer_config.json", MOST_TOKENIZER))
            token = config["eos_token"]
        except (OSError, ValueError, KeyError, TypeError):
            return END_OF_TEXT
        text = token.get("content") if isinstance(token, dict) else token
        return (text, *END_OF_TEXT) if isinstance(text, str) else END_OF_TEXT

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Returns the tokens of each text."""
        with _no_panic(self.name):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in encoded]

    def _pieces(self) -> list[bytes] | None:
        kinds = {step.get("type") for step in _steps(self._written.get("decoder"))}
        before = {step.get("type") for step in _steps(self._written.get("pre_tokenizer"))}
        if "ByteLevel" in kinds or (not kinds and "ByteLevel" in before):
            text_of = _byte_level
        elif "Metaspace" in kinds or any(
            step.get("type") == "Replace" and step.get("pattern") == {"String": _SPACE}
            for step in _steps(self._written.get("decoder"))
        ):
            text_of = _metaspace
        else:
            return None
        added = {each["id"]: each for each in self._written.get("added_tokens", [])}
        pieces = [b""] * self.vocabulary
        for token, number in self._vocabulary.items():
            if number not in added:
                pieces[number] = text_of(token)
            elif not added[number]["special"]:
                pieces[number] = token.encode()
        return pieces

    def _decode(self, tokens: list[int]) -> bytes:
        text: str = self._tokenizer.decode(tokens)
        return text.encode()


class SentencePiece(LibraryTokenizer):
    """A sentencepiece model. Documents begin with its beginning-of-sequence token, as is usual for these."""

    kind, file, package = "sentencepiece", "tokenizer.model", "sentencepiece"
    what, remedy = "sentencepiece model", "name the *.model file"

    def _open(self, library: Any, content: bytes) -> int:
        self._model = library.SentencePieceProcessor(model_proto=content)
        # All at once: a damaged model may hold pieces that are not UTF-8.
        self._names: list[str] = self._model.id_to_piece(list(range(self._model.vocab_size())))
        return len(self._names)

    def _tokens(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._names)}

    def _default_separators(self, path: Path | None) -> Sequence[str]:
        ids = (self._model.bos_id(), self._model.eos_id())
        return [self._names[number] for number in ids if 0 <= number < len(self._names)]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Returns the tokens of each text."""
        encoded = self._model.encode(list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=1)
        return [np.array(each, dtype=np.uint32) for each in encoded]

    def _pieces(self) -> list[bytes]:
        model, pieces = self._model, []
        for number, piece in enumerate(self._names):
            silent = model.is_control(number) or model.is_unknown(number) or model.is_unused(number)
            pieces.append(b"" if silent else _metaspace(piece) if model.is_byte(number) else _spaced(piece))
        return pieces


class Tiktoken(LibraryTokenizer):
    """A tiktoken encoding, saved as JSON so that packed data needs neither tiktoken's cache nor the network."""

    kind, file, package = "tiktoken", "tokenizer.tiktoken.json", "tiktoken"
    what, remedy = "saved tiktoken encoding", "use tiktoken:NAME"

    def _open(self, library: Any, content: bytes) -> int:
        written = parse_json(content)
        ranks = {base64.b64decode(word): rank for word, rank in written["ranks"]}
        self._special: dict[str, int] = written["special"]
        self._encoding = library.Encoding(
            written["name"], pat_str=written["pattern"], mergeable_ranks=ranks, special_tokens=self._special
        )
        return int(self._encoding.n_vocab)

    def _tokens(self) -> Mapping[str, int]:
        return self._special

    @classmethod
    def by_name(cls, name: str, separator: str | None) -> "Tiktoken":
        """Opens an encoding that tiktoken knows, from its cache or the network."""
        library = import_optional("tiktoken", f"tokenizer `tiktoken:{name}`")
        known = library.list_encoding_names()
        if name not in known:
            raise TokenizerError(
                f"tiktoken has no encoding `{name}`; it has {one_of(known)}", hint=did_you_mean(name, known)
            )
        try:
            encoding = library.get_encoding(name)
        except OSError as error:  # includes what `requests` raises
            raise TokenizerError(
                f"tiktoken does not have `{name}` in its cache and cannot download it: {type(error).__name__}",
                hint=f"on a machine with a network, run `TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
                f'tiktoken.get_encoding("{name}")\'`; copy DIR here and set TIKTOKEN_CACHE_DIR to it',
            ) from None
        tokenizer = cls(f"tiktoken:{name}", _to_json(encoding), None)
        tokenizer.choose_separator(separator)
        return tokenizer

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Returns the tokens of each text."""
        with _no_panic(self.name):
            return [np.array(self._encoding.encode_ordinary(text), dtype=np.uint32) for text in texts]

    def _pieces(self) -> list[bytes]:
        pieces = [b""] * self.vocabulary
        for word, rank in self._encoding._mergeable_ranks.items():
            pieces[rank] = word
        return pieces


@contextmanager
def _no_panic(name: str) -> Iterator[None]:
    """Turns a panic of a Rust library in the block, which is no `Exception`, into an error of ours."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer `{name}` is damaged: {error}", hint="fetch or train it again") from None


def _to_json(encoding: Any) -> bytes:
    """Returns an encoding as JSON. Its parts have no public names; they are what its constructor takes."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda pair: pair[1])
    return json.dumps(
        {
            "name": encoding.name,
            "pattern": encoding._pat_str,
            "special": dict(sorted(encoding._special_tokens.items())),
            "ranks": [[base64.b64encode(word).decode(), rank] for word, rank in ranks],
        },
        separators=(",", ":"),
    ).encode()


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for key in ("decoders", "pretokenizers"):
            for inner in part.get(key, ()):
                yield from _steps(inner)


def _unspellable(written: Any) -> str | None:
    """Returns the tokenizer with special tokens that no text can spell, or None if that is not needed.

    A Unigram model cuts a text into any entries of its vocabulary, special ones included: `</s>` would end a
    document.
    """
    model = written.get("model") if isinstance(written, dict) else None
    if not isinstance(model, dict) or model.get("type") != "Unigram":
        return None
    added = [
        {**each, "content": _UNSPELLABLE + each["content"]} if each["special"] else each
        for each in written.get("added_tokens", [])
    ]
    special = {each["content"] for each in written.get("added_tokens", []) if each["special"]}
    words = [[_UNSPELLABLE + word if word in special else word, chance] for word, chance in model["vocab"]]
    return json.dumps({**written, "added_tokens": added, "model": {**model, "vocab": words}})


def _metaspace(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _spaced(token)


def _spaced(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()  # added as text


def _characters_of_bytes() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 stands for itself, the rest for 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


BYTE_OF = _characters_of_bytes()  # of a character of byte-level tokenizers
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


_CHOICES = (
    "a tokenizer is `bytes`, a tokenizer.json, a sentencepiece *.model, a folder that holds one of them, or "
    "tiktoken:NAME; `halfstep data train-tokenizer` trains a new one"
)
_LIBRARIES = {kind.kind: kind for kind in (HuggingFace, SentencePiece, Tiktoken)}


def open_tokenizer(spec: str, separator: str | None = None) -> Tokenizer:
    """Opens the tokenizer that a command names. `separator` is the token between documents, or `none`."""
    if spec == BytesTokenizer.kind:
        if separator not in (None, NO_SEPARATOR):
            raise TokenizerError(f"tokenizer `bytes` has no token `{separator}`", hint="omit --separator")
        return BytesTokenizer()
    if spec.startswith("tiktoken:"):
        return Tiktoken.by_name(spec.removeprefix("tiktoken:"), separator)
    path = Path(spec).expanduser()
    if path.name == INDEX and path.is_file():
        path = path.parent
    if path.is_dir():
        if separator is None and is_packed(path):
            return open_saved(path, read_index(path).tokenizer)
        path = _find_in_folder(path)
    if not path.is_file():
        neighbors = path.parent.iterdir() if path.parent.is_dir() else ()
        files = [entry.name for entry in neighbors if entry.suffix in (".json", ".model") or entry.is_dir()]
        hint = did_you_mean(path.name, [BytesTokenizer.kind, "tiktoken:gpt2", *files], _CHOICES)
        raise TokenizerError(f"tokenizer `{spec}` does not exist", hint=hint)
    for ending, kind in ((Tiktoken.file, Tiktoken), (".json", HuggingFace), (".model", SentencePiece)):
        if path.name.endswith(ending):
            return kind.read(path, separator)
    raise TokenizerError(f"`{path}` does not have the name of a tokenizer", hint=_CHOICES)


def open_saved(folder: Path, identity: TokenizerIdentity) -> Tokenizer:
    """Opens the tokenizer that packed data was made with, from the file in its folder."""
    if identity.kind == BytesTokenizer.kind:
        return BytesTokenizer()
    if identity.kind not in _LIBRARIES or identity.file is None:
        raise TokenizerError(f"`{folder}` was packed with a tokenizer of unknown kind `{identity.kind}`")
    content = read_tokenizer_file(folder, identity)
    return _LIBRARIES[identity.kind](identity.name, content, identity.separator)


def _find_in_folder(folder: Path) -> Path:
    for kind in _LIBRARIES.values():
        if (folder / kind.file).is_file():
            return folder / kind.file
    raise TokenizerError(f"folder `{folder}` holds no tokenizer", hint=_CHOICES)
