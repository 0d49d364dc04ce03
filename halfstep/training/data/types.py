"""The types that every module of the data package shares."""

from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from halfstep.core.errors import HalfstepError

TokenArray: TypeAlias = NDArray[Any]  # one-dimensional; uint8, uint16 or uint32


class DataError(HalfstepError):
    """Data that is missing, damaged, too short, or does not fit the model."""


class DataNotFoundError(DataError):
    """Data that does not exist, or a path that matches none."""


class DataContentError(DataError):
    """Text, records or token shards that are not what they should be, or that are empty."""


class DamagedDataError(DataError):
    """Packed data that was changed, truncated or lost after it was written."""


class DataMismatchError(DataError):
    """Data, or an order of data, that is not what the run learned from."""


class DataSizeError(DataError):
    """Data that is too short for the sequences of an update, or too large for memory."""


class HeldOutError(DataError):
    """Held-out text that does not exist, or that the run would be trained on too."""


class VocabularyError(DataError):
    """Tokens or bytes that the vocabulary of the model does not have."""


class TokenizerError(DataError):
    """A tokenizer that does not exist, is damaged, or lacks a token that is needed."""


class PackingError(DataError):
    """Options, sources or a folder that data cannot be packed with."""


class Tokens(Protocol):
    """A sequence of tokens: a numpy array, or shards that read like one. Only slices without a step are used."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> TokenArray: ...


class Document(NamedTuple):
    """A text, the name that errors call it by, and the file it is from or a part of."""

    name: str
    content: bytes
    path: str = ""
