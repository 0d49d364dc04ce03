"""Runs thousands of commands that nobody should type, and reads hundreds of files that nobody should trust.

    python benchmarks/prove/fuzz.py [--seed 0] [--commands 2000] [--files 600] [--only NUMBER] [--planted]
        [--seconds 60]

**Commands.** Every command of `halfstep` with random arguments, good and bad: numbers of any size, empty and long
texts, control characters, brackets nested thousands deep, pipes, devices and folders where a file is expected; and
every setting with values of every kind.

**Files.** Everything that halfstep reads: recipes, run.toml, events, manifests, states, indexes, shards,
checksums, tokenizers, weights, artifacts, exports, text, and loss logs (CSV, W&B's export, TensorBoard). Each is
damaged (bits flipped, cut, added to), replaced (by a pipe, a device, a folder, a terabyte), or given a value of
another kind in one place, with its digests made right again, as an attacker would.

Each case runs in a process of its own, forked from one that has imported everything and computed nothing. It must
end in time with exit code 0, 1 or 2 (or 3: `compare` cannot tell), without a traceback, without a control
character on the terminal, without echoing what is long, in bounded memory; and a refusal must leave every file as
it was.

The same seed gives the same cases. `--only` runs one and shows what it prints. `--planted` plants defects, one at
a time, each of which must be found. Exit code 1 if a promise was broken.
"""

import argparse
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before anything imports numpy or torch
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from fuzz_cases import (  # noqa: E402
    MADE,
    PARTLY,
    Case,
    commands,
    copy,
    damaged,
    make_sources,
    make_weights,
)

from halfstep.cli.main import main as halfstep  # noqa: E402
from halfstep.config import reading, schema  # noqa: E402
from halfstep.core import errors  # noqa: E402
from halfstep.training.data.pack import pack  # noqa: E402

MEMORY = 1 << 30  # bytes that a case may add to what the imports take
ADDRESSES = 16 << 30  # bytes of address space, for the sake of this machine
OUTPUT = 64 << 10  # bytes of messages
CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
# What commands import late, once for all cases.
LATE = "cli.app cli.outcome report.page report.watch tools.runs tools.probe tools.export.run torch.session "
LATE += "torch.export training.loop training.data.load training.run.trained "
LATE += "training.data.pack.train_tokenizer cli.compare tools.compare.judge report.compare"
OTHERS = "torch._dynamo safetensors.numpy tiktoken tokenizers rich.table rich.progress rich.markdown "
OTHERS += "rich._emoji_codes docstring_parser tomli_w onnxscript onnxruntime tensorboard.util.tensor_util "
OTHERS += "tensorboard.backend.event_processing.event_accumulator"


class Ended(NamedTuple):
    """How a case ended: its exit code (None if it hung), what it said, the most bytes it held, and its output."""

    code: int | None
    said: bytes
    memory: int
    output: bytes


class Result(NamedTuple):
    """A case that is done: the promise that it broke, if it broke one."""

    number: int
    broken: str
    ended: Ended
    seconds: float


