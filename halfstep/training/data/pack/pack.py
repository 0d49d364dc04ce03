"""`halfstep data pack`: turns text into token shards, in parallel, and resumes if it was killed.

    this process     reads blocks in order ---> encodes nothing, writes shards in order
    N workers                 block -> tokens

The result depends only on the text, the tokenizer and the request. A worker that is ahead waits in a window of a
few blocks, which bounds the memory. Every few seconds, and after each block that fills a shard, `packing.json` is
replaced by one that says what is finished and where reading continues; the same command resumes from there. A
folder that holds a different packing is refused: nobody would notice two mixed ones. So is a finished one that has
lost a file. A packing that is refused, or that wrote no token, leaves the folder as it was.
"""

import dataclasses
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from halfstep import __version__
from halfstep.config.schema import Count
from halfstep.core.errors import one_of
from halfstep.training.data.index import (
    INDEX,
    STATE,
    TOKEN_BYTES,
    Index,
    Packing,
    SourceRecord,
    check_name,
    is_marked,
    is_packed,
    read_index,
    read_verified,
    seal,
    write_index,
)
from halfstep.training.data.pack.blocks import Block, Position, blocks
from halfstep.training.data.pack.encode import SIDES, Encoded, Encoder, encoded_blocks
from halfstep.training.data.pack.sources import Source
from halfstep.training.data.pack.writer import ShardWriter, SideState
from halfstep.training.data.packed import open_shards, read_token_bytes
from halfstep.training.data.text import STDLIB
from halfstep.training.data.tokenizer_base import Tokenizer, TokenizerIdentity
from halfstep.training.data.types import DamagedDataError, DataContentError, DataError, HeldOutError, PackingError
from halfstep.training.data.walk import describe_skipped
from halfstep.training.files import PARTIAL, RunLock, make_folder, os_errors, write_whole
from halfstep.training.paths import LOCK

SECONDS_BETWEEN_COMMITS = 5.0
# The header of a shard counts its tokens in an int32.
MOST_TOKENS = 2**31 - 1
_SHARD = re.compile(r"(train|val)_\d{6,}\.(bin|crc)")
# Called during a packing with the bytes of the sources that are done, their total, and the tokens so far.
Meter: TypeAlias = Callable[[int, int, int], object]


@dataclass(frozen=True)
class PackRequest:
    """The options of a packing; equal requests give equal bytes."""

    field: str = "text"
    only: str | None = None
    validation: float | Source = 0.01  # a share of the documents, or a source that is held out
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not isinstance(self.validation, Source):
            check_share(self.validation)
        if not 1 <= self.shard_tokens <= MOST_TOKENS:
            raise PackingError(f"--shard-tokens is {self.shard_tokens}; it must be from 1 to {MOST_TOKENS}")


@dataclass(frozen=True)
class Plan:
    """What is packed, and how: a packing can only be resumed with the same."""

    tokenizer: TokenizerIdentity
    packing: Packing


@dataclass(frozen=True)
class State:
    """How far a packing has come, as packing.json holds it."""

    plan: Plan
    sides: Mapping[str, SideState]
    position: Position
    done: Count  # bytes of the sources
    skipped: Mapping[str, Count]
    shares: tuple[float, float]

    @property
    def has_tokens(self) -> bool:
        """Whether the packing has written any tokens."""
        return any(side.shards or side.tokens for side in self.sides.values())


def check_share(validation: float) -> None:
    """Refuses an invalid share of documents to hold out."""
    if not 0 <= validation <= 0.5:
        raise PackingError(
            f"--validation is {validation}; it must be a share of the documents from 0 to 0.5, or a path"
        )


def pack(
    sources: Sequence[Source],
    out: Path,
    tokenizer: Tokenizer,
    request: PackRequest,
    *,
    workers: int,
    meter: Meter | None = None,
) -> Index:
    """Packs sources into a folder, or resumes a packing there; 0 workers encode in this process.

    `skipped` of the returned index also counts what is not a file of the sources; the index on disk does not.
    """
    held_out = request.validation
    _check_outside([*sources, held_out] if isinstance(held_out, Source) else sources, out)
    if out.is_dir() and not is_packed(out):
        _check_empty(out)  # before a lock is put there
    created = _create(out)
    lock = RunLock(out)
    hint = "free some space or check the disk; the same command resumes the packing"
    try:
        with os_errors(PackingError, f"packing into `{out}` stopped", hint):
            packing = _Packing(sources, out, tokenizer, request, workers, meter)
            index = packing.finished_index() or packing.run()
            return dataclasses.replace(index, skipped={**index.skipped, **packing.not_files})
    finally:
        if not is_marked(out):  # nothing was kept
            for path in created:  # the lock, which is held, and empty folders
                with suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()
        lock.release()


