"""Loss functions that run backward passes or touch gradients: an update is of the losses they return."""

import pytest
import torch
from torch import nn

from halfstep.torch.run import prepare

POLICIES = ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true", "fp16-mixed"]


def _trained(loss_of, policy, micro_batches, clip_norm=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy, clip_norm=clip_norm)
    batches = torch.randn(micro_batches, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
    for _ in range(2):
        run.step(lambda x: loss_of(model, x), batches)
    return run.weights()


def _loss(model, x):
    return model(x).float().square().mean()


def by_grad_of_the_input(model, x):
    """The usual adversarial step: `backward` for `x.grad`, which leaves gradients in the parameters."""
    x = x.clone().requires_grad_()
    _loss(model, x).backward()
    return _loss(model, (x + 0.1 * x.grad.sign()).detach())


def by_autograd_grad(model, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(_loss(model, x), x)
    return _loss(model, (x + 0.1 * grad.sign()).detach())


def plain(model, x):
    return _loss(model, x)


def clears_first(model, x):
    model.zero_grad()
    return _loss(model, x)


def clears_to_zeros(model, x):
    model.zero_grad(set_to_none=False)
    return _loss(model, x)


def backward_and_retain(model, x):
    loss = _loss(model, x)
    loss.backward(retain_graph=True)
    return loss


def writes_grads(model, x):
    for p in model.parameters():
        p.grad = torch.ones_like(p, dtype=p.grad_dtype)  # of a split master, fp32
    return _loss(model, x)


def hooks_on_the_input(model, x):
    x = x.clone().requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    return _loss(model, x)


SAME = [
    (by_grad_of_the_input, by_autograd_grad),
    (clears_first, plain),
    (clears_to_zeros, plain),
    (backward_and_retain, plain),
    (writes_grads, plain),
    (hooks_on_the_input, plain),
]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("loss_of", "reference"), SAME, ids=[loss.__name__ for loss, _ in SAME])
def test_only_losses_that_are_returned_make_an_update(loss_of, reference, policy, micro_batches):
    got, expected = (_trained(loss, policy, micro_batches) for loss in (loss_of, reference))
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name
