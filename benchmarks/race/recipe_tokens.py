"""Makes real tokens without a network: the Python source of installed packages, encoded by a BPE trained on it.

    python benchmarks/race/recipe_tokens.py FOLDER [--vocabulary 50257] [--megabytes 200]

Writes FOLDER/train_000.bin, FOLDER/val_000.bin (every 50th file) and FOLDER/tokens.json, which records how many
bytes of text the tokens of each file encode: a byte-level BPE loses none. A complete folder is used as it is.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SUMMARY = "tokens.json"
END = "<|endoftext|>"
HELD_OUT_EVERY = 50
AT_ONCE = 512  # files


def make(folder: Path, vocabulary: int, megabytes: int = 200, roots: list[Path] | None = None) -> dict[str, int]:
    """Returns the summary of a folder of tokens, which is created if missing."""
    if (folder / SUMMARY).exists():
        summary: dict[str, int] = json.loads((folder / SUMMARY).read_text())
        if summary["vocabulary"] > vocabulary:
            raise SystemExit(f"{folder} uses {summary['vocabulary']} tokens, more than the model's {vocabulary}")
        return summary
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(sources(roots or [Path(sysconfig.get_path(p)) for p in ("purelib", "stdlib")], megabytes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    # A third of the text is enough to find frequent pairs, and most of the time goes into encoding.
    tokenizer.train_from_iterator(texts[::3], trainer)
    summary = {"vocabulary": tokenizer.get_vocab_size(), "train_bytes": 0, "val_bytes": 0}
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for first in range(0, len(texts), AT_ONCE):
        chunk = texts[first : first + AT_ONCE]
        for place, encoded in enumerate(tokenizer.encode_batch(chunk), first):
            side = "val" if place % HELD_OUT_EVERY == 0 else "train"
            parts[side].append(np.asarray([tokenizer.token_to_id(END), *encoded.ids], "<u2"))
            summary[f"{side}_bytes"] += len(chunk[place - first].encode())
    for side, arrays in parts.items():
        tokens = np.concatenate(arrays)
        summary[f"{side}_tokens"] = len(tokens)
        write_shard(folder / f"{side}_000.bin", tokens)
    summary["seconds"] = round(time.perf_counter() - started)
    (folder / SUMMARY).write_text(json.dumps(summary))  # last: it marks the folder as complete
    return summary


def sources(roots: list[Path], megabytes: int) -> Iterator[str]:
    """Yields the text of Python files in the order of their paths, each content once, up to a total size."""
    left, seen = megabytes << 20, set[int]()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if not text or hash(text) in seen:
                continue
            seen.add(hash(text))
            left -= len(text)
            if left < 0:
                return
            yield text


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes one shard of uint16 tokens in the format that both sources and halfstep read."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    print(json.dumps(make(options.folder, options.vocabulary, options.megabytes), indent=1))
