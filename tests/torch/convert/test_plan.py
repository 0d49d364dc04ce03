"""Third-party models: what their modules become, and the model as a whole."""

import inspect

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply, restore
from halfstep.torch.convert.modules import ISLANDS, KINDS
from halfstep.torch.layers import Layer
from halfstep.torch.numerics.cast import carried, join
from halfstep.torch.numerics.split.writes import note_write
from tests.torch.nets import Net, draw, same, within


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias)


class Named(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.note = "mine"

    def extra_repr(self):
        return f"note={self.note}"


class Gamma(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, scale=None):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype) * (1.0 if scale is None else scale)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (x * self.log.exp()).square().mean()


def test_subclasses_leaves_shared_modules_and_hooks():
    layer = within(Named(4, 4), "bf16-mixed")
    assert isinstance(layer, Named)
    assert layer(draw(2, 4)).dtype == torch.bfloat16
    assert "note=mine" in repr(layer)
    assert "bf16 operands" in repr(layer)
    layer = within(Scaled(4, 4).bfloat16().requires_grad_(False), "bf16-mixed")
    assert (layer.weight.dtype, layer(draw(2, 4).bfloat16()).dtype) == (torch.bfloat16, torch.bfloat16)
    assert within(Temperature(), "fp16-mixed")(draw(2, 4).half()).dtype == torch.float32
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    applied = apply(net, Policy.parse("bf16-mixed,param=fp32:split"))
    assert (applied.modules, list(applied.masters)) == (1, ["0.weight", "0.bias"])
    net(draw(2, 4)).sum().backward()
    assert net[2].weight.grad.dtype == torch.float32
    net = Net(nn.Linear(4, 4))
    seen = []
    net.layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    apply(net, Policy.parse("bf16-mixed"))
    net(draw(2, 4))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda: Scaled(4, 4), (draw(2, 4),)),
        (lambda: Gamma(4), (draw(2, 4),)),
        (lambda: nn.PReLU(4), (draw(2, 4),)),
        (lambda: nn.Bilinear(4, 4, 3), (draw(2, 4), draw(2, 4, seed=1))),
        (lambda: nn.GRUCell(4, 4), (draw(2, 4),)),
    ],
    ids=["forward of its own", "gain", "prelu", "bilinear", "cell"],
)
def test_a_leaf_runs_as_written_in_fp32_and_gives_compute(make, arguments):
    torch.manual_seed(0)
    module = make()
    layer = within(module, "bf16-mixed")
    narrow = [x.bfloat16() for x in arguments]
    y = layer(*narrow)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, module(*(x.float() for x in narrow)).bfloat16())
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    assert "as written, bf16 out" in repr(layer)


