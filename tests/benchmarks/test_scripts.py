"""Scripts that run here: what they measure or prove is within its bars, and what differs is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import monitor
from benchmarks.measure.tracing import per_layer
from benchmarks.prove.same_bits import differences

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What dynamo interprets of a layer: what holds on torch 2.13 and 2 % more; of the same under autocast it is 267.
MOST = {"bf16-mixed": 3_960, "bf16-mixed,param=fp32:split": 4_080}


def printed_by(script, *options):
    """What a script prints in a process of its own."""
    command = [sys.executable, str(BENCHMARKS / script), *options]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_no_journey_is_longer_than_its_bar():
    """What is counted is the first `prepare` of a process."""
    lines = printed_by("measure/journeys.py").splitlines()
    assert [line.split()[0] for line in lines] == ["prepare", "step", "save", "resume"]


@pytest.mark.prove
@pytest.mark.parametrize("policy", MOST)
def test_dynamo_interprets_no_more_than_before(policy):
    assert per_layer(policy) <= MOST[policy]


@pytest.mark.prove
def test_the_cost_of_the_monitor_is_measured_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["monitor.py", "--tiny", "--steps", "10", "--samples", "1"])
    assert monitor.main() == 0
    printed = capsys.readouterr().out
    assert "the same bits" in printed
    assert "not the same" not in printed
    assert [bar for bar in ("time, mean", "memory", "sampled step", "graphs") if bar not in printed] == []


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no SIGKILL")
def test_a_run_resumes_on_every_backend(tmp_path):
    printed_by("prove/other_backends.py", "--json", str(tmp_path / "found.json"))
    result = json.loads((tmp_path / "found.json").read_text())
    assert len(result["pairs"]) == 9
    assert all(pair["step"] == 20 for pair in result["pairs"].values())
    assert 0 < result["bound"] < (result["first"] - result["last"]) / 1000  # far below what was learned


def test_a_changed_a_missing_and_a_new_value_are_named():
    old = {"train torch fp32": {"loss": "a", "weight": "b"}, "loop jax fp32": {"loss": "a"}}
    assert differences(old, old) == []
    (line,) = differences(old, old | {"train torch fp32": {"loss": "a", "weight": "c", "moment": "d"}})
    assert line == "train torch fp32: 2 of 3 differ: moment, weight"
    assert differences(old, {"train torch fp32": old["train torch fp32"]}) == [
        "loop jax fp32: 1 of 1 differ: loss"
    ]
