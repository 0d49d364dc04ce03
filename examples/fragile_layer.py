"""Plants a layer that e4m3 breaks in `tiny`, to see `halfstep tune` find it.

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


def plant(name: str = "fragile", settings: tuple[str, ...] = (), layer: str = "blocks.0.mlp") -> str:
    """Writes NAME.toml, a recipe that starts from NAME.safetensors; returns the name of the fragile layer."""
    config = load("tiny", settings)
    weights = {key: np.array(value) for key, value in initial_weights(config.model, seed=0)}
    weights[f"{layer}.up.weight"][0] = 0
    weights[f"{layer}.down.weight"][:, 0] = 2.0**14
    save_file(weights, f"{name}.safetensors")
    with open(f"{name}.toml", "w", encoding="utf-8") as file:
        file.write(to_toml(override(config, [f"init={name}.safetensors"])))
    return f"{layer}.down"


if __name__ == "__main__":
    print(f"{plant()} is fragile in fragile.toml")
