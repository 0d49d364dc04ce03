"""Runs the proofs: everything exhaustive or slow, in parts.

    python benchmarks/prove/run.py              every part
    python benchmarks/prove/run.py --only NAME ...
    python benchmarks/prove/run.py --changed    the part that the commit's hash chooses, and those about a folder
                                                that changed since they last passed: what CI runs

docs/measurements/proofs.json keeps when each part last passed, at which commit, on what contents, and how long it
took; CI does not write it. A part that fails does not keep the others from running. Exit code 1 if any failed.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "measurements" / "proofs.json"
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "-m", "prove")
# `python -O` leaves out assertions, ours and those of others: these tests run what has some, where it meets torch,
# files and processes. One process, because Python compiles all that it imports anew.
OPTIMIZED = (
    *("tests/core/test_choice.py", "tests/core/test_devices.py", "tests/core/test_scaling.py"),
    *("tests/torch/update/test_gradients.py", "tests/torch/update/test_prepare.py"),
    "tests/torch/instruments/test_replay.py",
    *("tests/training/run/test_checkpointing.py", "tests/training/run/test_monitor.py"),
    *("tests/training/data/pack/test_blocks.py", "tests/training/data/pack/test_pack.py"),
    *("tests/training/data/test_packed.py", "tests/training/telemetry/test_progress.py"),
    "tests/training/test_schedule.py",
)
# For a process that forks thousands of times: with huge pages there is less to copy.
FORKING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class Part:
    """Some proofs, and the folders or files of the package that they are about."""

    proves: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)


def proofs_in(*folders: str, without: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """The command that runs the tests marked `prove` in folders."""
    ignored = (f"--ignore=tests/{folder}" for folder in without)
    return ((*PYTEST, *(f"tests/{folder}" for folder in folders), *ignored),)


def script(name: str, *options: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}", *options)


FILES = ("training/files.py", "training/checkpoints", "training/run")
# None takes more than some minutes: CI has fifteen for everything.
INSTRUMENTS, KERNELS = ("torch/instruments",), ("torch/kernels", "torch/fusion")
PARTS = {
    "torch": Part(("torch",), proofs_in("torch", without=INSTRUMENTS + KERNELS)),
    "kernels": Part(("torch/numerics", "torch/loss", *KERNELS), proofs_in(*KERNELS)),
    "instruments": Part(("torch",), proofs_in(*INSTRUMENTS)),
    "jax": Part(("jax", "core/arrays"), proofs_in("jax")),
    "mlx": Part(("mlx", "core/arrays"), proofs_in("mlx")),
    "conformance": Part(("core",), proofs_in("core", "conformance", "architecture", "test_public_names.py")),
    "training": Part(("training", "config"), proofs_in("training", "config")),
    "commands": Part(("cli",), proofs_in("cli", "packaging")),
    "tools": Part(("tools", "report"), proofs_in("tools", "report")),
    "other libraries": Part(("integrations",), proofs_in("integrations")),
    "examples": Part(("integrations",), proofs_in("models", "docs", "examples", "benchmarks")),
    "optimized": Part((), (("-m", "pytest", "-q", "-m", "not prove", *OPTIMIZED),), {"PYTHONOPTIMIZE": "1"}),
    "split masters": Part(("core/split.py", "torch/numerics/split"), (script("prove/split_all.py"),)),
    "kills": Part(
        FILES, (script("prove/kills.py", "--steps", "20"), script("prove/job_kills.py", "--seconds", "40"))
    ),
    "hostile input": Part(
        ("cli", "config"),
        (
            script("prove/fuzz.py"),
            script("prove/fuzz.py", "--planted", "--commands", "300", "--files", "150", "--seconds", "15"),
        ),
        FORKING,
    ),
    "hazards": Part(("core",), (script("prove/hazards.py"),)),
    "time of the host": Part(("torch/update", "torch/optim"), (script("measure/host.py", "--rounds", "6"),)),
}


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def contents(part: Part) -> dict[str, str]:
    """Git's hash of each place that a part is about: what is committed there, however it came to be."""
    return {place: git("rev-parse", f"HEAD:halfstep/{place}").strip() for place in part.proves}


def chosen_by(commit: str, changed: Callable[[str], bool]) -> list[str]:
    """The parts that CI runs for a commit: one by its hash, and those about what changed since it last passed."""
    by_hash = list(PARTS)[int(commit, 16) % len(PARTS)]
    return [name for name in PARTS if name == by_hash or changed(name)]


def read_record() -> dict[str, dict[str, Any]]:
    """When each part last passed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def run(name: str) -> float | None:
    """Runs one part; returns how many seconds it took, or None if it failed."""
    started = time.monotonic()
    environment = os.environ | PARTS[name].environment
    codes = [
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode
        for words in PARTS[name].commands
    ]
    return None if any(codes) else round(time.monotonic() - started, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changed", action="store_true", help="what CI runs for this commit")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    options = parser.parse_args()
    commit, recorded, names = git("rev-parse", "HEAD").strip(), read_record(), options.only or list(PARTS)
    if options.changed:
        names = chosen_by(commit, lambda name: recorded.get(name, {}).get("contents") != contents(PARTS[name]))
    print("proofs:", ", ".join(names), flush=True)
    seconds = {name: run(name) for name in names}
    for name, taken in seconds.items():
        print(f"{name:20} {'FAILED' if taken is None else f'{taken:7.1f} s'}")
    if not options.changed:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        passed = {"date": today, "commit": commit[:9], "machine": machine}
        now = {
            name: passed | {"seconds": taken, "contents": contents(PARTS[name])}
            for name, taken in seconds.items()
            if taken is not None
        }
        RECORD.write_text(json.dumps(recorded | now, indent=1) + "\n", encoding="utf-8")
    return 1 if None in seconds.values() else 0


if __name__ == "__main__":
    sys.exit(main())
