"""The tokenizers of three libraries, each reduced to what packing, sampling and bits per byte need.

What a token stands for is read from how the library writes its vocabulary:

    byte-level      each of 256 characters stands for a byte (GPT-2, Llama 3, Qwen, ...)
    metaspace       a space is written U+2581, a byte <0xNN> (Llama 2, Gemma, sentencepiece itself)
    tiktoken        the bytes themselves

A tokenizer.json of another kind (WordPiece and the like) can be packed, sampled and trained on; the bytes of one
of its tokens are not known, so its bits per byte are by the average over all held-out text.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import did_you_mean, one_of
from halfstep.training.data.corpus import DataError
from halfstep.training.data.tokenizers import NO_SEPARATOR, Tokenizer, needed

# What end-of-text is called, in the order in which it is looked for.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<s>", "<bos>", "[SEP]")

_SPACE = "\u2581"
_UNSPELLABLE = "\uffff"  # no character at all, and so in no text


@final
class HuggingFace(Tokenizer):
    """A tokenizer.json."""

    kind, file = "tokenizer.json", "tokenizer.json"

    def __init__(self, name: str, content: bytes, separator: int | None):
        library = needed("tokenizers", f"tokenizer `{name}`")
        try:
            self._written: dict[str, Any] = json.loads(content)
            self._tokenizer = library.Tokenizer.from_str(_unspellable(self._written) or content.decode())
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"`{name}` is no tokenizer.json: {error}", hint="`halfstep data train-tokenizer` makes one"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # in a text they are text
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocabulary = {token.removeprefix(_UNSPELLABLE): number for token, number in found.items()}
        super().__init__(name, content, 1 + max(self._vocabulary.values(), default=-1), separator)

    @classmethod
    def read(cls, path: Path, separator: str | None) -> "HuggingFace":
        """From a file; the separator is the end-of-text that the file or the configuration beside it names."""
        found = cls(str(path), path.read_bytes(), None)
        found.name = path.name  # an index holds no paths
        names = END_OF_TEXT if separator is None else (separator,)
        if separator is None and (told := _end_of_text_beside(path)):
            names = (told, *names)
        found.separator = _separator(found._vocabulary, names, separator, str(path))
        return found

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of each text."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in encoded]

    def _pieces(self) -> list[bytes] | None:
        kinds = {step.get("type") for step in _steps(self._written.get("decoder"))}
        before = {step.get("type") for step in _steps(self._written.get("pre_tokenizer"))}
        if "ByteLevel" in kinds or (not kinds and "ByteLevel" in before):
            text_of = _byte_level
        elif "Metaspace" in kinds or any(_replaces_space(step) for step in _steps(self._written.get("decoder"))):
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


@final
class SentencePiece(Tokenizer):
    """A sentencepiece model. Its documents begin with its beginning-of-sequence, as its users write them."""

    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, name: str, content: bytes, separator: int | None):
        library = needed("sentencepiece", f"tokenizer `{name}`")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
            vocabulary = int(self._model.vocab_size())
        except (RuntimeError, OSError, ValueError) as error:
            raise DataError(f"`{name}` is no sentencepiece model: {error}", hint="name the *.model file") from None
        super().__init__(name, content, vocabulary, separator)

    @classmethod
    def read(cls, path: Path, separator: str | None) -> "SentencePiece":
        """From a file."""
        found = cls(str(path), path.read_bytes(), None)
        found.name = path.name  # an index holds no paths
        model = found._model
        if separator is None:
            known = [number for number in (model.bos_id(), model.eos_id()) if number >= 0]
            if not known:
                raise _no_separator(str(path))
            found.separator = known[0]
        else:
            names = {model.id_to_piece(number): number for number in range(found.vocabulary)}
            found.separator = _separator(names, (separator,), separator, str(path))
        return found

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of each text."""
        encoded = self._model.encode(list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=1)
        return [np.array(each, dtype=np.uint32) for each in encoded]

    def _pieces(self) -> list[bytes]:
        model, pieces = self._model, []
        for number in range(self.vocabulary):
            silent = model.is_control(number) or model.is_unknown(number) or model.is_unused(number)
            piece = model.id_to_piece(number)
            pieces.append(b"" if silent else _metaspace(piece) if model.is_byte(number) else _spaced(piece))
        return pieces


