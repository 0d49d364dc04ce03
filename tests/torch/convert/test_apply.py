"""A policy meets a model: how parameters are held, what is refused, and what is reported."""

import copy

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import BF16, FP32
from halfstep.core.policy import Policy
from halfstep.core.roles import Param
from halfstep.torch.convert.apply import Change, apply, hold, restore, set_precision
from halfstep.torch.layers import CastedLinear
from halfstep.torch.numerics.cast import carried, join, split
from halfstep.torch.numerics.split.operand import is_split
from tests.refusals import refuses
from tests.torch.nets import draw, same

SPLIT = "bf16-mixed,param=fp32:split"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.norm(self.embed(index)))


def applied_to(model, policy, names=None):
    return apply(model, Policy.parse(policy), names)


def test_a_split_master_is_exact_and_the_parameter_keeps_its_identity():
    model = Tied()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    applied = applied_to(model, SPLIT)
    assert {str(p.format) for p in applied.masters.values()} == {"fp32"}
    assert [name for name, p in applied.masters.items() if p.split] == ["embed.weight"]
    for name, p in model.named_parameters():
        old, numbers = before[name]
        assert p is old
        held = join(p, applied.remainders[name]) if name in applied.remainders else p
        assert torch.equal(held, numbers)
    assert (model.embed.weight.dtype, applied.remainders["embed.weight"].dtype) == (torch.bfloat16, torch.int16)
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-mixed,emulate=true; head: compute=fp32"])
def test_a_module_that_computes_in_more_than_bf16_uses_the_whole_master(policy):
    split_policy = policy.replace(";", ",param=fp32:split;") if ";" in policy else policy + ",param=fp32:split"
    one, other = Tied(), Tied()
    applied_to(one, policy), applied_to(other, split_policy)
    index = torch.arange(7)
    assert is_split(other.embed.weight)
    if "emulate" not in policy:
        assert torch.equal(one(index), other(index))
    x = draw(3, 4)
    assert torch.equal(one.head(x), other.head(x))
    narrow = torch.nn.functional.linear(x, other.embed.weight.float())
    assert not torch.equal(one.head(x), narrow.to(one.head(x).dtype))


