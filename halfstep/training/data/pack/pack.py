"""`halfstep data pack`: text to token shards, in parallel, so that a killed packing goes on.

    this process     reads blocks in order ---> encodes nothing, writes shards in order
    N workers                 block -> tokens

What comes out depends on the text, the tokenizer and what was asked for, and on nothing else: not on the number of
workers, nor on how often the packing was stopped. Blocks are made in order and their tokens are taken in order; a
worker that is ahead waits for its turn in a window of a few blocks, which also bounds the memory.

Every few seconds, and after each block in which a shard became full, `packing.json` is replaced by one that says
what is finished and where reading goes on. A packing that was killed is begun again with the same command, goes on
from there, and ends in the same bytes. A folder that holds another packing is refused: mixing two would be found
by nobody. A finished one is looked at, and what was lost of it is made again (repair.py). A packing that is
refused, or that got no token down, leaves what it found.
"""

import dataclasses
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, final

from halfstep import __version__
from halfstep.training.data.corpus import DataError
from halfstep.training.data.index import (
    INDEX,
    STATE,
    TOKEN_BYTES,
    Index,
    is_marked,
    is_packed,
    read_index,
    sealed,
    unsealed,
    write_index,
)
from halfstep.training.data.pack.blocks import Block, Position, blocks
from halfstep.training.data.pack.encode import SIDES, Encoded, Encoder, encoded_blocks, token_type
from halfstep.training.data.pack.repair import lost_shards, mend_shards, mend_tables
from halfstep.training.data.pack.sources import STDLIB, Source, SourceFile
from halfstep.training.data.pack.writer import ShardWriter
from halfstep.training.data.packed import check_names
from halfstep.training.data.tokenizers import Tokenizer
from halfstep.training.data.walk import told as words
from halfstep.training.files import PARTIAL, RunLock, make_folder, write_whole
from halfstep.training.paths import LOCK

SECONDS_BETWEEN_COMMITS = 5.0
# The header of a shard counts its tokens in an int32.
MOST_TOKENS = 2**31 - 1
_SHARD = re.compile(r"(train|val)_\d{6,}\.(bin|crc)")
# Told while a packing goes on: bytes of the sources that are done, all of them, tokens so far.
Meter: TypeAlias = Callable[[int, int, int], object]


@dataclass(frozen=True)
class Asked:
    """What a packing is asked for; two that agree in it give the same bytes."""

    field: str = "text"
    only: str | None = None
    validation: float = 0.01
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        check_share(self.validation)
        if not 1 <= self.shard_tokens <= MOST_TOKENS:
            raise DataError(f"--shard-tokens is {self.shard_tokens}; a shard holds 1 to {MOST_TOKENS} tokens")


def check_share(validation: float) -> None:
    """Refuses a share of documents to hold out that is none."""
    if not 0 <= validation <= 0.5:
        raise DataError(f"--validation is {validation}; it is a share of the documents, from 0 to 0.5")


def pack(
    sources: Sequence[Source],
    out: Path,
    tokenizer: Tokenizer,
    asked: Asked,
    *,
    workers: int,
    meter: Meter | None = None,
) -> Index:
    """Packs sources into a folder, or goes on with it, or mends it; 0 workers encode in this process.

    The index that comes back counts in `skipped` what is no file of the sources too, as folders of runs that lie
    in them. The one on the disk does not: it is of the same text whatever else was put beside it.
    """
    _check_outside(sources, out)
    if out.is_dir() and not is_packed(out):
        _check_empty(out)  # before a lock is put there
    made = _make(out)
    lock = RunLock(out)
    try:
        plan = _plan(sources, tokenizer, asked)
        told = meter or (lambda done, total, tokens: None)
        index = _finished(out, plan)
        if index is not None:
            _mend(sources, out, tokenizer, asked, index, workers, told)
        else:
            packing = _Packing(sources, out, tokenizer, asked, plan)
            try:
                index = packing.run(workers, told)
            except DataError:
                packing.drop()
                raise
            finally:
                packing.close()
        return dataclasses.replace(index, skipped={**index.skipped, **_passed(sources)})
    except OSError as error:
        raise DataError(
            f"packing into `{out}` stopped: {error.strerror or error}",
            hint="make room or see to the disk; the same command goes on where it stopped",
        ) from None
    finally:
        if not is_marked(out):  # nothing was kept
            _take_back(made)
        lock.release()


