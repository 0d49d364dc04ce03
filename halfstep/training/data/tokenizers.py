"""Opens a tokenizer by the name a command gives, or the one that packed data was made with.

    bytes                        each byte is a token; nothing to install, nothing to save
    a tokenizer.json             or a folder that holds one          (package tokenizers)
    a sentencepiece *.model      or a folder that holds one          (package sentencepiece)
    tiktoken:NAME                such as tiktoken:gpt2               (package tiktoken)
    a folder of packed data      the tokenizer it was packed with

To add a library, implement `Tokenizer` in tokenizer_libraries.py and list it here.
"""

from pathlib import Path

from halfstep.core.errors import did_you_mean
from halfstep.training.data.checksums import read_tokenizer_file
from halfstep.training.data.index import INDEX, is_packed, read_index
from halfstep.training.data.tokenizer_base import NO_SEPARATOR, BytesTokenizer, Tokenizer, TokenizerIdentity
from halfstep.training.data.tokenizer_libraries import HuggingFace, SentencePiece, Tiktoken
from halfstep.training.data.types import DataError

_CHOICES = (
    "a tokenizer is `bytes`, a tokenizer.json, a sentencepiece *.model, a folder that holds one of them, or "
    "tiktoken:NAME; `halfstep data train-tokenizer` trains a new one"
)
_LIBRARIES = {kind.kind: kind for kind in (HuggingFace, SentencePiece, Tiktoken)}


def open_tokenizer(spec: str, separator: str | None = None) -> Tokenizer:
    """Opens the tokenizer that a command names. `separator` is the token between documents, or `none`."""
    if spec == BytesTokenizer.kind:
        if separator not in (None, NO_SEPARATOR):
            raise DataError(f"tokenizer `bytes` has no token `{separator}`", hint="omit --separator")
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
        hint = did_you_mean(path.name, _similar_names(path), _CHOICES)
        raise DataError(f"tokenizer `{spec}` does not exist", hint=hint)
    if path.name == Tiktoken.file:
        return Tiktoken.read(path, separator)
    if path.suffix == ".json":
        return HuggingFace.read(path, separator)
    if path.suffix == ".model":
        return SentencePiece.read(path, separator)
    raise DataError(f"`{path}` does not have the name of a tokenizer", hint=_CHOICES)


def open_saved(folder: Path, identity: TokenizerIdentity) -> Tokenizer:
    """Opens the tokenizer that packed data was made with, from the file in its folder."""
    if identity.kind == BytesTokenizer.kind:
        return BytesTokenizer()
    if identity.kind not in _LIBRARIES or identity.file is None:
        raise DataError(f"`{folder}` was packed with a tokenizer of unknown kind `{identity.kind}`")
    content = read_tokenizer_file(folder, identity)
    return _LIBRARIES[identity.kind](identity.name, content, identity.separator)


def _similar_names(path: Path) -> list[str]:
    neighbors = path.parent.iterdir() if path.parent.is_dir() else ()
    files = [entry.name for entry in neighbors if entry.suffix in (".json", ".model") or entry.is_dir()]
    return [BytesTokenizer.kind, "tiktoken:gpt2", *files]


def _find_in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken.json"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"folder `{folder}` holds no tokenizer", hint=_CHOICES)
