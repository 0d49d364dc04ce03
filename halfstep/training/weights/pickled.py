"""Files of torch, read without torch and without running any code that is in them.

    *.pt, *.pth, *.bin, *.ckpt    a zip: `data.pkl`, and each storage as it is in memory
    .metadata, *.distcp           a folder of torch.distributed.checkpoint: names, shapes, and where each piece is

A pickle is a program that names functions and calls them. Here it can call nothing: the few names that describe
tensors mean functions of this file, and any other name means `Unknown`, which does nothing with what it is given.
`strict` refuses any other name: what is loaded must be all there, while an audit may pass over what it cannot
read. Tensors become the ranges of bytes that hold them.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfstep.config.reading import MOST_TABLE, open_regular, read_bytes
from halfstep.training.weights.disk import FORMATS, DiskTensor, Span
from halfstep.training.weights.safetensors import WeightsFileError

METADATA = ".metadata"
_WIDTHS = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float64": 8, "float32": 4}
_WIDTHS |= {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip


class Unknown:
    """Whatever a pickle names that describes no tensor: it keeps what it is given, and does nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        named = state if isinstance(state, dict) else {"state": state}
        self.__dict__.update({key: value for key, value in named.items() if isinstance(key, str)})

    def __call__(self, *_: Any, **__: Any) -> "Unknown":
        """Does nothing, whatever a pickle calls it with."""
        return Unknown()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        """Takes what a pickle would add to a list."""

    append = extend


class _Storage:
    def __init__(self, dtype: str, span: Span | None):
        self.dtype, self.span = dtype, span


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, *_: Any, dtype: str = "") -> DiskTensor:
    dtype = dtype or storage.dtype
    width, shape = _WIDTHS.get(dtype, 0), tuple(shape)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    dense = math.prod(shape) == reach + 1
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    in_order = all(stride == row for size, stride, row in zip(shape, strides, rows, strict=True) if size > 1)
    span = storage.span
    if span is None or not dense or (offset + reach + 1) * width > span.size:
        return DiskTensor(FORMATS.get(dtype, dtype), shape, ())
    held = Span(span.file, span.offset + offset * width, math.prod(shape) * width)
    return DiskTensor(FORMATS.get(dtype, dtype), shape, (held,), in_order)


def _tensor_v3(storage: Any, offset: int, shape: Any, strides: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Any:
    return _tensor(storage, offset, shape, strides, dtype=str(dtype))


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, arguments, state: function(*arguments),
    ("torch", "Size"): lambda *sizes: tuple(sizes[0]) if sizes else (),
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: defaultdict(Unknown),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda *_: None,
}


# What describes a folder of torch.distributed.checkpoint beside its tensors; each is an `Unknown`.
_DESCRIBES = {
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "torch.serialization",
    "pathlib",
}  # fmt: skip


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, storage: Callable[[str, str], Span | None], strict: bool):
        super().__init__(io.BytesIO(content))
        self._storage, self._strict = storage, strict

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and (name in _WIDTHS or name in FORMATS):
            return name
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if self._strict and module not in _DESCRIBES:
            raise pickle.UnpicklingError(f"it names `{module}.{name}`")
        return type(name, (Unknown,), {})

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, *_ = pid
        dtype = dtype if isinstance(dtype, str) else "unknown"
        return _Storage(dtype, self._storage(str(key), dtype))


def read_torch(file: Path, *, strict: bool = False) -> Any:
    """Returns what a file of torch holds: plain data, with each tensor as the bytes that hold it."""
    try:
        with open_regular(file) as opened:
            if not zipfile.is_zipfile(opened):
                raise WeightsFileError(
                    f"`{file}` is torn or damaged, or not a file of torch 1.6 or later",
                    hint="write it again, with `torch.save` or as safetensors",
                )
            return _read_zip(opened, file, 0, strict)
    except OSError as error:
        raise WeightsFileError(f"`{file}` cannot be read: {error.strerror or error}") from None


def _read_zip(opened: Any, file: Path, base: int, strict: bool) -> Any:
    try:
        with zipfile.ZipFile(opened) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if entries["data.pkl"].file_size > MOST_TABLE:
                raise ValueError("its table is too large")
            content = archive.read(entries["data.pkl"])
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise ValueError("its numbers are big-endian")

        def storage(key: str, dtype: str) -> Span | None:
            entry = entries.get(f"data/{key}")
            if entry is None or entry.compress_type != zipfile.ZIP_STORED:
                return None
            return Span(file, base + _begin(opened, entry.header_offset), entry.file_size)

        return _Reader(content, storage, strict).load()
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, struct.error) as error:
        raise WeightsFileError(f"`{file}` is torn or damaged: {error}", hint="write it again") from None
    except (pickle.UnpicklingError, AttributeError, IndexError, RecursionError) as error:
        raise _code_error(file, error) from None