@final
class _Packing:
    """One packing of a folder, from where it stands to its end."""

    def __init__(
        self, sources: Sequence[Source], out: Path, tokenizer: Tokenizer, asked: Asked, plan: dict[str, Any]
    ):
        self.files, self.passed = _files(sources), _passed(sources)
        self.out, self.tokenizer, self.asked = out, tokenizer, asked
        self.plan = plan
        table = tokenizer.token_bytes
        self.table = None if table is None else table.to_npy()
        dtype = token_type(tokenizer.vocabulary)
        self.writers = {side: ShardWriter(out, side, dtype, asked.shard_tokens, table) for side in SIDES}
        self.position, self.skipped, self.shares = Position(), Counter[str](), (1.0, 0.0)
        self.done = 0  # bytes of the sources, for the progress
        self._begin()

    def run(self, workers: int, meter: Meter) -> Index:
        """Packs what is left."""
        total = sum(file.size for file in self.files)
        committed = time.monotonic()
        meter(self.done, total, self._num_tokens)
        todo = blocks(self.files, self.position, self.asked.field)
        for block, encoded in encoded_blocks(todo, _encoder(self.tokenizer, self.asked), self.out, workers):
            named = self._take(block, encoded)
            meter(self.done, total, self._num_tokens)
            if named or time.monotonic() - committed >= SECONDS_BETWEEN_COMMITS:
                self._commit()
                committed = time.monotonic()
        self._check_sizes()
        self._check_sides()
        return self._end()

    @property
    def _num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers.values())

    def close(self) -> None:
        """Lets go of the files."""
        for writer in self.writers.values():
            writer.close()

    def drop(self) -> None:
        """Removes what has no token on the disk: what goes on from there begins anew."""
        self.close()
        if (self.out / STATE).is_file() and not _has_tokens(unsealed(self.out / STATE)):
            _discard(self.out, self.plan)

    def _begin(self) -> None:
        state = self._earlier()
        if state is not None:
            for side, writer in self.writers.items():
                writer.resume(state["sides"][side])
            self.position, self.done = Position(**state["position"]), state["done"]
            self.skipped, self.shares = Counter(state["skipped"]), tuple(state["shares"])
        else:
            _check_empty(self.out)
            self._commit()
        self.tokenizer.save(self.out)
        if self.table is not None:
            write_whole(self.out / TOKEN_BYTES, self.table)

    def _earlier(self) -> dict[str, Any] | None:
        """What an earlier packing left to go on from. One that got no token down left nothing, whatever it was."""
        if not (self.out / STATE).is_file():
            return None
        state = unsealed(self.out / STATE)
        if _has_tokens(state):
            _check_same(self.out, state["plan"], self.plan)
            return state
        _discard(self.out, state["plan"])
        return None

    def _take(self, block: Block, encoded: Encoded) -> bool:
        """Writes the tokens of a block; whether a shard became full."""
        for side, writer in self.writers.items():
            part = encoded.sides[side]
            writer.append(part.tokens, part.starts)
            writer.text_bytes += part.text_bytes
        self.position, self.done = block.after, block.done
        self.skipped += encoded.skipped
        self.shares = min(self.shares[0], encoded.shares[0]), max(self.shares[1], encoded.shares[1])
        return any(writer.has_full for writer in self.writers.values())

    def _commit(self, *, final: bool = False) -> None:
        state = {
            "plan": self.plan,
            "sides": {side: writer.commit(final=final) for side, writer in self.writers.items()},
            "position": vars(self.position),
            "done": self.done,
            "skipped": dict(sorted(self.skipped.items())),
            "shares": self.shares,
        }
        write_whole(self.out / STATE, sealed(state))

    def _check_sizes(self) -> None:
        """What was read must be what was looked at before: a file that grows would be packed in part."""
        for file in self.files:
            size = file.path.stat().st_size
            if size != file.size:
                raise DataError(
                    f"`{file.path}` had {file.size} bytes when it was looked at and has {size} now: it changed "
                    "while it was packed",
                    hint="pack again when nobody writes to the sources, into another folder, or after removing "
                    f"`{self.out}`",
                )

    def _check_sides(self) -> None:
        """Both sides must exist, unless nothing was to be held out. If not, nothing is kept: all must change."""
        train, val = (self.writers[side].num_tokens for side in SIDES)
        if not train and not val:
            skipped = ", ".join(words(self.skipped + self.passed)) or "nothing"
            _discard(self.out, self.plan)
            raise DataError(f"there is no text in the sources (skipped: {skipped})", hint="name other sources")
        if (train and val) or (train and not self.asked.validation):
            return
        self.close()
        _discard(self.out, self.plan)
        said = "all documents fall" if val else "no document falls"
        between = share_between(*self.shares)
        more = "give more text" if between is None else f"`--validation {between}` leaves text on both sides"
        raise DataError(
            f"{said} into the share of {self.asked.validation} that is held out",
            hint=f"{more}, or `--validation 0` to hold out the last tokens instead; nothing was kept",
        )

    def _end(self) -> Index:
        self._commit(final=True)
        sides = {side: writer.record() for side, writer in self.writers.items()}
        index = write_index(
            self.out,
            Index(
                version=__version__,
                tokenizer=self.tokenizer.identity(),
                packing=self.plan["packing"],
                skipped=dict(sorted(self.skipped.items())),
                token_bytes=None if self.table is None else hashlib.sha256(self.table).hexdigest(),
                train=sides["train"],
                val=sides["val"],
            ),
        )
        (self.out / STATE).unlink()
        return index


