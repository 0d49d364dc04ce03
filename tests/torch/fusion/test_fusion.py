"""Passes over the compiled graph: each way of writing is fused, and what cannot be is left, with the reason."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from halfstep.torch import prepare
from halfstep.torch.fusion import APART, FUSED, Chain, fuse, install, mlp
from halfstep.torch.fusion import loss as loss_pass
from halfstep.torch.fusion.graph import CASTS, called
from halfstep.torch.fusion.loss import OF_LAYER, OF_ROWS
from halfstep.torch.fusion.mlp import BETWEEN
from halfstep.torch.fusion.pointwise import SQUARE
from halfstep.torch.kernels import epilogue
from halfstep.torch.loss import plain
from tests.torch.graphs import fused

V, D = 64, 16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Pretends that any device has the kernels."""
    monkeypatch.setattr(loss_pass, "why_no_kernel", lambda x, dtype: "" if dtype in plain.NARROW else "wide")
    monkeypatch.setattr(epilogue, "device_lacks", lambda device: "")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CastNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)


class Model(nn.Module):
    """A block and a head; norms are the caller's own, so that nothing is known of what layers are given."""

    def __init__(self, activation, loss):
        super().__init__()
        self.activation, self.loss = activation, loss
        self.embed, self.norm, self.last = nn.Embedding(V, D), CastNorm(D, bias=False), CastNorm(D, bias=False)
        self.up, self.down, self.head = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)  # logits below 4

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.activation(self.up(self.norm(x))))
        return self.loss(self.head(self.last(x)), tokens)


def flat(z, t, **options):
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), t.reshape(-1), **options)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def written_out(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def in_fp32(x):
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def by_an_exponential(x):
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def padded(z, t):
    return F.cross_entropy(z[..., :60].float().view(-1, 60), t.clamp(max=59).view(-1))


def shifted(z, t):
    return F.cross_entropy(z[..., :-1, :].contiguous().float().view(-1, V), t[..., 1:].contiguous().view(-1))


def shifted_labels(z, t):
    """As transformers does."""
    t = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(z.float().view(-1, V), t, ignore_index=-100, reduction="sum") / 30


LOSSES = {
    "plain": flat,
    "widened": lambda z, t: flat(z.float(), t, ignore_index=-1),
    "widened late": lambda z, t: F.cross_entropy(z.view(-1, V).float(), t.view(-1)),
    "smoothed": lambda z, t: flat(z, t, label_smoothing=0.1),
    "shifted": shifted,
    "shifted labels": shifted_labels,
    "classes second": lambda z, t: F.cross_entropy(z.transpose(1, 2), t),
    "a padded vocabulary": padded,
    "a softcap": lambda z, t: flat(15 * torch.tanh(z.float() / 15), t),
    "a softcap in bf16": lambda z, t: flat(15 * torch.tanh(z / 15), t),
    "capped by a sigmoid": lambda z, t: flat(30 * torch.sigmoid(z.float() / 7.5), t),
    "twice the loss": lambda z, t: 2 * flat(z.float(), t),
}
ACTIVATIONS = {
    "tanh": tanh_gelu,
    "written out": written_out,
    "in fp32": in_fp32,
    "by an exponential": by_an_exponential,
}
SQUARES = {
    "square": lambda x: F.relu(x).square(),
    "power": lambda x: torch.relu(x) ** 2,
    "product": lambda x: F.relu(x) * F.relu(x),
}


def train(activation, loss, *, backend, memory="fast"):
    """Returns the loss and the gradients of one pass, and what was fused."""
    torch.manual_seed(0)
    model = Model(activation, loss)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed", memory=memory)
    tokens = torch.randint(0, V, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    FUSED.clear()
    APART.clear()
    made = torch.compile(model, fullgraph=True, backend=backend)(tokens)
    made = made[0] if isinstance(made, tuple) else made
    run.backward(made)
    return made.detach(), [p.grad.clone() for p in model.parameters()], dict(FUSED), dict(APART)


def check_same(activation, loss, memory="fast"):
    """Trains with and without the passes; returns what they fused, and why not."""
    made, grads, found, apart = train(activation, loss, backend=fused(), memory=memory)
    right, right_grads, _, _ = train(activation, loss, backend="aot_eager", memory=memory)
    # A GELU or a softcap is rounded once instead of up to nine times, each by at most 2^-9. A loss changes by at
    # most twice what logits do; the logits' gradient is rounded before a factor instead of after it.
    assert (made - right).abs() <= 2 * 9 * 2.0**-9 * 4
    for grad, expected in zip(grads, right_grads, strict=True):
        assert (grad - expected).norm() <= 2.0**-5 * expected.norm()
    return found, apart


SAMPLE = ("shifted labels", "capped by a sigmoid")


@pytest.mark.parametrize(
    "form", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.prove) for name in LOSSES]
)
def test_a_loss_is_computed_by_the_layer_before_it_however_it_is_written(form):
    assert check_same(F.silu, LOSSES[form])[0] == {OF_LAYER: 1}


