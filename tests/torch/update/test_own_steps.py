"""Plain loops on a prepared model, `loss.backward(); optimizer.step()`: exact, or refused where they cannot be."""

import copy
import gc
import math
from functools import partial

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.optim.test_drivers import Capturable
from tests.torch.update.test_prepare import ALL, Net, batch, loss_of, sgd, trained

KINDS = ALL | {
    "capturable": lambda m: Capturable(m.parameters()),
    "fused SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
}
NAN = 2  # the step whose loss is not finite


def loss_at(model, step, bad):
    loss = loss_of(model)(batch(step))
    return loss * math.nan if step in bad else loss


def listed(optimizers):
    return optimizers if isinstance(optimizers, list) else [optimizers]


def in_a_loop(by_run, policy, make, bad=(), steps=4):
    model = Net()
    optimizers = listed(make(model))
    run = prepare(model, optimizers, policy)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for step in range(steps):
        if by_run:
            run.step(lambda s: loss_at(model, s, bad), [step])
        else:
            loss_at(model, step, bad).backward()
        for each in () if by_run else optimizers:
            each.step()
        for scheduler in schedulers:
            scheduler.step()
        for each in () if by_run else optimizers:
            each.zero_grad()
    return run


in_a_plain_loop, by_the_run = partial(in_a_loop, False), partial(in_a_loop, True)