def test_a_gain_that_promotes_does_not_promote_the_stream_and_leaves_are_listed():
    """Hazard: fp32 gains promote; attention then refuses q and k of another dtype than v."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.norm = nn.Linear(8, 24), Gamma(8)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)

    block = within(Block(), "bf16-mixed")
    assert block(draw(2, 3, 8)).dtype == torch.bfloat16
    net = nn.Sequential(Scaled(4, 4), Gamma(4), nn.Linear(4, 4))
    net[2].forward = lambda x: x
    forms = {change.name: change.form for change in apply(net, Policy.parse("bf16-mixed")).changes}
    assert "a forward of its own, not that of nn.Linear" in forms["0"]
    assert "holds `weight` itself" in forms["1"]
    assert "replaced" in forms["2"]
    assert type(net[2]) is nn.Linear


def test_parametrized_weights_and_adapters_of_a_narrow_base_have_fp32_gradients():
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    layer = within(linear, "bf16-mixed,param=fp32:split")
    plain = nn.Linear(4, 4)
    plain.weight.data, plain.bias.data = linear.weight.detach(), linear.bias.detach()
    plain = within(plain, "bf16-mixed")
    x, g = draw(8, 4), draw(8, 4, seed=1).bfloat16()
    y = layer(x)
    assert torch.equal(y, plain(x))
    y.backward(g), plain(x).backward(g)
    # The weight's own gradient was not rounded on its way to what it is made of.
    linear.weight.backward(plain.weight.grad)
    made_of = (module.parametrizations.parameters() for module in (layer, linear))
    for ours, theirs in zip(*made_of, strict=True):
        assert ours.dtype == ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad)

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    base = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    net = Adapter(base)
    applied = apply(net, Policy.parse("bf16-mixed"))
    net(draw(3, 4)).sum().backward()
    assert base.weight.dtype == torch.bfloat16
    assert base.weight.grad is None
    assert set(applied.masters) == {"a.weight", "b.weight"}
    assert net.a.weight.grad.dtype == torch.float32


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(11, 8), nn.Parameter(torch.zeros(6, 8))
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.batch, self.rms = nn.BatchNorm1d(8), nn.RMSNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.own, self.gate, self.head = Gamma(8), nn.Softmax(-1), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, index, targets):
        x = self.embed(index) + self.pos
        x = x + self.batch(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        x = x + self.attention(self.rms(x), x, x, need_weights=False)[0]
        x = self.own(self.block(x)) * self.gate(x)
        return self.loss(self.head(x).flatten(0, 1), targets.flatten())


def tokens():
    return torch.arange(12).reshape(2, 6) % 11, torch.arange(12).reshape(2, 6) * 5 % 11


def everything():
    torch.manual_seed(0)
    return Everything()


@pytest.mark.prove
def test_what_compiled_whole_before_does_after_and_not_anew_when_masters_change():
    model = everything()
    apply(model, Policy.parse("bf16-mixed,param=fp32:split"))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tokens()), model(*tokens()))
    model = nn.Sequential(nn.Linear(4, 4))
    applied = apply(model, Policy.parse("fp16-mixed,param=fp32:split"))
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counted)
    x = draw(2, 4)
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
        with torch.no_grad():
            model[0].weight.add_(1.0)
            applied.remainders["0.weight"].add_(1)
            note_write(model[0].weight)
        model.zero_grad()
    assert counted.frame_count == 1


@pytest.mark.prove
@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
def test_compiled_gradients_are_those_of_eager_code(held):
    """Hazards: an fp32 region inside autocast runs its backward in bf16 when compiled; and torch.compile does not
    know `grad_dtype`: the gradient of a half is rounded there, and only its dtype looks right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11), nn.LogSoftmax(-1))
    model[2].weight = model[0].weight
    apply(model, Policy.parse(f"bf16-mixed{held}"))
    index, g = torch.arange(40) % 11, draw(40, 11)
    model(index).backward(g)
    eager = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(index).backward(g)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        # the order of sums is open
        assert ((p.grad - eager[name]).abs() <= 40 * 2.0**-23 * eager[name].abs().max()).all(), name
    assert not torch.equal(model[0].weight.grad, carried(model[0].weight.grad, BF16))


def test_a_model_is_within_its_roundings_of_fp32_and_prints_the_truth():
    wide, model = everything(), everything()
    apply(model, Policy.parse("bf16-mixed"))
    loss, theirs = model(*tokens()), wide(*tokens())
    # logits of order one, each the end of some twenty roundings of u
    assert abs(float((loss - theirs).detach())) <= 20 * BF16.epsilon / 2
    model = everything()
    apply(model, Policy.parse("fp8-mixed,emulate=true,norm=bf16; conv: compute=fp32"))
    text = repr(model)
    assert "Linear(in_features=8, out_features=16, bias=True, e4m3 operands emulated)" in text
    assert "Conv1d(8, 8, kernel_size=(3,), stride=(1,), padding=(1,), fp32 operands)" in text
    assert "RMSNorm((8,), eps=None, elementwise_affine=True, bf16 inside, bf16 out)" in text
    assert "Softmax(dim=-1, fp32 inside, bf16 out)" in text
    assert "e4m3 operands emulated, fp32 softmax" in text
    assert "CrossEntropyLoss(fp32 inside, fp32 out)" in text