def share_between(smallest: float, largest: float) -> str | None:
    """A short share that holds out the smallest document and not the largest; None where there is none."""
    exact = Decimal(smallest)
    for digits in range(3, 18):
        step = Decimal(1).scaleb(exact.adjusted() + 1 - digits)
        share = (exact // step + 1) * step
        if smallest < float(share) <= min(largest, 0.5):
            return f"{share.normalize():f}"
    return None


def _files(sources: Sequence[Source]) -> list[SourceFile]:
    return list(chain.from_iterable(source.files for source in sources))


def _passed(sources: Sequence[Source]) -> Counter[str]:
    return sum((Counter(source.skipped) for source in sources), Counter[str]())


def _mend(
    sources: Sequence[Source],
    out: Path,
    tokenizer: Tokenizer,
    asked: Asked,
    index: Index,
    workers: int,
    meter: Meter,
) -> None:
    """Makes again what a finished packing has lost; nothing is read where nothing is."""
    check_names(out, index)
    mend_tables(out, index, tokenizer)
    lost = lost_shards(out, index)
    if not lost:
        return
    files = _files(sources)
    total, tokens = sum(file.size for file in files), 0

    def counted() -> Iterator[Encoded]:
        nonlocal tokens
        todo = blocks(files, Position(), asked.field)
        for block, encoded in encoded_blocks(todo, _encoder(tokenizer, asked), out, workers):
            yield encoded
            tokens += sum(len(part.tokens) for part in encoded.sides.values())
            meter(block.done, total, tokens)

    mend_shards(out, index, lost, counted())


def _encoder(tokenizer: Tokenizer, asked: Asked) -> Encoder:
    return Encoder(tokenizer, asked.field, asked.validation)


def _plan(sources: Sequence[Source], tokenizer: Tokenizer, asked: Asked) -> dict[str, Any]:
    """What must agree for two packings to be one."""
    identity = dataclasses.asdict(tokenizer.identity())
    told = [
        {"given": each.given, "files": len(each.files), "bytes": each.num_bytes, "digest": each.digest()}
        for each in sources
    ]
    return {"tokenizer": identity, "packing": {"sources": told, **dataclasses.asdict(asked)}}


def _has_tokens(state: dict[str, Any]) -> bool:
    return any(side["shards"] or side["tokens"] for side in state["sides"].values())


def _make(out: Path) -> list[Path]:
    """Makes the folder; the paths that are there by this packing alone, innermost first, its lock among them."""
    try:
        made = [path for path in (out / LOCK, out, *out.parents) if not path.exists()]
        make_folder(out)
        return made
    except OSError as error:
        raise DataError(
            f"`{out}` cannot be written: {error.strerror or error}", hint="name another folder by --out"
        ) from None


def _take_back(made: list[Path]) -> None:
    """Removes the lock, which must be held, and empty folders."""
    for path in made:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _finished(out: Path, plan: dict[str, Any]) -> Index | None:
    """The index of a folder in which this packing is finished already."""
    if not (out / INDEX).is_file() or not is_packed(out):
        return None
    index = read_index(out)
    _check_same(out, {"tokenizer": dataclasses.asdict(index.tokenizer), "packing": index.packing}, plan)
    (out / STATE).unlink(missing_ok=True)  # killed between the index and this
    return index


def _check_outside(sources: Sequence[Source], out: Path) -> None:
    """Refuses to write where it reads: a packing that goes on would find its own shards among the sources."""
    for source in sources:
        folder = Path(source.given).expanduser()
        if source.given != STDLIB and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise DataError(
                f"`{out}` lies in the source `{source.given}`", hint="name a folder outside of it by --out"
            )


def _discard(out: Path, plan: dict[str, Any]) -> None:
    """Removes what a packing wrote; what says that it began, last."""
    beside = (TOKEN_BYTES, plan["tokenizer"]["file"])
    for path in out.iterdir():
        name = path.name.removesuffix(PARTIAL)
        if name in beside or _SHARD.fullmatch(name):
            path.unlink()
    (out / STATE).unlink()


def _check_empty(out: Path) -> None:
    strange = sorted(path.name for path in out.iterdir() if path.name not in (LOCK, STATE + PARTIAL))
    if strange:
        raise DataError(
            f"`{out}` holds other files, as `{strange[0]}`", hint="name an empty folder or a new one by --out"
        )


def _check_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses a folder that holds another packing, and says in what it differs."""
    for told, was, is_now in _differences(before, now):
        raise DataError(
            f"`{out}` holds another packing: {told} was {was} and is now {is_now}",
            hint="name another folder by --out, or ask for the same to go on with it",
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in ("kind", "sha256", "vocabulary", "separator"):
        was, is_now = before["tokenizer"][key], now["tokenizer"][key]
        if was != is_now:
            yield f"the tokenizer's {key}", was, is_now
    told, tells = before["packing"], now["packing"]
    if len(told["sources"]) != len(tells["sources"]):
        yield "the number of sources", len(told["sources"]), len(tells["sources"])
    for was, is_now in zip(told["sources"], tells["sources"], strict=False):
        for key in ("files", "bytes", "digest"):
            if was[key] != is_now[key]:
                yield f"source `{is_now['given']}` ({key})", was[key], is_now[key]
    for key in ("field", "only", "validation", "shard_tokens"):
        if told[key] != tells[key]:
            yield f"--{key.replace('_', '-')}", told[key], tells[key]
