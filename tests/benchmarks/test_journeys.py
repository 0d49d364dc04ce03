import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_journey_is_longer_than_its_bar():
    """In a process of its own: what is counted is the first `prepare`."""
    command = [sys.executable, "benchmarks/measure/journeys.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["prepare", "step", "save", "resume"]
