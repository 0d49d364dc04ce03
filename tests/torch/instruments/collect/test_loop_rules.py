"""Rules about the loss scale, sums and the loop: each fires on a small loop that breaks it, with the line, and is
silent on a twin of that loop that does not."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.torch.instruments.collect import log as log_module
from halfstep.torch.instruments.collect.watch import Watch

IDS = ["HS2", "HS3", "HS5"]


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to(dtype)


def found(loop):
    """Returns the rules of these hundreds that a loop breaks, with the findings."""
    with Watch(formats=False) as watch:
        loop()
    return {finding.rule: finding for finding in check(watch.record(), select=IDS)}


def scaled_loop(
    mistake=None, *, steps=3, scale=1024.0, bad=(), schedule=False, format=None, fused=False, by_hand=False
):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", format or torch.float16, enabled=format is not None):
            loss = model(torch.ones(2, 4)).float().square().mean()
        scaler.scale(loss).backward()
        if step in bad:
            model[0].weight.grad[0, 0] = float("inf")
        if by_hand:
            for p in model.parameters():
                p.grad.div_(scaler.get_scale())
        elif mistake != "clip" and mistake != "never":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if mistake == "never" or by_hand:
            optimizer.step()
        else:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if schedule and (mistake == "schedule" or scaler.get_scale() >= before):
                scheduler.step()


def two_optimizers(*, once=False, apart=False):
    """Two models that share a loss, or take turns as in adversarial training, each with an update of the scale."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        losses = [model(torch.ones(2, 4)).mean() for model in models]
        if not apart:
            scaler.scale(sum(losses)).backward()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            if apart:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            if not once:
                scaler.update()
            optimizer.zero_grad()
        if once:
            scaler.update()


def adversarial():
    two_optimizers(apart=True)


def one_region(*, left):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    region = torch.autocast("cpu", torch.bfloat16)
    around, inside = (nullcontext(), region) if left else (region, nullcontext())
    with around:
        for _ in range(3):
            with inside:
                model(torch.ones(2, 4)).float().mean().backward()
                optimizer.step()


def accumulation(dtype, passes):
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        for _ in range(passes):
            model(torch.ones(2, 4, dtype=dtype)).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reading(*, often, passes=1):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        for _ in range(passes):
            loss = model(torch.ones(2, 4)).mean()
            loss.backward()
            float(loss.detach())
            if often and loss > 1e9:
                raise AssertionError
        optimizer.step()
        optimizer.zero_grad()


def broken(*, where, filtered=False):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = model(torch.ones(2, 4)).mean()
        (loss * float("nan") if where == "loss" and step == 1 else loss).backward()
        if where == "gradient":
            model[1].weight.grad[0, 0] = float("inf")
        if where != "loss" or step != 1:
            optimizer.step()
        optimizer.zero_grad()


# rule -> loops that break it, and twins that do not
CASES = {
    "HS201": ([lambda: scaled_loop(format=torch.bfloat16)], [lambda: scaled_loop(format=torch.float16)]),
    "HS202": ([lambda: scaled_loop("clip")], [scaled_loop, lambda: scaled_loop(by_hand=True)]),
    "HS203": ([lambda: scaled_loop("never")], [scaled_loop, lambda: scaled_loop(by_hand=True)]),
    "HS204": ([two_optimizers], [lambda: two_optimizers(once=True), adversarial]),
    "HS205": ([lambda: scaled_loop("never")], [scaled_loop]),
    "HS206": (
        [
            lambda: scaled_loop(steps=4, scale=4.0, bad=range(4)),
            lambda: scaled_loop(steps=9, scale=65536.0, bad=range(9)),
        ],
        [lambda: scaled_loop(steps=8, scale=65536.0, bad=range(3))],
    ),
    "HS207": (
        [
            lambda: scaled_loop("schedule", schedule=True, bad=[1]),
            lambda: scaled_loop("schedule", schedule=True, bad=[1], fused=True),
        ],
        [lambda: scaled_loop(schedule=True, bad=[1]), lambda: scaled_loop("schedule", schedule=True)],
    ),
    "HS208": ([lambda: one_region(left=False)], [lambda: one_region(left=True)]),
    "HS301": (
        [lambda: accumulation(torch.bfloat16, 4)],
        [lambda: accumulation(torch.bfloat16, 1), lambda: accumulation(torch.float32, 4)],
    ),
    "HS502": (
        [lambda: reading(often=True)],
        [lambda: reading(often=False), lambda: reading(often=False, passes=3)],
    ),
    "HS503": (
        [lambda: broken(where="loss"), lambda: broken(where="gradient")],
        [lambda: broken(where=None), lambda: scaled_loop(bad=[1]), lambda: scaled_loop(bad=[1], fused=True)],
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_on_its_reproducers_and_not_on_their_twins(rule):
    loops, twins = CASES[rule]
    for loop in loops:
        assert "test_loop_rules.py:" in found(loop)[rule].place
    for twin in twins:
        assert rule not in found(twin)


@pytest.mark.parametrize("twin", [scaled_loop, adversarial, lambda: accumulation(torch.float32, 2)])
def test_a_correct_loop_breaks_no_rule(twin):
    assert found(twin) == {}


def test_a_clip_names_line_scale_and_norm():
    finding = found(lambda: scaled_loop("clip"))["HS202"]
    line = int(finding.place.rpartition(":")[2])
    with open(__file__, encoding="utf-8") as source:
        assert "clip_grad_norm_" in source.read().splitlines()[line - 1]
    assert finding.evidence["scale"] == 1024.0
    assert finding.evidence["clips"] == 3


def clips_of_embeddings(bad=()):
    """Clips before it unscales, with few of the tokens in each batch; breaks off after the clip of update 21."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(21):
        optimizer.zero_grad()
        scaler.scale(model(torch.randint(256, (2, 4))).square().mean()).backward()
        if step in bad:
            model[1].weight.grad[0, 0] = float("inf")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step < 20:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("bad", [(), (0, 1, 7)])
def test_every_clip_of_an_update_is_counted(bad):
    """Also where the rows of an embedding that are looked at have no gradient, and where gradients overflow."""
    assert found(lambda: clips_of_embeddings(bad))["HS202"].evidence["clips"] == 20


def test_gradients_that_are_not_finite_are_named():
    finding = found(lambda: broken(where="gradient"))["HS503"]
    assert finding.where == ["1.weight"]
    assert finding.evidence["steps"] == 3


def test_a_nan_that_the_trainer_hides(monkeypatch):
    args = SimpleNamespace(logging_nan_inf_filter=True)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(log_history=[{"loss": 0.5}, {"eval_loss": 1.0}]))
    monkeypatch.setattr(log_module, "trainer_of", lambda frame: trainer)
    assert found(lambda: broken(where="loss"))["HS501"].evidence == {"losses": 1, "of": 3, "logged as numbers": 1}
    assert "HS501" not in found(lambda: broken(where=None))
    args.logging_nan_inf_filter = False
    assert "HS501" not in found(lambda: broken(where="loss"))
