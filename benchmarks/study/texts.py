"""Text that is on every machine: what is installed beside torch, held out by whole units.

A unit is a package, or a folder of headers. Units are held out in the order of a hash of their names, up to a
tenth of the text: one that is larger than what is left of that is trained on. A file held out alone would leak:
packages carry copies of each other. So folders of copies are left out, and so is every held-out file whose content
the text to train on has too. Files are in the order of a hash of their content: any part is of all units.
"""

from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from halfstep.core.errors import HalfstepError
from halfstep.training.data.corpus import Corpus, from_sides, hash_share
from halfstep.training.data.text import glob_documents
from halfstep.training.data.types import Document

SHARE = 0.1
COPIES = {"_vendor", "vendored", "_vendored_packages", "third_party", "_distutils"}
COPIES |= {"ops"}  # torch has a thousand headers there that are alike
UNITS: dict[str, Callable[[Path], str]] = {
    "package": lambda path: path.parts[0].removesuffix(".py"),
    "folder": lambda path: path.parent.as_posix(),
}


def installed() -> Path:
    """Returns the folder that holds torch and the packages beside it."""
    return Path(str(find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]


def load_text(files: str, unit: str, vocabulary: int, root: Path | None = None) -> Corpus:
    """Returns the text of the files that match below a folder, by default the one of installed packages."""
    root = root or installed()
    paths = sorted(path for path in root.glob(files) if not COPIES & {*path.relative_to(root).parts})
    documents, _ = glob_documents(paths, str(root / files))
    units: dict[str, list[Document]] = {}
    for document in documents:
        units.setdefault(UNITS[unit](Path(document.path).relative_to(root)), []).append(document)
    to_train, held_out, left = list[Document](), list[Document](), SHARE * sum(map(_size, units.values()))
    for name in sorted(units, key=lambda name: hash_share(name.encode())):
        fits = _size(units[name]) <= left
        left -= _size(units[name]) if fits else 0
        (held_out if fits else to_train).extend(units[name])
    trained = {document.content for document in to_train}
    held_out = [document for document in held_out if document.content not in trained]
    if not held_out or not trained:
        raise HalfstepError(
            f"the {len(documents)} files `{files}` in `{root}` are of too few units to hold some out",
            hint="install more packages beside torch",
        )
    train, validation = (sorted(side, key=_order) for side in (to_train, held_out))
    description = f"{len(documents):,} files `{files}` of installed packages, held out by {unit}"
    return from_sides(train, validation, description, vocabulary)


def _size(documents: list[Document]) -> int:
    return sum(len(document.content) for document in documents)


def _order(document: Document) -> bytes:
    return blake2b(document.content, digest_size=16).digest()