@dataclass(eq=False)
class _Packing:
    sources: Sequence[Source]
    out: Path
    tokenizer: Tokenizer
    request: PackRequest
    workers: int
    meter: Meter | None

    def __post_init__(self) -> None:
        tokenizer, request, held_out = self.tokenizer, self.request, self.request.validation
        self.plan = _plan(self.sources, tokenizer, request)
        share, own = (0.0, [held_out]) if isinstance(held_out, Source) else (held_out, [])
        sources = [*self.sources, *own]
        self.files = list(chain.from_iterable(source.files for source in sources))
        self.not_files = sum((Counter(source.skipped) for source in sources), Counter[str]())
        self.encoder = Encoder(tokenizer, request.field, share)
        table = tokenizer.token_bytes
        self.table = None if table is None else table.to_npy()
        size, dtype = request.shard_tokens, self.encoder.dtype
        self.writers = {side: ShardWriter(self.out, side, dtype, size, table) for side in SIDES}
        self.position, self.skipped, self.shares = Position(), Counter[str](), (1.0, 0.0)
        self.done = 0  # bytes of the sources

    def finished_index(self) -> Index | None:
        """Returns the index of the folder if this packing is already finished."""
        if not (self.out / INDEX).is_file() or not is_packed(self.out):
            return None
        index = read_index(self.out)
        _check_same(self.out, Plan(index.tokenizer, index.packing), self.plan)
        open_shards(self.out, index)
        read_token_bytes(self.out, index)
        (self.out / STATE).unlink(missing_ok=True)  # killed between writing the index and this
        return index

    def run(self) -> Index:
        """Packs what is left."""
        self._begin()
        try:
            committed = time.monotonic()
            self._show_progress()
            todo = blocks(self.files, self.position, self.request.field)
            for block, encoded in encoded_blocks(todo, self.encoder, self.out, self.workers):
                is_full = self._append(block, encoded)
                self._show_progress()
                if is_full or time.monotonic() - committed >= SECONDS_BETWEEN_COMMITS:
                    self._commit()
                    committed = time.monotonic()
            self._check_sizes()
            self._check_sides()
            return self._end()
        except DataError:
            self._close()
            if (self.out / STATE).is_file() and not _read_state(self.out).has_tokens:
                _discard(self.out, self.plan)
            raise
        finally:
            self._close()

    def _show_progress(self) -> None:
        if self.meter is not None:
            tokens = sum(writer.num_tokens for writer in self.writers.values())
            self.meter(self.done, sum(file.size for file in self.files), tokens)

    def _close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def _begin(self) -> None:
        if (state := self._earlier_state()) is not None:
            for side, writer in self.writers.items():
                writer.resume(state.sides[side])
            self.position, self.done = state.position, state.done
            self.skipped, self.shares = Counter(state.skipped), state.shares
        else:
            _check_empty(self.out)
            self._commit()
        self.tokenizer.save(self.out)
        if self.table is not None:
            write_whole(self.out / TOKEN_BYTES, self.table)

    def _earlier_state(self) -> "State | None":
        """Returns the state to resume from. An earlier packing without tokens is discarded, whatever it was."""
        if not (self.out / STATE).is_file():
            return None
        state = _read_state(self.out)
        if state.has_tokens:
            _check_same(self.out, state.plan, self.plan)
            return state
        _discard(self.out, state.plan)
        return None

    def _append(self, block: Block, encoded: Encoded) -> bool:
        """Writes the tokens of a block; returns whether a shard is full now."""
        is_full = False
        for side, writer in self.writers.items():
            part = encoded.sides[side]
            is_full |= writer.append(part.tokens, part.starts)
            writer.text_bytes += part.text_bytes
        self.position, self.done = block.after, block.done
        self.skipped += encoded.skipped
        self.shares = min(self.shares[0], encoded.shares[0]), max(self.shares[1], encoded.shares[1])
        return is_full

    def _commit(self, *, final: bool = False) -> None:
        state = State(
            plan=self.plan,
            sides={side: writer.commit(final=final) for side, writer in self.writers.items()},
            position=self.position,
            done=self.done,
            skipped=dict(sorted(self.skipped.items())),
            shares=self.shares,
        )
        write_whole(self.out / STATE, seal(dataclasses.asdict(state)))

    def _check_sizes(self) -> None:
        """Refuses sources that changed meanwhile: a growing file would be packed in part."""
        for file in self.files:
            size = file.path.stat().st_size
            if size != file.size:
                raise PackingError(
                    f"`{file.path}` changed while it was packed: it had {file.size} bytes and now has {size}",
                    hint="pack again when nothing writes to the sources, into another folder or after removing "
                    f"`{self.out}`",
                )

    def _check_sides(self) -> None:
        train, val = (self.writers[side].num_tokens for side in SIDES)
        if train and (val or not self.request.validation):
            return
        self._close()
        _discard(self.out, self.plan)
        if not train and not val:
            skipped = ", ".join(describe_skipped(self.skipped + self.not_files)) or "nothing"
            raise DataContentError(f"the sources hold no text (skipped: {skipped})", hint="choose other sources")
        if isinstance(held_out := self.request.validation, Source):
            empty = "the sources hold" if val else f"`{held_out.given}`, which is to be held out, holds"
            raise HeldOutError(f"{empty} no text", hint="choose others; nothing was kept")
        fallen = "all documents fall" if val else "no document falls"
        between = share_between(*self.shares)
        more = "provide more text" if between is None else f"`--validation {between}` leaves text on both sides"
        raise HeldOutError(
            f"{fallen} into the held-out share of {held_out}",
            hint=f"{more}, or use `--validation 0` to hold out the last tokens instead; nothing was kept",
        )

    def _end(self) -> Index:
        self._commit(final=True)
        index = write_index(
            self.out,
            Index(
                version=__version__,
                tokenizer=self.tokenizer.identity(),
                packing=self.plan.packing,
                skipped=dict(sorted(self.skipped.items())),
                token_bytes=None if self.table is None else hashlib.sha256(self.table).hexdigest(),
                train=self.writers["train"].record(),
                val=self.writers["val"].record(),
            ),
        )
        (self.out / STATE).unlink()
        return index


