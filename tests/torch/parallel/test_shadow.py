"""Shadows in several processes: nothing that is trained depends on them, and gradients are those of all ranks."""

import pytest
import torch

from halfstep.core.errors import HalfstepError
from tests.refusals import refuses
from tests.torch.parallel import jobs


def train(shape, shadowed):
    # Shards travel in the format that layers compute in, here bf16, and in fp32 for the comparison.
    run, wrapped = jobs.begin("bf16-mixed,emulate=true" if shape is None else "bf16-mixed", shape=shape)
    result, refused = None, ""
    for step in range(2):
        if shadowed:
            later = run.shadow(jobs.loss_of(wrapped), jobs.batches(step, 2))
            result = result or later
        run.step(jobs.loss_of(wrapped), jobs.batches(step, 2))
    weights = jobs.whole(run.model) if shape is not None else run.weights()
    if shadowed and shape is not None:
        run.backward(jobs.loss_of(wrapped)(jobs.batches(2, 2)[0]), last=False)
        try:
            run.shadow(jobs.loss_of(wrapped), jobs.batches(2, 2))
        except HalfstepError as error:
            refused = str(error)
    return weights, result, refused


@pytest.mark.prove
@pytest.mark.parametrize("shape", [None, ()], ids=["replicas", "shards"])
def test_ranks_compare_the_gradients_of_all_and_train_as_without(ranks, shape):
    alone = train(None, True)[1]
    plain, shadowed = (ranks(train, 2, shape, on) for on in (False, True))
    results = [result for _, result, _ in shadowed]
    for (weights, *_), (same, result, refused) in zip(plain, shadowed, strict=True):
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert result.to_event() == results[0].to_event()  # all ranks have the same numbers
        assert (result.outside, result.loss_outside) == ([], False)
        assert result.layers.keys() == alone.layers.keys()
        assert result.reference == pytest.approx(alone.reference, rel=2.0**-18)
        assert ("FSDP holds gradients" in refused) == (shape is not None)


def measure(shape):
    run, wrapped = jobs.begin("bf16-mixed", shape=shape)
    return run.sensitivity(jobs.loss_of(wrapped), jobs.batches(0, 2))


@pytest.mark.prove
def test_replicas_measure_the_sensitivity_of_all_and_shards_refuse(ranks):
    alone, both = measure(None), ranks(measure, 2, None)
    assert both[0] == both[1] == pytest.approx(alone, rel=0.2, abs=1e-9)
    with refuses(HalfstepError, "shards are compared with shards only"):
        ranks(measure, 1, ())
