"""A watch sees what a loop does, in order and with its place, changes no number, and leaves nothing in torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfstep.torch.instruments.collect.watch import Watch

HERE = "test_watch.py:"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def losses_of(kind, steps=4):
    """Trains a small model in some way and returns its losses, as plain numbers."""
    model = net()
    if kind == "bf16":
        model.to(torch.bfloat16)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if kind == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind in ("scaled", "fused"))
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = call(torch.randn(4, 8, dtype=model[0].weight.dtype)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        seen.append(loss.item())
    return seen


KINDS = ["fp32", "bf16", "autocast", "scaled", "fused", pytest.param("compiled", marks=pytest.mark.prove)]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_keep_their_bits_and_torch_its_functions(kind):
    patched = (torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, torch.nn.utils.clip_grad, F)
    before = [dict(vars(each)) for each in patched], torch.compile, torch.autograd.backward
    plain = losses_of(kind)
    with Watch() as watch:
        watched = losses_of(kind)
    assert watched == plain == losses_of(kind)
    assert ([dict(vars(each)) for each in patched], torch.compile, torch.autograd.backward) == before
    hooks = [_global_optimizer_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks]
    assert not any(hooks)
    assert torch._C._len_torch_function_stack() == 0
    record = watch.record()
    assert record.updates == 4
    assert record.losses == plain


def test_the_order_of_calls_with_places_and_numbers():
    with Watch() as watch:
        losses_of("scaled", steps=2)
    record = watch.record()
    order = ["zero", "scale", "backward", "unscale", "clip", "step", "update", "schedule"]
    assert [call.what for call in record.calls] == order * 2
    assert all(HERE in call.place for call in record.calls)
    assert [call.update for call in record.calls[:8]] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert record.calls[6].numbers == {"before": 1024.0, "after": 1024.0}
    assert [(s.what, s.per_step) for s in record.syncs] == [("item", 1)]
    weight = record.weights[0]
    assert (weight.name, weight.optimizer, weight.grad_format) == ("0.weight", "AdamW", "fp32")
    assert HERE in weight.place
    assert weight.moments == {"exp_avg": "fp32", "exp_avg_sq": "fp32"}


@pytest.mark.prove
def test_steps_in_compiled_code_are_counted_and_said_to_be_unseen():
    def train():
        torch._dynamo.reset()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        @torch.compile(backend="aot_eager")
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [step(torch.randn(4, 8)).item() for _ in range(3)]

    plain = train()
    with Watch() as watch:
        assert train() == plain
    record = watch.record()
    assert record.updates == 3
    assert "the steps of SGD: they are compiled" in record.unseen
