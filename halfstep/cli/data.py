"""`halfstep data`: packs text into token shards, trains tokenizers, and checks packed data."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.core import host
from halfstep.core.errors import OptionError
from halfstep.training.paths import LOCK

if TYPE_CHECKING:
    from halfstep.training.data.index import Index

app = App(name="data", help="Pack text into token shards, train a tokenizer, check packed data.")
# Warns if the tokens stand for fewer or more bytes than the text by more than this share.
LOSSLESS = 1e-3
# Smaller shards are a mistake: thousands of files for a corpus that fits in one.
FEWEST_TOKENS = 1000


@app.command
def pack(
    *sources: str,
    out: Path,
    tokenizer: str,
    workers: int | None = None,
    shard_tokens: int = 100_000_000,
    field: str = "text",
    validation: float | str = 0.01,
    only: str | None = None,
    separator: str | None = None,
    json: Json = False,
) -> int:
    """Turn text into token shards, to train on with `--set data.source=DIR`.

    To resume a packing that was stopped or killed, run the same command again. The result is the same, byte for
    byte, whatever the number of workers.

    Parameters
    ----------
    sources
        Text files, folders, *.jsonl (.gz, .zst), *.parquet, *.arrow, the folder of a Hugging Face dataset that
        `save_to_disk` wrote, or `stdlib`.
    out
        The folder to write to.
    tokenizer
        bytes, a tokenizer.json, a sentencepiece *.model, a folder that holds one of them, or tiktoken:NAME.
    workers
        How many processes encode text; by default, one per core.
    shard_tokens
        Tokens per shard; the last shard of each side may be smaller.
    field
        The field of JSONL records, or the column of tables, that holds the text.
    validation
        The share of documents to hold out, chosen by their content, 0 to 0.5; or a text of yours to hold out, such
        as valid.txt: any source.
    only
        In folders, read only files that match this pattern, such as '*.py'.
    separator
        The token before each document; by default the tokenizer's end of text; `none` for no separator.
    """
    from halfstep.training.data.pack.pack import PackRequest
    from halfstep.training.data.pack.pack import pack as run
    from halfstep.training.data.pack.sources import find_sides
    from halfstep.training.data.tokenizers import open_tokenizer
    from halfstep.training.telemetry.progress import BytesProgress

    cores = host.threads() or 1
    most = max(64, 4 * cores)
    if workers is not None and not 1 <= workers <= most:
        raise OptionError(
            f"--workers is {workers}; it must be from 1 to {most}", hint="omit it: one per core is best"
        )
    if 0 < shard_tokens < FEWEST_TOKENS:
        raise OptionError(
            f"--shard-tokens is {shard_tokens}: each shard is a file, and there would be very many",
            hint=f"use {FEWEST_TOKENS:,} or more; the default is 100,000,000",
        )
    share = 0.0 if isinstance(validation, str) else validation
    PackRequest(field, only, share, shard_tokens)  # refuses what is wrong before anything is opened
    opened = open_tokenizer(tokenizer, separator)
    files, held_out = find_sides(sources, validation, only, field)
    request = PackRequest(field, only, held_out, shard_tokens)
    before = _modification_times(out)
    try:
        with BytesProgress("packing") as progress:
            index = run(files, out, opened, request, workers=workers or cores, meter=progress)
    except KeyboardInterrupt:
        print_words(f"stopped; to resume `{out}`, run the same command again")
        return 130
    if _modification_times(out) == before:
        print_words(f"nothing to do: `{out}` is complete")
    _print_packed(out, index, json)
    return 0


@app.command(name="train-tokenizer")
def train_tokenizer(
    *sources: str,
    out: Path,
    vocabulary: int = 50257,
    field: str = "text",
    validation: float | str = 0.01,
    only: str | None = None,
) -> int:
    """Train a byte-level BPE tokenizer with <|endoftext|>; the same text gives the same file.

    Parameters
    ----------
    sources
        As for `halfstep data pack`.
    out
        The tokenizer.json to write.
    vocabulary
        The number of tokens, including the 256 bytes and <|endoftext|>.
    field
        The field of JSONL records, or the column of tables, that holds the text.
    validation
        The share of documents that packing will hold out, which are left out here too; or the text that it will
        hold out, which must not be one of the sources.
    only
        In folders, read only files that match this pattern.
    """
    from halfstep.training.data.pack.sources import find_sides
    from halfstep.training.data.pack.train_tokenizer import train_tokenizer as run
    from halfstep.training.telemetry.progress import BytesProgress

    files, held_out = find_sides(sources, validation, only, field)
    share = held_out if isinstance(held_out, float) else 0.0
    with BytesProgress("reading") as progress:
        number = run(files, out, vocabulary, field=field, validation=share, meter=progress)
    if number < vocabulary:
        print_words(f"warning: the text gave only {number} of {vocabulary} tokens: nothing was left to merge")
    print_words(f"{number} tokens: {out}")
    return 0


@app.command
def verify(folder: Path, /, *, json: Json = False) -> int:
    """Check every byte of packed data against its index. The exit code is 1 if something is damaged.

    Parameters
    ----------
    folder
        A folder that `halfstep data pack` wrote.
    """
    from halfstep.training.data.packed import verify as run
    from halfstep.training.telemetry.progress import BytesProgress

    with BytesProgress("reading") as progress:
        damage = run(folder, progress)
    if json:
        print_json([dataclasses.asdict(each) for each in damage])
    elif damage:
        print_table(("file", "damage"), [(each.file, each.what) for each in damage])
    else:
        print_words(f"`{folder}` is intact: every byte is as it was packed")
    return 1 if damage else 0


@app.command
def show(folder: Path, /, *, json: Json = False) -> None:
    """Show what a folder of packed data holds: tokenizer, shards, tokens, documents, bytes.

    Parameters
    ----------
    folder
        A folder that `halfstep data pack` wrote.
    """
    from halfstep.training.data.index import read_index
    from halfstep.training.data.walk import describe_skipped

    index = read_index(folder)
    if json:
        print_json(dataclasses.asdict(index))
        return
    tokenizer, held_out = index.tokenizer, index.packing.validation
    rows = [
        ("tokenizer", f"{tokenizer.name} ({tokenizer.kind}), {tokenizer.vocabulary:,} tokens"),
        ("separator", "none" if tokenizer.separator is None else f"token {tokenizer.separator}"),
        ("sources", ", ".join(source.given for source in index.packing.sources)),
        ("held out", f"{held_out:g} of the documents" if isinstance(held_out, float) else held_out.given),
        ("skipped", ", ".join(describe_skipped(index.skipped)) or "nothing"),
        ("digest", index.digest),
    ]
    print_table(("", ""), rows)
    columns = ("shard", "tokens", "documents", "bytes of text")
    shards = [
        (each.name, *("unknown" if n is None else f"{n:,}" for n in (each.tokens, each.documents, each.bytes)))
        for each in index.shards
    ]
    print_table(columns, shards, right=columns[1:])


def _modification_times(out: Path) -> dict[str, int]:
    """Returns when each file of packed data was written, without the lock, which every command writes."""
    return {path.name: path.lstat().st_mtime_ns for path in out.glob("*") if path.name != LOCK}


def _print_packed(out: Path, index: "Index", json: bool) -> None:
    from halfstep.training.data.walk import describe_skipped

    if json:
        print_json(dataclasses.asdict(index))
        return
    rows = []
    for name, side in (("train", index.train), ("held out", index.val)):
        counts = [f"{number:,}" for number in (side.tokens, side.documents, side.text_bytes)]
        rows.append((name, *counts, f"{side.text_bytes / max(1, side.tokens):.3f}"))
    columns = ("", "tokens", "documents", "bytes of text", "bytes per token")
    print_table(columns, rows, right=columns[1:])
    if skipped := describe_skipped(index.skipped):
        print_words(f"skipped: {', '.join(skipped)}")
    text = index.train.text_bytes + index.val.text_bytes
    if index.train.token_bytes is None or index.val.token_bytes is None:
        print_words(
            "warning: the byte lengths of this tokenizer's tokens are unknown; bits per byte will use the average"
        )
    elif abs((kept := index.train.token_bytes + index.val.token_bytes) - text) > LOSSLESS * text:
        print_words(
            f"warning: the tokenizer is not lossless: its tokens stand for {kept:,} bytes, the text has {text:,}"
        )
    vocabulary = -(-index.tokenizer.vocabulary // 128) * 128
    print_words(f"to train on it: halfstep train --set data.source={out} --set model.vocabulary={vocabulary}")