@pytest.mark.parametrize(
    "form", ["written out", *(pytest.param(n, marks=pytest.mark.prove) for n in ACTIVATIONS if n != "written out")]
)
@pytest.mark.parametrize("memory", ["fast", pytest.param("lean", marks=pytest.mark.prove)])
def test_a_gelu_is_computed_by_the_matmuls_around_it(form, memory):
    assert check_same(ACTIVATIONS[form], flat, memory)[0] == {BETWEEN: 1, OF_LAYER: 1}


@pytest.mark.prove
@pytest.mark.parametrize("form", SQUARES)
def test_relu_squared_keeps_its_result_alone_however_it_is_written(form):
    assert check_same(SQUARES[form], flat)[0] == {SQUARE: 1, OF_LAYER: 1}


def halved(z, t):
    z.div_(2.0)
    return flat(z.float(), t)


def written_through_a_view(z, t):
    z = z.float()
    z.view(-1, V)[:, 5] = -1.0
    return flat(z, t)


def without_gradients(z, t):
    with torch.no_grad():
        wide = z.float()
    return flat(wide, t) + z.sum()


def hooked(z, t):
    z.register_hook(lambda g: g * 2)
    return flat(z.float(), t)


def with_z_loss(z, t):
    return flat(z.float(), t) + 1e-4 * z.float().logsumexp(-1).square().mean()


LEFT = {
    "returned": (lambda z, t: (flat(z.float(), t), z), {OF_ROWS: 1}, "are returned"),
    "each row": (lambda z, t: flat(z.float(), t, reduction="none").sum(), {OF_ROWS: 1}, "the loss of each row"),
    "a z-loss": (with_z_loss, {OF_ROWS: 1}, "`float` uses"),
    "halved": (halved, {OF_ROWS: 1}, "`div_` uses"),
    "written through a view": (written_through_a_view, {}, "`setitem` may write"),
    "a hook": (hooked, {OF_ROWS: 1}, "register_hook"),
    "weights of classes": (lambda z, t: flat(z.float(), t, weight=torch.ones(V)), {}, "weights of classes"),
    "a temperature": (lambda z, t: flat(z.float() / 0.7, t), {}, "from `div`"),
    "cast to fp16": (lambda z, t: flat(z.half().float(), t), {OF_ROWS: 1}, "from `half`"),
    "without gradients": (without_gradients, {}, "switched"),
}  # fmt: skip


@pytest.mark.parametrize(
    "form",
    ["written through a view", *(pytest.param(n, marks=pytest.mark.prove) for n in LEFT if "through" not in n)],
)
def test_logits_that_other_code_sees_are_made_and_the_reason_is_said(form):
    loss, expected, why = LEFT[form]
    found, apart = check_same(F.silu, loss)
    assert found == expected
    assert any(why in said or (form == "a hook" and "`getitem`" in said) for _, said in apart), apart  # torch 2.11