@final
class Tiktoken(Tokenizer):
    """An encoding of tiktoken; saved as JSON, so that packed data needs neither its cache nor the network."""

    kind, file = "tiktoken", "tokenizer.tiktoken.json"

    def __init__(self, name: str, content: bytes, separator: int | None):
        library = needed("tiktoken", f"tokenizer `{name}`")
        try:
            written = json.loads(content)
            ranks = {base64.b64decode(word): rank for word, rank in written["ranks"]}
            self._special: dict[str, int] = written["special"]
            self._encoding = library.Encoding(
                written["name"], pat_str=written["pattern"], mergeable_ranks=ranks, special_tokens=self._special
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"`{name}` is no saved tiktoken encoding: {error}", hint="name tiktoken:NAME"
            ) from None
        super().__init__(name, content, int(self._encoding.n_vocab), separator)

    @classmethod
    def by_name(cls, name: str, separator: str | None) -> "Tiktoken":
        """One that tiktoken knows, from its cache or the network."""
        library = needed("tiktoken", f"tokenizer `tiktoken:{name}`")
        known = library.list_encoding_names()
        if name not in known:
            raise DataError(
                f"tiktoken has no encoding `{name}`; it has {one_of(known)}", hint=did_you_mean(name, known)
            )
        try:
            encoding = library.get_encoding(name)
        except OSError as error:  # what `requests` raises is one
            raise DataError(
                f"tiktoken keeps no file of `{name}` in its cache and cannot fetch it: {type(error).__name__}",
                hint=f"where there is a network, run `TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
                f'tiktoken.get_encoding("{name}")\'`; copy DIR here and set TIKTOKEN_CACHE_DIR to it',
            ) from None
        return cls._with_separator(f"tiktoken:{name}", _written(encoding), separator)

    @classmethod
    def read(cls, path: Path, separator: str | None) -> "Tiktoken":
        """One that was saved."""
        found = cls._with_separator(str(path), path.read_bytes(), separator)
        found.name = path.name
        return found

    @classmethod
    def _with_separator(cls, name: str, content: bytes, separator: str | None) -> "Tiktoken":
        found = cls(name, content, None)
        names = END_OF_TEXT if separator is None else (separator,)
        found.separator = _separator(found._special, names, separator, name)
        return found

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of each text."""
        return [np.array(self._encoding.encode_ordinary(text), dtype=np.uint32) for text in texts]

    def _pieces(self) -> list[bytes]:
        pieces = [b""] * self.vocabulary
        for word, rank in self._encoding._mergeable_ranks.items():
            pieces[rank] = word
        return pieces


def _written(encoding: Any) -> bytes:
    """An encoding as JSON. Its parts have no public names; they are what its constructor takes."""
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


def _separator(vocabulary: Mapping[str, int], names: Sequence[str], asked: str | None, where: str) -> int | None:
    if asked == NO_SEPARATOR:
        return None
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    if asked is None:
        raise _no_separator(where)
    raise DataError(
        f"tokenizer `{where}` has no token `{asked}`",
        hint=did_you_mean(asked, vocabulary, f"--separator {NO_SEPARATOR} puts nothing between documents"),
    )


def _no_separator(where: str) -> DataError:
    return DataError(
        f"tokenizer `{where}` has no token that is known to end a text",
        hint=f"name the token to put before each document by --separator TOKEN, or --separator {NO_SEPARATOR}",
    )


def _end_of_text_beside(path: Path) -> str | None:
    """What the tokenizer_config.json in the same folder says ends a text."""
    try:
        told = json.loads((path.parent / "tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = told.get("content") if isinstance(told, dict) else told
    return found if isinstance(found, str) else None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A decoder or pre-tokenizer, or those that a sequence is made of."""
    if isinstance(part, dict):
        yield part
        for key in ("decoders", "pretokenizers"):
            for inner in part.get(key, ()):
                yield from _steps(inner)


def _replaces_space(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": _SPACE}


def _unspellable(written: Any) -> str | None:
    """The same tokenizer, in which no text can spell a special token; None where none can as it is.

    In a Unigram model each entry of the vocabulary is a word that a text may be cut into, special ones too: a
    document that mentions `</s>` would end there. (Others reach theirs by merges, or not at all.)
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
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()  # added as text


def _characters_of_bytes() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 stands for itself, the rest for 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTES = _characters_of_bytes()
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
