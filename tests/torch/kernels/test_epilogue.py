"""Matmuls that compute a GELU, in the form without a GPU, and which layers use them."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply
from halfstep.torch.kernels import epilogue
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.matmul import LinearGeluLinear
from halfstep.torch.run import prepare
from tests.torch.graphs import fused

SIZES = [(1, 8, 8, 8), (37, 24, 40, 16), (5, 3, 7, 2)]
EPS = torch.finfo(torch.float32).eps


def draws(rows, width, hidden, outputs):
    torch.manual_seed(rows)
    shapes = [(rows, width), (hidden, width), (hidden,), (outputs, hidden), (outputs,), (rows, outputs)]
    return [torch.randn(shape) for shape in shapes]


def gelu(h):
    return F.gelu(h, approximate="tanh")


def plain(x, up, b, down, c):
    return F.linear(gelu(F.linear(x, up, b)), down, c)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_those_of_the_layers(sizes, biases, lean):
    """In fp32 they differ from fp64 by sums of at most as many roundings as the longest sum has terms."""
    *given, g = draws(*sizes)
    given = [t if biases or t.dim() > 1 else None for t in given]
    ours = [None if t is None else t.clone().requires_grad_() for t in given]
    x, up, b, down, c = ours
    pairs = [(None if t is None else t.detach(), t) for t in (up, b, down, c)]
    y = LinearGeluLinear.apply(x, *(t for pair in pairs for t in pair), lean, torch.float32)
    wide = [None if t is None else t.double().requires_grad_() for t in given]
    expected = plain(*wide)
    y.backward(g)
    expected.backward(g.double())
    bound = 8 * max(sizes) * EPS
    for a, b in zip(
        [y, *(t.grad for t in ours if t is not None)],
        [expected, *(t.grad for t in wide if t is not None)],
        strict=True,
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_result_is_rounded_once(dtype):
    x, up, b, down, _, g = (t.to(dtype) for t in draws(37, 24, 40, 16))
    h, act = epilogue.linear_gelu(x, up.t(), b)
    wide = F.linear(x.float(), up.float(), b.float())
    assert torch.equal(h, wide.to(dtype))
    assert torch.equal(act, gelu(wide).to(dtype))
    dh = epilogue.linear_gelu_grad(h, g, down)
    slope = torch.autograd.functional.jvp(gelu, h.double(), torch.ones_like(h.double()))[1]
    expected = (g.double() @ down.double()) * slope
    # Half a unit of the last place, and what fp32 sums add: nothing is rounded in between.
    assert (dh.double() - expected).abs().max() <= (torch.finfo(dtype).eps / 2 + 100 * EPS) * expected.abs().max()


@pytest.fixture
def everywhere(monkeypatch):
    """Pretends that any device has the kernels."""
    monkeypatch.setattr(epilogue, "device_lacks", torch.compiler.assume_constant_result(lambda device: ""))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def ours(lean):
    """Returns a norm and an MLP of our decoder."""
    torch.manual_seed(0)
    model = Decoder(load("tiny", ["model.mlp=gelu", "model.bias=true", "model.norm=layer"]).model)
    apply(model, Policy.parse("bf16-mixed"))
    if lean:
        model.save_memory()
    block = model.blocks[0]
    return nn.Sequential(block.mlp_norm, block.mlp)


class Theirs(nn.Module):
    """An MLP as people write it; `between` gets the input of the first layer, its result and the GELU of that."""

    def __init__(self, between=lambda x, h, act: act, approximate="tanh", hidden=40):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, hidden), nn.Linear(hidden, 16)
        self.between, self.approximate = between, approximate

    def forward(self, x):
        x = self.norm(x)
        h = self.up(x)
        return self.down(self.between(x, h, F.gelu(h, approximate=self.approximate)))


def theirs(lean, policy="bf16-mixed", **settings):
    model = Theirs(**settings)
    return prepare(model, policy=policy, memory="lean" if lean else "fast").model


def with_a_rule(lean):
    """Returns theirs with a rule of its own inside a model: two modes see its functions."""
    outer = nn.Sequential(OrderedDict(mlp=Theirs()))
    policy = "fp16-mixed; mlp: compute=bf16,grad=bf16; mlp.*: compute=bf16,grad=bf16"
    return prepare(outer, policy=policy, memory="lean" if lean else "fast").model


def input_of(model):
    width = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x.to(next(model.parameters()).device).requires_grad_()


def results(model, function):
    """Returns the result and all gradients."""
    model.zero_grad()
    x = input_of(model)
    y = function(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def compiled(model):
    """Returns the targets of the forward and the backward graph, the shapes that are kept, and the results."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = fused(aot_autograd(fw_compiler=keep, bw_compiler=keep))
    found = results(model, torch.compile(model, fullgraph=True, backend=backend))
    returned = list(next(iter(graphs[0].graph.find_nodes(op="output"))).args[0])
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    return *targets, [tuple(node.meta["val"].shape) for node in returned], found


