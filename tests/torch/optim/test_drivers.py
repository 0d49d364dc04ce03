"""How a run steps any optimizer: which driver skips a step, and what is refused."""

import inspect
import re

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP32
from halfstep.core.roles import Param
from halfstep.torch.numerics.cast import split
from halfstep.torch.numerics.split.parameter import make_split
from halfstep.torch.optim import drivers
from halfstep.torch.optim.adamw import AdamW, Grads
from halfstep.torch.optim.drivers import FusedDriver, SyncDriver, check_optimizers, driver_of
from halfstep.torch.optim.masters import Masters
from halfstep.torch.run import prepare
from tests.torch.nets import draw

COUNT = torch.ones((), dtype=torch.int32)
FINE, BAD, ONE = torch.zeros(()), torch.ones(()), torch.ones(())


def whole():
    p = nn.Parameter(draw(6, 4))
    return p, Masters({p: "w"}, {"w": Param(FP32)})


def half():
    hi, lo = split(draw(6, 4))
    p = nn.Parameter(hi)
    make_split(p, lo)
    return p, Masters({p: "w"}, {"w": Param(FP32, split=True)}, {"w": lo})


# torch 2.11's fused Adagrad takes no `found_inf`, 2.13's does.
ADAGRAD = FusedDriver if "_step_supports_amp_scaling" in inspect.getsource(torch.optim.Adagrad) else SyncDriver
OTHERS = ("SGD", "Adagrad", "Adafactor", "Muon", "NAdam", "RAdam", "Rprop", "Adamax", "ASGD")
STOCK = {
    "AdamW fused": (lambda p: torch.optim.AdamW([p], lr=0.01, fused=True), FusedDriver),
    "AdamW foreach": (lambda p: torch.optim.AdamW([p], lr=0.01, foreach=True), SyncDriver),
    "AdamW plain": (lambda p: torch.optim.AdamW([p], lr=0.01, foreach=False), SyncDriver),
    "Adam amsgrad": (lambda p: torch.optim.Adam([p], lr=0.01, amsgrad=True, fused=True), FusedDriver),
    "SGD fused": (lambda p: torch.optim.SGD([p], lr=0.01, momentum=0.9, fused=True), FusedDriver),
    "Adagrad fused": (lambda p: torch.optim.Adagrad([p], lr=0.01, fused=True), ADAGRAD),
    **{name: (lambda p, name=name: getattr(torch.optim, name)([p], lr=0.01), SyncDriver) for name in OTHERS},
    "RMSprop": (lambda p: torch.optim.RMSprop([p], lr=0.01, momentum=0.9), SyncDriver),
    "Adadelta": (lambda p: torch.optim.Adadelta([p], lr=0.1), SyncDriver),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizers_take_the_steps_of_fp32_on_split_masters_bit_for_bit(name):
    """Against the optimizer alone on an fp32 parameter, with steps that are skipped: the first one is."""
    make, way = STOCK[name]
    p, masters = half()
    plain = nn.Parameter(draw(6, 4))
    driver, alone = driver_of(make(p), masters, {}), make(plain)
    driver.cast_moments()  # as preparing does
    assert type(driver) is way
    for step in range(12):
        given = draw(6, 4, seed=step)
        skipped = step in (0, 4)
        grads = Grads({id(p): given * float("nan") if skipped else given.clone()})
        driver.step(grads, ONE, BAD if skipped else FINE, COUNT)
        p.grad = None
        if not skipped:
            plain.grad = given.clone()
            alone.step()
    assert p.dtype == torch.bfloat16
    assert torch.equal(masters.wide([p])[0], plain)
    ours, theirs = driver.optimizer.state[p], alone.state[plain]
    assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in theirs)


class Capturable(torch.optim.Adagrad):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.defaults["capturable"] = True
        for group in self.param_groups:
            group["capturable"] = True


Capturable.__module__ = "torch.optim.imagined"


