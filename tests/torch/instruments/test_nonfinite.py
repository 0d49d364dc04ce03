"""Which tensor stopped being finite first, and in which pass."""

import pytest
import torch
from torch import nn

from halfstep.core.errors import ScalingError
from halfstep.torch.instruments.nonfinite import find
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from tests.refusals import refuses


class Block(nn.Module):
    def __init__(self, between=1.0):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, 8), nn.Linear(8, 4), between

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)) * self.between)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)
        for p in self.parameters():
            nn.init.constant_(p, 0.25)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x)
        return self.head(x if mask is None else x + mask.clamp(min=-1e3))


def mean(model):
    return lambda x: model(x).square().mean()


def test_what_is_to_blame_is_the_innermost_module_its_weight_or_code_between_modules():
    model = Model()
    model.blocks[1].up.weight.data.fill_(1e38)
    cause = find(model, mean(model), [torch.ones(2, 4)], 1.0)
    assert str(cause).startswith("forward: blocks.1.up, largest input ")
    assert cause.module == "blocks.1.up"
    model = Model()
    model.blocks[2].down.weight.data[0, 0] = float("nan")
    assert "blocks.2.down, whose own `weight` is not finite" in str(
        find(model, mean(model), [torch.ones(2, 4)], 1.0)
    )
    model = Model()
    model.blocks[1].between = float("inf")
    cause = find(model, mean(model), [torch.ones(2, 4)], 1.0)
    assert str(cause).startswith("forward: blocks.1, in its own code before `blocks.1.down`")


def test_the_loss_the_input_the_micro_batch_and_masks_are_distinguished_from_the_model():
    model = Model()
    assert "the loss itself" in str(find(model, lambda x: model(x).mean() * float("inf"), [torch.ones(2, 4)], 1.0))
    assert "the input of the model" in str(find(model, mean(model), [torch.full((2, 4), float("nan"))], 1.0))
    batches = [torch.ones(2, 4), torch.ones(2, 4), torch.full((2, 4), float("inf"))]
    assert find(model, mean(model), batches, 1.0).where == "forward"
    mask = torch.tensor([0.0, float("-inf"), 0.0, 0.0])
    cause = find(model, lambda x: model(x, mask=mask).square().mean(), [torch.ones(2, 4)], 1.0)
    assert cause.where == "nowhere"


def test_a_loss_that_alone_is_not_finite_is_named_as_such():
    model, alone = Model(), "; the loss was not finite, its gradients were"
    cause = find(model, lambda x: model(x).mean() - float("inf"), [torch.ones(2, 4)], 1.0)
    assert str(cause).startswith("forward: the loss itself; what the model gave it is finite; made by `sub`")
    assert str(cause).endswith(alone)
    assert cause.micro_batch == 0
    assert cause.to_dict()["message"] == str(cause)
    assert alone not in str(find(model, lambda x: model(x).mean() * float("inf"), [torch.ones(2, 4)], 1.0))