def _code_error(file: Path, error: Exception) -> WeightsFileError:
    return WeightsFileError(
        f"`{file}` cannot be read without running its code: {error}",
        hint="fetch or write it again, from somewhere you trust; tensors and plain values are read",
    )


def _begin(opened: Any, header: int) -> int:
    """Returns where the bytes of a zip's entry begin: its local header may be longer than the central one."""
    opened.seek(header)
    name, extra = struct.unpack("<26x2H", opened.read(30))
    return header + 30 + int(name) + int(extra)


# Folders of torch.distributed.checkpoint


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, offset: int, size: int):
        self._file, self._offset, self._size, self._place = file, offset, size, 0

    def seek(self, place: int, whence: int = 0) -> int:
        self._place = (0, self._place, self._size)[whence] + place
        return self._place

    def tell(self) -> int:
        return self._place

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._place
        self._file.seek(self._offset + self._place)
        content: bytes = self._file.read(left if size is None or size < 0 else min(size, left))
        self._place += len(content)
        return content


def read_dcp(folder: Path) -> dict[str, DiskTensor]:
    """Returns the tensors of a folder of torch.distributed.checkpoint, each with its pieces in order."""
    return {name: value for name, (_, value) in _read_dcp(folder, strict=False).items() if value is not None}


def read_saved(folder: Path) -> dict[Any, Any]:
    """Returns what torch.distributed.checkpoint was given to save, nested as it was; lists as {place: value}."""
    found: dict[Any, Any] = {}
    for parents, value in _read_dcp(folder, strict=True).values():
        place = found
        for parent in parents[:-1]:
            place = place.setdefault(parent, {})
        place[parents[-1]] = value
    return found


def _read_dcp(folder: Path, *, strict: bool) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Returns each name with the path to it and its value, which of anything but a tensor is read if `strict`."""
    try:
        metadata = _Reader(read_bytes(folder / METADATA, MOST_TABLE), lambda key, dtype: None, strict).load()
        described: Mapping[str, Any] = metadata.state_dict_metadata
        places: dict[str, list[Any]] = {}
        for index, info in metadata.storage_data.items():
            places.setdefault(index.fqn, []).append((tuple(getattr(index, "offset", None) or ()), info))
        paths = getattr(metadata, "planner_data", None) or {}
        found = dict[str, tuple[tuple[Any, ...], Any]]()
        for name, each in described.items():
            pieces, value = sorted(places.get(name, []), key=lambda place: place[0]), None
            if hasattr(each, "properties"):
                value = _dcp_tensor(folder, each, pieces, strict)
            elif strict:
                ((_, info),) = pieces
                value = _dcp_piece(folder, info, strict)
            found[name] = tuple(paths.get(name, (name,))), value
        return found
    except pickle.UnpicklingError as error:
        raise _code_error(folder / METADATA, error) from None
    except (AttributeError, ValueError, TypeError, KeyError, EOFError, OSError) as error:
        raise WeightsFileError(
            f"`{folder / METADATA}` is torn or damaged: {error}", hint="write it again"
        ) from None


def _dcp_piece(folder: Path, info: Any, strict: bool) -> Any:
    if Path(info.relative_path).name != info.relative_path:
        raise ValueError(f"it points to `{info.relative_path}`, which is not in its folder")
    file = folder / info.relative_path
    with open_regular(file) as opened:
        return _read_zip(_Slice(opened, info.offset, info.length), file, info.offset, strict)


def _dcp_tensor(folder: Path, described: Any, pieces: list[Any], strict: bool) -> DiskTensor:
    properties = described.properties
    dtype = str(getattr(properties, "dtype", None) or getattr(properties, "state", ("unknown",))[0])
    spans: list[Span] = []
    in_order = not any(any(offset[1:]) for offset, _ in pieces)  # else they are not rows
    for _, info in pieces:
        held = _dcp_piece(folder, info, strict)
        if isinstance(held, DiskTensor):
            spans += held.spans
            in_order = in_order and held.in_order
    return DiskTensor(FORMATS.get(dtype, dtype), tuple(described.size), tuple(spans), in_order)
