"""Which tensor stopped being finite first, and in which pass."""

import pytest
import torch
from torch import nn

from halfstep.core.errors import ScalingError
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run.nonfinite import find
from halfstep.torch.step import prepare
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
    assert (str(cause), cause.module) == ("backward: gradient of the output of `blocks.1`", "blocks.1")
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
