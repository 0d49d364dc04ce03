"""Numbers for tests."""

import numpy as np


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
