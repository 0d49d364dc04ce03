"""Weights on a disk: one safetensors file, or several with an index, read a tensor at a time and without a pickle.

    folder/model.safetensors                      all in one
    folder/model.safetensors.index.json           {"weight_map": {tensor: file}}, files next to it
    file.safetensors                              any single file

fp32, bf16 and fp16 are read as fp32, exactly (a bf16 number is the upper half of an fp32 pattern). Any other
format is refused by name. The digest is the SHA-256 of the file; of several, that of the lines that `sha256sum`
prints:

    sha256sum model-0000*.safetensors | sha256sum
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import MOST_TABLE, open_regular, parse_json, read_bytes
from halfstep.core.errors import HalfstepError
from halfstep.training.files import PICKLES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTIONS = (".json", ".toml")
AS_SAFETENSORS = (
    "if you trust it, load it with its own library and write it again as safetensors: "
    "`model.save_pretrained(FOLDER)` does"
)

# The dtypes that widen to fp32 exactly: how their bytes are read, and their names in messages.
WIDENED = {"F32": ("<f4", "fp32"), "BF16": ("<u2", "bf16"), "F16": ("<f2", "fp16")}


class WeightsError(HalfstepError):
    """Weights that cannot be read, or do not fit the model."""


class WeightsFileError(WeightsError):
    """Files of weights that do not exist, cannot be read, or are not complete."""


class WeightsFitError(WeightsError):
    """Weights whose dtype, numbers, names or shapes do not fit the model."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its name there, and where its bytes are."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[np.float32]:
        """Returns the numbers, in fp32."""
        raw = self.bits(WIDENED[self.dtype][0])
        if self.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # ARM flags a signaling NaN
            return raw.astype(np.float32, copy=False)

    def bits(self, carrier: str) -> NDArray[Any]:
        """Returns the bytes as a dtype of numpy, which has no bf16."""
        count = int(np.prod(self.shape, dtype=np.int64))
        with open_regular(self.file) as opened:
            return np.fromfile(opened, carrier, count, offset=self.offset).reshape(self.shape)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold it."""
        return (self.file,)

    def equals(self, other: "Tensor") -> bool:
        """Whether another tensor holds the same numbers in the same format."""
        self.check_format()
        same = (self.dtype, self.shape) == (other.dtype, other.shape)
        return same and bool((self.read() == other.read()).all())

    def check_format(self) -> None:
        """Refuses a format that does not widen to fp32."""
        if self.dtype not in WIDENED:
            raise WeightsFitError(
                f"`{self.name}` in `{self.file}` is held in {self.dtype}; weights are read from "
                f"{', '.join(WIDENED)}",
                hint="write the model again in float32 or bfloat16, unquantized",
            )


@dataclass(frozen=True, eq=False)
class DecodedTensor(Tensor):
    """A tensor whose numbers were computed from a file: they are in memory."""

    numbers: NDArray[np.float32]

    def bits(self, carrier: str) -> NDArray[Any]:
        """Returns the numbers."""
        return self.numbers


@dataclass(frozen=True, eq=False)
class SpreadTensor(Tensor):
    """A tensor whose rows are in several files, each of which holds some."""

    pieces: tuple[Tensor, ...]

    def bits(self, carrier: str) -> NDArray[Any]:
        """Returns the bytes of all rows."""
        return np.concatenate([piece.bits(carrier) for piece in self.pieces])

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold it."""
        return tuple(piece.file for piece in self.pieces)


