"""A recipe's model with weights from elsewhere, for a loop of one's own.

    model = halfstep.load_model("gpt2", "openai-gpt2/")                            # a torch module, for `prepare`
    model = halfstep.load_model("qwen3", "Qwen3-0.6B/", backend="mlx")
    model, params = halfstep.load_model("qwen3", "Qwen3-0.6B/", backend="jax")     # a pytree, for `init`

The weights may be whatever `halfstep train --init` takes, held against the recipe in the same way. They are fp32.
What was padded, left out or widened is told as a warning of Python's.
"""

import warnings
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

from halfstep.config.load import load
from halfstep.training.session import backend_module
from halfstep.training.weights.pretrained import open_pretrained


def load_model(
    recipe: str, weights: str | PathLike[str], *, backend: str = "", settings: Sequence[str] = ()
) -> Any:
    """The model of a recipe (a name or a TOML file) with the weights at a path; for JAX a pair, with its pytree.

    `settings` change the recipe, as `--set` does: `["model.vocabulary=50257"]`. The backend is the recipe's unless
    it is named.
    """
    config = load(recipe, [*settings, *([f"backend={backend}"] if backend else [])])
    found = open_pretrained(fspath(weights), config.model)
    for note in found.notes:
        warnings.warn(f"{found.path}: {note}", stacklevel=2)
    model = backend_module(config.backend, "model").Decoder(config.model)
    made = model.set_weights(found.weights())
    return (model, made) if config.backend == "jax" else model
