"""What the tests of the command line share: a run that takes a moment, on the CPU."""

import json

import pytest

from halfstep.cli.main import run

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2",
         "training.steps=3", "training.validation_tokens=64", "monitor.on=false"]  # fmt: skip


@pytest.fixture
def small(text):
    """The device and the --set flags of the run."""
    settings = [f"data.source={text}", *SMALL]
    return ["--device", "cpu", *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture
def quick(small):
    """The same, in fp32 and without measuring the device."""
    return ["--policy", "fp32", "--set", "training.measure_ceiling=false", *small]


@pytest.fixture
def arguments(quick, tmp_path):
    """The whole command, which writes to `run`."""
    return ["train", "--out", str(tmp_path / "run"), *quick]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def refused(capsys):
    """A function: runs a command that must exit with 2, and returns what it said, in one line."""

    def check(*words):
        capsys.readouterr()
        assert run([*words]) == 2
        return " ".join(capsys.readouterr().err.split())

    return check


@pytest.fixture
def data_of(capsys):
    """A function: runs a command with --json that must exit with a code, and returns what it printed."""

    def check(*words, code=0):
        capsys.readouterr()
        assert run([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return check