MLPS = {
    "its result is used twice": lambda x: tanh_gelu(x) + 0 * x.sum(),
    "a cast to fp8": lambda x: tanh_gelu(x).to(torch.float8_e5m2).to(x.dtype),
    "a write": lambda x: tanh_gelu(x).mul_(2),
    "almost a GELU": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.prove
@pytest.mark.parametrize("form", MLPS)
def test_what_is_between_two_layers_and_no_gelu_keeps_them_apart(form):
    assert BETWEEN not in check_same(MLPS[form], flat)[0]


TRIPS = {
    "there and back": (lambda x: x.float().bfloat16(), 0),
    "views in between": (lambda x: x.float().view(-1, 4 * D).to(x.dtype).view(2, 16, 4 * D), 0),
    "by way of fp64": (lambda x: x.double().float().flatten().view(x.shape).bfloat16(), 0),
    "used in fp32": (lambda x: (w := x.float()).bfloat16() + w.exp().bfloat16(), 3),
    "used before": (lambda x: x + x.float().bfloat16(), 2),
    "written to": (lambda x: x.float().mul_(2).bfloat16(), 2),
    "the result is written to": (lambda x: x.float().bfloat16().mul_(2), 2),
    "something is computed": (lambda x: (x.float() * 2).bfloat16(), 2),
    "a narrower format": (lambda x: x.half().bfloat16(), 2),
}


@pytest.mark.parametrize("form", TRIPS)
def test_casts_that_change_nothing_are_dropped(form):
    function, left = TRIPS[form]
    made = []

    def keep(graph, inputs):
        made.append(sum(called(node) in CASTS for node in graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    def passed(backend):
        model = Model(F.silu, flat)
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        x = torch.randn(2, 16, 4 * D, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        run = prepare(model.up, torch.optim.SGD(model.up.parameters(), lr=0.1), "bf16-mixed")

        def call(x):
            return 3 * function(x * 1.5), model.up(x[..., :D].float())

        y, other = torch.compile(call, fullgraph=True, backend=backend)(x)
        (y.float().square().sum() + other.float().sum()).backward()
        assert run is not None
        return y.detach(), x.grad

    found, expected = passed(fused(keep)), passed("aot_eager")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert made[0] == left + 1  # and that of the layer


def broken(z, t):
    torch._dynamo.graph_break()
    return flat(z.float(), t)


def test_a_graph_break_that_keeps_operations_apart_is_said():
    torch.manual_seed(0)
    model = Model(F.silu, broken)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed")
    FUSED.clear()
    APART.clear()
    run.backward(torch.compile(model, backend=fused())(torch.randint(0, V, (2, 16))))
    assert not FUSED
    assert "operations on both sides of a graph break: Call to `torch._dynamo.graph_break()`" in str(run.summary())


@pytest.mark.parametrize("megabytes", [1, pytest.param(25, marks=pytest.mark.prove)])
def test_buckets_of_ddp_leave_a_head_with_its_loss(megabytes):
    """Whatever their size: a bucket ends at the first operation that has enough parameters, seen from the loss."""
    torch.manual_seed(0)
    model = Model(tanh_gelu, flat)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed")
    FUSED.clear()
    APART.clear()
    size = megabytes * 2**20 if megabytes > 1 else 100  # the second: each parameter is a bucket
    split = DDPOptimizer(bucket_bytes_cap=size, backend_compile_fn=fused(), first_bucket_cap=size)
    run.backward(torch.compile(model, backend=split.compile_fn)(torch.randint(0, V, (2, 16))))
    assert ({OF_LAYER: 1, BETWEEN: 1} if megabytes > 1 else {OF_LAYER: 1}) == FUSED
    assert any("DDP" in why for _, why in APART) == (megabytes == 1)


@pytest.mark.prove
def test_what_the_backward_pass_computes_again_is_counted_once():
    def mlp(model, x):
        y = model.up(model.norm(x))
        return model.down(tanh_gelu(y)) + y.sum()

    class Checkpointed(Model):
        def forward(self, tokens):
            x = self.embed(tokens)
            x = x + checkpoint(mlp, self, x, use_reentrant=False)
            return self.loss(self.head(self.last(x)), tokens)

    model = Checkpointed(F.silu, flat)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed")
    FUSED.clear()
    APART.clear()
    run.backward(torch.compile(model, fullgraph=True, backend=fused())(torch.randint(0, V, (2, 16))))
    assert FUSED == {OF_LAYER: 1}
    assert APART == {(BETWEEN, "`sum` uses the results of up.weight too"): 1}


def test_the_pass_is_there_once_and_after_one_of_the_users(monkeypatch):
    config = pytest.importorskip("torch._inductor.config")
    seen = []
    for there in (None, fuse, lambda graph: seen.append(graph)):
        with config.patch(pre_grad_custom_pass=there):
            install()
            install()
            made = config.pre_grad_custom_pass
            assert made is fuse if there in (None, fuse) else isinstance(made, Chain) and made.first is there
    graph = torch.fx.symbolic_trace(nn.Identity()).graph
    Chain(seen.append)(graph)
    assert seen == [graph]


def test_a_model_without_a_policy_is_compiled_as_before():
    model = Model(tanh_gelu, flat).bfloat16()
    FUSED.clear()
    APART.clear()
    torch.compile(model, fullgraph=True, backend=fused())(torch.randint(0, V, (2, 16))).backward()
    assert not FUSED
    assert not APART


@pytest.mark.prove
def test_inductor_runs_the_pass(monkeypatch):
    monkeypatch.setattr(mlp, "_has_form", lambda *_: False)
    monkeypatch.setattr(loss_pass, "why_no_kernel", lambda *_: "not here")
    _, _, _, apart = train(F.silu, flat, backend="inductor")
    assert apart == {(OF_LAYER, "not here"): 1, (OF_ROWS, "not here"): 1}
