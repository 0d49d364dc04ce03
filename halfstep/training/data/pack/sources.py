"""What there is to pack: the files that sources name, what each of them is, and how they are known again.

    stdlib                     the text of this Python's standard library
    *.jsonl, *.ndjson          a JSON object a line, the document in one of its fields; .gz and .zst too
    *.parquet, *.arrow         a table, the document in one of its columns
    a Hugging Face dataset     the folder that `save_to_disk` writes; its arrow files are read as they are
    any other folder           every file below it, each by its own name, as data/walk.py finds them
    any other file             text

What a file *is* is decided by its name alone, never by what would happen to parse. The order is that of the
sources, and in a folder that of the relative paths. A source is known again by its files' relative names, sizes,
first and last pages: a pack that goes on must go on with the same text.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

from halfstep.core.errors import did_you_mean
from halfstep.training.data.corpus import DataError
from halfstep.training.data.file_kinds import Kind, has_splits, is_dataset, kind_of
from halfstep.training.data.index import is_packed
from halfstep.training.data.text import library_paths
from halfstep.training.data.walk import regular, told, walk

STDLIB = "stdlib"
PAGE = 4096


@dataclass(frozen=True)
class SourceFile:
    """One file. `name` is relative to its source; `named` is whether the user named the file itself."""

    path: Path
    name: str
    kind: Kind
    size: int
    named: bool


@dataclass(frozen=True)
class Source:
    """What one argument names. `skipped` counts what is no file of it, as folders of runs that lie in it."""

    given: str
    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of its files."""
        return sum(file.size for file in self.files)

    def digest(self) -> str:
        """The identity of its files, wherever they lie."""
        identity = blake2b(digest_size=16)
        for file in self.files:
            # surrogateescape: a file's name is bytes, and not all of them are UTF-8.
            told = f"{file.name}\0{file.kind}\0{file.size}\0"
            identity.update(told.encode(errors="surrogateescape"))
            for page in _ends(file):
                identity.update(page)
        return identity.hexdigest()


def find_sources(given: Sequence[str], only: str | None = None) -> list[Source]:
    """The files that sources name; of those in folders, only such as match the pattern `only`."""
    if not given:
        raise DataError("there is no source to read", hint="name text files, folders, *.jsonl or *.parquet")
    sources = [_find(each, only) for each in given]
    for source in sources:
        if not source.files:
            matching = f" that matches --only `{only}`" if only else ""
            skipped = f" (skipped: {', '.join(told(source.skipped))})" if source.skipped else ""
            raise DataError(
                f"source `{source.given}` holds no file{matching}{skipped}",
                hint="name another pattern by --only, or leave it out" if only else "name another source",
            )
        if not source.num_bytes:
            raise DataError(f"source `{source.given}` is empty", hint="give a source with text in it")
    _check_once(sources)
    return sources


def _check_once(sources: Sequence[Source]) -> None:
    """Refuses a file that two sources name: its text would count twice."""
    known: dict[str, str] = {}
    for source in sources if len(sources) > 1 else ():
        places = {os.path.realpath(file.path): file.path for file in source.files}
        for place, path in places.items():
            if place in known:
                raise DataError(
                    f"`{path}` is named twice: by source `{known[place]}` and by source `{source.given}`",
                    hint="name each file once",
                )
        known |= dict.fromkeys(places, source.given)


def _find(given: str, only: str | None) -> Source:
    if given == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return Source(given, _files(library_paths(root), root, only))
    path = Path(given).expanduser()
    if path.is_dir():
        return _folder(given, path, only)
    if path.is_file():
        return Source(given, (_named(path),))
    matched = sorted(Path(match) for match in glob.glob(str(path), recursive=True)) if given else []
    if not matched:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"there is no source `{given}`",
            hint=did_you_mean(path.name, beside, "name a text file, a folder, *.jsonl, *.parquet, or `stdlib`"),
        )
    found = regular(matched, path)
    return Source(given, tuple(_named(each) for each in found.files), found.skipped)


def _folder(given: str, folder: Path, only: str | None) -> Source:
    if has_splits(folder):
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        raise DataError(
            f"`{folder}` is a Hugging Face dataset of several splits: {', '.join(splits) or 'none'}",
            hint=f"name one, as `{folder / (splits[0] if splits else 'train')}`",
        )
    if is_dataset(folder):
        return Source(given, _saved_dataset(folder))
    if is_packed(folder):
        raise DataError(f"`{folder}` holds token shards, which are packed already", hint="name the text itself")
    found = walk(folder)
    return Source(given, _files(found.files, folder, only), found.skipped)


def _saved_dataset(folder: Path) -> tuple[SourceFile, ...]:
    """The arrow files of a dataset that `save_to_disk` wrote, in its order."""
    try:
        names = [str(each["filename"]) for each in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`{folder / 'state.json'}` does not list the files of a dataset: {error}",
            hint="save it to disk again",
        ) from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError(f"`{folder}` lacks `{name}`, which its state.json lists", hint="save it to disk again")
    return tuple(SourceFile(folder / name, name, "arrow", (folder / name).stat().st_size, True) for name in names)


def _files(paths: list[Path], root: Path, only: str | None) -> tuple[SourceFile, ...]:
    found = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        if only is None or fnmatch(name, only) or fnmatch(path.name, only):
            found.append(SourceFile(path, name, kind_of(path), path.stat().st_size, False))
    return tuple(found)


def _named(path: Path) -> SourceFile:
    if path.suffix == ".bin":
        raise DataError(
            f"`{path}` is named as a token shard, which is packed already", hint="name the text itself"
        )
    return SourceFile(path, path.name, kind_of(path), path.stat().st_size, True)


def _ends(file: SourceFile) -> tuple[bytes, bytes]:
    """The first page and the last."""
    try:
        with open(file.path, "rb") as opened:
            first = opened.read(PAGE)
            opened.seek(max(0, file.size - PAGE))
            return first, opened.read(PAGE)
    except OSError as error:
        said = error.strerror or error
        raise DataError(f"`{file.path}` cannot be read: {said}", hint="see to its permissions") from None
