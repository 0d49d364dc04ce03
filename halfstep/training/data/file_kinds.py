"""What a file holds, by its name alone: text, or records, which `halfstep data pack` reads and a run does not."""

from pathlib import Path
from typing import Literal, TypeAlias

FileKind: TypeAlias = Literal["text", "jsonl", "parquet", "arrow"]

_SUFFIXES: dict[str, FileKind] = {
    **{name + tail: "jsonl" for name in (".jsonl", ".ndjson") for tail in ("", ".gz", ".zst")},
    ".parquet": "parquet",
    ".arrow": "arrow",
}
DESCRIPTIONS: dict[FileKind, str]
DESCRIPTIONS = {"text": "text", "jsonl": "JSONL", "parquet": "parquet", "arrow": "an arrow table"}


def kind_of(path: Path) -> FileKind:
    """Returns the kind of a file by its name."""
    name = path.name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "text")


def is_compressed(path: Path) -> bool:
    """Whether a file must be decompressed to be read, by its name."""
    return path.suffix.lower() in (".gz", ".zst")


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a Hugging Face dataset that `save_to_disk` wrote."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def has_splits(folder: Path) -> bool:
    """Whether a folder holds several such datasets as splits of one."""
    return (folder / "dataset_dict.json").is_file()