class Fuzz:
    """All cases of a seed, and the folders that they run in."""

    def __init__(self, where: Path, seed: int, num_commands: int, num_files: int, seconds: float):
        self.where, self.material, self.seconds = where, where / "material", seconds
        self.imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.material.mkdir(parents=True)
        make_sources(self.material)
        for words in MADE:
            ended = self.run(words, self.material)
            assert ended.code == 0, f"{shlex.join(words)}: {ended.said.decode()}"
        self.run(PARTLY, self.material, first=_stop_before_the_end)
        make_weights(self.material)
        rng = random.Random(seed)
        files = itertools.islice(damaged(rng, self.material), num_files)
        self.cases: list[Case] = [*files, *itertools.islice(commands(rng), num_commands)]
        rng.shuffle(self.cases)

    def run(self, words: list[str], folder: Path, first: Callable[[], object] = lambda: None) -> Ended:
        """Runs a command in a folder, in its own process."""
        output, said = folder.with_suffix(".stdout"), folder.with_suffix(".stderr")
        if (process := os.fork()) == 0:
            _be_halfstep(words, folder, (output, said), first)
        code, memory = _wait(process, self.seconds)
        ended = Ended(code, said.read_bytes(), memory, output.read_bytes())
        output.unlink()
        said.unlink()
        return ended

    def try_case(self, number: int) -> Result:
        """Runs a case in a copy of the material."""
        case, folder, began = self.cases[number], self.where / f"case{number}", time.monotonic()
        try:
            copy(self.material, folder)
            case.prepare(folder)
            before = _tree(folder)
            ended = self.run(case.words, folder)
            broken = self.judge(case, ended, before, _tree(folder))
        except Exception:  # of this script
            ended, broken = Ended(None, b"", 0, b""), traceback.format_exc()
        shutil.rmtree(folder, ignore_errors=True)
        return Result(number, broken, ended, time.monotonic() - began)

    def judge(self, case: Case, ended: Ended, before: dict[str, Any], after: dict[str, Any]) -> str:
        """Returns the promise that a case broke, or nothing."""
        code, said, memory, output = ended
        if code is None:
            return f"it hung: it had {self.seconds:g} seconds"
        if code not in (0, 1, 2) and (code, case.words[0]) != (3, "compare"):
            return f"exit code {code}"
        if b"Traceback" in said:
            return "a traceback"
        texts = said if case.words[0] == "sample" else said + output  # what a model writes is data
        if control := CONTROLS.search(texts):
            return f"a control character on the terminal: {control[0]!r}"
        if len(said) > OUTPUT:
            return f"{len(said):,} bytes of messages"
        if memory > self.imported + MEMORY:
            return f"{memory >> 20:,} MiB of memory"
        if code == 2 and b"error: " not in said:
            return "exit code 2 without an error"
        trained = case.words[0] == "train" and b"step 1/" in said  # then it is a run that an error ended
        if code == 2 and before != after and not trained:
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            return f"a refusal made, changed or removed {sorted(changed)}"
        return ""

    def results(self, workers: int) -> Iterator[Result]:
        """Runs all cases, several at a time."""
        with multiprocessing.get_context("fork").Pool(workers, _share, (self,)) as pool:
            yield from pool.imap_unordered(_try_case, range(len(self.cases)))

    def describe(self, result: Result) -> str:
        """Returns a case that broke a promise, and the end of what it said."""
        case = self.cases[result.number]
        lines = result.ended.said.decode(errors="backslashreplace").splitlines()[-12:]
        shown = [result.broken, _shorten(shlex.join(case.words)), *(f"| {_shorten(line)}" for line in lines)]
        return "\n  ".join([f"#{result.number} {case.file or 'command'}", *shown])


_shared: Fuzz | None = None  # of a worker, which is forked and needs no copy


def _share(fuzz: Fuzz) -> None:
    global _shared
    _shared = fuzz


def _try_case(number: int) -> Result:
    assert _shared is not None
    return _shared.try_case(number)


