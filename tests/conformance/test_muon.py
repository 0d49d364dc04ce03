"""Muon as every backend exports it: the same numbers as torch's, step by step."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn, optimizers

from halfstep.core.formats import BF16, FP32
from halfstep.mlx import AdamW, Muon, prepare
from halfstep.torch import Muon as TorchMuon

RATE, STEPS, ULP = 0.1, 3, 2.0**-24


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 4)])
def test_mlxs_is_torchs(shape):
    p = torch.nn.Parameter(torch.from_numpy(draw(shape, 0)))
    theirs = TorchMuon([p], lr=RATE, momentum=0.9, weight_decay=0.1)
    ours, held = Muon(RATE, momentum=0.9, weight_decay=0.1), {"w": mx.array(draw(shape, 0))}
    for seed in range(1, STEPS + 1):
        g = draw(shape, seed)
        theirs.step({p: torch.from_numpy(g)})
        held = ours.apply_gradients({"w": mx.array(g)}, held)
    # A Newton-Schulz step multiplies an error by 3.4445 at most, and adds that of three sums of 8; in both.
    bound = 2 * STEPS * RATE * 2**0.5 * sum(3.4445**step for step in range(6)) * 8 * 8 * ULP
    assert np.abs(np.array(held["w"]) - p.detach().numpy()).max() <= bound


def test_on_mlx_it_takes_the_matrices_of_any_model_and_the_policys_compute_format():
    def prepared(policy, **options):
        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2))
        muon = Muon(0.02, **options)
        both = optimizers.MultiOptimizer([muon, AdamW(1e-3)], [lambda name, array: array.ndim == 2])
        return prepare(model, both, policy), muon

    run, muon = prepared("bf16-mixed")
    before = run.model.layers[0].weight
    run.step(lambda model, x: mx.square(model(x)).mean(), [mx.ones((2, 4))])
    assert muon.iteration == BF16
    assert not mx.array_equal(run.model.layers[0].weight, before)
    assert muon.state["layers"][0]["weight"]["momentum"].dtype == mx.float32
    assert prepared("fp16-mixed", iteration="fp32")[1].iteration == FP32
