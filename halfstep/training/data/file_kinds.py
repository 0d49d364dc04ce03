"""What a file holds, by its name alone: text, or records that `halfstep data pack` reads and a run does not."""

from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["text", "jsonl", "parquet", "arrow"]

_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".ndjson.zst": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
NAMES: dict[Kind, str] = {"text": "text", "jsonl": "JSONL", "parquet": "parquet", "arrow": "an arrow table"}


def kind_of(path: Path) -> Kind:
    """What a file is, by its name."""
    name = path.name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "text")


def is_compressed(path: Path) -> bool:
    """Whether a file must be unpacked to be read, by its name."""
    return path.suffix.lower() in (".gz", ".zst")


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a Hugging Face dataset that `save_to_disk` wrote."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def has_splits(folder: Path) -> bool:
    """Whether a folder holds several such datasets, as splits of one."""
    return (folder / "dataset_dict.json").is_file()
