"""Measures how long a set of packed shards takes to open, and how much memory it needs.

    python benchmarks/measure/open_shards.py [--gigabytes 10] [--rounds 5] [--batches 20]

The shards are sparse files with real headers, checksums and index, so that they take no disk space. Each round
opens them in this process and reads batches of 512 windows of 1,025 tokens, as the recipe gpt2 does. Memory is
the growth of the process's resident set. Exit code 1 if opening takes a second or more.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from halfstep.training.data.batches import Batches
from halfstep.training.data.index import Index, Packing, ShardRecord, SideRecord, write_index
from halfstep.training.data.load import load_corpus
from halfstep.training.data.shards import CHUNK, HEADER_BYTES, header
from halfstep.training.data.tokenizer_base import BytesTokenizer

TOKENS = 100_000_000
BAR = 1.0


def write_holes(folder: Path, gigabytes: float) -> None:
    """Writes sparse shards of zeros and their index."""
    dtype, records = np.dtype("<u2"), []
    for number in range(max(1, round(gigabytes * 1e9 / (2 * TOKENS)))):
        path = folder / f"train_{number:06d}.bin"
        path.write_bytes(header(TOKENS, dtype))
        os.truncate(path, HEADER_BYTES + 2 * TOKENS)
        sums = sums_of_holes(path)
        path.with_suffix(".crc").write_bytes(sums)
        digest = hashlib.sha256(sums).hexdigest()
        records.append(ShardRecord(path.name, TOKENS, TOKENS, 1, "", digest))
    total = TOKENS * len(records)
    train, val = SideRecord(total, len(records), total, total, tuple(records)), SideRecord(0, 0, 0, 0, ())
    write_index(
        folder,
        Index("holes", BytesTokenizer().identity(), Packing((), "text", None, 0, TOKENS), {}, None, train, val),
    )


def sums_of_holes(path: Path) -> bytes:
    """Returns the checksums of a shard of zeros: only its first and last chunks differ from the others."""
    with open(path, "rb") as file:
        first, hole = zlib.crc32(file.read(CHUNK)), zlib.crc32(bytes(CHUNK))
    whole, rest = divmod(path.stat().st_size, CHUNK)
    return np.array([first, *[hole] * (whole - 1), zlib.crc32(bytes(rest))], dtype="<u4").tobytes()


def resident() -> int:
    """Returns the bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_holes(Path(folder), options.gigabytes)
        for number in range(options.rounds):
            before, started = resident(), time.perf_counter()
            corpus = load_corpus(folder, 0.001, 256)
            feed = Batches(corpus.train, context=1024, batch=32, micro_batches=16, seed=number)
            opened, grown = time.perf_counter() - started, resident() - before
            started = time.perf_counter()
            for step in range(options.batches):
                feed.at(step)
            each, later = (time.perf_counter() - started) / max(1, options.batches), resident() - before
            windows = 512 * options.batches
            print(
                f"{len(corpus.train):,} tokens opened in {opened * 1e3:.1f} ms, {grown / 1e6:.2f} MB more; "
                f"a batch in {each * 1e3:.1f} ms; after {options.batches}, {later / 1e6:.1f} MB more "
                f"({later / windows / 1e3:.1f} kB per window)",
                flush=True,
            )
            worst = max(worst, opened)
            del corpus, feed  # unmap before the next round measures
    return 0 if worst < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
