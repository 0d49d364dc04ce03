"""Plants each known hazard of mixed precision, one at a time, and expects its test to fail.

    python benchmarks/prove/hazards.py [--only WORD ...]

A hazard names the function that guards against it, a faulty version of that function, and the test that must
notice; faults/ holds them by what they are about. All tests must pass without a fault, and each must fail with its
fault. Faults wrap functions and never edit source, so they survive moves and rewrites;
tests/benchmarks/test_hazards.py checks that every function and test still exists. Exit code 1 if a fault goes
unnoticed.
"""

import argparse
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
    os.environ.setdefault(_name, "1")  # before anything imports numpy or torch
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading them takes longer than most tests

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.prove.faults import casting, choice, masters, runs, scaling  # noqa: E402, F401
from benchmarks.prove.faults.registry import HAZARDS, Hazard  # noqa: E402


def find(where: str) -> tuple[Any, str, Any]:
    """Returns the owner (a module or class), the name, and the stored object of a hazard's function."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)


def plant(chosen: Hazard) -> None:
    """Replaces a hazard's function by its faulty version, also where other modules have imported it by name."""
    owner, name, good = find(chosen.where)
    faulty = chosen.fault(good)
    setattr(owner, name, faulty)
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "halfstep"]:
        for key in [k for k, value in vars(module).items() if value is good]:
            setattr(module, key, faulty)


def run_tests(task: tuple[int | None, list[str]]) -> tuple[int | None, int, str]:
    """Runs tests in this process, with a fault if one is given; returns pytest's exit code and output."""
    index, tests = task
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "200"  # else pytest cuts off why a test failed
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        import pytest

        try:
            if index is not None:
                plant(HAZARDS[index])
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
        except Exception:  # the function is not there any more
            traceback.print_exc()
            code = -1
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return index, code, output.read()[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="hazards whose name or function has such a word")
    words = parser.parse_args().only
    chosen = [i for i, h in enumerate(HAZARDS) if any(word in f"{h.name} {h.where}" for word in words)]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo.testing
    import torch.distributed.fsdp  # noqa: F401

    # Every task is a fork of this process, which has imported the slowest modules and computed nothing.
    tests = sorted({HAZARDS[i].test for i in chosen})
    tasks = [(None, tests), *((i, [HAZARDS[i].test]) for i in chosen)]
    failed = 0
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        for index, code, output in pool.imap_unordered(run_tests, tasks):
            fine = code == (0 if index is None else 1)
            failed += not fine
            name = "all tests, without a fault" if index is None else HAZARDS[index].name
            expected = "passed" if index is None else "noticed"
            print(f"{expected if fine else 'NOT ' + expected:<14}{name}", flush=True)
            reason = [line for line in output.splitlines() if line.startswith("FAILED ")]
            print("".join(f"{'':<14}{line.partition(' - ')[2]}\n" for line in reason) if fine else output, end="")
    print(f"{len(tasks) - failed} of {len(tasks)} as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