def _be_halfstep(words: list[str], folder: Path, streams: tuple[Path, Path], first: Callable[[], object]) -> None:
    code = 99
    try:
        os.chdir(folder)
        for number, path in enumerate(streams, 1):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        first()
        try:
            halfstep(words)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(process: int, seconds: float) -> tuple[int | None, int]:
    """Returns the exit code of a process, None if it had to be killed, and the most bytes it held."""
    watched = os.pidfd_open(process)
    ready, _, _ = select.select([watched], [], [], seconds)
    os.close(watched)
    if ready:
        _, status, usage = os.wait4(process, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None, 0


def _tree(folder: Path) -> dict[str, Any]:
    """Returns all that is below a folder, with size and time; every command that asks for a lock signs it."""
    found: dict[str, Any] = {}
    for here, folders, files in os.walk(folder):
        found |= {os.path.relpath(os.path.join(here, name), folder): "a folder" for name in folders}
        for name in files:
            facts = os.lstat(os.path.join(here, name))
            key = os.path.relpath(os.path.join(here, name), folder)
            found[key] = "a lock" if name == "lock" else (facts.st_size, facts.st_mtime_ns)
    return found


def _stop_before_the_end() -> None:
    """A packing then leaves what a kill leaves."""
    pack._Packing._end = lambda self: (self._commit(), os._exit(0))  # type: ignore[method-assign,assignment]


def _shorten(text: str) -> str:
    return errors.printable(errors.shortened(text, 600))


# --- planted defects --------------------------------------------------------------------------------------


def _everywhere(name: str, fault: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("halfstep") and hasattr(module, name):
            setattr(module, name, fault)


PLANTED: dict[str, Callable[[], None]] = {
    "pipes and devices are opened": lambda: setattr(reading, "_open", os.open),
    "values are not checked": lambda: setattr(schema, "_check", lambda hint, value, key, others: value),
    "nesting is not expected": lambda: setattr(reading, "parse_toml", tomllib.loads),
    "control characters are printed": lambda: _everywhere("printable", lambda text, *, lines=False: text),
    "what is long is echoed": lambda: setattr(errors, "shortened", lambda text, longest=0: text),
    "a refusal leaves its folder": lambda: setattr(Path, "rmdir", lambda self: None),
}


def _find_planted(fuzz: Fuzz, workers: int) -> Iterator[tuple[str, bool]]:
    """Yields each defect, and whether it was found."""
    for name, plant in PLANTED.items():
        if (process := os.fork()) == 0:
            plant()
            os._exit(0 if any(result.broken for result in fuzz.results(workers)) else 1)
        yield name, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def _report(fuzz: Fuzz, results: Iterable[Result]) -> int:
    counts: Counter[str] = Counter()
    began, slowest = time.monotonic(), 0.0
    for result in results:
        counts["commands" if not fuzz.cases[result.number].file else "files"] += 1
        counts[f"exit code {result.ended.code}"] += 1
        slowest = max(slowest, result.seconds)
        if result.broken:
            counts["broken"] += 1
            print(fuzz.describe(result), flush=True)
    numbers = ", ".join(f"{name}: {counts[name]:,}" for name in sorted(counts))
    print(f"{numbers}; {time.monotonic() - began:.0f} s, the slowest {slowest:.1f} s")
    print("broken promises: see above" if counts["broken"] else "every promise held")
    return 1 if counts["broken"] else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--files", type=int, default=600)
    parser.add_argument("--only", type=int)
    parser.add_argument("--seconds", type=float, default=60.0, help="longer is a hang; most take a tenth of one")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--workers", type=int, default=min(4, len(os.sched_getaffinity(0))))
    given = parser.parse_args()
    for name in [*(f"halfstep.{name}" for name in LATE.split()), *OTHERS.split()]:
        importlib.import_module(name)
    encoded = pack.encoded_blocks
    # In the process itself: to start a worker takes longer than all else, and there is not much to encode.
    pack.encoded_blocks = lambda todo, encoder, folder, workers: encoded(todo, encoder, folder, 0)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    with tempfile.TemporaryDirectory() as temporary:
        fuzz = Fuzz(Path(temporary), given.seed, given.commands, given.files, given.seconds)
        if given.only is not None:
            result = fuzz.try_case(given.only)
            print(fuzz.describe(result), result.ended.code, result.broken or "as promised", sep="\n")
            return 1 if result.broken else 0
        if given.planted:
            found = {}
            for name, was_found in _find_planted(fuzz, given.workers):
                found[name] = was_found
                print(f"{'found' if was_found else 'NOT FOUND'}: {name}", flush=True)
            return 0 if all(found.values()) else 1
        print(f"seed {given.seed}: {given.commands} commands, {given.files} files", flush=True)
        return _report(fuzz, fuzz.results(given.workers))


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        gc.unfreeze()
