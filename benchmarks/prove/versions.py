"""Does the audit find the same in older environments? Makes each, runs the reproducers in it, and deletes it.

    python benchmarks/prove/versions.py [--torch 2.6 --torch 2.8] [--here] [--folder DIR]

The engine of halfstep needs the torch of its own `pyproject.toml`; what the audit runs inside a script does not.
In each environment, with the versions below, run

    rules     the faults of the census and of loops, each with its mended twin, and scripts that are right
    files     the rules on files, which are written by that torch
    no harm   an error planted in each function of the collector: output, losses and exit code stay as they were
    Trainer   a run of transformers.Trainer, watched from this environment: the same rules as here

and a table says what passed. `--here` runs the same in this environment. The wheels of torch for x86 bring CUDA:
3 GB to load and 5 GB on the disk, in `--folder`; those for ARM are small.

Exit code 1 if anything differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))  # for halfstep
from halfstep.core.audit.engine import check
from halfstep.tools.audit import script

ROOT = Path(__file__).parents[2]
# torch -> what was usual beside it
VERSIONS = {
    "2.6": ["numpy==1.26.*", "transformers==4.57.*"],
    "2.8": ["numpy==2.2.*", "transformers==4.57.*"],
    "2.10": ["numpy==2.3.*", "transformers==5.0.*"],
    "2.11": ["numpy", "transformers==5.*"],
    "2.13": ["numpy", "transformers==5.*"],
}
TOOLS = ["accelerate", "pytest", "safetensors", "lazy-loader", "filelock", "jinja2", "docstring-parser", "rich"]
TOOLS += ["tomli-w", "cyclopts"]
COLLECT = "tests/torch/instruments/collect"
PARTS = {
    "rules": [
        "tests/tools/audit/test_census.py",
        *(f"{COLLECT}/test_{name}.py" for name in ("loop_rules", "by_hand", "correct_scripts")),
    ],
    "files": ["tests/tools/audit/test_files.py"],
    "no harm": [f"{COLLECT}/test_never_harm.py"],
}
# Left out there: what itself needs the engine, FSDP2 on a CPU, or `no_dist` of torch.distributed.checkpoint.
NEWER = ("enough_of_them", "over_ranks", "axolotl", "as_dcp", "as_fsdp_of_accelerate")
TRAINER = ROOT / "tests" / "tools" / "audit" / "scripts" / "hf_trainer.py"


@dataclass
class Outcome:
    """What ran in one environment: of each part the tests that passed, and those that did not."""

    versions: str
    passed: dict[str, int]
    failed: dict[str, list[str]]


def python_of(folder: Path, torch: str) -> str:
    """Makes an environment, and returns its Python."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    packages = [f"torch=={torch}.*", *VERSIONS[torch], *TOOLS]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_tests(python: str, files: list[str], folder: Path) -> tuple[int, list[str]]:
    """Runs tests; returns how many passed, and the names of the others."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)  # of the part before
    options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    chosen = [] if python == sys.executable else ["-k", f"not ({' or '.join(NEWER)})"]
    command = [python, "-m", "pytest", *options, *chosen, *files]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    cases = [*ElementTree.parse(report).iter("testcase")]
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {each.tag for each in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - len(failed) - skipped, failed


def rules_of(python: str) -> list[str]:
    """Returns what the audit finds in a run of transformers.Trainer, or why it was not watched."""
    with open(os.devnull, "w") as nowhere:
        outcome = script.run([python, str(TRAINER), "bf16"], 6, stdout=nowhere.fileno())
    found = [finding.rule for finding in check(outcome.records)]
    return [*found, *outcome.failures] if outcome.records and not outcome.exit_code else [*outcome.notes]


def look(python: str, folder: Path) -> Outcome:
    """Runs everything with a Python."""
    show = "import sys, torch, numpy, transformers as t; print(sys.version.split()[0], torch.__version__, "
    show += "numpy.__version__, t.__version__, sep=' | ')"
    versions = subprocess.run([python, "-c", show], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    passed, failed = {}, {}
    for part, files in PARTS.items():
        passed[part], failed[part] = run_tests(python, files, folder)
    here, there = rules_of(sys.executable), rules_of(python)
    passed["Trainer"], failed["Trainer"] = int(here == there), [] if here == there else [f"{there}, here {here}"]
    return Outcome(versions, passed, failed)


def show(outcome: Outcome) -> None:
    cells = (
        f"{passed} passed" + (f", {len(outcome.failed[part])} failed" if outcome.failed[part] else "")
        for part, passed in outcome.passed.items()
    )
    print(f"| {outcome.versions} | {' | '.join(cells)} |", flush=True)
    for part, names in outcome.failed.items():
        for name in names:
            print(f"    {part}: {name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", choices=VERSIONS, help="may be repeated; by default all")
    parser.add_argument("--here", action="store_true", help="this environment too")
    parser.add_argument("--folder", help="where environments are made; by default where temporary files are")
    arguments = parser.parse_args()
    chosen = arguments.torch or ([] if arguments.here else [*VERSIONS])
    print("| Python | torch | numpy | transformers | rules | files | no harm | Trainer |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    same = True
    for torch in ["", *chosen] if arguments.here else chosen:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
            folder = Path(parent)
            outcome = look(python_of(folder, torch) if torch else sys.executable, folder)
        show(outcome)
        same = same and not any(outcome.failed.values())
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
