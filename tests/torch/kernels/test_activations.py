"""GELU by a sigmoid or one exponential, computed in fp32 and rounded once. relu(x)^2, whose result is kept."""

import math

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from halfstep.torch.fusion import mlp
from halfstep.torch.kernels.activations import ExactGELU, by_sigmoid, gelu, squared_relu
from halfstep.torch.numerics.provenance import traced
from halfstep.torch.run import prepare
from tests.torch.graphs import fused

BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
# Its cube overflows beyond, in fp32 as in torch's own: there GELU is x or 0.
ALL_BF16 = BF16[BF16.float().abs() < 2.0**40]


def bound(x, y, eps):
    """What rounding allows: once to the result, and some of fp32 on the way, which the exponential enlarges.

    A sigmoid below 2^-128 is 0, because 1 / sigmoid overflows.
    """
    exponent = 2 * math.sqrt(2 / math.pi) * (x.abs() + 0.044715 * x.abs() ** 3)
    return (eps / 2 + (4 * exponent.clamp(max=200) + 8) * 2.0**-24) * y.abs() + 2.0**-124


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_number_is_that_of_the_tanh_form_but_for_rounding(dtype):
    x = ALL_BF16.to(dtype)
    y = by_sigmoid(x)
    assert y.dtype == dtype
    x, eps = x.double(), torch.finfo(dtype).eps
    e = torch.exp(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    # Of negative numbers not by torch's own, whose 1 + tanh(u) is rounded near 1 in fp64 too.
    right = torch.where(x < 0, x * e / (1 + e), F.gelu(x, approximate="tanh"))
    assert ((y.double() - right).abs() <= bound(x, right, eps)).all()


def test_its_slope_is_that_of_the_tanh_form():
    x = torch.linspace(-12, 12, 4001).requires_grad_()
    by_sigmoid(x).sum().backward()
    wide = x.detach().double().requires_grad_()
    F.gelu(wide, approximate="tanh").sum().backward()
    assert ((x.grad - wide.grad).abs() <= 16 * 2.0**-24 * (1 + x.detach().abs())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_gelu_of_every_number_is_off_by_rounding_and_little_more(dtype):
    """Beyond the tail that the polynomial is fitted to, it is below 2^-31, where torch's own is 0."""
    x = BF16.view(dtype)
    x = x[x.abs() <= 100]
    y, slope = both_gradients(ExactGELU.apply, x, torch.ones_like(x))
    wide = x.double()
    share = torch.special.erfc(-wide / math.sqrt(2)) / 2
    density = torch.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    info = torch.finfo(dtype)

    def allowed(right, size):  # half a unit for rounding; 2^-16 of what adds up; the tail beyond
        return info.eps / 2 * right.abs() + 2.0**-16 * size + 2.0**-31 + info.smallest_normal * info.eps

    assert ((y.double() - wide * share).abs() <= allowed(wide * share, wide.abs() * share)).all()
    right = share + wide * density
    assert ((slope.double() - right).abs() <= allowed(right, share + wide.abs() * density)).all()


def test_the_exact_gelu_of_what_is_no_number_is_that_of_torch():
    x = torch.tensor([math.inf, -math.inf, math.nan]).bfloat16()
    assert ExactGELU.apply(x).isnan().tolist() == [False, True, True]
    assert ExactGELU.apply(x)[0] == math.inf


def test_code_that_is_not_compiled_for_a_gpu_calls_torch():
    x = torch.linspace(-4, 4, 100)
    with traced(True):
        assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))


class Net(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.up, self.approximate = nn.Linear(16, 16), approximate

    def forward(self, x):
        return F.gelu(self.up(x), approximate=self.approximate)


@pytest.mark.parametrize(
    ("approximate", "operations"), [("tanh", {"gelu_in_graph"}), ("none", {"exact_gelu_in_graph"})]
)
@pytest.mark.parametrize("memory", ["fast", pytest.param("lean", marks=pytest.mark.prove)])
def test_models_of_others_get_the_form_that_they_ask_for(approximate, operations, memory, monkeypatch):
    monkeypatch.setattr(mlp, "_has_form", lambda name, x, function: not function.recomputed)  # as on a GPU
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    model = Net(approximate)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed", memory=memory)
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=fused(keep))(torch.randn(4, 16)).float().sum().backward()
    names = {
        str(getattr(node.target, "__name__", node.target))
        for module in graphs[0].modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    }
    assert names & {"gelu_in_graph", "exact_gelu_in_graph", "gelu", "tanh"} == operations


