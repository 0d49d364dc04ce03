"""From `data.source` to tokens.

    corpus      what a corpus is, and which documents are held out
    text        text files as documents of bytes
    kinds       what a file holds, by its name
    walking     which files lie below a folder
    shards      token shards, memory-mapped
    packed      token shards that `halfstep data pack` wrote, with their index
    batches     which tokens an update sees: a function of seed and step; validation; the bigram yardstick
    prefetch    the next batches, made while the device works

`load_corpus` decides by what the source *is*, never by what would happen to work: a name ending in .bin is token
shards, a folder that holds such files directly is a folder of token shards, one with the index of a packing is
packed data, whose shards are not read without it, and none falls back to text when a shard is damaged.
"""

import glob
from pathlib import Path

from halfstep.core.errors import did_you_mean
from halfstep.training.data.batches import Batches, bigram_bits, validation_batches
from halfstep.training.data.corpus import Corpus, DataError, Tokens, from_documents
from halfstep.training.data.index import is_marked, is_packed
from halfstep.training.data.packed import packed_corpus
from halfstep.training.data.prefetch import Prefetch
from halfstep.training.data.shards import shards_corpus
from halfstep.training.data.text import file_documents, folder_documents, glob_documents, stdlib_documents

__all__ = [
    "Batches",
    "Corpus",
    "DataError",
    "Prefetch",
    "Tokens",
    "bigram_bits",
    "load_corpus",
    "validation_batches",
]

STDLIB = "stdlib"
_NAMED_BY = "name it by `--set data.source=PATH` (train), `--data PATH` (eval, sample, artifact)"


def load_corpus(source: str, validation: float, vocabulary: int) -> Corpus:
    """The corpus at a source, with the share `validation` of it held out.

    `source` is `stdlib`, or names a text file, a folder of text, token shards (`*.bin`), a folder of them, or
    a glob of either. Files that share the name `stdlib` are reached as `./stdlib`.
    """
    if source == STDLIB:
        documents, told = stdlib_documents()
        return from_documents(documents, validation, vocabulary, source, told)
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # ~nobody
        raise DataError(f"`{source}`: {error}", hint="write the path out") from None
    if not source or not _exists(path, source):
        matched = sorted(Path(match) for match in glob.glob(str(path), recursive=True)) if source else []
        if not matched:
            raise _missing(source, path)
        return _load_several(matched, validation, vocabulary, source)
    if path.is_dir():
        if is_packed(path):
            return packed_corpus(path, validation, vocabulary)
        if shards := sorted(path.glob("*.bin")):
            return _load_shards(shards, validation, vocabulary, source)
        documents, told = folder_documents(path)
    elif path.suffix == ".bin":
        return _load_shards([path], validation, vocabulary, source)
    else:
        documents, told = file_documents(path)
    return from_documents(documents, validation, vocabulary, source, told)


def _load_several(paths: list[Path], validation: float, vocabulary: int, source: str) -> Corpus:
    shards = [path for path in paths if path.suffix == ".bin"]
    if shards and len(shards) < len(paths):
        other = next(path for path in paths if path not in shards)
        raise DataError(
            f"`{source}` matches token shards (`{shards[0]}`) and other files (`{other}`)",
            hint="shards and text are not mixed: use a glob that matches one kind, as `folder/*.bin`",
        )
    if shards:
        return _load_shards(shards, validation, vocabulary, source)
    documents, told = glob_documents(paths, source)
    return from_documents(documents, validation, vocabulary, source, told)


def _load_shards(paths: list[Path], validation: float, vocabulary: int, source: str) -> Corpus:
    for path in paths:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise DataError(f"`{path}` is named as a token shard and is no file", hint="remove or rename it")
    if packed := [path.parent for path in paths if is_marked(path.parent)]:
        raise DataError(
            f"`{source}` reads packed shards past the index of their folder: without its checksums and its "
            "tokenizer",
            hint=f"name the folder itself, as `--set data.source={packed[0]}`",
        )
    return shards_corpus(paths, validation, vocabulary, source)


def _exists(path: Path, source: str) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a folder on the way may not be entered, or the name is too long
        raise DataError(f"`{source}` cannot be read: {error.strerror or error}") from None


def _missing(source: str, path: Path) -> DataError:
    otherwise = (
        "`stdlib` needs no download; else a text file, a folder of text, token shards (`*.bin`), or packed data"
    )
    if not source:
        return DataError("data.source is empty", hint=f"{otherwise}; {_NAMED_BY}")
    if glob.has_magic(source):
        return DataError(f"no file matches `{source}`{_looked_from(path)}", hint=f"{otherwise}; {_NAMED_BY}")
    beside = {STDLIB: STDLIB} if path.parent == Path() else {}
    if path.parent.is_dir():
        beside |= {entry.name: str(entry) for entry in path.parent.iterdir()}
    hint = did_you_mean(path.name, beside, f"{otherwise};")
    return DataError(f"there is no file or folder `{source}`{_looked_from(path)}", hint=f"{hint} {_NAMED_BY}")


def _looked_from(path: Path) -> str:
    """Where a relative path was looked up: a run keeps it as it was typed, perhaps in another folder."""
    if path.is_absolute():
        return ""
    try:
        return f" in `{Path.cwd()}`"
    except OSError:  # somebody removed it
        return ""
