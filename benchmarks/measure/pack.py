"""Compares `halfstep data pack` with its tokenizer alone: the cost of reading, splitting, writing and checksums.

    python benchmarks/measure/pack.py SOURCE... [--only '*.py'] [--tokenizer FILE] [--workers 2] [--rounds 3]
                              [--limit 100e6]

Three arms take turns on the same documents with the same number of processes:

    pack                the whole command, from files to checksummed shards, including the start of its processes
    encode_batch        the tokenizer alone: texts are in memory, tokens are thrown away
    encode_batch_fast   the same without offsets, which is what packing calls

An arm's figure is the median of its rounds in bytes of text per second. Exit code 1 if pack is below 80 % of
encode_batch. The arms take turns so that a busy machine slows all of them alike; the processor time over all
processes of an arm is independent of other load.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import documents
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import Source, find_sources
from halfstep.training.data.pack.train_tokenizer import train_tokenizer
from halfstep.training.data.tokenizers import open_tokenizer

BAR = 0.80


def choose_sources(given: list[str], only: str | None, limit: int) -> list[Source]:
    """Returns the sources, cut off at `limit` bytes."""
    kept, total = [], 0
    for source in find_sources(given, only):
        files = []
        for file in source.files:
            if total < limit:
                files.append(file)
                total += file.size
        kept.append(Source(source.given, tuple(files)))
    return [source for source in kept if source.files]


def encode(rank: int, sources: list[Source], tokenizer: str, name: str, barrier: Barrier, answers: Any) -> None:
    """Runs the tokenizer alone on every n-th block of the text, in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(tokenizer)
    files = [file for source in sources for file in source.files]
    mine = [
        [each.text for each in documents(block, "text", 0.01, Counter())]
        for number, block in enumerate(blocks(files, Position(), "text"))
        if number % barrier.parties == rank
    ]
    barrier.wait()
    started, used = time.perf_counter(), time.process_time()
    for texts in mine:
        getattr(library, name)(texts, add_special_tokens=False)
    ended, used = time.perf_counter(), time.process_time() - used
    answers.put((started, ended, used, sum(len(text.encode()) for texts in mine for text in texts)))


def time_tokenizer(sources: list[Source], tokenizer: str, name: str, workers: int) -> tuple[float, float]:
    """Returns the tokenizer's bytes per second, and per second of processor time."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=encode, args=(rank, sources, tokenizer, name, barrier, answers))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    size = sum(each[3] for each in found)
    return size / (max(each[1] for each in found) - min(each[0] for each in found)), size / sum(
        each[2] for each in found
    )


def time_pack(sources: list[Source], tokenizer: str, workers: int, folder: Path) -> tuple[float, float]:
    """Returns the whole command's bytes per second, and per second of processor time."""
    shutil.rmtree(folder, ignore_errors=True)
    started, used = time.perf_counter(), processor_time()
    index = pack(sources, folder, open_tokenizer(tokenizer), PackRequest(), workers=workers)
    seconds, used = time.perf_counter() - started, processor_time() - used
    size = index.train.text_bytes + index.val.text_bytes
    assert size == (index.train.token_bytes or 0) + (index.val.token_bytes or 0)
    return size / seconds, size / used


def processor_time() -> float:
    """Returns the processor time of this process and its finished children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(found.ru_utime + found.ru_stime for found in map(resource.getrusage, kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=["stdlib"])
    parser.add_argument("--only")
    parser.add_argument("--tokenizer", help="a tokenizer.json (default: train one of 50,257 tokens)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=100e6)
    options = parser.parse_args()
    sources = choose_sources(options.sources, options.only, int(options.limit))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = options.tokenizer or f"{folder}/tokenizer.json"
        if options.tokenizer is None:
            train_tokenizer(choose_sources(options.sources, options.only, 20_000_000), Path(tokenizer), 50257)
        size, count = sum(source.num_bytes for source in sources), sum(len(source.files) for source in sources)
        print(
            f"{size / 1e6:.1f} MB in {count} files, {options.workers} processes, {options.rounds} rounds, ", end=""
        )
        print(f"a vocabulary of {open_tokenizer(tokenizer).vocabulary}")
        rates: dict[str, list[tuple[float, float]]] = {"pack": [], "encode_batch": [], "encode_batch_fast": []}
        for number in range(options.rounds):
            rates["pack"].append(time_pack(sources, tokenizer, options.workers, Path(folder) / "packed"))
            for name in ("encode_batch", "encode_batch_fast"):
                rates[name].append(time_tokenizer(sources, tokenizer, name, options.workers))
            print(
                f"round {number + 1}: " + ", ".join(f"{k} {v[-1][0] / 1e6:.2f} MB/s" for k, v in rates.items()),
                flush=True,
            )
    return report(rates)


def report(rates: dict[str, list[tuple[float, float]]]) -> int:
    middle = {name: statistics.median(rate for rate, _ in found) for name, found in rates.items()}
    efforts = {name: statistics.median(effort for _, effort in found) for name, found in rates.items()}
    print(f"\n{'arm':<20}{'MB/s':>8}{'lowest':>9}{'highest':>9}{'of encode_batch':>18}{'by processor time':>20}")
    for name, found in rates.items():
        share, effort = (table[name] / table["encode_batch"] for table in (middle, efforts))
        low, high = min(found)[0] / 1e6, max(found)[0] / 1e6
        print(f"{name:<20}{middle[name] / 1e6:>8.2f}{low:>9.2f}{high:>9.2f}{share:>18.1%}{effort:>20.1%}")
    share = middle["pack"] / middle["encode_batch"]
    print(f"\npack reaches {share:.1%} of the tokenizer alone: the bar of {BAR:.0%} is ", end="")
    print("reached" if share >= BAR else "missed")
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
