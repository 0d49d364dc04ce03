"""`halfstep data`: text to token shards, new tokenizers, and whether packed data is still what was packed."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from halfstep.cli.output import Flag, Place, check_named, print_json, print_table, print_words

if TYPE_CHECKING:
    from halfstep.training.data.index import Index, SideRecord

app = App(name="data", help="Pack text into token shards, train a tokenizer, check what was packed.")
# A tokenizer whose tokens stand for fewer or more bytes than the text by more than this is told of.
LOSSLESS = 1e-3
# Smaller shards than this are a slip: a thousand files of a corpus that fits in one.
FEWEST_TOKENS = 1000


@app.command
def pack(
    *sources: str,
    out: Place,
    tokenizer: str,
    workers: int | None = None,
    shard_tokens: int = 100_000_000,
    field: str = "text",
    validation: float = 0.01,
    only: str | None = None,
    separator: str | None = None,
    json: Flag = False,
) -> int:
    """Turn text into token shards that `--set data.source=DIR` trains on.

    A packing that was stopped or killed goes on when the same command is given again, and ends in the same bytes,
    whatever the number of workers.

    Parameters
    ----------
    sources
        Text files, folders, *.jsonl (.gz, .zst), *.parquet, *.arrow, the folder of a Hugging Face dataset that
        `save_to_disk` wrote, or `stdlib`.
    out
        The folder to write.
    tokenizer
        bytes, a tokenizer.json, a sentencepiece *.model, a folder with one of them, or tiktoken:NAME.
    workers
        Processes that encode; as many as there are cores unless named.
    shard_tokens
        Tokens of a shard; the last one of a side may be smaller.
    field
        Where the text is, in the records of JSONL and tables.
    validation
        Share of the documents that is held out, by their content; 0 to 0.5.
    only
        Of the files in folders, only those that match this pattern, as '*.py'.
    separator
        The token before each document; the tokenizer's end of text unless named; `none` for none.
    json
        Print the index as JSON.
    """
    from halfstep.cli.meter import meter
    from halfstep.core.errors import ConfigError
    from halfstep.training.data.pack.pack import PackRequest
    from halfstep.training.data.pack.pack import pack as run
    from halfstep.training.data.pack.sources import find_sources
    from halfstep.training.data.tokenizers import open_tokenizer

    number = _cores() if workers is None else workers
    if number < 1:
        raise ConfigError(f"--workers is {number}; at least one must work")
    if 0 < shard_tokens < FEWEST_TOKENS:
        raise ConfigError(
            f"--shard-tokens is {shard_tokens}: each shard is a file, and so small ones would be very many",
            hint=f"name {FEWEST_TOKENS:,} or more; left out, a shard holds 100,000,000",
        )
    check_named("a source", *sources)
    check_named("--tokenizer", tokenizer)
    asked = PackRequest(field, only, validation, shard_tokens)
    opened = open_tokenizer(tokenizer, separator)
    found = find_sources(sources, only)
    before = _times(out)
    try:
        with meter("packing") as told:
            index = run(found, out, opened, asked, workers=number, meter=told)
    except KeyboardInterrupt:
        print_words(f"stopped; the same command goes on with `{out}`")
        return 130
    if _times(out) == before:
        print_words(f"nothing was left to do: `{out}` is finished")
    if json:
        print_json(_as_data(index))
    else:
        _tell(out, index)
    return 0


@app.command(name="train-tokenizer")
def train_tokenizer(
    *sources: str,
    out: Place,
    vocabulary: int = 50257,
    field: str = "text",
    validation: float = 0.01,
    only: str | None = None,
) -> int:
    """Learn a byte-level BPE tokenizer from text, with <|endoftext|>; the same text gives the same file.

    Parameters
    ----------
    sources
        As for `halfstep data pack`.
    out
        The tokenizer.json to write.
    vocabulary
        How many tokens, the 256 bytes and <|endoftext|> among them.
    field
        Where the text is, in the records of JSONL and tables.
    validation
        Share of the documents that packing will hold out; they are left out here too.
    only
        Of the files in folders, only those that match this pattern.
    """
    from halfstep.cli.meter import meter
    from halfstep.training.data.pack.sources import find_sources
    from halfstep.training.data.pack.train_tokenizer import train_tokenizer as run

    check_named("a source", *sources)
    found = find_sources(sources, only)
    with meter("reading") as told:
        number = run(found, out, vocabulary, field=field, validation=validation, meter=told)
    if number < vocabulary:
        print_words(f"warning: the text gave {number} tokens, not {vocabulary}: there was nothing left to merge")
    print_words(f"{number} tokens: {out}")
    return 0


@app.command
def verify(folder: Place, /, *, json: Flag = False) -> int:
    """Check every byte of packed data against its index. Exit code 1 where something is damaged.

    Parameters
    ----------
    folder
        What `halfstep data pack` wrote.
    json
        Print what was found as JSON.
    """
    from halfstep.cli.meter import meter
    from halfstep.training.data.packed import verify as run

    with meter("reading") as told:
        found = run(folder, lambda done, total: told(done, total, 0))
    if json:
        print_json([dataclasses.asdict(each) for each in found])
    elif found:
        print_table(("file", "what"), [(each.file, each.what) for each in found])
    else:
        print_words(f"`{folder}` is what was packed, every byte")
    return 1 if found else 0


@app.command
def show(folder: Place, /, *, json: Flag = False) -> None:
    """Show what was packed: tokenizer, shards, tokens, documents, bytes.

    Parameters
    ----------
    folder
        What `halfstep data pack` wrote.
    json
        Print the index as JSON.
    """
    from halfstep.training.data.index import read_index

    index = read_index(folder)
    if json:
        print_json(_as_data(index))
        return
    tokenizer = index.tokenizer
    rows = [
        ("tokenizer", f"{tokenizer.name} ({tokenizer.kind}), {tokenizer.vocabulary:,} tokens"),
        ("separator", "none" if tokenizer.separator is None else f"token {tokenizer.separator}"),
        ("sources", ", ".join(source["given"] for source in index.packing["sources"])),
        ("held out", f"{index.packing['validation']:g} of the documents"),
        ("skipped", _skipped(index) or "nothing"),
        ("digest", index.digest),
    ]
    print_table(("", ""), rows)
    columns = ("shard", "tokens", "documents", "bytes of text")
    shards = [
        (
            each.name,
            f"{each.tokens:,}",
            f"{each.documents:,}",
            "unknown" if each.bytes is None else f"{each.bytes:,}",
        )
        for each in index.shards
    ]
    print_table(columns, shards, right=columns[1:])


def _times(out: Path) -> dict[str, int]:
    """When each file of packed data was written; the lock is by every command."""
    from halfstep.training.paths import LOCK

    return {path.name: path.lstat().st_mtime_ns for path in out.glob("*") if path.name != LOCK}


def _tell(out: Path, index: "Index") -> None:
    rows = [
        (side, f"{found.tokens:,}", f"{found.documents:,}", f"{found.text_bytes:,}", f"{_per_token(found):.3f}")
        for side, found in (("train", index.train), ("held out", index.val))
    ]
    columns = ("", "tokens", "documents", "bytes of text", "bytes a token")
    print_table(columns, rows, right=columns[1:])
    if skipped := _skipped(index):
        print_words(f"skipped: {skipped}")
    text = index.train.text_bytes + index.val.text_bytes
    if index.train.token_bytes is None or index.val.token_bytes is None:
        print_words(
            "warning: the bytes of this tokenizer's tokens are not known; bits per byte are by the average"
        )
    elif abs(index.train.token_bytes + index.val.token_bytes - text) > LOSSLESS * text:
        kept = index.train.token_bytes + index.val.token_bytes
        print_words(
            f"warning: the tokenizer does not give the text back: its tokens stand for {kept:,} bytes of {text:,}"
        )
    vocabulary = -(-index.tokenizer.vocabulary // 128) * 128
    print_words(f"train on it: halfstep train --set data.source={out} --set model.vocabulary={vocabulary}")


def _per_token(side: "SideRecord") -> float:
    return side.text_bytes / side.tokens if side.tokens else 0.0


def _skipped(index: "Index") -> str:
    from halfstep.training.data.walk import describe_skipped

    return ", ".join(describe_skipped(index.skipped))


def _as_data(index: "Index") -> object:
    return dataclasses.asdict(index)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
