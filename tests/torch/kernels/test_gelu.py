"""GELU by a sigmoid: the tanh form, computed in fp32 and rounded once."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch.functions import mode
from halfstep.torch.kernels.gelu import by_sigmoid, gelu
from halfstep.torch.step import prepare
from halfstep.torch.tracing import traced

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


@pytest.mark.parametrize(("approximate", "operations"), [("tanh", {"sigmoid"}), ("none", {"gelu"})])
@pytest.mark.parametrize("memory", ["fast", pytest.param("lean", marks=pytest.mark.prove)])
def test_models_of_others_get_it_where_they_ask_for_the_tanh_form(approximate, operations, memory, monkeypatch):
    monkeypatch.setattr(mode, "gelu", by_sigmoid)  # as on a GPU
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    model = Net(approximate)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed", memory=memory)
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=keep)(torch.randn(4, 16)).float().sum().backward()
    names = {
        str(getattr(node.target, "__name__", node.target))
        for module in graphs[0].modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    }
    assert names & {"sigmoid", "gelu", "tanh"} == operations
