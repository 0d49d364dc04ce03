"""`benchmarks/race.py` is `halfstep bench` under another name."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "race.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("halfstep_benchmarks_race", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("", "bench"),
        ("--arms autocast halfstep --bars", "bench --arms autocast halfstep --bars"),
        ("--json out.json --steps 3", "bench --save out.json --steps 3"),
        ("--json=out.json", "bench --save=out.json"),
        ("--source --jsonish", "bench --source --jsonish"),
    ],
)
def test_its_options_are_those_of_the_command(given, passed, script):
    assert script.arguments(given.split()) == passed.split()


def test_it_leaves_with_the_code_of_the_command():
    done = subprocess.run([sys.executable, SCRIPT, "--arms", "autocats"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown arm `autocats`")