def both_gradients(function, x, g):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(g)
    return y.detach(), x.grad


def plain(x):
    return F.relu(x).square()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_square_of_every_bf16_number_is_enough_for_its_gradient(compiled):
    x = BF16[~((BF16 > 0) & (BF16.float() < 2.0**-63))]
    g = torch.full_like(x, 1.0078125)  # seven bits: g x is rounded
    with traced(compiled):
        y, grad = both_gradients(squared_relu, x, g)
    expected_y, expected = both_gradients(plain, x, g)
    assert torch.equal(y.nan_to_num(), expected_y.nan_to_num())
    assert torch.equal(y.isnan(), expected_y.isnan())
    finite = y.isfinite()  # an infinite square has no root, and no loss
    assert torch.equal(grad[finite], expected[finite])
    assert not grad[y.isnan()].isfinite().any()


def test_numbers_whose_square_is_not_normal_have_next_to_no_slope():
    x = BF16[(BF16 > 0) & (BF16.float() < 2.0**-63)]
    _, grad = both_gradients(squared_relu, x, torch.ones_like(x))
    assert ((grad >= 0) & (grad <= 2.0**-62)).all()


def test_of_a_squared_relu_only_the_result_is_kept():
    x, kept = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = squared_relu(x)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_squared_relu_of_other_formats_is_that_of_torch(dtype):
    x = torch.randn(64, dtype=dtype)
    for ours, theirs in zip(both_gradients(squared_relu, x, x), both_gradients(plain, x, x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_squared_relu_can_be_differentiated_twice():
    values = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.bfloat16)
    seconds = []
    for function in (squared_relu, plain):
        x = values.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*seconds)  # of powers of two and small integers, every step is exact


class Squared(nn.Module):
    def __init__(self, squared):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 16)
        self.squared = squared

    def forward(self, x):
        return self.down(self.squared(self.up(self.norm(x))))


def written(h):
    r = F.relu(h)
    h.mul_(0)
    return r.square()


@pytest.mark.parametrize(
    ("squared", "alone"),
    [
        (lambda h: h.relu() ** 2, True),
        pytest.param(written, False, marks=pytest.mark.prove),
        pytest.param(lambda h: F.relu(h).square(), True, marks=pytest.mark.prove),
        pytest.param(lambda h: torch.pow(torch.relu(h), 2.0), True, marks=pytest.mark.prove),
        pytest.param(lambda h: nn.ReLU()(h).square(), True, marks=pytest.mark.prove),
        pytest.param(lambda h: torch.relu(h) ** 3, False, marks=pytest.mark.prove),
        pytest.param(lambda h: (h + 1) ** 2, False, marks=pytest.mark.prove),
        pytest.param(lambda h: (F.relu(h) + h.sum() * 0).square(), False, marks=pytest.mark.prove),
    ],
)
@pytest.mark.parametrize("memory", ["fast", pytest.param("lean", marks=pytest.mark.prove)])
def test_models_of_others_keep_the_square_alone(squared, alone, memory):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = prepare(Squared(squared), policy="bf16-mixed", memory=memory).model
    torch._dynamo.reset()
    backend = fused(aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    gradients = []
    for function in (compiled, model):
        model.zero_grad()
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
        function(x).float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    returned = list(next(iter(graphs[0].graph.find_nodes(op="output"))).args[0])
    held = {node.args[0] if node.target is torch.ops.aten.detach.default else node for node in returned}
    kept = [tuple(node.meta["val"].shape) for node in held].count((6, 40))
    assert any(node.target is torch.ops.aten.sqrt.default for node in graphs[1].graph.nodes) is alone
    assert not alone or kept == 1
    assert all(map(torch.equal, *gradients))
