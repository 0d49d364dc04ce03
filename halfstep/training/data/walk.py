"""Finds the files below a folder, in the same way for packing text and for training on it, by relative path.

ignored              names that start with a dot, __pycache__, and what the caller adds
skipped, counted     folders of runs and of packed data: what halfstep wrote is not text to learn from, and a
                     run that reads its own record could never resume
                     dangling links; pipes, sockets and devices, which may never end
followed             links to files and folders. Each file is read once: a file in the folder itself under its
                     own name, a file that only links lead to under the first of them. So loops end

The name alone says what a file holds: text, or records (JSONL, tables), which `halfstep data pack` reads and a run
does not.
"""

import errno
import glob
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from halfstep.training.data.index import INDEX, STATE, is_marked
from halfstep.training.data.types import DataContentError
from halfstep.training.files import PARTIAL, is_lock
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS, LOCK

FILE, FOLDER, LINK = "file", "folder", "link"
# What is skipped and counted.
RUN, PACKED, DANGLING, SPECIAL = _NOUNS = ("run folder", "packed folder", "dangling link", "special file")
UNREADABLE = "unreadable"
_IGNORED_FOLDERS = {"__pycache__"}


@dataclass(frozen=True)
class Walked:
    """The files below a folder, and how many entries were skipped, by kind."""

    files: list[Path]
    skipped: dict[str, int]


def walk(root: Path, ignore: Iterable[str] = ()) -> Walked:
    """Finds the files below a folder, without dot files, caches and the folders in `ignore`."""
    walker = _Walker({*ignore, *_IGNORED_FOLDERS})
    names = _names(root)
    if _is_run(names):
        raise DataContentError(
            f"`{root}` is a run folder: the run's own record would be part of the data",
            hint="put the text into a separate folder, and name that one",
        )
    if _is_locked_only(str(root), names):
        raise DataContentError(
            f"`{root}` holds no text, only a packing that did not finish",
            hint="run the same `halfstep data pack` again",
        )
    walker.enter(str(root), os.path.realpath(root))
    while walker.links:  # the links of a linked folder come after all those that led there
        links, walker.links = sorted(walker.links), []
        for link in links:
            walker.follow(link)
    files = sorted(map(Path, walker.files), key=lambda path: path.relative_to(root).as_posix())
    return Walked(files, dict(sorted(walker.skipped.items())))


def select_files(paths: Iterable[Path], pattern: Path) -> Walked:
    """Selects files among a pattern's matches; skips those in runs and packed data that it does not spell out."""
    named = Path(os.path.realpath(next(each for each in pattern.parents if not glob.has_magic(str(each)))))
    written_as = cache(lambda folder: _written_as(str(folder), _names(folder)))
    files, skipped, skipped_folders = [], Counter[str](), set[Path]()
    for path in paths:
        above = Path(os.path.realpath(path)).parents
        ours = next((each for each in above if each not in (named, *named.parents) and written_as(each)), None)
        kind = _kind_of_target(str(path))
        if ours is not None:
            skipped_folders.add(ours)
        elif kind == FILE:
            files.append(path)
        elif kind != FOLDER:
            skipped[kind] += 1
    skipped.update(filter(None, map(written_as, skipped_folders)))
    return Walked(files, dict(sorted(skipped.items())))


def describe_skipped(skipped: Mapping[str, int]) -> list[str]:
    """Returns the skipped entries for people: `2 binary`, `1 run folder`, `3 dangling links`."""
    return [f"{number} {kind}{'s' * (kind in _NOUNS and number != 1)}" for kind, number in skipped.items()]


class _Walker:
    """The state of a walk. `seen` holds real paths, so that each file and folder is visited once."""

    def __init__(self, ignore: set[str]):
        self.ignore = ignore
        self.files: list[str] = []
        self.links: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.skipped_folders: list[str] = []  # of runs and packed data: links into them are not followed

    def enter(self, path: str, real: str) -> None:
        """Collects what is in a folder and below it; links are kept for later."""
        todo = [(path, real)]
        while todo:
            path, real = todo.pop()
            if not self._is_new(real):
                continue
            try:
                with os.scandir(path) as listed:
                    entries = list(listed)
            except OSError:
                self.skipped[UNREADABLE] += 1
                continue
            if ours := _written_as(path, {entry.name for entry in entries}):
                self.skipped[ours] += 1
                self.skipped_folders.append(os.path.join(real, ""))
                continue
            for entry in entries:
                place = os.path.join(real, entry.name)
                kind = LINK if entry.is_symlink() else _kind_of_target(entry.path)
                if entry.name.startswith(".") or (kind == FOLDER and entry.name in self.ignore):
                    continue
                if kind == LINK:
                    self.links.append(entry.path)
                elif kind == FOLDER:
                    todo.append((entry.path, place))
                else:
                    self._add(entry.path, place, kind)

    def follow(self, link: str) -> None:
        """Collects the target of a link, unless it was collected before."""
        kind, real = _kind_of_target(link), os.path.realpath(link)
        if real.startswith(tuple(self.skipped_folders)):
            return
        if kind != FOLDER:
            self._add(link, link if kind == DANGLING else real, kind)
        elif os.path.basename(link) not in self.ignore:
            self.enter(link, real)

    def _add(self, path: str, real: str, kind: str) -> None:
        if not self._is_new(real):
            return
        if kind == FILE:
            self.files.append(path)
        else:
            self.skipped[kind] += 1

    def _is_new(self, real: str) -> bool:
        known = real in self.seen
        self.seen.add(real)
        return not known


def _kind_of_target(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return DANGLING if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else UNREADABLE
    if stat.S_ISREG(mode):
        return FILE
    return FOLDER if stat.S_ISDIR(mode) else SPECIAL


def _written_as(path: str, names: set[str]) -> str | None:
    if _is_run(names):
        return RUN
    if (INDEX in names or STATE in names) and is_marked(Path(path)):
        return PACKED
    return PACKED if _is_locked_only(path, names) else None


def _is_locked_only(path: str, names: set[str]) -> bool:
    return LOCK in names and names <= {LOCK, STATE + PARTIAL} and is_lock(Path(path, LOCK))


def _is_run(names: set[str]) -> bool:
    return CONFIG in names and not names.isdisjoint((EVENTS, CHECKPOINTS, LOCK))


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


FileKind: TypeAlias = Literal["text", "jsonl", "parquet", "arrow"]

_SUFFIXES: dict[str, FileKind] = {
    **{name + tail: "jsonl" for name in (".jsonl", ".ndjson") for tail in ("", ".gz", ".zst")},
    ".parquet": "parquet",
    ".arrow": "arrow",
}
DESCRIPTIONS: dict[FileKind, str]
DESCRIPTIONS = {"text": "text", "jsonl": "JSONL", "parquet": "parquet", "arrow": "an arrow table"}


def file_kind(path: Path) -> FileKind:
    """Returns the kind of a file by its name."""
    name = path.name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "text")


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a Hugging Face dataset that `save_to_disk` wrote."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def has_splits(folder: Path) -> bool:
    """Whether a folder holds several such datasets as splits of one."""
    return (folder / "dataset_dict.json").is_file()