def test_the_half_is_multiplied_as_it_is_and_sums_the_gradients_of_all_its_uses_in_fp32():
    """On a tie the half differs from the native cast: away from zero, not to even."""
    for policy, product in ((SPLIT, 1 + 2.0**-7), ("bf16-mixed", 1.0)):
        net = nn.Sequential(nn.Linear(1, 1, bias=False))
        net[0].weight.data.fill_(1 + 2.0**-8)
        applied_to(net, policy)
        assert net(torch.ones(1, 1)).item() == product
    model, wide = Tied(), Tied()
    applied_to(model, "fp32,param=fp32:split")
    index = torch.tensor([0, 3, 3, 6])
    for net in (model, wide, model, wide):
        net(index).square().sum().backward()
    assert torch.equal(model.embed.weight.grad, wide.embed.weight.grad)
    assert model.embed.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Conv1d(2, 2, 1), "no kernel sums"),
        (lambda: nn.GRU(2, 2), "no kernel sums"),
        (lambda: nn.EmbeddingBag(3, 2), "bags are summed"),
        (lambda: nn.Embedding(3, 2, sparse=True), "sparse"),
        (lambda: nn.MultiheadAttention(2, 1), "projected by parts"),
        (lambda: nn.Bilinear(2, 2, 2), "used as it is held"),
        (lambda: nn.LayerNorm((2, 2)), "never split"),
        (lambda: nn.ParameterList([torch.zeros(2, 2)]), "used as it is held"),
    ],
    ids=["conv", "gru", "bag", "sparse", "attention", "leaf", "norm", "list"],
)
def test_a_matrix_that_is_used_in_another_way_stays_whole_and_is_listed(make, reason):
    model = nn.ModuleDict({"layer": make(), "linear": nn.Linear(2, 2)})
    applied = applied_to(model, SPLIT)
    assert list(applied.remainders)[-1] == "linear.weight"
    forms = {change.name: change.form for change in applied.changes if change.kind == "Parameter"}
    assert forms
    assert all(name.startswith("layer.") and reason in form for name, form in forms.items())
    for name in forms:
        assert applied.masters[name] == Param(FP32)
        assert model.get_parameter(name).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened_and_listed(dtype):
    model = Tied().to(dtype)
    numbers = model.embed.weight.detach().clone()
    applied = applied_to(model, "bf16-mixed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.embed.weight, numbers.float())
    assert applied.widened == ("embed.weight", "norm.weight", "norm.bias")
    assert applied_to(Tied(), "bf16-mixed").widened == ()
    assert applied_to(Tied().bfloat16(), "bf16-true").widened == ()


def test_fp16_weights_are_not_rounded_to_another_format_and_frozen_ones_stay_as_they_are():
    """Hazard: fp16 parameters are trainable."""
    with refuses(PolicyError, r"`embed.weight` is fp16 and trainable", "param=fp32"):
        applied_to(Tied().half(), "bf16-true")
    assert applied_to(Tied().half(), "fp16-mixed").widened
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].half().requires_grad_(False), model[1].requires_grad_(False)
    applied = applied_to(model, SPLIT)
    assert list(applied.masters) == ["2.weight", "2.bias"]
    assert [layer.weight.dtype for layer in model] == [torch.float16, torch.float32, torch.bfloat16]
    model(draw(2, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad.dtype == torch.float32
    model[2].weight.requires_grad_(False).grad = None  # frozen later
    model(draw(2, 4)).sum().backward()
    assert model[2].weight.grad is None
    assert model[2].bias.grad is not None


def test_odd_parameters_are_left_alone_and_listed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
            self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
            self.register_buffer("table", torch.zeros(3))

        def forward(self, x):
            return self.linear(x) * self.scale + self.phase.abs().sum() + self.none.sum()

    model = Odd()
    applied = applied_to(model, SPLIT)
    assert (model.phase.dtype, model.count.dtype) == (torch.complex64, torch.int64)
    assert model.table.dtype == torch.float32
    assert set(applied.masters) == {"linear.weight", "linear.bias", "scale", "none"}
    forms = {change.name: change.form for change in applied.changes}
    assert forms["phase"] == "left alone: no policy has a format for complex64"
    assert "int64" in forms["count"]
    assert "holds `scale`, `none` itself" in forms[""]
    model(draw(2, 4)).sum().backward()
    assert model.scale.grad.dtype == torch.float32


def test_precision_can_be_set_for_evaluation_and_back_and_weights_held_or_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.PReLU())
    policy = Policy.parse("fp8-mixed,emulate=true")
    apply(model, policy)
    x = draw(3, 4)
    trained, numbers = model(x), model[0].weight.detach().clone()
    assert set_precision(model, policy.evaluation()) == 3
    assert not torch.equal(model(x), trained)
    assert torch.equal(model[0].weight, numbers)
    assert set_precision(model, policy) == 3
    assert torch.equal(model(x), trained)
    wide, policy = draw(4, 4), Policy.parse("bf16-mixed")
    held, remainder = hold(wide, Param(FP32, split=True), policy)
    assert same((held, remainder), split(wide))
    assert hold(wide, Param(FP32), policy) == (wide, None)
    assert hold(wide, Param(BF16), policy)[0].dtype == torch.bfloat16
    emulated = hold(wide, Param(BF16), Policy.parse("bf16-true,emulate=true"))[0]
    assert torch.equal(emulated, carried(wide, BF16))


def test_changes_say_what_each_module_became_and_masters_and_moments_follow_rules():
    parts = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.MSELoss(), nn.PReLU()
    applied = applied_to(nn.Sequential(*parts), "bf16-mixed")
    conv = "its weight gradients leave the kernel in bf16 and are then widened"
    leaf = "runs as written in the dtype of its parameters, bf16 out"
    assert applied.changes == (
        Change("0", "Linear", "multiplies in bf16, weight gradients in fp32"),
        Change("1", "BatchNorm1d", "is an island: fp32 inside, bf16 out"),
        Change("3", "Conv1d", f"computes in bf16; {conv}"),
        Change("4", "MSELoss", "is an island: fp32 inside and out"),
        Change("5", "PReLU", f"is a leaf, it holds `weight` itself: {leaf}"),
    )
    assert applied.modules == 5
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    applied = applied_to(model, "bf16-true,moments=bf16; 1: param=fp32,grad_weight=fp32,moments=fp32")
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert [str(fmt) for fmt in applied.moments.values()] == ["bf16"] * 2 + ["fp32"] * 2
    model = Tied()
    applied_to(model, "bf16-mixed; head: compute=fp32")
    assert model.embed(torch.tensor([1])).dtype == torch.bfloat16
    assert model.head(draw(1, 4)).dtype == torch.float32


def test_modules_whose_attributes_clash_that_are_lazy_or_share_a_matrix():
    class Mine(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.precision = "high"

    net = nn.Sequential(Mine())
    applied_to(net, "bf16-mixed")
    assert (net[0].precision, net(draw(2, 4)).dtype) == ("high", torch.float32)
    model = nn.Sequential(nn.LazyLinear(4))
    model(draw(2, 3))
    applied_to(model, "bf16-mixed")
    assert "bf16 operands" in repr(model)

    class Leaf(nn.Linear):
        def forward(self, x):
            return x @ self.weight

    linear, leaf = nn.Linear(4, 4), Leaf(4, 4, bias=False)
    leaf.weight = linear.weight
    net = nn.Sequential(linear, leaf)
    applied = applied_to(net, SPLIT)
    assert applied.remainders == {}
    assert net(draw(2, 4)).dtype == torch.float32


@pytest.mark.parametrize(
    ("policy", "said", "hint"),
    [
        ("bf16-mixed,compute=e3m2", "e3m2 cannot run on cpu", "emulate=true"),
        ("compute=tf32", "tf32 cannot run on cpu", "emulate=true"),
        ("bf16-mixed,grad=fp32", "keeps the gradient of an activation", "grad=bf16"),
        ("bf16-mixed,param=bf16", "held in bf16", "grad_weight=bf16"),
        ("bf16-mixed; nothing: compute=fp32", "matches none", None),
        ("bf16-mixed,emulate=true; norm: compute=e4m3", "names no matmul", "name the layers that multiply"),
        ("bf16-mixed; head: param=bf16", "it is one tensor", "give both the same `param`"),
        ("bf16-mixed; head: moments=bf16", "it is one tensor", "give both the same `moments`"),
        ("bf16-mixed,buffers=bf16", "not offered", "buffers=fp32"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_and_changes_nothing(policy, said, hint):
    model = Tied()
    first = copy.deepcopy(model)
    with pytest.raises(PolicyError) as caught:
        applied_to(model, policy)
    assert said in caught.value.message
    assert hint is None or hint in caught.value.hint
    assert repr(model) == repr(first)
    assert same(model.parameters(), first.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("make", [Tied, lambda: CastedLinear(4, 4)], ids=["torch's layers", "ours"])
def test_a_prepared_model_is_not_prepared_again(make):
    model = make()
    applied = applied_to(model, "bf16-mixed")
    for again in (model, nn.Sequential(model), copy.deepcopy(model)):
        with refuses(HalfstepError, "has a policy already", "unprepare"):
            applied_to(again, "bf16-mixed")
    restore(applied)
    assert repr(model) == repr(make())
    applied_to(model, "bf16-mixed")


def compiled(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda: torch.compile(Tied(), backend="eager"), "compiled already"),
        (lambda: compiled(Tied()), "compiled already"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")), "`0` is compiled already"),
        (lambda: nn.DataParallel(Tied()), "wrapped by DataParallel"),
    ],
    ids=["compiled", "in place", "a part", "DataParallel"],
)
def test_the_order_is_prepare_compile_wrap(wrap, said):
    with refuses(HalfstepError, said, "prepare, then compile, then wrap"):
        applied_to(wrap(), "bf16-mixed")


@pytest.mark.parametrize(
    ("make", "said", "hint"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), "`0.weight` has no shape yet", "run the model once"),
        (lambda: nn.Linear(2, 2, device="meta"), "`weight` is on the meta device", "load the weights first"),
        (lambda: nn.ReLU(), "no parameters to train", "requires_grad_"),
    ],
    ids=["lazy", "meta", "empty"],
)
def test_a_model_that_cannot_be_prepared_is_refused(make, said, hint):
    with pytest.raises(HalfstepError) as caught:
        applied_to(make(), "bf16-mixed")
    assert said in caught.value.message
    assert hint is None or hint in caught.value.hint


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_script_and_a_rule_for_parameters_that_no_module_holds_are_refused():
    with pytest.raises(PolicyError, match="holds a parameter"):
        applied_to(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "bf16-mixed; 1: param=bf16")
    with pytest.raises(HalfstepError, match="is a TorchScript module"):
        applied_to(torch.jit.script(nn.Linear(2, 2)), "bf16-mixed")


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed; lm_head: compute=fp32"])
def test_the_reference_decoder_is_the_same_function_of_split_masters(policy):
    from halfstep.config.model import ModelConfig
    from halfstep.config.weights import initial_weights
    from halfstep.torch.model import Decoder

    head, semicolon, rules = policy.partition(";")
    config = ModelConfig(
        vocabulary=32, context=8, layers=3, width=16, heads=2, unet_skips=True, embedding_shortcut="channel"
    )
    losses, grads = [], []
    for held in ("", ",param=fp32:split"):
        model = Decoder(config)
        model.set_weights(initial_weights(model.config, 0))
        applied = applied_to(model, f"{head}{held}{semicolon}{rules}", model.module_names())
        index = torch.arange(16).reshape(2, 8)
        losses.append(model.loss(index, index * 3 % 32))
        losses[-1].backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert len(applied.remainders) == sum(p.ndim >= 2 for p in model.parameters())
    assert torch.equal(*losses)
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
