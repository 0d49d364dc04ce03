"""A block of text as tokens, each document on its side: what the workers of a pack do.

A document's side is decided by its content as data/corpus.py says, and by nothing else: not by the
tokenizer, the file it is in or the number of workers. The content that is hashed ends in a newline, whether the
document does or not, as it is when text is trained on without packing: both hold out the same documents.

On either side the tokens of a document follow the tokenizer's separator. Where there is none (bytes), a document
that does not end its last line gets a newline instead, so that it does not run into the next.
"""

import json
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.training.data.corpus import DataError, TokenArray, hash_share
from halfstep.training.data.pack.blocks import Block, missing_field
from halfstep.training.data.text import cut
from halfstep.training.data.tokenizers import Identity, Tokenizer, open_saved

SIDES = ("train", "val")
SHORT = 1024


class SidedText(NamedTuple):
    """A document, where in [0, 1) its content falls (the pieces of a long text: from where to where), its side."""

    text: str
    shares: tuple[float, float]
    held_out: bool
    whole: bool  # a document of its own, not a part of a longer text


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
    """Blocks to tokens of the type that shards hold."""

    def __init__(self, tokenizer: Tokenizer, field: str, validation: float):
        self.tokenizer, self.field, self.validation = tokenizer, field, validation
        self.dtype = token_type(tokenizer.vocabulary)

    def encode(self, block: Block) -> Encoded:
        """The tokens of a block."""
        skipped: Counter[str] = Counter()
        found = list(documents(block, self.field, self.validation, skipped))
        shares = [share for each in found for share in each.shares]
        tokens = self.tokenizer.encode([self._written(each) for each in found])
        sides = {}
        for side, held_out in zip(SIDES, (False, True), strict=True):
            chosen = [n for n, each in enumerate(found) if each.held_out == held_out]
            size = sum(len(self._written(found[n]).encode()) for n in chosen)
            sides[side] = self._part([tokens[n] for n in chosen], size)
        return Encoded(sides, skipped, (min(shares, default=1.0), max(shares, default=0.0)))

    def _written(self, document: SidedText) -> str:
        needs = self.tokenizer.separator is None and document.whole and not document.text.endswith("\n")
        return document.text + "\n" if needs else document.text

    def _part(self, texts: list[NDArray[np.uint32]], size: int) -> Part:
        separator = self.tokenizer.separator
        if separator is not None:
            mark = np.array([separator], dtype=np.uint32)
            texts = [np.concatenate([mark, tokens]) for tokens in texts]
        starts = np.cumsum([0, *(len(tokens) for tokens in texts)], dtype=np.int64)[:-1]
        joined = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint32)
        return Part(joined.astype(self.dtype), starts, size)


def token_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """What shards of a vocabulary hold: two bytes a token where they are enough."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def documents(block: Block, field: str, validation: float, skipped: Counter[str]) -> Iterator[SidedText]:
    """The documents of a block. Those that are no text or empty are counted in `skipped`."""
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
        text = None if b"\0" in content else _decoded(content)
        if text is None:
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
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{where}, byte {error.start} of the line") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON: {error}", hint="mend or remove the line") from None
        if not isinstance(record, dict):
            raise DataError(f"{where} is no JSON object", hint='a line must be as {"text": ...}')
        if field not in record:
            raise missing_field(where, field, list(record))
        yield _as_text(record[field], where, field)


def _rows(block: Block, field: str, skipped: Counter[str]) -> Iterator[tuple[str, bytes]]:
    for row, text in enumerate(block.payload, block.at):
        yield _as_text(text, f"`{block.name}`, row {row}", field)


def _as_text(value: object, where: str, field: str) -> tuple[str, bytes]:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: `{field}` is {'null' if value is None else type(value).__name__}, not text",
            hint="mend or remove it, or name another --field",
        )
    try:
        return value, value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise DataError(
            f"{where}: character {error.start} of `{field}` is half of a surrogate pair, which UTF-8 cannot hold",
            hint="mend or remove the line",
        ) from None


def _runs(block: Block, validation: float) -> Iterator[SidedText]:
    """The pieces of a long text, neighbors on one side together."""
    assert isinstance(block.payload, bytes)
    at = block.payload.find(b"\0")
    if at >= 0:
        raise DataError(
            f"`{block.name}` is no text: byte {block.at + at} is NUL",
            hint="name a text file, *.jsonl or *.parquet",
        )
    try:
        block.payload.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(f"`{block.name}`, byte {block.at + error.start}") from None
    # What is too short for pieces that end between characters is one.
    pieces = cut(block.payload) if len(block.payload) >= SHORT else [block.payload]
    shared = [(piece, hash_share(piece)) for piece in pieces]
    for held_out, group in groupby(shared, key=lambda each: each[1] < validation):
        run = list(group)
        shares = [share for _, share in run]
        text = b"".join(piece for piece, _ in run).decode()
        yield SidedText(text, (min(shares), max(shares)), held_out, False)


def _decoded(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _not_utf8(where: str) -> DataError:
    return DataError(f"{where}: not UTF-8", hint="convert the file to UTF-8, as by iconv")


# --- in a process of its own --------------------------------------------------------------------------------


def encoded_blocks(
    todo: Iterable[Block], encoder: Encoder, folder: Path, workers: int
) -> Iterator[tuple[Block, Encoded]]:
    """Blocks with their tokens, in order. Workers open the tokenizer that `folder` holds; 0 is this process."""
    if workers < 1:
        yield from ((block, encoder.encode(block)) for block in todo)
        return
    arguments = (str(folder), encoder.tokenizer.identity(), encoder.field, encoder.validation)
    yield from in_order(todo, workers, arguments)


def in_order(todo: Iterable[Block], workers: int, arguments: tuple[Any, ...]) -> Iterator[tuple[Block, Encoded]]:
    """Blocks with their tokens, in order, by processes of their own; `arguments` are those of `begin`."""
    # Spawned, not forked: a fork copies locks that threads of this process hold at that moment.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin, arguments)
    window: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in todo:
            window.append((block, pool.submit(work, block)))
            if len(window) > 2 * workers + 2:
                yield _taken(window)
        while window:
            yield _taken(window)
    except BrokenProcessPool:
        raise DataError(
            "a worker of the packing died, perhaps for want of memory",
            hint="lower --workers; the same command goes on where it stopped",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _taken(window: deque[tuple[Block, Future[Encoded]]]) -> tuple[Block, Encoded]:
    block, future = window.popleft()
    return block, future.result()


_encoder: Encoder | None = None


def begin(folder: str, identity: Identity, field: str, validation: float) -> None:
    """Makes a new process a worker: it opens the tokenizer and outlives neither its task nor its parent."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core; there are as many as were asked for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _encoder = Encoder(open_saved(Path(folder), identity), field, validation)


def work(block: Block) -> Encoded:
    """The tokens of a block, by the worker's encoder."""
    assert _encoder is not None, "begin was not called"
    return _encoder.encode(block)


def _leave_with_parent() -> None:
    """A parent that was killed cannot end its workers, and the pool's queue would keep them waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
