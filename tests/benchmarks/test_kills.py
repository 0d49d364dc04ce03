"""Ten kills of the hundred: nothing is lost, nothing half-written, and the weights are those of no kill."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prove" / "kills.py"


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are forked after the framework is imported")
def test_ten_kills_lose_nothing():
    pytest.importorskip("torch")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, SCRIPT, "--only", "kills", "--kills", "10", "--steps", "24", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(line.split("  ", 1) for line in done.stdout.splitlines()[1:])
    struck = told["kills (seed 1)"].strip()
    assert struck.startswith("10: ")
    assert "'saving'" in struck  # some strike in the middle of a save
    assert told["lost, half-written or not found"].strip() == "0"
