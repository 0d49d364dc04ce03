"""Finds the files to pack, what each of them is, and how sources are recognized later.

    stdlib                     the text of this Python's standard library
    *.jsonl, *.ndjson          a JSON object per line, the document in one of its fields; .gz and .zst too
    *.parquet, *.arrow         a table, the document in one of its columns
    a Hugging Face dataset     the folder that `save_to_disk` writes; its arrow files are read directly
    any other folder           every file below it, each by its own name, as walk.py finds them
    any other file             text

The name alone decides what a file is, never what would happen to parse. A source is recognized by the relative
names, sizes, and first and last pages of its files: a packing can only be resumed with the same text.
"""

import glob
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

from halfstep.config.reading import MOST_TABLE, open_regular, parse_json, read_bytes
from halfstep.core.errors import did_you_mean
from halfstep.training.data.index import is_packed
from halfstep.training.data.text import STDLIB, library_paths
from halfstep.training.data.types import DataContentError, DataError, DataNotFoundError, HeldOutError, PackingError
from halfstep.training.data.walk import (
    FileKind,
    describe_skipped,
    file_kind,
    has_splits,
    is_dataset,
    select_files,
    walk,
)
from halfstep.training.files import os_errors

PAGE = 4096
FIELD = "text"  # of records, unless another is named


@dataclass(frozen=True)
class SourceFile:
    """One file. `name` is relative to its source; `named` says whether the user named the file itself."""

    path: Path
    name: str
    kind: FileKind
    size: int
    named: bool
    held_out: bool = False  # as a whole


