"""Faults that were seen elsewhere, each shown in MLX's own way first where MLX has it, and absent here.

Each test fails when the line that guards against its fault is taken out; a script plants them one by one.
"""

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx import nn

from halfstep.core.formats import E4M3
from halfstep.mlx import prepare
from halfstep.mlx.numerics.cast import quantize
from halfstep.mlx.optim.optimizers import AdamW

FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=2:floor=256"


def ones(dtype=mx.float32, outputs=3):
    model = nn.Linear(4, outputs, bias=False)
    model.weight = mx.ones((outputs, 4), dtype)
    return model


def data(seed=1, rows=4):
    return mx.array(np.random.default_rng(seed).standard_normal((rows, 4), np.float32))


def total(model, x):
    return model(x).sum(), float(len(x))


def squares(model, x):
    return mx.square(model(x)).sum(), float(len(x))


def test_bf16_weights_at_one_never_move_in_mlx_and_do_here():
    """1 - 1e-4 rounds to 1 in bf16, whose neighbor below is 1 - 2^-8: 200 updates are 200 times nothing."""
    x = mx.ones((1, 4))
    stock, optimizer = ones(mx.bfloat16), mlx.optimizers.AdamW(1e-4, weight_decay=0.0)
    differentiate = nn.value_and_grad(stock, lambda x: stock(x).sum())
    for _ in range(200):
        optimizer.update(stock, differentiate(x.astype(mx.bfloat16))[1])
    assert mx.array_equal(stock.weight, mx.ones((3, 4)))

    run = prepare(ones(mx.bfloat16), mlx.optimizers.AdamW(1e-4, weight_decay=0.0), "bf16-mixed")
    assert "1 of them came narrower and were widened" in run.summary()
    for _ in range(20):
        run.step(total, [x])
    moved = 1 - run.unprepare().weight
    # MLX's AdamW without bias correction: m / sqrt(v) of a constant gradient is above 1 from the first step on.
    assert mx.all(moved > 20e-4)


def test_moments_of_a_bf16_model_are_fp32():
    """MLX makes them in the parameter's dtype; one that was made so before is widened."""
    model, optimizer = ones(mx.bfloat16), mlx.optimizers.AdamW(1e-4)
    optimizer.init(model.trainable_parameters())
    assert optimizer.state["weight"]["m"].dtype == mx.bfloat16
    run = prepare(model, optimizer, "bf16-mixed")
    assert optimizer.state["weight"]["m"].dtype == optimizer.state["weight"]["v"].dtype == mx.float32
    run.step(total, [mx.ones((1, 4))])
    assert optimizer.state["weight"]["m"].dtype == optimizer.state["weight"]["v"].dtype == mx.float32


def test_replicas_round_stochastically_alike():
    """Words come from (seed, update, parameter, element), whatever else drew random numbers in the process."""

    def trained(others):
        run = prepare(ones(), AdamW(1e-3), "bf16-true,param=bf16:stochastic", seed=7)
        for _ in range(5):
            mx.random.seed(others)
            run.step(total, [mx.ones((1, 4))])
        return run.model.weight

    assert mx.array_equal(trained(0), trained(1))
    assert not mx.array_equal(trained(0), mx.ones((3, 4)))


def test_a_skipped_step_is_seen_by_schedules():
    """The schedule of MLX counts in the optimizer's state, ours on applied updates; neither advances."""
    run = prepare(ones(), AdamW(lambda step: 0.1 / (1 + step)), FP16)
    rates, counts = [], []
    for bad in (1.0, float("inf"), 1.0):
        run.step(lambda model, x, bad=bad: model(x).sum() * bad, [data()])
        rates.append(run.optimizer.learning_rate.item())
        counts.append((run.optimizer.step.item(), run.num_applied.item()))
    assert counts == [(1, 1), (1, 1), (2, 2)]
    assert rates == pytest.approx([0.1, 0.1, 0.05])


def test_fp32_gains_do_not_promote():
    """mx.fast.rms_norm of bf16 numbers and an fp32 weight is fp32."""
    norm, x = nn.RMSNorm(4), mx.ones((2, 4), mx.bfloat16)
    assert norm(x).dtype == mx.float32
    prepare(nn.Sequential(norm, nn.Linear(4, 4)), AdamW(), "bf16-mixed")
    assert norm(x).dtype == mx.bfloat16


def test_a_nan_stays_one_in_fp8():
    """MLX's own conversion turns it into 448: a diverged run would continue."""
    bad = mx.array([float("nan"), 1.0, 2.0, 3.0])
    assert mx.from_fp8(mx.to_fp8(bad), mx.float32)[0].item() == 448
    assert mx.isnan(quantize(bad, E4M3, overflow="saturate"))[0].item()
    run = prepare(nn.Sequential(ones()), AdamW(), "fp8-mixed,emulate=true")
    before = run.model.layers[0].weight
    assert run.step(squares, [bad[None]]).skipped.item()
    assert mx.array_equal(run.model.layers[0].weight, before)


def test_the_loss_is_not_computed_in_bf16():
    """nn.losses computes in the dtype of the logits; 300 of them averaged in bf16 lose the third digit."""
    seen = []

    def loss(model, x):
        logits = model(x)
        seen.append(logits.dtype)
        return nn.losses.cross_entropy(logits, mx.zeros(len(x), mx.int32)).mean()

    run = prepare(ones(), AdamW(), "bf16-mixed")
    assert run.step(loss, [data(rows=300)]).loss.item() == pytest.approx(np.log(3), rel=2.0**-20)
    assert seen == [mx.float32]
