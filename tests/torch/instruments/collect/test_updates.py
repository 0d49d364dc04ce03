"""Lost updates as they happen: torch's own optimizers against the formulas, and what must not count."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.core.audit.updates import FORMULAS, Seen
from halfstep.torch import AdamW as OurAdamW
from halfstep.torch import prepare
from halfstep.torch.instruments.collect.updates import UpdateWatch, formula_of

OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "amsgrad": True}),
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
]


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_formula_is_what_torch_does(name, options, kind):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(64, dtype=torch.float64))
    options = options | ({} if kind == "for-loop" else {kind: True})
    optimizer = getattr(torch.optim, name)([w], **options)
    assert formula_of(optimizer) == ("Adam" if name == "AdamW" and _shared_step() else name)
    for _ in range(3):
        w.grad = torch.randn(64, dtype=torch.float64)
        before, gradient = w.detach().numpy().copy(), w.grad.numpy().copy()
        optimizer.step()
        state = {k: v.numpy() for k, v in optimizer.state[w].items() if v is not None}
        seen = Seen(before, gradient, state, {}, optimizer.param_groups[0])
        intended = FORMULAS[formula_of(optimizer)](seen)
        whole = intended.update + (0 if intended.decay is None else intended.decay)
        assert (intended.decay is not None) == (name == "AdamW")
        np.testing.assert_allclose(whole, w.detach().numpy() - before, rtol=1e-9, atol=1e-15)


def _shared_step():
    return inspect.unwrap(torch.optim.AdamW.step) is inspect.unwrap(torch.optim.Adam.step)


def watched(model, optimizer, steps=3, rows=None):
    watch = UpdateWatch()
    torch.manual_seed(1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            if rows is not None:
                p.grad[rows:] = 0
        watch.before(optimizer)
        optimizer.step()
        watch.after(optimizer)
    return {name: watch.counts(p) for name, p in model.named_parameters()}


def bf16(out=16):
    torch.manual_seed(0)
    return nn.Linear(8, out, bias=False).to(torch.bfloat16)


def test_bf16_weights_lose_the_updates_of_a_small_learning_rate():
    model = bf16()
    counts = watched(model, torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1))["weight"]
    assert (counts.steps, counts.elements, counts.intended) == (3, 384, 384)
    assert counts.lost > 0.95 * 384
    assert counts.decay_lost == counts.decay_intended == 384
    assert counts.applied_fraction < 0.5
    assert counts.exact


def test_a_large_learning_rate_arrives():
    model = bf16()
    counts = watched(model, torch.optim.SGD(model.parameters(), lr=1.0))["weight"]
    assert counts.lost < 0.01 * counts.intended
    assert counts.applied_fraction == pytest.approx(1, abs=2.0**-8)


def test_rows_without_a_gradient_lose_nothing():
    model = bf16()
    counts = watched(model, torch.optim.SGD(model.parameters(), lr=1e-9), rows=4)["weight"]
    assert counts.intended == counts.lost == 3 * 4 * 8


def test_a_skipped_step_loses_nothing():
    model = bf16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.full((), 1024.0)
    counts = watched(model, optimizer)["weight"]
    assert (counts.steps, counts.lost, counts.intended) == (0, 0, 0)


def test_a_step_at_rate_zero_loses_nothing():
    class Unknown(torch.optim.SGD):
        def step(self):
            super().step()

    model = bf16()
    assert watched(model, torch.optim.SGD(model.parameters(), lr=0.0))["weight"].intended == 0
    assert watched(model, Unknown(model.parameters(), lr=0.0))["weight"].intended == 0
    counts = watched(model, Unknown(model.parameters(), lr=1e-9))["weight"]
    assert not counts.exact
    assert counts.lost == counts.intended == counts.gradient > 0.9 * counts.elements


def test_fp32_weights_are_watched_for_motion_only():
    model = nn.Linear(4, 4)
    counts = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))["weight"]
    assert (counts.steps, counts.moved, counts.gradient, counts.intended) == (3, True, 1, 0)
    still = watched(model, torch.optim.SGD(model.parameters(), lr=0.0))["weight"]
    assert (still.moved, still.gradient) == (False, 1)


def test_large_tensors_are_sampled_over_their_whole_length(monkeypatch):
    monkeypatch.setattr("halfstep.torch.instruments.collect.updates.LIMIT", 100)
    model = bf16(out=64)
    counts = watched(model, torch.optim.SGD(model.parameters(), lr=1e-9), rows=32, steps=1)["weight"]
    assert counts.elements == 86  # every sixth of 512
    assert counts.intended == 43  # the first half has gradients


def test_the_master_of_a_split_weight_is_what_is_watched():
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    optimizer = OurAdamW(model.parameters(), lr=1e-6)
    run = prepare(model, optimizer, "bf16-mixed,param=fp32:split,emulate=true")
    watch = UpdateWatch()
    watch.before(optimizer)
    run.backward(model(torch.ones(2, 16)).square().mean())
    watch.before(optimizer)
    run.update()
    watch.after(optimizer)
    counts = watch.counts(model.weight)
    assert counts.moved
    assert counts.intended == 0  # nothing narrow
