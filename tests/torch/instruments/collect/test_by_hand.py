"""What loops do by themselves to losses, gradients and averages: mistakes are found, and right twins are clean."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.core.audit.record import Record
from halfstep.torch.instruments.collect.averages import AverageWatch
from halfstep.torch.instruments.collect.watch import Watch
from tests.processes import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def net(dtype=FP32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(dtype)


def batch(dtype=FP32):
    return torch.randn(4, 8, dtype=dtype)


def hand_made_masters(*, wide):
    """A bf16 model with fp32 copies of its weights; its gradients are summed over four micro-batches."""
    model = net(BF16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for _ in range(3):
        sums = [torch.zeros_like(master) for master in masters]
        for _ in range(4):
            model(batch(BF16)).float().square().mean().backward()
            if wide:
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += p.grad.float()
                    p.grad = None
        for master, total, p in zip(masters, sums, model.parameters(), strict=True):
            master.grad = total if wide else p.grad.float()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


def average(dtype, *, decay=0.999, kind="lerp"):
    """An EMA of a model that is trained in fp32."""
    model = net()
    ema = copy.deepcopy(model).to(dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                if kind == "lerp":
                    e.lerp_(p.to(dtype), 1 - decay)
                elif kind == "copy":
                    e.copy_(p)
                else:
                    e.data = e.data * decay + p.data.to(dtype) * (1 - decay)


def clip_by_hand(*, unscaled, value=False, tokens=None):
    """Gradients limited without torch's functions; the twin divides them by a number of tokens instead."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        with torch.autocast("cpu", FP16):
            loss = (model(batch()).float() * (step + 1)).square().mean()
        scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        grads = [p.grad for p in model.parameters()]
        if tokens:
            for grad in grads:
                grad /= 3 + step
        elif value:
            for grad in grads:
                grad.clamp_(-1, 1)
        else:
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(min(1.0, 0.5 / float(norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def static_scale(kind="product", *, undone, dtype=FP16, scale=4096.0):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != FP32):
            loss = model(batch()).float().square().mean()
        if kind == "gradient":
            loss.backward(torch.tensor(scale))
        elif kind == "parts":
            (loss / 2 * scale).backward()
        else:
            (loss * scale).backward()
        if undone:
            for p in model.parameters():
                p.grad /= scale / (2 if kind == "parts" else 1)
        optimizer.step()


def replace_nan(what, *, overflow, skip=False):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        factor = 1e38 if overflow and step == 1 else 1.0
        loss = (model(batch()) * factor).square().mean()
        if what == "loss":
            loss = torch.nan_to_num(loss)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        if what == "gradients":
            for p in model.parameters():
                p.grad = torch.nan_to_num(p.grad)
        elif what == "in place":
            for grad in grads:
                grad[~grad.isfinite()] = 0
        elif skip and not all(grad.isfinite().all() for grad in grads):
            continue
        optimizer.step()


# rule -> loops that break it, and twins that do not
CASES = {
    "HS301": ([lambda: hand_made_masters(wide=False)], [lambda: hand_made_masters(wide=True)]),
    "HS108": (
        [lambda: average(BF16), lambda: average(BF16, kind="data"), lambda: average(FP16, decay=0.9999)],
        [lambda: average(FP32), lambda: average(BF16, decay=0.5), lambda: average(BF16, kind="copy")],
    ),
    "HS202": (
        [lambda: clip_by_hand(unscaled=False), lambda: clip_by_hand(unscaled=False, value=True)],
        [
            lambda: clip_by_hand(unscaled=True),
            lambda: clip_by_hand(unscaled=True, value=True),
            lambda: clip_by_hand(unscaled=False, tokens=True),
        ],
    ),
    "HS203": (
        [
            *(lambda kind=kind: static_scale(kind, undone=False) for kind in ("product", "gradient", "parts")),
            lambda: static_scale(undone=False, dtype=BF16),
        ],
        [
            *(lambda kind=kind: static_scale(kind, undone=True) for kind in ("product", "gradient", "parts")),
            lambda: static_scale(undone=False, scale=100.0),
            lambda: static_scale(undone=False, dtype=FP32),
        ],
    ),
    "HS504": (
        [lambda what=what: replace_nan(what, overflow=True) for what in ("loss", "gradients", "in place")],
        [lambda what=what: replace_nan(what, overflow=False) for what in ("gradients", "in place", "nothing")]
        + [lambda: replace_nan("nothing", overflow=True, skip=True)],
    ),
}


def found(loop):
    with Watch() as watch:
        loop()
    return {finding.rule: finding for finding in check(watch.record(), ignore=["HS502"])}


@pytest.mark.parametrize("rule", CASES)
def test_a_mistake_is_found_and_its_twin_is_clean(rule):
    loops, twins = CASES[rule]
    # Of a loss that is not finite HS503 speaks, too.
    allowed = {"HS503"} if rule == "HS504" else set()
    for i, loop in enumerate(loops):
        seen = found(loop)
        assert {rule} <= {*seen} <= {rule} | allowed, i
        assert rule == "HS108" or "test_by_hand.py:" in seen[rule].place
    for i, twin in enumerate(twins):
        assert {*found(twin)} <= allowed, i


def test_a_filter_that_has_replaced_nothing_is_a_warning():
    seen = found(lambda: replace_nan("loss", overflow=False))
    assert [each.severity for each in seen.values()] == ["warning"]


def summing_by_hand(kinds):
    dist.init_process_group("gloo")
    records = []
    for kind in kinds:
        with Watch(formats=False) as watch:
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                F.mse_loss(model(batch()), batch()).backward()
                grads = [p.grad for p in model.parameters()]
                if kind == "flat":
                    flat = torch.cat([grad.flatten() for grad in grads]).to(BF16)
                    dist.all_reduce(flat)
                    torch._foreach_copy_(
                        grads, [x.view_as(g) for g, x in zip(grads, split(flat, grads), strict=True)]
                    )
                else:
                    for grad in grads:
                        sent = grad.to(BF16 if kind == "each" else FP32)
                        dist.all_reduce(sent)
                        grad.copy_(sent)
                dist.all_reduce(torch.ones((), dtype=BF16))  # a number to print
                optimizer.step()
                optimizer.zero_grad()
        records.append(watch.record().to_dict())
    dist.destroy_process_group()
    return records


def split(flat, grads):
    return flat.split([grad.numel() for grad in grads])


def test_gradients_summed_over_ranks_in_bf16_by_hand():
    ranks = run_ranks(summing_by_hand, ["each", "flat", "wide"])
    for i, expected in enumerate((["HS302"], ["HS302"], [])):
        records = [Record.from_dict(records[i]) for records in ranks]
        assert [finding.rule for finding in check(records)] == expected


@pytest.mark.prove
def test_thousands_of_averages_of_one_shape_take_seconds():
    """As experts have: each was compared to each, which took minutes."""
    weights = {str(i): torch.randn(4, 4) for i in range(5000)}
    averages = [weight.to(BF16) for weight in weights.values()]
    crowd = [[i] for i in range(1_000_000)]
    watch, began = AverageWatch(), time.process_time()
    for _ in range(4):
        watch.look(weights, [])
        for each in averages:
            each.mul_(1)
        for weight in weights.values():
            weight[0, 0] += 1
    found = [*watch.averages()]
    assert time.process_time() - began < 20
    assert len(crowd) == 1_000_000
    assert len({each.name for each in found}) == len(found) >= 10
    assert all((each.behind, each.still) == (1, 1) for each in found)
