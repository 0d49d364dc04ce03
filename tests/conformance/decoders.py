"""Small decoders that have every value of every switch between them, and weights that hide nothing."""

from dataclasses import replace
from functools import cache

import numpy as np

from halfstep.config.model import ModelConfig
from halfstep.config.weights import initial_weights

TINY = ModelConfig(vocabulary=32, context=16, layers=2, width=16, heads=4)
EVERYTHING = {"kv_heads": 2, "mlp": "swiglu", "rope_base": 100.0, "qk_norm": "gain", "q_gain": True}
EVERYTHING |= {"unet_skips": True, "value_residual": True, "embedding_shortcut": "channel", "branch_scale": True}
EVERYTHING |= {"softcap": 5.0, "embedding_norm": True, "tied": False, "zero_head": True}
OTHERWISE = {"mlp": "relu2", "mlp_width": 24, "head_width": 8, "positions": "none", "qk_norm": "plain"}
OTHERWISE |= {"norm_gain": False, "embedding_shortcut": "scalar", "zero_init": False}

# Every value of every switch is in one of these: compiling a model for each would take minutes.
CONFIGS = {
    "gpt2": replace(TINY, norm="layer", bias=True, positions="learned", zero_init=False),
    "everything": replace(TINY, layers=4, **EVERYTHING),
    "otherwise": replace(TINY, **OTHERWISE),
    "exact": replace(TINY, layers=3, unet_skips=True, mlp="gelu_exact", qk_norm="plain", norm_epsilon=1e-2),
}


@cache
def awake_weights(config):
    """First weights, none of them zero: what is zero would hide everything behind it."""
    drawn = dict(initial_weights(config, 0))
    for place, (name, value) in enumerate(drawn.items()):
        if not value.any() or value.ndim < 2:
            noise = np.random.default_rng(place).standard_normal(value.shape).astype(np.float32)
            drawn[name] = np.asarray(value + np.float32(0.1) * noise)
    return drawn
