"""Micro-batches of random tokens, as a session takes them."""

import numpy as np


def batch(step, session):
    training, rng = session.config.training, np.random.default_rng(step)
    shape = (training.micro_batches, training.batch, session.config.model.context + 1)
    return rng.integers(0, 64, shape).astype(np.int32)
