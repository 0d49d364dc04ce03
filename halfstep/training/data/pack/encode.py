"""Turns a block of text into tokens, each document on its side: what the workers of a packing do.

A document's content alone decides its side (corpus.py), unless its source is held out as a whole. The hashed
content always ends in a newline, as it does when text is trained on without packing, so that both hold out the
same documents. The tokenizer's separator precedes each document. If there is none (bytes), a document without a
newline at its end gets one.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.config.reading import parse_json
from halfstep.training.data.corpus import hash_share
from halfstep.training.data.pack.blocks import Block, missing_field_error
from halfstep.training.data.text import cut
from halfstep.training.data.tokenizer_base import Tokenizer, TokenizerIdentity
from halfstep.training.data.tokenizers import open_saved
from halfstep.training.data.types import DataContentError, DataError, PackingError, TokenArray

SIDES = ("train", "val")
SHORT = 1024
_FIX_LINE = "fix or remove the line"


class SidedText(NamedTuple):
    """A document, the values in [0, 1) of its content (smallest and largest of its pieces), and its side."""

    text: str
    shares: tuple[float, float]
    held_out: bool
    whole: bool  # a document, not a part of a longer text


@dataclass
class Part:
    """The tokens of one side of a block, and where documents begin among them."""

    tokens: TokenArray
    starts: NDArray[np.int64]
    text_bytes: int


@dataclass
class Encoded:
    """A block as tokens."""

    sides: dict[str, Part]
    skipped: Counter[str] = field(default_factory=Counter)
    shares: tuple[float, float] = (1.0, 0.0)  # the smallest and the largest of its documents


class Encoder:
    """Encodes blocks as tokens of the type that shards hold."""

    def __init__(self, tokenizer: Tokenizer, field: str, validation: float):
        self.tokenizer, self.field, self.validation = tokenizer, field, validation
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")

    def encode(self, block: Block) -> Encoded:
        """Returns the tokens of a block."""
        skipped: Counter[str] = Counter()
        # Every document is below a share of 1.
        read = list(documents(block, self.field, 1.0 if block.held_out else self.validation, skipped))
        ends = "\n" if self.tokenizer.separator is None else ""
        texts = [each.text + (ends if each.whole and each.text[-1:] != "\n" else "") for each in read]
        tokens = self.tokenizer.encode(texts)
        sides = {}
        for side, held_out in zip(SIDES, (False, True), strict=True):
            chosen = [n for n, document in enumerate(read) if document.held_out == held_out]
            size = sum(len(texts[n].encode()) for n in chosen)
            sides[side] = self._part([tokens[n] for n in chosen], size)
        shares = [share for document in read for share in document.shares]
        return Encoded(sides, skipped, (min(shares, default=1.0), max(shares, default=0.0)))

    def _part(self, texts: list[NDArray[np.uint32]], size: int) -> Part:
        if (separator := self.tokenizer.separator) is not None:
            mark = np.array([separator], dtype=np.uint32)
            texts = [np.concatenate([mark, tokens]) for tokens in texts]
        starts = np.cumsum([0, *(len(tokens) for tokens in texts)], dtype=np.int64)[:-1]
        joined = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint32)
        return Part(joined.astype(self.dtype), starts, size)


def documents(block: Block, field: str, validation: float, skipped: Counter[str]) -> Iterator[SidedText]:
    """Yields the documents of a block. Those that are empty or not text are counted in `skipped`."""
    if block.kind == "pieces":
        yield from _runs(block, validation)
        return
    read = {"texts": _texts, "lines": _lines, "rows": _rows}[block.kind]
    for text, content in read(block, field, skipped):
        if not content:
            skipped["empty"] += 1
            continue
        share = hash_share(content if content.endswith(b"\n") else content + b"\n")
        yield SidedText(text, (share, share), share < validation, True)


def _texts(block: Block, field: str, skipped: Counter[str]) -> Iterator[tuple[str, bytes]]:
    for content in block.payload:
        assert isinstance(content, bytes)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped["binary"] += 1
        else:
            yield text, content


def _lines(block: Block, field: str, skipped: Counter[str]) -> Iterator[tuple[str, bytes]]:
    assert isinstance(block.payload, bytes)
    for number, line in enumerate(block.payload.split(b"\n"), block.at):
        if not line.strip():
            continue  # between records, or after the last
        where = f"`{block.name}`:{number}"
        try:
            record = parse_json(line, unique=False)
        except UnicodeDecodeError as error:
            raise _not_utf8_error(f"{where}, byte {error.start} of the line") from None
        except ValueError as error:
            raise DataContentError(f"{where} is not JSON: {error}", hint=_FIX_LINE) from None
        if not isinstance(record, dict):
            raise DataContentError(f"{where} is not a JSON object", hint='a line must look like {"text": ...}')
        if field not in record:
            raise missing_field_error(where, field, list(record))
        yield _as_text(record[field], where, field)


def _rows(block: Block, field: str, skipped: Counter[str]) -> Iterator[tuple[str, bytes]]:
    for row, text in enumerate(block.payload, block.at):
        yield _as_text(text, f"`{block.name}`, row {row}", field)


def _as_text(value: object, where: str, field: str) -> tuple[str, bytes]:
    if not isinstance(value, str):
        raise DataContentError(
            f"{where}: `{field}` is {'null' if value is None else type(value).__name__}, not text",
            hint="fix or remove it, or choose another --field",
        )
    try:
        return value, value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise DataContentError(
            f"{where}: character {error.start} of `{field}` is half of a surrogate pair, which UTF-8 cannot hold",
            hint=_FIX_LINE,
        ) from None


def _runs(block: Block, validation: float) -> Iterator[SidedText]:
    assert isinstance(block.payload, bytes)
    at = block.payload.find(b"\0")
    if at >= 0:
        raise DataContentError(
            f"`{block.name}` is not text: byte {block.at + at} is NUL",
            hint="name a text file, *.jsonl or *.parquet",
        )
    try:
        block.payload.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8_error(f"`{block.name}`, byte {block.at + error.start}") from None
    # A text too short for pieces that end between characters is a single piece.
    pieces = cut(block.payload) if len(block.payload) >= SHORT else [block.payload]
    shared = [(piece, hash_share(piece)) for piece in pieces]
    for held_out, group in groupby(shared, key=lambda each: each[1] < validation):
        run = list(group)
        shares = [share for _, share in run]
        text = b"".join(piece for piece, _ in run).decode()
        yield SidedText(text, (min(shares), max(shares)), held_out, False)


def _not_utf8_error(where: str) -> DataError:
    return DataContentError(f"{where}: not UTF-8", hint="convert the file to UTF-8, for example with iconv")


# --- in worker processes ------------------------------------------------------------------------------------


def encoded_blocks(
    todo: Iterable[Block], encoder: Encoder, folder: Path, workers: int
) -> Iterator[tuple[Block, Encoded]]:
    """Yields blocks with their tokens, in order. Workers open the tokenizer in `folder`; 0 means this process."""
    if workers < 1:
        yield from ((block, encoder.encode(block)) for block in todo)
        return
    arguments = (str(folder), encoder.tokenizer.identity(), encoder.field, encoder.validation)
    # Spawned, not forked: a fork copies locks that threads of this process hold at that moment.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, arguments)
    window: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in todo:
            window.append((block, pool.submit(_encode, block)))
            if len(window) > 2 * workers + 2:
                yield window[0][0], window.popleft()[1].result()
        while window:
            yield window[0][0], window.popleft()[1].result()
    except BrokenProcessPool:
        raise PackingError(
            "a packing worker died, perhaps because memory ran out",
            hint="lower --workers; the same command resumes the packing",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None  # of a worker


def _start_worker(folder: str, identity: TokenizerIdentity, field: str, validation: float) -> None:
    """Prepares a new process: it opens the tokenizer, and ends with its parent."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(open_saved(Path(folder), identity), field, validation)


def _encode(block: Block) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(block)


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and the pool's queue would keep them waiting forever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