@dataclass(frozen=True)
class Source:
    """What one argument names. `skipped` counts what is not one of its files, such as run folders inside it."""

    given: str
    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The total size of its files."""
        return sum(file.size for file in self.files)

    def digest(self) -> str:
        """Identifies its files, wherever they are stored."""
        identity = blake2b(digest_size=16)
        for file in self.files:
            # surrogateescape: a file name is bytes, not always UTF-8.
            entry = f"{file.name}\0{file.kind}\0{file.size}\0"
            identity.update(entry.encode(errors="surrogateescape"))
            for page in _end_pages(file):
                identity.update(page)
        return identity.hexdigest()


def find_sides(
    given: Sequence[str], validation: float | str, only: str | None = None, field: str = FIELD
) -> tuple[list[Source], float | Source]:
    """Finds the sources to pack, and the source to hold out if that is not a share of their documents."""
    sources = find_sources(given, only)
    if not isinstance(validation, str):
        _check_used(sources, only, field)
        return sources, validation
    try:
        (found,) = find_sources([validation], only)
    except DataError as error:
        raise HeldOutError(
            f"--validation is neither a share, such as 0.01, nor a text: {error.message}", hint=error.hint
        ) from None
    _check_used([*sources, found], only, field)
    if both := _find_duplicate([*sources, found]):
        raise HeldOutError(
            f"`{both[0]}` is to be held out, but source `{both[1]}` holds it too",
            hint="hold out a text that the sources do not hold (move it elsewhere), or a share, such as 0.01",
        )
    return sources, replace(found, files=tuple(replace(file, held_out=True) for file in found.files))


def _check_used(sources: Sequence[Source], only: str | None, field: str) -> None:
    """Refuses options that apply to none of the sources."""
    files = [file for source in sources for file in source.files]
    if only is not None and all(file.named for file in files):
        raise PackingError("--only selects files in folders, and no source is a folder", hint="omit it")
    if field != FIELD and all(file.kind == "text" for file in files):
        raise PackingError(
            "--field names where records hold their text, and no source holds records", hint="omit it"
        )


def find_sources(given: Sequence[str], only: str | None = None) -> list[Source]:
    """Finds the files that the sources name; in folders, only files that match the pattern `only`."""
    if not given:
        raise PackingError("no source is given", hint="name text files, folders, *.jsonl or *.parquet")
    sources = [_find(each, only) for each in given]
    for source in sources:
        if not source.files:
            matching = f" that matches --only `{only}`" if only else ""
            skipped = f" (skipped: {', '.join(describe_skipped(source.skipped))})" if source.skipped else ""
            raise DataNotFoundError(
                f"source `{source.given}` holds no file{matching}{skipped}",
                hint="change --only, or omit it" if only else "choose another source",
            )
        if not source.num_bytes:
            raise DataNotFoundError(f"source `{source.given}` is empty", hint="provide a source with text in it")
    if twice := _find_duplicate(sources):
        raise PackingError(
            f"`{twice[0]}` is named twice: by source `{twice[1]}` and by source `{twice[2]}`",
            hint="name each file once",
        )
    return sources


def _find_duplicate(sources: Sequence[Source]) -> tuple[Path, str, str] | None:
    """Returns a file that two sources name, and those sources: its text would count twice."""
    known: dict[str, Source] = {}
    for source in sources if len(sources) > 1 else ():
        for file in source.files:
            if (first := known.setdefault(os.path.realpath(file.path), source)) is not source:
                return file.path, first.given, source.given
    return None


def _find(given: str, only: str | None) -> Source:
    if given == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return Source(given, _files(library_paths(root), root, only))
    path = Path(given).expanduser()
    if path.is_dir():
        return _find_in_folder(given, path, only)
    if path.is_file():
        return Source(given, (_named_file(path),))
    matched = sorted(Path(match) for match in glob.glob(str(path), recursive=True)) if given else []
    if not matched:
        neighbors = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        otherwise = "name a text file, a folder, *.jsonl, *.parquet, or `stdlib`"
        raise DataNotFoundError(
            f"source `{given}` does not exist", hint=did_you_mean(path.name, neighbors, otherwise)
        )
    selected = select_files(matched, path)
    return Source(given, tuple(_named_file(each) for each in selected.files), selected.skipped)


def _find_in_folder(given: str, folder: Path, only: str | None) -> Source:
    if has_splits(folder):
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        raise DataContentError(
            f"`{folder}` is a Hugging Face dataset with several splits: {', '.join(splits) or 'none'}",
            hint=f"name one, such as `{folder / (splits[0] if splits else 'train')}`",
        )
    if is_dataset(folder):
        return Source(given, _saved_dataset(folder))
    if is_packed(folder):
        raise DataContentError(
            f"`{folder}` holds token shards, which are packed already", hint="name the text itself"
        )
    walked = walk(folder)
    return Source(given, _files(walked.files, folder, only), walked.skipped)


def _saved_dataset(folder: Path) -> tuple[SourceFile, ...]:
    again = "save the dataset to disk again"
    try:
        state = parse_json(read_bytes(folder / "state.json", MOST_TABLE))
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataContentError(
            f"`{folder / 'state.json'}` does not list the files of a dataset: {error}", hint=again
        ) from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataContentError(f"`{folder}` lacks `{name}`, which its state.json lists", hint=again)
    return tuple(SourceFile(folder / name, name, "arrow", (folder / name).stat().st_size, True) for name in names)


def _files(paths: list[Path], root: Path, only: str | None) -> tuple[SourceFile, ...]:
    named = ((path, path.relative_to(root).as_posix()) for path in paths)
    chosen = (each for each in named if only is None or fnmatch(each[1], only) or fnmatch(each[0].name, only))
    return tuple(SourceFile(path, name, file_kind(path), path.stat().st_size, False) for path, name in chosen)


def _named_file(path: Path) -> SourceFile:
    if path.suffix == ".bin":
        raise DataContentError(
            f"`{path}` has the name of a token shard, which is packed already", hint="name the text itself"
        )
    return SourceFile(path, path.name, file_kind(path), path.stat().st_size, True)


def _end_pages(file: SourceFile) -> tuple[bytes, bytes]:
    with (
        os_errors(DataContentError, f"cannot read `{file.path}`", "check its permissions"),
        open_regular(file.path) as opened,
    ):
        first = opened.read(PAGE)
        opened.seek(max(0, file.size - PAGE))
        return first, opened.read(PAGE)
