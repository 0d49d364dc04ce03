"""The benchmark of the monitor runs, on a small model."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "measure" / "monitor.py"


@pytest.mark.prove
def test_it_runs_on_a_cpu(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("monitor_benchmark", PATH)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(sys, "argv", ["monitor.py", "--tiny", "--steps", "10", "--samples", "1"])
    assert benchmark.main() == 0
    printed = capsys.readouterr().out
    assert "the same bits" in printed
    assert "not the same" not in printed
    assert [bar for bar in ("time, mean", "memory", "sampled step", "graphs") if bar not in printed] == []
