"""From `data.source` to a corpus.

The kind of source decides how it is read, never what would happen to work: a name ending in .bin means token
shards, as does a folder that directly holds such files; a folder with an index is packed data, whose shards are
never read without it. Damaged shards are never read as text instead.
"""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from halfstep.core.errors import did_you_mean
from halfstep.training.data.corpus import Corpus, from_documents, from_texts, only_held_out, trained_on_too
from halfstep.training.data.index import is_marked, is_packed
from halfstep.training.data.packed import packed_corpus
from halfstep.training.data.shards import shards_corpus
from halfstep.training.data.text import STDLIB, file_documents, folder_documents, glob_documents, stdlib_documents
from halfstep.training.data.types import DataError, Document
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
        documents, description = _check_text_source(found, source)
        others, other = _check_text(held_out, validation)
        _check_apart(documents, others, source)
        return from_texts(documents, others, f"{description} and, held out, {other}", vocabulary)
    if isinstance(found, Path):
        return packed_corpus(found, validation, vocabulary)
    if isinstance(found, list):
        return shards_corpus(found, validation, vocabulary, source)
    return from_documents(*found, source, validation, vocabulary)


def load_text(path: str, vocabulary: int) -> Corpus:
    """Opens a text to evaluate on, as bytes, without a text to train on."""
    return only_held_out(*_check_text(_find(path, "--validation"), path), vocabulary)


def _find(source: str, setting: str) -> Path | list[Path] | _Texts:
    """Returns the folder of packed data, the shards or the texts that a setting names."""
    if source == STDLIB:
        return stdlib_documents()
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # ~nobody
        raise DataError(f"`{source}`: {error}", hint="write the path out") from None
    with os_errors(DataError, f"cannot read `{source}`"):  # a folder on the way is closed, or the name too long
        exists = path.exists()
    if not source or not exists:
        matched = sorted(Path(match) for match in glob.glob(str(path), recursive=True)) if source else []
        if not matched:
            raise _missing(source, path, setting)
        return _find_several(matched, source)
    if path.is_dir() and is_packed(path):
        return path
    if path.suffix == ".bin" and not path.is_dir():
        return _check_shards([path], source)
    if path.is_dir() and (shards := sorted(path.glob("*.bin"))):
        return _check_shards(shards, source)
    return folder_documents(path) if path.is_dir() else file_documents(path)


def _check_text(found: Path | list[Path] | _Texts, name: str) -> _Texts:
    """Refuses shards in place of a text to hold out."""
    if isinstance(found, tuple):
        return found
    kind = "packed data" if isinstance(found, Path) else "token shards"
    raise DataError(f"`{name}` holds {kind}, and only text can be held out by name", hint="name the text itself")


def _check_text_source(found: Path | list[Path] | _Texts, name: str) -> _Texts:
    """Refuses to hold out a text from shards."""
    if isinstance(found, tuple):
        return found
    if isinstance(found, Path):
        kind, hint = "packed data", "hold out a text while packing: `halfstep data pack --validation PATH`"
    else:
        kind, hint = "token shards", "shards with `val` in their names are held out: put them next to the others"
    raise DataError(f"`{name}` holds {kind}, and data.validation names text to hold out from text", hint=hint)


def _check_apart(train: Iterable[Document], held_out: Iterable[Document], source: str) -> None:
    """Refuses a file to hold out that the source holds too."""
    trained = {os.path.realpath(path) for path in {each.path for each in train}}
    for path in dict.fromkeys(each.path for each in held_out):
        if os.path.realpath(path) in trained:
            raise trained_on_too(f"`{path}`", f"`{source}` holds it too, to train on it")


def _find_several(paths: list[Path], source: str) -> list[Path] | _Texts:
    shards = [path for path in paths if path.suffix == ".bin"]
    if shards and len(shards) < len(paths):
        other = next(path for path in paths if path not in shards)
        raise DataError(
            f"`{source}` matches token shards (`{shards[0]}`) and other files (`{other}`)",
            hint="shards and text cannot be mixed: use a glob that matches only one, such as `folder/*.bin`",
        )
    if shards:
        return _check_shards(shards, source)
    return glob_documents(paths, source)


def _check_shards(paths: list[Path], source: str) -> list[Path]:
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe would wait forever
            raise DataError(
                f"`{path}` has the name of a token shard but is not a file", hint="remove or rename it"
            )
    if packed := [path.parent for path in paths if is_marked(path.parent)]:
        raise DataError(
            f"`{source}` names packed shards without the index of their folder, which holds their checksums and "
            "their tokenizer",
            hint=f"name the folder itself: `--set data.source={packed[0]}`",
        )
    return paths


def _missing(source: str, path: Path, setting: str) -> DataError:
    choices, flags = _CHOICES[setting], _FLAGS[setting]
    if not source:
        return DataError(f"{setting} is empty", hint=f"{choices}; {flags}")
    if glob.has_magic(source):
        return DataError(f"no file matches `{source}`{_searched_in(path)}", hint=f"{choices}; {flags}")
    neighbors = {STDLIB: STDLIB} if path.parent == Path() else {}
    if path.parent.is_dir():
        neighbors |= {entry.name: str(entry) for entry in path.parent.iterdir()}
    hint = did_you_mean(path.name, neighbors, f"{choices};")
    return DataError(f"there is no file or folder `{source}`{_searched_in(path)}", hint=f"{hint} {flags}")


def _searched_in(path: Path) -> str:
    """Says where a relative path was searched: a run keeps it as typed, perhaps in another folder."""
    return "" if path.is_absolute() else f" in `{Path.cwd()}`"
