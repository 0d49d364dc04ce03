"""Another policy in your own loop: the model is given back, and prepared again with its optimizers."""

import pytest
import torch
from torch import nn

from halfstep.torch import prepare
from halfstep.torch.optim.adamw import AdamW

SPLIT, FP16 = "bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true"


@pytest.mark.parametrize("build", [torch.optim.AdamW, AdamW])
def test_masters_and_moments_keep_every_bit(build):
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = build(model.parameters(), lr=0.01)
    x, y = torch.randn(4, 16), torch.randn(4, 4)
    run = prepare(model, optimizer, SPLIT)
    run.step(lambda _: ((model(x) - y) ** 2).mean(), [0])
    weights = run.weights()
    states = optimizer.state.values()
    moments = [{key: v.clone() for key, v in each.items() if torch.is_tensor(v)} for each in states]
    run = prepare(run.unprepare(), optimizer, FP16)
    assert str(run.policy) == FP16
    assert all(torch.equal(master, weights[name]) for name, master in run.weights().items())
    for state, kept in zip(optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(state[key], value) for key, value in kept.items())
    assert bool(torch.isfinite(run.step(lambda _: ((model(x) - y) ** 2).mean(), [0]).loss))
