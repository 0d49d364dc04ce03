"""Which files lie below a folder: the same walk for text that is packed and for text that is trained on.

    passed over          names that start with a dot, __pycache__, and what the caller adds
    left out, counted    folders of runs and of packed data: what halfstep wrote is no text to learn from, and a
                         run that finds its own record among its data could never go on
                         links that lead nowhere; pipes, sockets and devices, which may never end
    followed             links to files and folders. A file is read once, by whatever way it is reached: what lies
                         in the folder itself by its own name, what only links lead to by the first of them

So a loop of links ends, and a link to what is there anyway adds nothing. The order is that of the relative paths;
what the disk happens to list first changes nothing.
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
from typing import final

from halfstep.training.data.corpus import DataError
from halfstep.training.data.index import INDEX, STATE, is_marked
from halfstep.training.files import PARTIAL, is_lock
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS, LOCK

FILE, FOLDER, LINK = "file", "folder", "link"
# What is left out and counted.
RUN, PACKED, DANGLING, SPECIAL = _NOUNS = ("run folder", "packed folder", "dangling link", "special file")
UNREADABLE = "unreadable"
_SKIPPED_FOLDERS = {"__pycache__"}


@dataclass(frozen=True)
class Walked:
    """The files below a folder, and how much was left out, by what it is."""

    files: list[Path]
    skipped: dict[str, int]


def walk(root: Path, skip: Iterable[str] = ()) -> Walked:
    """The files below a folder by relative path, without dot files, caches and the folders in `skip`."""
    walker = _Walker({*skip, *_SKIPPED_FOLDERS})
    names = _names(root)
    if _is_run(names):
        raise DataError(
            f"`{root}` is the folder of a run: its own record would be among the data",
            hint="put the text into a folder of its own, and name that one",
        )
    if _is_locked_alone(str(root), names):
        raise DataError(
            f"`{root}` holds no text: the packing in it did not come to its end",
            hint="give the same `halfstep data pack` again",
        )
    walker.enter(str(root), os.path.realpath(root))
    while walker.links:  # those of a linked folder come after all that led there
        links, walker.links = sorted(walker.links), []
        for link in links:
            walker.follow(link)
    files = sorted(map(Path, walker.files), key=lambda path: path.relative_to(root).as_posix())
    return Walked(files, dict(sorted(walker.skipped.items())))


def regular(paths: Iterable[Path], pattern: Path) -> Walked:
    """The files among what a pattern matched, in their order; folders are neither files nor left out.

    What lies in the folder of a run or of packed data is left out, unless the pattern spells that folder out.
    """
    named = Path(os.path.realpath(next(each for each in pattern.parents if not glob.has_magic(str(each)))))
    ours = cache(lambda folder: _ours(str(folder), _names(folder)))
    files, skipped, left_out = [], Counter[str](), set[Path]()
    for path in paths:
        above = Path(os.path.realpath(path)).parents
        written = next((each for each in above if each not in (named, *named.parents) and ours(each)), None)
        what = _what(str(path))
        if written is not None:
            left_out.add(written)
        elif what == FILE:
            files.append(path)
        elif what != FOLDER:
            skipped[what] += 1
    skipped.update(filter(None, map(ours, left_out)))
    return Walked(files, dict(sorted(skipped.items())))


def told(skipped: Mapping[str, int]) -> list[str]:
    """What was left out, in words: `2 binary`, `1 run folder`, `3 dangling links`."""
    return [f"{number} {kind}{'s' * (kind in _NOUNS and number != 1)}" for kind, number in skipped.items()]


@final
class _Walker:
    """What was found so far. `seen` holds real paths: of a file or a folder there is one, however many links."""

    def __init__(self, skip: set[str]):
        self.skip = skip
        self.files: list[str] = []
        self.links: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.left_out: list[str] = []  # folders of runs and of packed data: links into them lead nowhere new

    def enter(self, path: str, real: str) -> None:
        """Takes what is in a folder and below it; links are kept for later."""
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
            if ours := _ours(path, {entry.name for entry in entries}):
                self.skipped[ours] += 1
                self.left_out.append(os.path.join(real, ""))
                continue
            for entry in entries:
                place, what = os.path.join(real, entry.name), _kind(entry)
                if entry.name.startswith(".") or (what == FOLDER and entry.name in self.skip):
                    continue
                if what == LINK:
                    self.links.append(entry.path)
                elif what == FOLDER:
                    todo.append((entry.path, place))
                else:
                    self._take(entry.path, place, what)

    def follow(self, link: str) -> None:
        """Takes what a link leads to, if nothing led there before."""
        what, real = _what(link), os.path.realpath(link)
        if real.startswith(tuple(self.left_out)):
            return
        if what != FOLDER:
            self._take(link, link if what == DANGLING else real, what)
        elif os.path.basename(link) not in self.skip:
            self.enter(link, real)

    def _take(self, path: str, real: str, what: str) -> None:
        if not self._is_new(real):
            return
        if what == FILE:
            self.files.append(path)
        else:
            self.skipped[what] += 1

    def _is_new(self, real: str) -> bool:
        known = real in self.seen
        self.seen.add(real)
        return not known


def _kind(entry: os.DirEntry[str]) -> str:
    """What an entry is itself; its folder has told it already, on most disks."""
    try:
        if entry.is_symlink():
            return LINK
        if entry.is_dir():
            return FOLDER
        return FILE if entry.is_file() else SPECIAL
    except OSError:
        return UNREADABLE


def _what(path: str) -> str:
    """What a path leads to."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return DANGLING if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else UNREADABLE
    if stat.S_ISREG(mode):
        return FILE
    return FOLDER if stat.S_ISDIR(mode) else SPECIAL


def _ours(path: str, names: set[str]) -> str | None:
    """What halfstep wrote a folder as, if it did."""
    if _is_run(names):
        return RUN
    if (INDEX in names or STATE in names) and is_marked(Path(path)):
        return PACKED
    return PACKED if _is_locked_alone(path, names) else None


def _is_locked_alone(path: str, names: set[str]) -> bool:
    """Whether a folder holds nothing but what a packing writes before its first token."""
    return LOCK in names and names <= {LOCK, STATE + PARTIAL} and is_lock(Path(path, LOCK))


def _is_run(names: set[str]) -> bool:
    return CONFIG in names and not names.isdisjoint((EVENTS, CHECKPOINTS, LOCK))


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
