"""What a model returns beside its loss: in compute, until something is computed with it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import prepare
from halfstep.torch.convert.functions.narrow_logits import Output, keep_narrow

TARGETS = torch.tensor([0, 1, 2])


class WithLoss(nn.Module):
    """As many write a language model: it computes its loss if it is given targets."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x, targets=None):
        logits = self.head(self.body(x))
        return (logits, None if targets is None else F.cross_entropy(logits, targets))


def prepared(policy="bf16-mixed"):
    torch.manual_seed(0)
    model = WithLoss()
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy), torch.randn(3, 4)


@pytest.mark.parametrize(("policy", "narrow"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_beside_a_loss_outputs_stay_in_compute_and_a_loss_of_them_is_the_same_to_the_bit(policy, narrow):
    run, x = prepared(policy)
    alone, _ = run.model(x)
    logits, loss = run.model(x, TARGETS)
    assert (alone.dtype, type(alone)) == (torch.float32, torch.Tensor)
    assert (logits.dtype, type(logits), loss.dtype) == (narrow, Output, torch.float32)
    outside = F.cross_entropy(logits, TARGETS)
    assert (outside.dtype, type(outside)) == (torch.float32, torch.Tensor)
    assert torch.equal(outside, F.cross_entropy(alone, TARGETS))
    assert torch.equal(outside, loss)
    grads = [torch.autograd.grad(y, run.model.body.weight, retain_graph=True)[0] for y in (outside, loss)]
    assert torch.equal(*grads)
    distance = F.kl_div(logits.log_softmax(-1), torch.full((3, 5), 0.2), reduction="batchmean")
    run.backward(distance + logits.square().mean())
    run.update()


def test_a_policy_whose_loss_is_narrow_or_that_emulates_returns_what_it_did():
    run, x = prepared("bf16-mixed,emulate=true")
    logits, _ = run.model(x, TARGETS)
    assert (type(logits), logits.dtype) == (torch.Tensor, torch.float32)
    run, x = prepared("fp32")
    assert type(run.model(x, TARGETS)[0]) is torch.Tensor


COMPUTED = {
    "sum": lambda y: y.sum(),
    "softmax": lambda y: torch.softmax(y, -1),
    "with a number": lambda y: 2 - y,
    "with a tensor": lambda y: y @ torch.ones(5, 2),
    "joined": lambda y: torch.cat([y, y]),
    "joined by name": lambda y: torch.stack(tensors=(y, y)),
    "where": lambda y: torch.where(y > 0, y, 0.0),
    "largest": lambda y: y.max(-1).values,
    "a loss": lambda y: F.mse_loss(input=y, target=torch.zeros(3, 5)),
    "copied": copy.deepcopy,
}


KEPT = {
    "detached": lambda y: y.detach(),
    "a slice": lambda y: y[:, 1:],
    "flat": lambda y: y.view(-1),
    "transposed": lambda y: y.T,
    "split": lambda y: y.split(2)[1],
    "to the CPU": lambda y: y.to("cpu").cpu(),
    "the row of an iteration": lambda y: next(iter(y)),
}


@pytest.mark.parametrize("name", {**COMPUTED, **KEPT})
def test_computing_gives_fp32_and_what_moves_numbers_leaves_them_narrow(name):
    x, function = torch.randn(3, 5).bfloat16(), {**COMPUTED, **KEPT}[name]
    y = function(keep_narrow(x))
    assert (y.dtype, type(y)) == ((torch.float32, torch.Tensor) if name in COMPUTED else (torch.bfloat16, Output))
    assert torch.equal(y.float(), function(x.float()))


def test_it_can_be_looked_at_written_to_saved_and_turned_into_numpy():
    x = torch.randn(3, 5).bfloat16()
    y = keep_narrow(x.clone())
    assert (y.shape, len(y), y.dim(), y.device.type) == ((3, 5), 3, 2, "cpu")
    assert torch.equal(y.argmax(-1), x.argmax(-1))
    assert (y.numpy() == x.float().numpy()).all()
    y[0] = float("-inf")
    assert y.mul_(2) is y
    assert torch.equal(y.float()[1:], x.float()[1:] * 2)
    assert bool(y.isinf()[0].all())
    total = torch.zeros(3, 5)
    total += keep_narrow(x)
    assert torch.equal(total, x.float())
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), y.float())


@pytest.mark.prove
def test_compiled_code_returns_the_same_and_may_compute_with_it():
    run, x = prepared()
    expected = run.model(x, TARGETS)
    compiled = torch.compile(run.model, fullgraph=True, backend="aot_eager")
    logits, loss = compiled(x, TARGETS)
    assert (type(logits), logits.dtype) == (Output, torch.bfloat16)
    assert torch.equal(logits.float(), expected[0].float())
    assert torch.equal(loss, expected[1])

    def outside(x):
        logits, loss = run.model(x, TARGETS)
        return loss + F.cross_entropy(logits.view(-1, 5), TARGETS) + logits[0].sum()

    total = torch.compile(outside, fullgraph=True, backend="aot_eager")(x)
    assert total.dtype == torch.float32
    assert torch.equal(total, outside(x))