def open_file(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of one safetensors file."""
    refuse_pickle(file)
    if file.is_dir():
        raise WeightsFileError(f"`{file}` is a folder, not a file of weights", hint="fetch or write it again")
    if file.suffix in DESCRIPTIONS:
        raise WeightsFileError(
            f"`{file}` describes weights but holds none", hint=f"name the folder that holds both, `{file.parent}`"
        )
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(file) as opened, safe_open(file, framework="numpy"):  # it checks header and size
            (length,) = struct.unpack("<Q", opened.read(8))
            header = parse_json(opened.read(length))
    except (SafetensorError, ValueError, struct.error) as error:
        raise WeightsFileError(f"`{file}` does not read as safetensors: {error}", hint=_kind_hint(file)) from None
    except OSError as error:
        raise WeightsFileError(f"`{file}` cannot be read: {error.strerror or error}") from None
    header.pop("__metadata__", None)
    return {
        name: Tensor(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def open_folder(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder in Hugging Face layout."""
    if (folder / SINGLE).exists():
        return open_file(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise _no_weights_error(folder)
    tensors: dict[str, Tensor] = {}
    where = _read_index(folder / INDEX)
    for file in sorted(set(where.values())):
        if not os.path.isfile(folder / file):  # false for an impossible name, too
            raise WeightsFileError(
                f"`{folder / INDEX}` names `{file}`, and there is no such file next to it",
                hint="fetch all files of the model again",
            )
        here = open_file(folder / file)
        if twice := sorted(here.keys() & tensors.keys()):
            raise WeightsFileError(
                f"`{twice[0]}` is in `{tensors[twice[0]].file.name}` and in `{file}` of `{folder}`",
                hint="the files are not of one model: fetch or write them again",
            )
        tensors |= here  # including what the index does not name: the caller decides what may be unused
    if missing := sorted(name for name in where if name not in tensors or tensors[name].file.name != where[name]):
        raise WeightsFileError(
            f"`{folder / INDEX}` puts `{missing[0]}` in `{where[missing[0]]}`, but it is not there",
            hint="index and files are not of the same model: fetch them again",
        )
    return tensors


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns the SHA-256 of the file that holds the tensors, or of what `sha256sum` prints for several."""
    sums = {}
    for file in {file for tensor in tensors for file in tensor.files}:
        with open_regular(file) as opened:
            sums[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digest_of_sums(sums)


def digest_of_sums(sums: Mapping[str, str]) -> str:
    """Returns the digest of a model's files, given the SHA-256 of each by its name."""
    if len(sums) == 1:
        return next(iter(sums.values()))
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Returns the table in a JSON file."""
    try:
        table = parse_json(read_bytes(file, MOST_TABLE))
    except ValueError as error:
        raise WeightsFileError(f"`{file}` is not JSON: {error}", hint="fetch or write it again") from None
    except OSError as error:
        raise WeightsFileError(f"`{file}` cannot be read: {error.strerror or error}") from None
    if not isinstance(table, dict):
        raise WeightsFileError(f"`{file}` holds no table", hint="fetch or write it again")
    return table


def refuse_pickle(file: Path) -> None:
    """Refuses a pickle, which runs code when it is loaded."""
    if file.suffix.lower() in PICKLES:
        raise WeightsFileError(f"`{file}` is a pickle, which runs code when it is loaded", hint=AS_SAFETENSORS)


def _read_index(index: Path) -> Mapping[str, str]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise WeightsFileError(f"`{index}` has no `weight_map` of tensors to files", hint="fetch it again")
    for name, file in where.items():
        if not file or Path(file).name != file or file in (".", ".."):
            raise WeightsFileError(
                f"`{index}` puts `{name}` in `{file}`, which is not a file next to it",
                hint="an index that points outside its folder is not followed",
            )
        refuse_pickle(index.parent / file)
    return where


def _no_weights_error(folder: Path) -> WeightsError:
    names = sorted(entry.name for entry in folder.iterdir())
    if SINGLE in names:
        return WeightsFileError(
            f"`{folder / SINGLE}` is a link to a missing file",
            hint="a hub's cache keeps files elsewhere: copy them with `cp -rL`, or fetch them again",
        )
    if pickles := [name for name in names if name.endswith((*PICKLES, ".bin.index.json"))]:
        return WeightsFileError(
            f"`{folder}` holds its weights as a pickle, `{pickles[0]}`, which runs code when it is loaded",
            hint=AS_SAFETENSORS,
        )
    hint = "a folder in Hugging Face layout holds model.safetensors, or shards and their index"
    if others := [name for name in names if name.endswith(".safetensors")]:
        hint = f"name the file itself: `--init {folder / others[0]}`"
    return WeightsFileError(f"`{folder}` holds neither {SINGLE} nor {INDEX}", hint=hint)


def _kind_hint(file: Path) -> str:
    with open_regular(file) as opened:
        start = opened.read(64)
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return f"it looks like a pickle; {AS_SAFETENSORS}"
    if start.startswith(b"version https://git-lfs"):
        return "it is a git LFS pointer: `git lfs pull` fetches the file itself"
    return "it is truncated, damaged or another kind of file: fetch or write it again as safetensors"