def same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    tensors = same_by_name(left.pop("tensors"), right.pop("tensors"))
    for state in (left, right):
        for groups in state["groups"]:
            for group in groups:
                group.pop("initial_lr", None)
    return tensors and left == right


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [(), (0,), (NAN,)], ids=["finite", "first bad", "third bad"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first step was skipped
def test_a_plain_loop_makes_the_updates_of_the_run_bit_for_bit(name, bad):
    plain, run = in_a_plain_loop("bf16-mixed", KINDS[name], bad), by_the_run("bf16-mixed", KINDS[name], bad)
    assert same_by_name(plain.weights(), run.weights())
    assert same_state(plain, run)
    assert int(plain.num_applied) == 4 - len(bad)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,moments=bf16", "bf16-mixed,norm=bf16; head: compute=fp32"])
def test_it_is_exact_with_other_policies_of_whole_masters_and_no_scale(policy):
    plain, run = (made(policy, ALL["AdamW"]) for made in (in_a_plain_loop, by_the_run))
    assert same_state(plain, run)


def test_gradients_that_the_loop_sums_and_clips_are_the_gradients():
    """Dividing by a power of two is exact, so the sum of halves is the mean of the run."""
    run, _ = trained("bf16-mixed", ALL["fused"], 3)
    model = Net()
    optimizer = ALL["fused"](model)
    prepare(model, optimizer, "bf16-mixed")
    clipped = 0
    for step in range(3):
        for m in range(2):
            (loss_of(model)(batch(2 * step + m)) / 2).backward()
        clipped += float(nn.utils.clip_grad_norm_(model.parameters(), 1e6)) > 0
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert clipped == 3
    assert same_by_name(run.weights(), dict(model.named_parameters()))


REFUSED = {
    "scales the loss": ("fp16-mixed", ALL["AdamW"], {}),
    "split or narrower": ("bf16-mixed,param=fp32:split", ALL["AdamW"], {}),
    "split or narrower than fp32": ("bf16-true", ALL["fused"], {}),
    "clip_norm=1 would": ("bf16-mixed", ALL["AdamW"], {"clip_norm": 1.0}),
    "averages would": ("bf16-mixed", ALL["fused"], {"ema": 0.9}),
    "moments are narrower": ("bf16-mixed,moments=bf16", ALL["fused"], {}),
    "amaxes of its delayed": ("fp8-mixed,emulate=true; **.up: compute=e4m3:delayed", ALL["AdamW"], {}),
    "not in accumulate=bf16": ("bf16-mixed,accumulate=bf16", ALL["AdamW"], {}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_where_it_cannot_be_exact_it_is_refused_and_nothing_moves(said):
    policy, make, settings = REFUSED[said]
    model = Net()
    run = prepare(model, make(model), policy, **settings)
    before = run.weights()
    loss_of(model)(batch()).backward()
    with refuses(HalfstepError, said, "run.step(", "run.update()"):
        run.optimizers[0].step()
    assert same_by_name(run.weights(), before)
    assert said in run.summary()
    assert not bool(run.step(loss_of(model), [batch()]).skipped)


def test_the_summary_says_that_a_plain_loop_is_exact():
    model = Net()
    assert prepare(model, sgd(model), "bf16-mixed").summary().endswith("optimizer.step(): exact")


def test_what_the_run_or_others_did_to_gradients_is_refused():
    model = Net()
    run = prepare(model, ALL["fused"](model), "bf16-mixed")
    optimizer = run.optimizers[0]
    run.backward(loss_of(model)(batch()))
    with refuses(HalfstepError, "run.backward", "run.update()"):
        optimizer.step()
    run.update()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)(batch())).backward()
    with refuses(HalfstepError, "GradScaler", "omit"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    optimizer.step()  # nothing to do, as in torch
    loss_of(model)(batch()).backward()
    model.half()
    with refuses(HalfstepError, "the model was cast"):
        optimizer.step()


@pytest.mark.parametrize("name", ["fused", "foreach", "SGD"])
@pytest.mark.parametrize("named", [False, True])
def test_a_closure_is_run_before_its_gradients_are_looked_at(name, named):
    run = by_the_run("bf16-mixed", ALL[name], (NAN,))
    model = Net()
    optimizer = ALL[name](model)
    mine = prepare(model, optimizer, "bf16-mixed")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_at(model, step, (NAN,))
            loss.backward()
            return loss.detach()

        loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        assert bool(loss.isfinite()) == (step != NAN)
        scheduler.step()
    assert same_state(mine, run)


def test_a_closure_is_refused_where_it_might_be_called_again():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return closure() + closure()

    for make in (AdamW, Twice):
        model = Net()
        run = prepare(model, make(model.parameters(), lr=0.1), "bf16-mixed")
        with refuses(HalfstepError, "was given arguments", "run.step("):
            run.optimizers[0].step(lambda model=model: loss_of(model)(batch()))


def test_parameters_that_joined_later_are_not_left_out_silently():
    model = Net()
    run = prepare(model, ALL["fused"](model), "bf16-mixed")
    model.extra = nn.Linear(13, 1)
    model.extra(model(batch()[0])).mean().backward()
    with refuses(HalfstepError, "`extra.weight` was not there"):
        run.optimizers[0].step()


def test_buffers_of_a_step_that_is_not_finite_are_restored_and_a_scheduler_may_wait():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = sgd(model)
    run = prepare(model, optimizer, "bf16-mixed")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = copy.deepcopy(model.state_dict())
    model(torch.full((3, 4), math.nan)).sum().backward()
    optimizer.step()
    assert same_by_name(model.state_dict(), before)
    assert model[1].weight.grad.isnan().any()  # as the backward pass left it
    assert not run.scheduler_step(scheduler)
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert run.scheduler_step(scheduler)
    assert not same_by_name(model.state_dict(), before)


def test_a_copied_run_watches_its_own_optimizers_and_a_run_that_nobody_keeps_still_does():
    model = Net()
    twin = copy.deepcopy(prepare(model, ALL["fused"](model), "bf16-mixed", clip_norm=1.0))
    loss_of(twin.model)(batch()).backward()
    with refuses(HalfstepError, "clip_norm=1 would be ignored", "run.step("):
        twin.optimizers[0].step()
    model = Net()
    optimizer = ALL["foreach"](model)
    prepare(model, optimizer, "bf16-mixed")  # the one line: nothing is kept of it
    gc.collect()
    before = copy.deepcopy(model.state_dict())
    loss_at(model, NAN, (NAN,)).backward()
    optimizer.step()
    assert same_by_name(model.state_dict(), before)
    twin = copy.deepcopy(prepare(Net(), "bf16-mixed"))
    assert not bool(twin.attach(sgd(twin.model)).step(loss_of(twin.model), [batch()]).skipped)


def test_after_unprepare_the_optimizer_is_torchs_alone_and_the_verbs_follow_a_plain_step():
    model = Net()
    optimizer = sgd(model)
    run = prepare(model, optimizer, "bf16-mixed", clip_norm=1.0)
    run.unprepare()
    loss_of(model)(batch()).backward()
    optimizer.step()
    model = Net()
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    loss_of(model)(batch()).backward()
    run.optimizers[0].step()
    run.step(loss_of(model), [batch(1)])  # the gradients of the plain step are no part of it
    twin = in_a_plain_loop("bf16-mixed", lambda m: AdamW(m.parameters()), steps=2)
    assert int(run.num_applied) == int(twin.num_applied) == 2
    assert torch.equal(run.optimizers[0].state[model.up.weight]["step"], torch.tensor(2.0))