def test_backward_the_first_gradient_is_named_and_nothing_is_left_behind():
    model = Model()

    class Burst(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("inf")

    def loss(x):
        for block in model.blocks[:2]:
            x = block(x)
        return model.head(model.blocks[2](Burst.apply(x))).square().mean()

    cause = find(model, loss, [torch.ones(2, 4)], 1.0)
    what = "backward: gradient of the output of `blocks.1`; made by `mul of BurstBackward`"
    assert (str(cause), cause.module) == (what, "blocks.1")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    buffers = [b.clone() for b in model.buffers()]
    model[0].weight.grad = torch.ones(4, 4)
    random = torch.get_rng_state()
    find(model, mean(model), [torch.randn(8, 4, generator=torch.Generator().manual_seed(0))], 1.0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[0].bias.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model[0].weight._backward_hooks is None or not model[0].weight._backward_hooks


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax((q @ k.mT).masked_fill(mask, float("-inf")), -1) @ v


class Planted(nn.Module):
    """A model whose second block fails in one way; `fail` gets what the block computes."""

    def __init__(self, fail=lambda x: x):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.fail = nn.LayerNorm(4), fail
        self.blocks[1].register_forward_hook(lambda module, args, out: fail(out))

    def forward(self, x):
        for block in self.blocks:
            x = block(self.norm(x))
        return x


def replaced(x):
    """Divides by zero, and replaces the result, as code with a guard does: nothing happened."""
    zero = torch.zeros_like(x)
    return torch.where(zero > 0, (1 / zero).detach(), x)


# what fails in the second block: its pass, and the operation
FAILURES = {
    "an exponential": (lambda x: (x * 1e4).exp(), "forward", "exp"),
    "a product": (lambda x: (replaced(x) * 1e30) @ (x * 1e30).mT @ x, "forward", "mm"),
    "a logarithm of zero": (lambda x: (x * 0).log(), "forward", "log"),
    "a write in place": (lambda x: replaced(x).mul_(1e38).mul_(1e38), "forward", "mul_"),
    "a root at zero": (lambda x: x + (x * 0).sqrt(), "backward", "div of SqrtBackward0"),
    "a quotient": (
        lambda x: x + 1e-20 * (torch.full_like(x, 1e-10) / (x * 0 + 1e-25)), "backward", "div of DivBackward0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_the_operation_is_the_first_with_finite_inputs_forward_or_backward(failure):
    fail, where, operation = FAILURES[failure]
    torch.manual_seed(0)
    model = Planted(fail)
    batches = [torch.zeros(2, 4), torch.randn(2, 4)]
    clean = Planted(replaced)
    assert find(clean, mean(clean), batches, 1.0).where == "nowhere"
    cause = find(model, mean(model), batches, 1.0)
    assert (cause.where, cause.operation) == (where, operation), str(cause)
    assert cause.module.startswith("blocks.1")


def test_a_softmax_of_nothing_but_masks_is_named_and_masks_are_not():
    model = Attention()
    mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    assert find(model, lambda x: model(x, mask).sum(), [torch.ones(3, 4)], 1.0).where == "nowhere"
    mask[1] = True
    cause = find(model, lambda x: model(x, mask).sum(), [torch.ones(3, 4)] * 2, 1.0)
    assert (cause.where, cause.operation, cause.micro_batch) == ("forward", "_softmax", 0)


def test_the_micro_batch_is_named_and_a_sum_that_overflows_is_a_reduction():
    model = nn.Linear(1, 1, bias=False)
    ones = torch.ones(1, 1)
    cause = find(model, lambda x: model(x).sum(), [ones, ones, ones * float("inf")], 1.0)
    assert (cause.where, cause.micro_batch) == ("forward", 2)
    cause = find(model, lambda x: model(x).sum(), [ones * 3e38] * 2, 1.0)
    assert (cause.where, cause.module, cause.micro_batch) == ("reduction", "", None)
    assert str(cause) == "reduction: the sum of gradients of `weight`; of each micro-batch they are finite"
    assert model.weight.grad is None


def test_under_compile_the_step_is_run_again_eagerly():
    model = Planted(lambda x: (x * 1e4).exp())
    compiled = torch.compile(mean(model), backend="eager")
    cause = find(model, compiled, [torch.ones(2, 4)], 1.0)
    assert (cause.where, cause.operation) == ("forward", "exp")


FP16 = "fp16-mixed,scale=dynamic:init=4:floor=2"


def stuck(model, run, loss, batch):
    for _ in range(4):
        result = run.step(loss, [batch])
        if bool(result.stuck):
            return result
    raise AssertionError("it did not get stuck")


@pytest.mark.filterwarnings("ignore:the loss scale is")
@pytest.mark.parametrize("masters", ["", ",param=fp32:split"])
def test_at_the_floor_a_forward_overflow_is_reported_as_one_and_a_backward_one_names_its_gradient(masters):
    """fp16 ends at 65504, whatever the loss is multiplied by."""
    model = Model()
    model.blocks[1].up.weight.data.fill_(3e4)
    run = prepare(model, AdamW(model.parameters()), FP16 + masters)
    result = stuck(model, run, mean(model), torch.ones(2, 4))
    with pytest.raises(ScalingError, match=r"floor, 2; forward: blocks\.1\.up, largest input \d") as raised:
        run.check(result)
    assert "no loss scale reaches the forward pass" in raised.value.hint
    assert "`blocks.1.up: compute=fp32`" in raised.value.hint
    model = Model()
    run = prepare(model, AdamW(model.parameters()), FP16 + masters)

    def loss(x):
        return model(x).float().mean() * 1e6

    result = stuck(model, run, loss, torch.ones(2, 4))
    with pytest.raises(ScalingError, match="floor, 2; backward: gradient of the output of") as raised:
        run.check(result)
    assert "forward" not in raised.value.hint


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_without_step_the_loss_must_be_passed_and_a_finite_step_is_not_run_again():
    model = Model()
    model.head.weight.data.fill_(6e4)
    run = prepare(model, AdamW(model.parameters()), FP16)
    x = torch.ones(2, 4)
    for _ in range(3):
        run.backward(model(x).float().square().mean())
        result = run.update()
    with refuses(ScalingError, "floor, 2", "run.check(result, loss_fn, micro_batches)"):
        run.check(result)
    with pytest.raises(ScalingError, match="forward: head"):
        run.check(result, mean(model), [x])
    model = Model()
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    calls = []

    def loss(x):
        calls.append(1)
        return model(x).float().square().mean()

    run.check(run.step(loss, [torch.ones(2, 4)]))
    assert len(calls) == 1
