"""The benchmark of JAX's speed runs on a small model, and its arms train alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import jax_speed
from halfstep.config.load import load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "measure" / "jax_speed.py"


def check_alike(ours, other):
    # First weights are the same, and a loss of 4.9 is a mean over bf16 logits, each within 2^-8 of its like.
    assert abs(ours[0] - other[0]) <= other[0] * 2.0**-8
    learned = other[0] - other[-1]
    assert learned > 0
    assert abs(ours[-1] - other[-1]) < learned / 10


@pytest.mark.prove
def test_the_recipe_trains_as_it_does_by_hand():
    small = ("--tiny", "--set", "model.layers=1", "--rounds", "2", "--steps", "4", "--arms", "jax", "by-hand")
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *small],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    pattern = r"^(\S+): first and last losses (.*)$"
    losses = {
        name: [float(each) for each in values.split(", ")]
        for name, values in re.findall(pattern, found.stdout, re.MULTILINE)
    }
    check_alike(losses["jax"], losses["by-hand"])
    assert "jax against by-hand: " in found.stdout
    assert "peak GiB" in found.stdout


@pytest.mark.prove
def test_a_stock_model_of_flax_trains_as_it_does_by_hand():
    config = load("gpt2", [*jax_speed.TINY, "model.layers=1", "policy=bf16-mixed"])
    draw = np.random.default_rng(0)
    batch = draw.integers(0, config.model.vocabulary, (2, config.model.context + 1)).astype(np.int32)
    ours, other = (jax_speed.MAKERS[arm](config, True)[0]([batch] * 8) for arm in ("flax", "flax-by-hand"))
    check_alike(ours, other)