def test_restoring_gives_the_model_back_bit_for_bit():
    model, first = everything(), everything()
    text = repr(first)
    applied = apply(model, Policy.parse("bf16-mixed,param=fp32:split"))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    assert repr(model) != text
    restore(applied)
    for name, p in model.named_parameters():
        if name in applied.remainders:
            p.data = join(p.data, applied.remainders[name])
        assert not p.__dict__
    assert repr(model) == text
    for mine, module in zip(model.modules(), first.modules(), strict=True):
        assert (type(mine), sorted(mine.__dict__)) == (type(module), sorted(module.__dict__))
    assert list(model.state_dict()) == list(first.state_dict())
    assert same(model.state_dict().values(), first.state_dict().values())
    assert torch.equal(model(*tokens()), first(*tokens()))
    apply(model, Policy.parse("bf16-mixed"))


def test_a_state_dict_has_the_masters_and_loads_them():
    first, model = everything(), everything()
    applied = apply(model, Policy.parse("bf16-mixed,param=fp32:split"))
    state = first.state_dict()
    other = {n: value * 1.7 if value.is_floating_point() else value for n, value in state.items()}
    for given in (state, other):
        if given is other:
            model.load_state_dict(other)
        assert list(model.state_dict()) == list(given)
        assert same(model.state_dict().values(), given.values())
    assert torch.equal(join(model.head.weight, applied.remainders["embed.weight"]), other["head.weight"])
    assert model.embed.weight.dtype == torch.bfloat16
    with pytest.raises(HalfstepError, match=r"assign=True.*half of a split master"):
        model.load_state_dict(other, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other, "embed.weight": torch.zeros(3, 3)})


def test_what_a_model_returns_is_in_the_loss_format_and_every_kind_of_module_is_known():
    class Two(nn.Sequential):
        def forward(self, x, *, flag: bool = True) -> dict:
            y = self[0](x)
            return {"logits": y, "all": [y, (y, 3)], "loss": y.mean(), "index": torch.arange(2)}

    model, before = Two(nn.Linear(4, 4)), inspect.signature(Two.forward)
    apply(model, Policy.parse("bf16-mixed"))
    out = model(draw(2, 4), flag=True)
    outputs = [out["logits"], out["all"][0], out["all"][1][0]]
    assert {(y.dtype, (y + 1).dtype) for y in outputs} == {(torch.bfloat16, torch.float32)}  # beside a loss
    assert out["loss"].dtype == torch.bfloat16  # a loss of narrow logits does not look like fp32
    assert out["index"].dtype == torch.int64
    assert inspect.signature(type(model).forward) == before
    assert isinstance(model, Two)
    losses = {c for c in vars(nn.modules.loss).values() if isinstance(c, type) and c.__name__.endswith("Loss")}
    unknown = {c.__name__ for c in losses - ISLANDS.keys() if not c.__name__.startswith("_")}
    # holds its own matrix, so it is a leaf, in fp32
    assert unknown <= {"LinearCrossEntropyLoss"}
    assert all(issubclass(kind, Layer) for kind in KINDS.values())
    alone = nn.Sequential(nn.Linear(4, 4))
    apply(alone, Policy.parse("bf16-mixed"))
    assert (alone(draw(2, 4)).dtype, type(alone(draw(2, 4)))) == (torch.float32, Tensor)


def test_autocast_around_a_model_with_a_policy_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(HalfstepError, match="autocast"):
        apply(model, Policy.parse("bf16-mixed"))
    apply(model, Policy.parse("bf16-mixed"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(HalfstepError, match="autocast") as caught:
        model(draw(2, 4))
    assert "leave torch.autocast out" in caught.value.hint