def _plan(sources: Sequence[Source], tokenizer: Tokenizer, request: PackRequest) -> Plan:
    held_out = request.validation
    validation = _record(held_out) if isinstance(held_out, Source) else held_out
    rest = (request.field, request.only, validation, request.shard_tokens)
    return Plan(tokenizer.identity(), Packing(tuple(map(_record, sources)), *rest))


def _record(source: Source) -> SourceRecord:
    return SourceRecord(source.given, len(source.files), source.num_bytes, source.digest())


def share_between(smallest: float, largest: float) -> str | None:
    """Returns a short share that holds out the smallest document but not the largest, or None."""
    exact = Decimal(smallest)
    for digits in range(3, 18):
        step = Decimal(1).scaleb(exact.adjusted() + 1 - digits)
        share = (exact // step + 1) * step
        if smallest < float(share) <= min(largest, 0.5):
            return f"{share.normalize():f}"
    return None


def _read_state(out: Path) -> State:
    state = read_verified(out / STATE, State)
    for name in [record.name for side in state.sides.values() for record in side.shards]:
        check_name(name, out / STATE)
    if set(state.sides) != set(SIDES):
        raise DamagedDataError(
            f"`{out / STATE}` has other sides than {one_of(SIDES)}", hint="remove the folder and pack again"
        )
    return state


def _create(out: Path) -> list[Path]:
    """Creates the folder; returns the paths that only this packing creates, innermost first, with its lock."""
    with os_errors(PackingError, f"cannot write to `{out}`", "choose another folder with --out"):
        created = [path for path in (out / LOCK, out, *out.parents) if not path.exists()]
        make_folder(out)
        return created


def _check_outside(sources: Sequence[Source], out: Path) -> None:
    """Refuses to write into a source: a resumed packing would find its own shards among the text."""
    for source in sources:
        folder = Path(source.given).expanduser()
        if source.given != STDLIB and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise PackingError(
                f"`{out}` is inside the source `{source.given}`", hint="choose a folder outside of it with --out"
            )


def _discard(out: Path, plan: Plan) -> None:
    """Removes what a packing wrote, and last the file that says that it began."""
    for path in out.iterdir():
        name = path.name.removesuffix(PARTIAL)
        if name in (TOKEN_BYTES, plan.tokenizer.file) or _SHARD.fullmatch(name):
            path.unlink()
    (out / STATE).unlink()


def _check_empty(out: Path) -> None:
    others = sorted(path.name for path in out.iterdir() if path.name not in (LOCK, STATE + PARTIAL))
    if others:
        raise PackingError(
            f"`{out}` holds other files, such as `{others[0]}`", hint="choose an empty or new folder with --out"
        )


def _check_same(out: Path, before: Plan, now: Plan) -> None:
    for what, was, is_now in _compare_plans(before, now):
        if was != is_now:
            raise PackingError(
                f"`{out}` holds a different packing: {what} was {was} and is now {is_now}",
                hint="choose another folder with --out, or repeat the earlier request to resume it",
            )


def _compare_plans(before: Plan, now: Plan) -> Iterator[tuple[str, Any, Any]]:
    for key in ("kind", "sha256", "vocabulary", "separator"):
        yield f"the tokenizer's {key}", getattr(before.tokenizer, key), getattr(now.tokenizer, key)
    old, new = before.packing, now.packing
    yield "the number of sources", len(old.sources), len(new.sources)
    pairs = [*zip(old.sources, new.sources, strict=False)]
    if isinstance(old.validation, SourceRecord) and isinstance(new.validation, SourceRecord):
        pairs.append((old.validation, new.validation))
    else:
        share, other = (getattr(each.validation, "given", each.validation) for each in (old, new))
        yield "--validation", share, other
    for was, is_now in pairs:
        for key in ("files", "bytes", "digest"):
            yield f"source `{is_now.given}` ({key})", getattr(was, key), getattr(is_now, key)
    for key in ("field", "only", "shard_tokens"):
        yield f"--{key.replace('_', '-')}", getattr(old, key), getattr(new, key)
