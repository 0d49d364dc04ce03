"""Takes each guard out, one at a time, and expects its test to turn red.

    python benchmarks/prove/plant_faults.py [--only WORD]

benchmarks/prove/faults/*.toml list them. A fault is one edit of the source: the guard's own line, replaced by what
others do. Each is planted in a copy of the tree, and the test that holds the guard is run there: it must pass
without the fault and fail with it. Exit code 1 if any fault goes unnoticed. tests/docs/test_faults.py checks that
every edit still fits the source.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """An edit, and the tests that must notice it."""

    what: str  # the hazard, as docs and issues of others describe it
    file: str
    old: str
    new: str
    test: str  # what pytest is to run


def listed() -> list[Fault]:
    """Every fault of every list."""
    files = sorted((ROOT / "benchmarks" / "prove" / "faults").glob("*.toml"))
    return [Fault(**entry) for file in files for entry in tomllib.loads(file.read_text("utf-8"))["fault"]]


def passes(tree: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
    done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
    if done.returncode > 1:  # below 0 it was killed, as by an address that a kernel must not have: red as well
        raise SystemExit(f"pytest {test} could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description or file holds this word")
    options = parser.parse_args()
    chosen = [f for f in listed() if options.only in f.what or options.only in f.file or options.only in f.test]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("halfstep", "tests", "examples", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
            shutil.copy(ROOT / name, tree / name)
        green = {test: passes(tree, test) for test in dict.fromkeys(fault.test for fault in chosen)}
        for fault in chosen:
            path = tree / fault.file
            source = path.read_text("utf-8")
            assert source.count(fault.old) == 1, f"{fault.file} holds {source.count(fault.old)} times: {fault.old}"
            path.write_text(source.replace(fault.old, fault.new), "utf-8")
            red = not passes(tree, fault.test)
            path.write_text(source, "utf-8")
            fine = red and green[fault.test]
            unnoticed += not fine
            state = (
                "red as it must be" if fine else ("NOT NOTICED" if green[fault.test] else "RED WITHOUT THE FAULT")
            )
            print(f"{state:<22}{fault.what}\n{'':<22}{fault.file}, {fault.test}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} planted faults turn their test red")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