def is_close(found, expected):
    """Whether results are as close as some roundings to bf16 leave them: each has a relative error of 2^-9."""
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and (a - b).float().norm() <= 2**-6 * b.float().norm() for a, b in pairs)


@pytest.mark.parametrize("lean", [False, pytest.param(True, marks=pytest.mark.prove)])
@pytest.mark.parametrize("made", [ours, theirs, with_a_rule])
def test_compiled_layers_compute_the_gelu_between_them(everywhere, made, lean):
    model = made(lean)
    forward, backward, kept, found = compiled(model)
    hidden = next(m.out_features for m in model.modules() if isinstance(m, nn.Linear))
    assert sum("halfstep.linear_gelu.default" in target for target in forward) == 1
    assert sum("halfstep.linear_gelu_grad" in target for target in backward) == 1
    assert not any("aten.gelu" in target for target in forward)
    assert any("aten.gelu" in target for target in backward) is lean
    assert kept.count((6, hidden)) == 2 - lean  # h, and gelu(h)
    assert is_close(found, results(model, model))


def scaled(x, h, act):
    """Writes to the input of the first layer before the second is called."""
    x.mul_(3)
    return act


def scaled_view(x, h, act):
    """Writes to it through a view."""
    x.view(-1).mul_(3)
    return act


@pytest.mark.prove
@pytest.mark.parametrize(
    "settings",
    [
        {"between": scaled},
        {"between": scaled_view},
        {"between": lambda x, h, act: act.mul_(2)},
        {"between": lambda x, h, act: act + h},
        {"between": lambda x, h, act: F.dropout(act, 0.0)},
        {"approximate": "none"},
        {"hidden": 36},
        {"policy": "fp32"},
    ],
)
def test_what_happens_in_between_keeps_the_layers_apart(everywhere, settings):
    model = theirs(False, **settings)
    if settings.get("between") in (scaled, scaled_view):  # as in eager mode: the first layer needs its input
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            compiled(model)
        return
    forward, _, _, found = compiled(model)
    assert not any("halfstep.linear_gelu" in target for target in forward)
    assert is_close(found, results(model, model))


@pytest.mark.prove
def test_hooks_see_what_is_between_the_layers(everywhere):
    model = theirs(False)
    for layer in (model.up, model.down):
        seen = []
        handle = layer.register_forward_hook(lambda _, inputs, y: seen.extend([*inputs, y]))  # noqa: B023
        torch.compiler.reset()
        assert not any("halfstep.linear_gelu" in target for target in compiled(model)[0])
        assert len(seen) == 2
        handle.remove()


GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(epilogue.device_lacks(torch.device("cuda"))), reason="needs a Hopper GPU"
)


@GPU
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(33, 24, 40, 16), (1000, 768, 3072, 768)])
def test_the_library_computes_what_the_operations_say(sizes, dtype, biased, turned):
    """Half a unit of the last place for the rounding, and as much for the tanh of the hardware."""
    x, up, b, down, _, g = (t.to(dtype).cuda() for t in draws(*sizes))
    up, down = ((t.t().contiguous().t() if turned else t) / t.shape[1] ** 0.5 for t in (up, down))
    bias = b if biased else None
    h, act = epilogue.linear_gelu(x, up.t(), bias)
    wide = F.linear(x.double(), up.double(), None if bias is None else bias.double())
    dh = epilogue.linear_gelu_grad(h, g, down)
    slope = torch.ops.aten.gelu_backward(g.double() @ down.double(), h.double(), approximate="tanh")
    for found, expected in ((h, wide), (act, gelu(wide)), (dh, slope)):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()
    again = (*epilogue.linear_gelu(x, up.t(), bias), epilogue.linear_gelu_grad(h, g, down))
    assert all(torch.equal(a, b) for a, b in zip(again, (h, act, dh), strict=True))


@GPU
def test_a_cuda_graph_replays_it():
    x, up, b, down, _, g = (t.bfloat16().cuda() for t in draws(33, 24, 40, 16))

    def work():
        h, act = epilogue.linear_gelu(x, up.t(), b)
        return h, act, epilogue.linear_gelu_grad(h, g, down)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = work()
    x.mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, work(), strict=True))


@GPU
@pytest.mark.parametrize("made", [ours, theirs, with_a_rule])
def test_compiled_layers_on_a_gpu_use_it(made):
    torch.compiler.reset()
    model = made(False).cuda()
    forward, _, _, found = compiled(model)
    assert any("halfstep.linear_gelu" in target for target in forward)
    assert is_close(found, results(model, model))
