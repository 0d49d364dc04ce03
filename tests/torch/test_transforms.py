"""torch.func, forward mode and second derivatives on a prepared model: they work, or say what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply

POLICIES = ["bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-mixed,emulate=true", "bf16-true"]


class Net(nn.Module):
    """A layer, a norm, attention in steps, and products that its own code writes."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.w, self.batches = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(2, 8, 3) / 3)

    def forward(self, x):
        x = self.norm(torch.tanh(self.up(x)))
        y, _ = self.attention(x, x, x)
        q = x @ self.w
        return (F.softmax(q @ q.mT, -1) @ q + y).unsqueeze(-3) @ self.batches


def nets(policy, make=Net):
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    apply(model, Policy.parse(policy))
    return plain, model, torch.randn(3, 2, 4)


def close(found, expected, times=8):
    found, expected = (torch.cat([t.detach().flatten().float() for t in part]) for part in (found, expected))
    assert (found - expected).norm() <= times * BF16.epsilon * expected.norm()


def loss_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).float().square().mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_torch_func_differentiates_and_batches_a_prepared_model(policy):
    plain, model, x = nets(policy)
    masters, theirs = dict(model.state_dict()), dict(plain.state_dict())
    found, expected = grad(loss_of(model))(masters, x), grad(loss_of(plain))(theirs, x)
    close(found.values(), expected.values())
    wide = torch.bfloat16 if policy == "bf16-true" else torch.float32
    assert {g.dtype for g in found.values()} == {wide}
    if policy in POLICIES[:2]:  # a weight gradient is fp32 from the sum on
        assert all((g != g.bfloat16().float()).any() for g in found.values())
    each = vmap(grad(loss_of(model)), (None, 0))(masters, x)
    close([g.float().mean(0) for g in each.values()], expected.values())
    close([jacrev(model)(x[0])], [jacrev(plain)(x[0])])


@pytest.mark.prove  # seconds: torch builds its rules for forward mode at their first use
@pytest.mark.parametrize("policy", POLICIES)
def test_forward_mode_and_hessians_work_too(policy):
    plain, model, x = nets(policy)
    close([jvp(model, (x,), (x,))[1]], [jvp(plain, (x,), (x,))[1]])
    one = x[0]
    curvature = [hessian(lambda x, net=net: net(x).square().mean())(one) for net in (model, plain)]
    close(curvature[:1], curvature[1:], times=16)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(one, one))).tangent
    close([tangent], [jvp(plain, (one,), (one,))[1]])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gradient_can_be_differentiated_again(policy):
    plain, model, x = nets(policy)
    found = []
    for net in (model, plain):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
        slope.float().square().sum().backward()  # a gradient penalty
        found.append([inputs.grad, *(p.grad for p in net.parameters() if p.grad is not None)])
    close(*found, times=16)
    batched = [torch.autograd.functional.jacobian(net, x[0], vectorize=True) for net in (model, plain)]
    close(batched[:1], batched[1:])


def test_looked_up_rows_of_split_masters_are_transformed_too():
    _, model, _ = nets("bf16-mixed,param=fp32:split", lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    index = torch.tensor([1, 1, 3])
    gradients = grad(lambda p: functional_call(model, p, (index,)).sum())(dict(model.state_dict()))
    assert gradients["0.weight"].dtype == torch.float32
    assert gradients["0.weight"][[0, 2, 4]].abs().max() == 0
    assert torch.equal(vmap(model)(index), model(index))


@pytest.mark.parametrize(
    ("policy", "transform", "said", "hint"),
    [
        ("fp8-mixed,emulate=true", vmap, "does not reach a matmul with narrow operands", "`bf16-mixed`"),
        ("fp8-mixed,emulate=true", "twice", "cannot be differentiated twice", "`bf16-mixed`"),
        ("bf16-mixed,param=fp32:split", "halves", "whose gradient the policy wants in fp32", "model.state_dict()"),
    ],
)
def test_what_cannot_be_transformed_is_refused_with_a_remedy(policy, transform, said, hint):
    _, model, _ = nets(policy, lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    x = torch.randn(16, 16, requires_grad=True)

    def twice(model):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.sum().backward()

    def halves(model):
        given = {name: p.detach() for name, p in model.named_parameters()}
        return grad(lambda p: functional_call(model, p, (x,)).sum())(given)

    calls = {"twice": lambda: twice(model), "halves": lambda: halves(model), vmap: lambda: vmap(model)(x)}
    with pytest.raises(HalfstepError, match=said) as caught:
        calls[transform]()
    assert hint in caught.value.hint
