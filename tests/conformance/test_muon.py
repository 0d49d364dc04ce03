"""Muon as torch and MLX export it, against its equations; tests/jax/test_optim.py holds that of JAX."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn, optimizers

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.formats import BF16, FP32
from halfstep.mlx import AdamW, Muon, prepare
from halfstep.torch import Muon as TorchMuon

RATE, STEPS, ULP = 0.1, 3, 2.0**-24


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(w, grads):
    """The equations of Muon with Nesterov momentum 0.9 and a decay of 0.1, in fp64."""
    w, held = w.astype(np.float64), 0.0
    a, b, c = NEWTON_SCHULZ
    for g in grads:
        held = 0.9 * held + g.astype(np.float64)
        x = g + 0.9 * held
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            product = x @ x.T
            x = a * x + (b * product + c * product @ product) @ x
        x = x.T if tall else x
        w = w * (1 - RATE * 0.1) - RATE * x * max(1.0, w.shape[0] / w.shape[1]) ** 0.5
    return w


@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 4)])
def test_on_torch_and_mlx_it_follows_its_equations(shape):
    first, grads = draw(shape, 0), [draw(shape, seed) for seed in range(1, STEPS + 1)]
    p = torch.nn.Parameter(torch.from_numpy(first.copy()))
    theirs = TorchMuon([p], lr=RATE, momentum=0.9, weight_decay=0.1)
    ours, held = Muon(RATE, momentum=0.9, weight_decay=0.1), {"w": mx.array(first)}
    for g in grads:
        theirs.step({p: torch.from_numpy(g)})
        held = ours.apply_gradients({"w": mx.array(g)}, held)
    # A Newton-Schulz step multiplies an error by 3.4445 at most, and adds that of three sums of 8.
    bound = STEPS * RATE * 2**0.5 * sum(3.4445**step for step in range(6)) * 8 * 8 * ULP
    for found in (p.detach().numpy(), np.array(held["w"])):
        assert np.abs(found - reference(first, grads)).max() <= bound


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
