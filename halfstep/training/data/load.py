"""From `data.source` to a corpus; and from a text to evaluate on to the tokens that a run would have had of it.

The kind of source decides how it is read, never what would happen to work: a name ending in .bin means token
shards, as does a folder that directly holds such files; a folder with an index is packed data, whose shards are
never read without it. Damaged shards are never read as text instead.

To evaluate a trained model on another text, what it was trained on is not needed. Tokens of a run on text are
bytes. A run on packed data has its tokenizer in the folder of that data, whose shards are not read: the text is
encoded as `halfstep data pack` would have, so that a text that was held out in packing gives the same tokens
again.
"""

import glob
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.core.errors import did_you_mean
from halfstep.training.data.corpus import Corpus, check_not_trained_on, from_sides, overlap_error, split
from halfstep.training.data.index import INDEX, Index, is_marked, is_packed, read_index
from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import Encoder
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.packed import packed_corpus
from halfstep.training.data.shards import shards_corpus
from halfstep.training.data.text import STDLIB, file_documents, folder_documents, glob_documents, stdlib_documents
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.tokenizers import open_saved
from halfstep.training.data.types import (
    DataContentError,
    DataError,
    DataMismatchError,
    DataNotFoundError,
    Document,
    HeldOutError,
    TokenizerError,
)
from halfstep.training.files import os_errors

_CHOICES = {
    "data.source": "use `stdlib` (no download), a text file, a folder of text, shards (`*.bin`), or packed data",
    "data.validation": "use a share such as 0.1, a text file, or a folder of text",
    "--validation": "name a text file or a folder of text",
}
_FLAGS = {
    "data.source": "set it with `--set data.source=PATH` (train) or `--data PATH` (eval, sample, artifact), or "
    "name another text there, with `--validation PATH`",
    "data.validation": "set it with `--set data.validation=PATH`",
    "--validation": "such as `--validation valid.txt`",
}
_Texts = tuple[list[Document], str]  # with their description


def load_corpus(source: str, validation: float | str, vocabulary: int) -> Corpus:
    """Opens `stdlib`, a text, a folder of text, shards, or a glob of either; holds out a share or another text."""
    found = _find(source, "data.source")
    if isinstance(validation, str):
        held_out = _find(validation, "data.validation")
        documents, description = _check_text(found, source, to_train=True)
        others, other = _check_text(held_out, validation)
        _check_apart(documents, others, source)
        corpus = from_sides(documents, others, f"{description} and, held out, {other}", vocabulary)
        check_not_trained_on(corpus, documents, others)
        return corpus
    if isinstance(found, Path):
        return packed_corpus(found, validation, vocabulary)
    if isinstance(found, list):
        return shards_corpus(found, validation, vocabulary, source)
    documents, description = found
    return from_sides(*split(documents, validation, source), description, vocabulary)


def _find(source: str, setting: str) -> Path | list[Path] | _Texts:
    """Returns the folder of packed data, the shards or the texts that a setting names."""
    if source == STDLIB:
        return stdlib_documents()
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # ~nobody
        raise DataNotFoundError(f"`{source}`: {error}", hint="write the path out") from None
    # A folder on the way may be closed, or the name too long.
    with os_errors(DataNotFoundError, f"cannot read `{source}`"):
        exists = path.exists()
    if not source or not exists:
        matched = sorted(Path(match) for match in glob.glob(str(path), recursive=True)) if source else []
        if not matched:
            raise _missing_error(source, path, setting)
        return _find_several(matched, source)
    if path.is_dir() and is_packed(path):
        return path
    if path.suffix == ".bin" and not path.is_dir():
        return _check_shards([path], source)
    if path.is_dir() and (shards := sorted(path.glob("*.bin"))):
        return _check_shards(shards, source)
    return folder_documents(path) if path.is_dir() else file_documents(path)


def _check_text(found: Path | list[Path] | _Texts, name: str, *, to_train: bool = False) -> _Texts:
    """Refuses shards where a text to hold out is expected, or (`to_train`) one that a text is held out from."""
    if isinstance(found, tuple):
        return found
    kind = "packed data" if isinstance(found, Path) else "token shards"
    why, hint = "only text can be held out by name", "name the text itself"
    if to_train:
        why = "data.validation names text to hold out from text"
        hint = "shards with `val` in their names are held out: put them next to the others"
        if isinstance(found, Path):
            hint = "hold out a text while packing: `halfstep data pack --validation PATH`"
    raise HeldOutError(f"`{name}` holds {kind}, and {why}", hint=hint)


def _check_apart(train: Iterable[Document], held_out: Iterable[Document], source: str) -> None:
    """Refuses a file to hold out that the source holds too."""
    trained = {os.path.realpath(path) for path in {each.path for each in train}}
    for path in dict.fromkeys(each.path for each in held_out):
        if os.path.realpath(path) in trained:
            raise overlap_error(f"`{path}`", f"`{source}` holds it too, to train on it")


