"""The monitor in several processes: nothing that is trained depends on it, and each rank sees its own data."""

import numpy as np
import pytest
import torch

from halfstep.core.observed import COUNT
from tests.torch.parallel import jobs


def train(policy, optimizer, shape, watched):
    run, wrapped = jobs.begin(policy, optimizer, shape)
    monitor = run.monitor() if watched else None
    numbers = None
    for step in range(3):
        unread = monitor.weight_numbers() if watched else None
        run.step(jobs.loss_of(wrapped), jobs.batches(step, 2))
        if watched:
            samples = monitor.sample(jobs.loss_of(wrapped), jobs.batches(step, 1)[0])
            numbers = monitor.layer_numbers().read(), unread.read(), [*samples["blocks.0.up"]]
    return jobs.whole(run.model) if shape is not None else run.weights(), numbers


@pytest.mark.parametrize(
    ("shape", "optimizer"), jobs.few([(None, "ours"), ((), "ours"), ((), "muon")], ((), "ours"))
)
def test_nothing_that_is_trained_depends_on_it(ranks, shape, optimizer):
    plain, watched = (ranks(train, 2, "bf16-mixed", optimizer, shape, on) for on in (False, True))
    for (weights, _), (same, (layers, updates, roles)) in zip(plain, watched, strict=True):
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert (layers[:, :, COUNT] > 0).all()
        # No fp32 master loses an update of 1e-2; those of Muon are products, of which one may be nearly zero.
        assert np.nanmax(updates[:, 3]) <= (0.01 if optimizer == "muon" else 0)
        assert (updates[:-1, :3] > 0).all()
        assert sorted(roles) == ["activation", "gradient", "weight"]
