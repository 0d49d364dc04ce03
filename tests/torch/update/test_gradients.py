"""Gradients by hand, between `backward` and `update`: true after `unscale`, and not changed unnoticed before."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare
from tests.refusals import refuses
from tests.torch.nets import seeded_net

# With a scale, and numbers that may be compared with torch's in fp32.
SCALED = "fp16-mixed{}; **: compute=fp32,grad=fp32"
SPLIT_SCALED = SCALED.format(",param=fp32:split")
POLICIES = ("fp32", "param=fp32:split", SCALED.format(",scale=static:value=256"), SPLIT_SCALED)
KINDS = {
    "ours": lambda p: AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sync": lambda p: torch.optim.SGD(p, lr=1.0),
}
BATCHES = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2)]


def loss(model, x):
    return model(x).square().mean()


def prepared(policy, kind="ours", **settings):
    model = seeded_net()
    return prepare(model, KINDS[kind](model.parameters()), policy, **settings)


def backward(run, batches=BATCHES):
    for x in batches:
        run.backward(loss(run.model, x), weight=len(x), last=x is batches[-1])


def plain(clip, kind="sync"):
    """The weights and gradients of torch alone, in fp32."""
    model = seeded_net()
    optimizer = KINDS[kind](model.parameters())
    (sum(len(x) * loss(model, x) for x in BATCHES) / sum(map(len, BATCHES))).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    clip(model.parameters())
    if kind != "ours":
        optimizer.step()
    return dict(model.named_parameters()), grads


CLIPS = {
    "norm": lambda p: clip_grad_norm_(p, 0.01),
    "value": lambda p: clip_grad_value_(p, 1e-3),
    "noise": lambda p: [q.grad.add_(0.125) for q in p],
    "assigned": lambda p: [setattr(q, "grad", torch.full_like(q.grad, 0.25)) for q in p],
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_users_do_to_gradients_after_unscale_is_what_torch_does(policy, clip):
    run = prepared(policy, "sync")
    expected, grads = plain(clip)
    backward(run)
    run.unscale()
    run.unscale()  # a second one changes nothing
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=1e-7)
    clip(run.model.parameters())
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in run.model.parameters()]))
    result = run.update()
    torch.testing.assert_close(result.grad_norm, norm)
    for name, w in run.weights().items():
        torch.testing.assert_close(w, expected[name].detach(), rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_unscale_alone_changes_no_bit_of_an_update(policy, kind):
    found = []
    for unscaled in (False, True):
        run = prepared(policy, kind)
        for sizes in ((4, 2), (3, 4), (2, 5, 4)):  # none of the sums is a power of two
            backward(run, [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in sizes])
            if unscaled:
                run.unscale()
            result = run.update()
        numbers = {"the loss": result.loss, "the norm": result.grad_norm, "the scale": result.scale}
        found.append({**run.weights(), **numbers})
    differ = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    assert differ == []


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true"])
def test_without_a_scale_and_with_one_micro_batch_gradients_are_true_at_once(policy):
    run = prepared(policy, "sync", clip_norm=0.5)
    backward(run, BATCHES[:1])
    assert all(p.grad.isfinite().all() for p in run.model.parameters())
    before = run.weights()
    clip_grad_norm_(run.model.parameters(), 1e-3)
    run.model[2].zero_grad()  # these have no part in the update
    result = run.update()
    assert float(result.grad_norm) <= 1.001e-3
    after = run.weights()
    moved = {name for name, w in after.items() if not torch.equal(w, before[name])}
    assert moved <= {"0.weight", "0.bias", "1.weight", "1.bias"}
    backward(run, BATCHES[:1])
    run.optimizers[0].zero_grad()
    with refuses(HalfstepError, "no parameter of the optimizers has a gradient"):
        run.update()


CHANGES = {
    "clipped": lambda run: clip_grad_norm_(run.model.parameters(), 1e-3),
    "dropped": lambda run: run.model.zero_grad(),
    "assigned": lambda run: setattr(run.model[2].weight, "grad", torch.ones(4, 8)),
    "added to": lambda run: loss(run.model, BATCHES[0]).backward(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("policy", ["fp32", "param=fp32:split", SPLIT_SCALED])
def test_gradients_that_are_changed_while_they_are_sums_or_scaled_are_refused(policy, change):
    run = prepared(policy)
    scaled = policy == SPLIT_SCALED
    before = run.weights()
    backward(run, BATCHES[:1] if scaled else BATCHES)
    change(run)
    said = "times the loss scale" if scaled else "a sum over micro-batches"
    for use in (run.update, run.unscale):
        with refuses(HalfstepError, f"between backward and update, where it is still {said}", "run.unscale()"):
            use()
    run.forget()
    run.backward(loss(run.model, BATCHES[0]))
    change(run)
    with refuses(HalfstepError, "between two backward passes", "run.forget()"):
        run.backward(loss(run.model, BATCHES[1]))
    run.forget()
    assert all(torch.equal(w, before[name]) for name, w in run.weights().items())
    backward(run)
    run.update()


def test_a_step_that_is_not_finite_is_skipped_whatever_was_done_to_its_gradients():
    """Hazard: clipping by value makes an infinite gradient finite."""
    run = prepared(SPLIT_SCALED)
    before = run.weights()
    run.backward(loss(run.model, BATCHES[0]) * math.inf)
    run.unscale()
    for p in run.model.parameters():
        p.grad.nan_to_num_(0.0)
    clip_grad_value_(run.model.parameters(), 1e-3)
    result = run.update()
    assert bool(result.skipped)
    assert float(run.scale_state.scale) == 32768.0
    backward(run)
    run.unscale()
    run.model[0].weight.grad.fill_(math.nan)  # by the user
    assert bool(run.update().skipped)
    assert all(torch.equal(w, before[name]) for name, w in run.weights().items())
    backward(run)
    assert not bool(run.update().skipped)


def test_the_order_of_the_verbs_is_checked():
    run = prepared(SPLIT_SCALED)
    with refuses(HalfstepError, "no gradients to update with"):
        run.unscale()
    run.backward(loss(run.model, BATCHES[0]), last=False)
    with refuses(HalfstepError, "passed with last=False"):
        run.unscale()
    run.backward(loss(run.model, BATCHES[0]))
    run.unscale()
    for use in (backward, lambda run: run.step(lambda x: loss(run.model, x), BATCHES)):
        with refuses(HalfstepError, "have been unscaled", "run.forget()"):
            use(run)
    run.update()
    run.backward(loss(run.model, BATCHES[0]))
    run.step(lambda x: loss(run.model, x), BATCHES)  # adds to it


def test_split_gradients_are_out_of_the_way_of_a_compiler_between_micro_batches():
    """Hazard: dynamo compiles nothing that uses a parameter whose gradient is wider than itself."""
    run = prepared("bf16-mixed,param=fp32:split")
    for x in BATCHES:
        run.backward(loss(run.model, x), last=False)
        assert run.model[0].weight.grad is None
    run.backward(loss(run.model, BATCHES[0]))
    assert run.model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("policy", POLICIES)
def test_the_norm_before_an_update_is_that_of_the_update_which_does_not_take_it_again(policy, monkeypatch):
    run, other = (prepared(policy, clip_norm=0.01) for _ in range(2))
    backward(run)
    backward(other)
    norm, taken = run.grad_norm(), []
    monkeypatch.setattr(run, "_norm", lambda grads: taken.append(grads))
    result, expected = run.update(), other.update()
    assert not taken
    assert float(norm) == pytest.approx(float(expected.grad_norm), rel=2**-22)
    assert torch.equal(result.grad_norm, expected.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True))


def test_a_norm_is_taken_again_if_gradients_were_changed_since():
    run = prepared("fp32", clip_norm=0.01)
    run.backward(loss(run.model, BATCHES[0]))
    before = run.grad_norm()
    for p in run.model.parameters():
        p.grad.mul_(2.0)
    assert float(run.update().grad_norm) == pytest.approx(2 * float(before), rel=2**-22)
    backward(run)
    unscaled = run.grad_norm()
    run.unscale()
    assert float(run.update().grad_norm) == pytest.approx(float(unscaled), rel=2**-20)


def test_a_norm_needs_all_micro_batches():
    run = prepared("fp32")
    with refuses(HalfstepError, "no gradients", "backward"):
        run.grad_norm()
    run.backward(loss(run.model, BATCHES[0]), last=False)
    with refuses(HalfstepError, "last=False", "last=True"):
        run.grad_norm()
