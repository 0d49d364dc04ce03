"""The types that every module of the data package shares."""

from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from halfstep.core.errors import HalfstepError

TokenArray: TypeAlias = NDArray[Any]  # one-dimensional; uint8, uint16 or uint32


class DataError(HalfstepError):
    """Data that is missing, damaged, too short, or does not fit the model."""


class Tokens(Protocol):
    """A sequence of tokens: a numpy array, or shards that read like one. Only slices without a step are used."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> TokenArray: ...


class Document(NamedTuple):
    """A text, the name that errors call it by, and the file it is from or a part of."""

    name: str
    content: bytes
    path: str = ""