def _find_several(paths: list[Path], source: str) -> list[Path] | _Texts:
    shards = [path for path in paths if path.suffix == ".bin"]
    if shards and len(shards) < len(paths):
        other = next(path for path in paths if path not in shards)
        raise DataContentError(
            f"`{source}` matches token shards (`{shards[0]}`) and other files (`{other}`)",
            hint="shards and text cannot be mixed: use a glob that matches only one, such as `folder/*.bin`",
        )
    if shards:
        return _check_shards(shards, source)
    return glob_documents(paths, source)


def _check_shards(paths: list[Path], source: str) -> list[Path]:
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe would wait forever
            raise DataContentError(
                f"`{path}` has the name of a token shard but is not a file", hint="remove or rename it"
            )
    if packed := [path.parent for path in paths if is_marked(path.parent)]:
        raise DataContentError(
            f"`{source}` names packed shards without the index of their folder, which holds their checksums and "
            "their tokenizer",
            hint=f"name the folder itself: `--set data.source={packed[0]}`",
        )
    return paths


def _missing_error(source: str, path: Path, setting: str) -> DataError:
    choices, flags = _CHOICES[setting], _FLAGS[setting]
    if not source:
        return DataNotFoundError(f"{setting} is empty", hint=f"{choices}; {flags}")
    if glob.has_magic(source):
        return DataNotFoundError(f"no file matches `{source}`{_searched_in(path)}", hint=f"{choices}; {flags}")
    neighbors = {STDLIB: STDLIB} if path.parent == Path() else {}
    if path.parent.is_dir():
        neighbors |= {entry.name: str(entry) for entry in path.parent.iterdir()}
    hint = did_you_mean(path.name, neighbors, f"{choices};")
    return DataNotFoundError(f"there is no file or folder `{source}`{_searched_in(path)}", hint=f"{hint} {flags}")


def _searched_in(path: Path) -> str:
    """Says where a relative path was searched: a run keeps it as typed, perhaps in another folder."""
    return "" if path.is_absolute() else f" in `{Path.cwd()}`"


def load_held_out(text: str, source: str, recorded: Mapping[str, Any], vocabulary: int) -> Corpus:
    """Opens a text to evaluate on. `source` is the data of the run, `recorded` what its manifest says of it."""
    if (index := packed_index(source, recorded)) is None:
        corpus = from_sides((), *_check_text(_find(text, "--validation"), text), vocabulary)
        return replace(corpus, digest=corpus.held_out_digest)
    tokenizer, (found,) = open_saved(Path(source).expanduser(), index.tokenizer), find_sources([text])
    encoder = Encoder(tokenizer, index.packing.field, 1.0)  # every document is below a share of 1
    parts = [encoder.encode(block).sides["val"] for block in blocks(found.files, Position(), encoder.field)]
    tokens = np.concatenate([part.tokens for part in parts])
    if not len(tokens):
        raise HeldOutError(f"`{text}` holds no text", hint="name another with --validation")
    return Corpus(
        train=tokens[:0],
        validation=tokens,
        description=f"held-out text `{text}`: {len(tokens):,} tokens, tokenizer {tokenizer.name}",
        digest=blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        bytes_per_token=sum(part.text_bytes for part in parts) / len(tokens),
        token_bytes=tokenizer.token_bytes,
    )


def run_tokenizer(source: str, recorded: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a run: that of its packed data, or bytes."""
    index = packed_index(source, recorded)
    return BytesTokenizer() if index is None else open_saved(Path(source).expanduser(), index.tokenizer)


def packed_index(source: str, recorded: Mapping[str, Any]) -> Index | None:
    """Returns the index of a run's packed data, or None if its tokens are bytes; refuses an unknown tokenizer."""
    folder = Path(source).expanduser()
    if folder.is_dir() and is_packed(folder):
        index = read_index(folder)
        if str(recorded["digest"]).startswith(index.digest):
            return index
        raise DataMismatchError(
            f"`{folder}` is not the data that the run learned from: {recorded['description']}",
            hint="name that data with --data: only its tokenizer reads what the model writes",
        )
    if recorded["bytes_per_token"] == 1:
        return None
    if recorded["bytes_per_token"] is None:
        raise TokenizerError(
            "the model was trained on token shards without an index, and which tokenizer made them is unknown",
            hint="train on data that `halfstep data pack` wrote: it keeps its tokenizer",
        )
    gone = f"`{folder}` holds no packed data" if folder.exists() else f"there is no `{folder}`"
    raise TokenizerError(
        f"the tokenizer of the run is not here: {gone}",
        hint=f"name the folder of the packed data with --data; its {INDEX} and its tokenizer are enough",
    )