@pytest.mark.parametrize("made", [whole, half])
def test_a_capturable_step_is_undone_where_it_must_be_skipped(made):
    p, masters = made()
    driver = driver_of(Capturable([p]), masters, {})
    assert isinstance(driver, drivers.RollbackDriver)
    for step in range(3):
        driver.step(Grads({id(p): draw(6, 4, seed=step)}), ONE, FINE, COUNT)
    state = driver.optimizer.state[p]
    before = [masters.wide([p])[0].clone(), *(value.clone() for value in state.values())]
    driver.step(Grads({id(p): torch.full((6, 4), float("nan"))}), ONE, BAD, COUNT)
    after = [masters.wide([p])[0], *driver.optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    driver.step(Grads({id(p): draw(6, 4, seed=9)}), ONE, FINE, COUNT)
    assert not torch.equal(before[0], masters.wide([p])[0])


@pytest.mark.parametrize("fused", [True, False])
def test_moments_are_stored_in_their_format_and_widened_for_the_step(fused):
    p, masters = whole()
    plain = nn.Parameter(p.detach().clone())
    driver = driver_of(torch.optim.AdamW([p], lr=0.1, fused=fused), masters, {"w": BF16})
    alone = torch.optim.AdamW([plain], lr=0.1, fused=fused)
    for step in range(3):
        driver.step(Grads({id(p): draw(6, 4, seed=step)}), ONE, FINE, COUNT)
        plain.grad = draw(6, 4, seed=step)
        alone.step()
        for key in ("exp_avg", "exp_avg_sq"):
            alone.state[plain][key] = alone.state[plain][key].bfloat16().float()
            held = driver.optimizer.state[p][key]
            assert held.dtype == torch.bfloat16
            assert torch.equal(held.float(), alone.state[plain][key])
    assert torch.equal(p, plain)


def test_costs_and_names():
    p, masters = whole()

    def described(optimizer):
        return f"{drivers.label(optimizer)}: {driver_of(optimizer, masters, {}).cost}"

    assert described(AdamW([p])) == "AdamW (halfstep): no sync"
    assert described(torch.optim.AdamW([p], fused=True)) == "AdamW (torch, fused): no sync"
    adagrad = "Adagrad (torch): one sync per step, because it cannot skip"
    assert described(torch.optim.Adagrad([p])).startswith(adagrad)
    assert "fused=True" in described(torch.optim.SGD([p]))
    assert "except in the first step" in described(torch.optim.SGD([p], momentum=0.9, fused=True))
    assert "capturable=True" in described(torch.optim.NAdam([p]))
    assert "would need none" not in described(torch.optim.Muon([p]))
    mixed = torch.optim.SGD([{"params": [p], "fused": False}], lr=0.1, fused=True)
    assert isinstance(driver_of(mixed, masters, {}), SyncDriver)  # one group would not look at the flag
    assert isinstance(driver_of(AdamW([p]), masters, {}), drivers.HalfstepDriver)


class Foreign(torch.optim.Optimizer):
    """An optimizer of another project: SGD that replaces the data instead of changing them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("made", [whole, half])
def test_optimizers_of_other_projects_step_the_masters(made):
    p, masters = made()
    expected = masters.wide([p])[0].detach() - 0.5 * draw(6, 4, seed=5)
    driver = driver_of(Foreign([p]), masters, {})
    assert isinstance(driver, SyncDriver)
    driver.step(Grads({id(p): draw(6, 4, seed=5)}), ONE, FINE, COUNT)
    assert torch.equal(masters.wide([p])[0], expected)


class ScheduleFree(Foreign):
    train = eval = lambda self: None


TWICE = r"`bias` is held by SGD \(torch\) and again by AdamW \(halfstep\)"
REFUSED = [
    (lambda m: torch.optim.LBFGS(m.parameters()), "needs `closure`", "step\\(\\) takes no arguments"),
    (lambda m: torch.amp.GradScaler("cpu"), "GradScaler", "load_torch_amp"),
    (lambda m: [torch.optim.SGD(m.parameters()), torch.amp.GradScaler("cpu")], "GradScaler", "bf16 needs none"),
    (lambda m: [], "no optimizer", "prepare"),
    (lambda m: torch.optim.SGD([nn.Parameter(torch.ones(3))]), r"shape \(3,\) that the model does not", "copied"),
    (lambda m: [torch.optim.SGD(m.parameters()), AdamW([m.bias])], TWICE, "one optimizer"),
    (lambda m: ScheduleFree(m.parameters()), "outside of step", "param=fp32"),
    (lambda m: torch.optim.SGD([{"params": []}]), "hold no parameters", "model.parameters"),
]


@pytest.mark.parametrize(("given", "said", "hint"), REFUSED)
def test_what_cannot_be_run_is_refused_with_the_remedy(given, said, hint):
    model = nn.Linear(2, 3)
    with pytest.raises(HalfstepError, match=said) as raised:
        check_optimizers(given(model), model, narrow=True)
    assert re.search(hint, raised.value.hint)
    # One that moves parameters itself may hold whole masters.
    assert check_optimizers(ScheduleFree(model.parameters()), model, narrow=False)


def test_an_optimizer_without_gradients_rests_while_another_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    run = prepare(model, optimizers, "bf16-mixed")
    kept = model[1].weight.detach().clone()
    run.step(lambda x: model[0](x).square().mean().float(), [draw(3, 4)])
    assert torch.equal(model[1].weight, kept)


def test_sums_that_are_narrower_than_their_parameter_are_widened_for_the_step():
    model = nn.Linear(4, 4)
    run = prepare(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16-mixed,accumulate=bf16")
    before = model.weight.detach().clone()
    run.backward(model(draw(3, 4)).square().mean().float())
    run.update()
    assert not torch.equal(model.weight, before)
