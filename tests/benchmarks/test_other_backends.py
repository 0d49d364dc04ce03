"""A run begun on one backend and resumed on another: all nine pairs, killed in between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prove" / "other_backends.py"


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no SIGKILL")
def test_a_run_resumes_on_every_backend(tmp_path):
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(tmp_path / "found.json")], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert len(result["pairs"]) == 9
    assert all(pair["step"] == 20 for pair in result["pairs"].values())
    assert 0 < result["bound"] < (result["first"] - result["last"]) / 1000  # far below what was learned
