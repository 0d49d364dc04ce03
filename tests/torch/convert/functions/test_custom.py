"""Third-party autograd functions, under a policy."""

import pytest
import torch
from torch import nn
from torch.autograd import Function

from halfstep.core.formats import BF16
from halfstep.torch import prepare

seen = []


class Product(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class WithContext(Product):
    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Decorated(Product):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


class Wide(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        if not torch.compiler.is_compiling():
            seen.append((x.dtype, w.dtype))
        return x * w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Net(nn.Module):
    def __init__(self, function, parameter):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.w = nn.Parameter(parameter)

    def forward(self, x):
        return self.last(self.function(self.first(x), self.w))


def gradients(model, backward, x, compiled=False):
    found = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: found.update({name: g.clone()}))
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    backward(forward(x).square().mean())
    return found


def compare(function, parameter, policy, compiled=False):
    torch.manual_seed(0)
    plain, model = Net(function, parameter), Net(function, parameter.clone())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(5, 4)
    expected = gradients(plain, torch.Tensor.backward, x)
    seen.clear()
    run = prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy)
    found = gradients(model, run.backward, x, compiled)
    scale = float(run.scale_state.scale)
    for name, g in expected.items():
        assert (found[name].float() / scale - g).norm() <= 6 * BF16.epsilon * g.norm(), name
        assert found[name].dtype == torch.float32
    return run, x


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true"])
@pytest.mark.parametrize("kind", [Product, WithContext, Decorated])
def test_an_activation_and_a_parameter_meet_in_its_backward(kind, policy):
    compare(kind.apply, torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) / 2, policy)


def test_a_third_party_mode_hides_nothing():
    """Hazard: `with torch.device(...)` in a forward is a function mode too, above the policy's."""

    def inside(x, w):
        with torch.device("cpu"):
            return Wide.apply(Product.apply(x, w), w[0])

    compare(inside, torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), "bf16-mixed")
    assert seen == [(torch.float32, torch.float32)]


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_cast_inputs_are_cast_and_everything_inside_runs_as_written(policy):
    run, x = compare(Wide.apply, torch.linspace(0.5, 2, 4), policy)
    assert seen == [(torch.float32, torch.float32)]
    assert "Wide (the model): covered, inputs cast as custom_fwd says" in str(run.coverage(run.model, x))
    run.unprepare()
    seen.clear()
    Wide.apply(x.bfloat16(), x.bfloat16())
    assert seen == [(torch.bfloat16, torch.bfloat16)]  # without a policy nothing changed


@pytest.mark.prove
def test_both_are_compiled_whole():
    def both(x, w):
        return Wide.apply(Product.apply(x, w), w[0])

    compare(both, torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), "bf16-mixed", compiled=True)
