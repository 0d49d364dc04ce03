"""Plants a layer that e4m3 breaks in the weights of a recipe, to see `halfstep tune` find it.

    python examples/fragile_layer.py fragile.safetensors
    halfstep tune tiny --set init=fragile.safetensors

A unit of an MLP never fires (its row of `up` is zero), so its column of `down` is never used. Here that column is
huge. In fp32 and bf16 nothing changes: huge times zero is zero. But one e4m3 scale for the matrix must make room
for it, and all that is used rounds to zero.
"""

import sys

import numpy as np
from safetensors.numpy import save_file

from halfstep.config.load import load
from halfstep.config.weights import initial_weights

LAYER = "blocks.1.mlp"


def plant(path: str, settings: tuple[str, ...] = ()) -> str:
    """Writes the tiny recipe's first weights with a fragile layer; returns the layer's name."""
    weights = {name: np.array(value) for name, value in initial_weights(load("tiny", settings).model, seed=0)}
    weights[f"{LAYER}.up.weight"][0] = 0
    weights[f"{LAYER}.down.weight"][:, 0] = 2.0**14
    save_file(weights, path)
    return f"{LAYER}.down"


if __name__ == "__main__":
    print(f"{plant(sys.argv[1], tuple(sys.argv[2:]))} is fragile in {sys.argv[1]}")
