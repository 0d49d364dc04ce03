"""Runs rows of the registered study, one after the other, and says what `halfstep compare` makes of them.

    python benchmarks/study/run.py [--row A1 C ...] [--seconds 540] [--out runs/study]
    python benchmarks/study/run.py --list    # what there is, what it costs, and what is left
    python benchmarks/study/run.py --try     # everything tiny, on a CPU: only to show that it runs

`plan.toml` registers the rows; a letter names a whole tier, and without --row all run in registered order. An arm
is compiled once for all of its seeds, and each seed ends in a log of its own, OUT/SIZE/ARM/seed-N.jsonl: the same
command continues where it was, and trains nothing twice. `--seconds` is a limit: no run begins that would not end
in time. Exit code 0 if all rows are judged, 3 if some are left, and 1 if one cannot run here.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.race import seeds
from benchmarks.study.plan import Plan, Row, read_plan
from benchmarks.study.results import REASON, Result, log_of, pairs_done, results
from benchmarks.study.texts import load_text
from halfstep.core.errors import HalfstepError
from halfstep.report.compare import conclusion
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus

SLOWER = 1.25  # how much longer than expected a run may take before it could miss the limit
LEFT, CANNOT = 3, 1


class OutOfTimeError(Exception):
    """The next run would not end before the limit."""


class CannotRunError(Exception):
    """An arm cannot run on this machine."""


class Study:
    """Runs of the study in a folder, within a time."""

    def __init__(self, plan: Plan, out: Path, device: str, seconds: float, base: Path):
        self.plan, self.out, self.device, self.base = plan, out, device, base
        self.end = time.monotonic() + seconds
        self.measured: dict[tuple[str, str], float] = {}  # seconds of a run

    def run_row(self, row: Row) -> Result:
        """Trains what is missing of a row, look by look until one decides; returns what it says."""
        for pairs in row.pairs:
            for arm in (row.against, row.arm):
                self.train(row.size, arm, row.seeds_of(pairs), row.name)
            found = next(each for each in results(self.plan, self.out) if each.row == row)
            if found.kind != "cannot tell":
                break
        return found

    def train(self, size: str, arm: str, wanted: Sequence[int], row: str) -> None:
        """Trains the seeds of an arm that have no log."""
        missing = [seed for seed in wanted if not log_of(self.out, size, arm, seed).exists()]
        if not missing:
            return
        self.check_time(self.plan.seconds(size, arm, 1), f"{row}: {len(missing)} runs of {arm} are left")
        setting = self.plan.setting(size, arm, self.device, str(self.base))
        known = {"text": self.corpus(size).digest, "torch": torch.__version__, "device": device_name(self.device)}
        if setting.init:
            known["base"] = self.make_base()
        about = self.plan.seconds(size, arm, len(missing))
        say(f"{row}: {len(missing)} runs of {arm} ({size}), about {about:.0f} s on an H200")
        trained = self.make_arm(size, arm, setting)
        for number, seed in enumerate(missing):
            left = len(missing) - number
            expected = self.measured.get((size, arm), self.plan.seconds(size, arm, 1))
            self.check_time(expected, f"{row}: {left} runs of {arm} are left")
            events = list(trained.train(seed, self.corpus(size)))
            events[-1] |= known
            write_log(log_of(self.out, size, arm, seed), events)
            self.measured[size, arm] = took = events[-1]["seconds"]
            rest = f"{left - 1} left, about {(left - 1) * took:.0f} s" if left > 1 else "all done"
            say(f"  {arm}, seed {seed}: held-out {events[-1]['held_out']:.4f}, {took:.0f} s; {rest}")
        del trained
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()

    def make_arm(self, size: str, arm: str, setting: seeds.Setting) -> seeds.Arm:
        """Prepares an arm; notes why it cannot run, for the page."""
        noted = self.out / size / arm / REASON
        try:
            found = seeds.make_arm(self.plan.policy(arm, self.device), setting)
        except (HalfstepError, ImportError, RuntimeError) as error:  # a package that does not fit, or memory
            noted.parent.mkdir(parents=True, exist_ok=True)
            noted.write_text(f"{arm}: {error}\n", encoding="utf-8")
            raise CannotRunError(f"{arm}: {error}") from error
        noted.unlink(missing_ok=True)
        return found

    def check_time(self, needed: float, what: str) -> None:
        """Stops if a run would not end in time."""
        if time.monotonic() + SLOWER * needed > self.end:
            raise OutOfTimeError(what)

    @cache  # noqa: B019  # as long as the study
    def text(self, name: str, vocabulary: int) -> Corpus:
        """Returns a text of the plan."""
        if self.plan.is_try:
            return load_corpus("stdlib", 0.1, vocabulary)
        found = load_text(**self.plan.texts[name], vocabulary=vocabulary)
        say(found.description)
        return found

    def corpus(self, size: str) -> Corpus:
        """Returns the text that a size is trained on."""
        return self.text(self.plan.sizes[size]["text"], self.plan.setting(size, "fp32").vocabulary)

    def make_base(self) -> str:
        """Trains the base of fine-tuning, if it is not there; returns its digest."""
        size, arm = self.plan.base["size"], self.plan.base["arm"]
        if not self.base.exists():
            self.check_time(self.plan.seconds(size, arm, 1), "the base is to be trained")
            say(f"the base of fine-tuning, about {self.plan.seconds(size, arm, 1):.0f} s")
            trained = seeds.Policy(self.plan.policy(arm, self.device), self.plan.setting(size, arm, self.device))
            write_log(log_of(self.out, size, arm, 0), list(trained.train(0, self.corpus(size))))
            weights = {name: w.cpu() for name, w in trained.run.weights().items() if name != "lm_head.weight"}
            self.base.parent.mkdir(parents=True, exist_ok=True)
            save_file(weights, f"{self.base}.part")
            os.replace(f"{self.base}.part", self.base)
        with self.base.open("rb") as file:
            digest = blake2b(digest_size=8)
            while part := file.read(1 << 24):
                digest.update(part)
        return digest.hexdigest()


def write_log(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Writes a finished run, wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    os.replace(part, path)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def describe(result: Result) -> str:
    """Returns the verdict of a row, alone and after Holm."""
    if result.comparison is None:
        return f"{result.row.name}: no verdict; {result.reason}"
    alone, why = conclusion(result.comparison)
    return f"{result.row.name}: {result.kind.upper()} among the rows of its tier\n  {alone}\n  {why}"


def list_rows(plan: Plan, rows: Sequence[Row], out: Path) -> None:
    """Prints what there is of each row, and what is left of it."""
    for row in rows:
        done, left = pairs_done(row, out), 0.0
        pairs = next((each for each in row.pairs if each > done), 0)
        for arm in (row.arm, row.against):
            runs = sum(not log_of(out, row.size, arm, seed).exists() for seed in row.seeds_of(pairs))
            left += plan.seconds(row.size, arm, runs)
        print(f"{row.name:4}{done:3} of {row.pairs[-1]:3} pairs, {left:6,.0f} s to the next look   {row.title}")


def run(plan: Plan, rows: Sequence[Row], study: Study) -> int:
    """Runs rows in order; returns the exit code."""
    code = 0
    for row in rows:
        try:
            print(describe(study.run_row(row)), flush=True)
        except OutOfTimeError as stopped:
            say(f"stopped before the limit; {stopped}; the same command continues")
            return LEFT
        except CannotRunError as error:  # other rows may
            say(f"{row.name} cannot run here: {error}")
            code = CANNOT
    return code


def say(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the rows of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", default=[], help="rows such as A1, or tiers such as A")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--base", type=Path, default=Path("runs/study-base.safetensors"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else None)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--try", action="store_true", dest="is_try")
    options = parser.parse_args()
    plan = read_plan(is_try=options.is_try)
    rows, device = plan.choose(options.row), "cpu" if options.is_try else options.device
    if options.list:
        list_rows(plan, rows, options.out)
        return 0
    if device is None:
        raise SystemExit("there is no NVIDIA GPU here, and a CPU would take weeks; --try shows how it runs")
    return run(plan, rows, Study(plan, options.out, device, options.seconds, options.base))


if __name__ == "__main__":
    sys.exit(main())
