"""The benchmark of the monitor runs, on a small model."""

import sys

import pytest

from benchmarks.measure import monitor


@pytest.mark.prove
def test_it_runs_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["monitor.py", "--tiny", "--steps", "10", "--samples", "1"])
    assert monitor.main() == 0
    printed = capsys.readouterr().out
    assert "the same bits" in printed
    assert "not the same" not in printed
    assert [bar for bar in ("time, mean", "memory", "sampled step", "graphs") if bar not in printed] == []
