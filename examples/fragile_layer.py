"""Plants a layer that e4m3 breaks in a small `tiny`, to see `halfstep tune` find it.

    python examples/fragile_layer.py                    writes fragile.toml, and its weights
    halfstep tune fragile.toml --steps 40

A unit of an MLP never fires (its row of `up` is zero), so its column of `down` is never used. Here that column is
huge. In fp32 and bf16 nothing changes: huge times zero is zero. But one e4m3 scale for the matrix must make room
for it, and all that is used rounds to zero.
"""

import numpy as np
from safetensors.numpy import save_file

from halfstep.config.load import load, override, to_toml
from halfstep.config.weights import initial_weights

# Two layers: of four, the others would make up for the broken one within a short run.
SMALL = (
    "model.layers=2",
    "model.width=64",
    "model.heads=2",
    "model.context=64",
    "training.validation_tokens=8192",
)
LAYER = "blocks.1.mlp"


def plant(name: str = "fragile", settings: tuple[str, ...] = SMALL) -> str:
    """Writes NAME.toml, a recipe that starts from NAME.safetensors; returns the name of the fragile layer."""
    config = load("tiny", settings)
    weights = {key: np.array(value) for key, value in initial_weights(config.model, seed=0)}
    weights[f"{LAYER}.up.weight"][0] = 0
    weights[f"{LAYER}.down.weight"][:, 0] = 2.0**14
    save_file(weights, f"{name}.safetensors")
    with open(f"{name}.toml", "w", encoding="utf-8") as file:
        file.write(to_toml(override(config, [f"init={name}.safetensors"])))
    return f"{LAYER}.down"


if __name__ == "__main__":
    print(f"{plant()} is fragile in fragile.toml")
