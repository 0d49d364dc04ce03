"""Small sessions on a backend, and the numbers that their states stand for."""

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core import rounding, split
from halfstep.core.formats import BF16

TRAINING = ["training.batch=2", "training.micro_batches=2", "training.compile=false"]
RECIPE = [*TRAINING, "model.context=16", "model.layers=2", "model.width=32", "model.heads=2"]
RECIPE += ["model.vocabulary=64"]
SMALL = [*RECIPE, "model.context=8", "model.layers=1", "model.width=16", "optimizer.name=adamw"]
SMALL += ["model.qk_norm=none", "model.positions=none"]
prove = pytest.mark.prove


def session(backend, policy="fp32", *extra):
    return backend.open(load("tiny", [*SMALL, *extra]), policy, lambda applied, xp: 1.0 / (1.0 + applied))


def masters(state):
    """The fp32 numbers that a state's weights stand for, however they are held."""
    wide = {}
    for name, (dtype, shape, data) in state.items():
        if name.startswith("model."):
            name = name.removeprefix("model.")
            if dtype == "F32":
                flat = np.frombuffer(data, "<f4")
            elif f"remainder.{name}" in state:
                lo = np.frombuffer(state[f"remainder.{name}"][2], "<i2")
                flat = split.join(np.frombuffer(data, "<u2").astype(np.uint16), lo.astype(np.int16))
            else:
                flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            wide[name] = flat.reshape(shape)
    return wide


def as_bf16(x):
    return rounding.cast(np.ascontiguousarray(x, np.float32), BF16, overflow="inf")
