"""The plugin of pytest: steps that are clean, ways to train that are the same, and a project that uses it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.integrations.testing import assert_clean, assert_same_training

ROOT = Path(__file__).parents[2]


def step_of(dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=dtype)).float().square().mean().backward()
        optimizer.step()

    return step


def test_a_clean_step_passes_and_a_step_in_bf16_fails():
    assert_clean(step_of(torch.float32))
    with pytest.raises(pytest.fail.Exception, match=r"HS101 error: .*test_testing.py:\d+.*\n    fix: "):
        assert_clean(step_of(torch.bfloat16))
    assert_clean(step_of(torch.bfloat16), ignore=["HS1"])
    with pytest.raises(pytest.fail.Exception, match="no update was seen"):
        assert_clean(lambda: None)


def test_ways_to_train_are_judged_over_seeds():
    def loss(seed, gap=0.0):
        return 2.0 + 0.1 * (seed * 37 % 11) + gap * (1 + 0.01 * (seed % 3))

    assert_same_training(loss, loss, range(5))
    assert_same_training(lambda seed: loss(seed, 0.01), loss, range(5))
    with pytest.raises(pytest.fail.Exception, match="different: the mean gap of 5 seeds is"):
        assert_same_training(lambda seed: loss(seed, 1.0), loss, range(5))
    with pytest.raises(pytest.fail.Exception, match="different"):
        assert_same_training(lambda seed: loss(seed, 0.01), loss, range(5), delta=0.001)
    with pytest.raises(pytest.fail.Exception, match="at least two"):
        assert_same_training(loss, loss, [1])
    with pytest.raises(pytest.fail.Exception, match="cannot tell"):
        assert_same_training(lambda seed: loss(seed, 0.2 * (-1) ** seed), loss, range(3))


PROJECT = {
    "model.py": "from torch import nn\n\ndef make(dtype):\n    return nn.Linear(4, 4).to(dtype)\n",
    "training.py": """
import torch
from model import make

def steps(dtype):
    net = make(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    def step():
        optimizer.zero_grad()
        net(torch.ones(2, 4, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    return step
""",
    "test_precision.py": """
import torch
from training import steps

def test_clean(assert_clean):
    assert_clean(steps(torch.float32))

def test_broken(assert_clean):
    assert_clean(steps(torch.bfloat16))

def test_same(assert_same_training):
    assert_same_training(lambda seed: seed, lambda seed: seed, seeds=range(3))
""",
}


@pytest.mark.prove
def test_a_project_of_three_files_uses_it_from_a_wheel(tmp_path):
    wheels, installed, project = (tmp_path / name for name in ("wheels", "installed", "project"))
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", wheels, ROOT], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", installed, wheel], check=True)
    project.mkdir()
    for name, text in PROJECT.items():
        (project / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(project)])}
    environment.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)  # which benchmarks/prove/hazards.py sets
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", project],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"HS101 error: project/training\.py:\d+: ", done.stdout)


def test_one_seed_is_refused_before_anything_trains():
    with pytest.raises(pytest.fail.Exception, match="at least two"):
        assert_same_training(pytest.fail, pytest.fail, seeds=[0])
