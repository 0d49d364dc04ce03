"""What other packages did to a model or an optimizer: refused with the remedy, or shown for what it is."""

import copy
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.torch.convert.known_packages import routers
from halfstep.torch.run import prepare
from tests.refusals import refuses


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def adamw(given):
    return torch.optim.AdamW(given.parameters(), lr=1e-3)


def refused(given, optimizer=None, policy="bf16-mixed"):
    with pytest.raises(HalfstepError) as caught:
        prepare(given, optimizer or adamw(given), policy)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        ("DistributedDataParallel", "wrapped by DDP", "prepare, then compile, then wrap"),
        ("FullyShardedDataParallel", "wrapped by FSDP1", "use FSDP2"),
        ("FSDPModule", "wrapped by FSDP", "then fully_shard"),
        ("DeepSpeedEngine", "wrapped by DeepSpeed", "prepare(engine.module, ...)"),
    ],
)
def test_a_wrapper_is_known_by_the_name_of_its_class(kind, text, remedy):
    made = type("Mine", (type(kind, (nn.Sequential,), {}),), {})
    error = refused(made(model()))
    assert text in error.message
    assert remedy in error.hint
    inside = nn.Sequential(nn.Linear(8, 8), made(model()))
    assert "`1`" in refused(inside).message


def test_a_real_ddp_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model())
        assert "wrapped by DDP already" in refused(wrapped).message
        del wrapped  # the last to hold the group would wait for gloo's threads, and those for the interpreter
    finally:
        torch.distributed.destroy_process_group()


def decorated(enabled=True):
    """A module with a forward under autocast, as people write it."""

    class Decorated(nn.Sequential):
        @torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        def forward(self, x):
            return self[0](x)

    return Decorated(nn.Linear(8, 8))


def test_a_forward_that_autocast_decorates_is_refused():
    error = refused(decorated())
    assert "decorated by torch.autocast" in error.message
    assert "take the decorator off" in error.hint
    assert "`0`" in refused(nn.Sequential(decorated(), nn.Linear(8, 8))).message
    patched = model()
    patched.forward = torch.autocast("cpu", torch.bfloat16)(patched.forward)
    assert "decorated by torch.autocast" in refused(patched).message
    given = decorated(enabled=False)
    run = prepare(given, adamw(given), "bf16-mixed")
    run.step(lambda x: given(x).square().mean(), [torch.ones(2, 8)])


@pytest.mark.parametrize("bound", [True, False])
def test_a_forward_that_was_replaced_on_the_model_runs_under_the_policy(bound):
    """As TRL's trainers do, which compute the loss of a causal LM from the weight of its head."""
    given = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before, first = given.forward, given[0]

    def fused(self, x):
        return before(x), F.linear(first(x), self[1].weight)

    given.forward = types.MethodType(fused, given) if bound else partial(fused, given)
    replaced = given.forward
    run = prepare(given, adamw(given), "bf16-mixed")
    reached = run.coverage(lambda x: given(x)[1].square().mean(), torch.ones(2, 8))
    assert "linear" in str(reached)  # its own product is in bf16 too
    run.step(lambda x: given(x)[1].float().square().mean(), [torch.ones(2, 8)])
    assert int(run.num_applied) == 1
    assert copy.deepcopy(given)(torch.ones(2, 8))[0].shape == (2, 4)
    assert run.unprepare() is given
    assert given.forward == replaced
    assert type(given) is nn.Sequential


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    state = accelerate.state.AcceleratorState

    def make(precision):
        state._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(mixed_precision=precision, cpu=True)

    yield make
    state._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_prepared_is_refused_and_the_remedy_works(accelerator):
    accelerate = accelerator("bf16")
    given = model()
    first = adamw(given)
    ours, optimizer = accelerate.prepare(given, first)
    error = refused(ours, first)
    assert "prepared by Accelerate already" in error.message
    assert "accelerator.unwrap_model(model, keep_fp32_wrapper=False)" in error.hint
    again = accelerate.unwrap_model(ours, keep_fp32_wrapper=False)
    error = refused(again, optimizer)
    assert "the optimizer was prepared by Accelerate already" in error.message
    assert "`optimizer.optimizer`" in error.hint
    run = prepare(again, optimizer.optimizer, "bf16-mixed")
    seen = []
    again[0].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    result = run.step(lambda x: again(x).square().mean(), [torch.ones(2, 8)])
    assert (seen, result.loss.dtype) == ([torch.bfloat16], torch.float32)
    assert "forward" in run.unprepare().__dict__  # where Accelerate had left it
    given = model()
    ours, optimizer = accelerator("no").prepare(given, adamw(given))
    assert "Accelerate" in refused(ours, optimizer).message
    prepare(ours, optimizer.optimizer, "bf16-mixed")


class Float8Linear(nn.Linear):
    """A stand-in for the one of torchao: a linear layer that rounds its operands itself."""

    def __init__(self, *args):
        super().__init__(*args)
        self.config = "Float8LinearConfig(cast_config_input=e4m3)"

    def forward(self, x):
        self.seen = (x.dtype, self.weight.dtype)
        return F.linear(x, self.weight, self.bias)


Float8Linear.__module__ = "torchao.float8.float8_linear"


class Inner(nn.Linear):
    pass


class LayerNormMLP(nn.Module):
    """A stand-in for a layer of Transformer Engine, which has parts."""

    def __init__(self):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.eye(8)), Inner(8, 8)
        self.fp8_meta = {"recipe": "DelayedScaling(margin=0, format=HYBRID)"}

    def forward(self, x):
        self.seen = self.part(x).dtype
        return F.softmax(F.linear(self.part(x), self.weight), -1)


LayerNormMLP.__module__ = "transformer_engine.pytorch.module.layernorm_mlp"


@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "fp8-mixed,emulate=true"])
def test_layers_with_recipes_of_their_own_are_leaves_and_listed(policy):
    torch.manual_seed(0)
    first, second = Float8Linear(8, 8), LayerNormMLP()
    theirs = copy.deepcopy((first, second))
    given = nn.Sequential(first, second, nn.Linear(8, 8))
    run = prepare(given, adamw(given), policy)
    x = torch.randn(2, 8).bfloat16()
    given(x)
    assert first.seen == (torch.float32, torch.float32)
    assert second.seen == torch.float32
    assert type(second.part) is Inner
    assert first.weight.dtype == second.weight.dtype == second.part.weight.dtype == torch.float32
    dtype = torch.float32 if "emulate" in policy else torch.bfloat16
    assert first(x).dtype == second(x.to(dtype)).dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(second(x), theirs[1](x.float()).bfloat16())  # nothing in it was reached
        assert torch.equal(first(x), theirs[0](x.float()).bfloat16())
    forms = {change.name: change.form for change in run.conversion.changes}
    assert forms["0"].startswith("is torchao's, with Float8LinearConfig(cast_config_input=e4m3): runs as written")
    assert forms["1"].startswith("is Transformer Engine's, with DelayedScaling(margin=0, format=HYBRID): runs as")
    assert "torchao's, with Float8LinearConfig" in run.summary()


def test_a_recipe_of_a_context_is_shown_as_that_and_a_rule_for_such_a_layer_alone_is_refused():
    second = LayerNormMLP()
    second.fp8_meta = {}
    given = nn.Sequential(second, nn.Linear(8, 8))
    run = prepare(given, adamw(given), "bf16-mixed")
    assert "with the recipe of its own context" in run.summary()
    given = nn.Sequential(Float8Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(PolicyError, match="names no matmul"):
        prepare(given, adamw(given), "bf16-mixed,emulate=true; 0: compute=e4m3")


class Quantized(torch.Tensor):
    """A stand-in for a weight of 8-bit numbers: it knows `F.linear`, and nothing else that multiplies."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = (a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args)
            return F.linear(x, weight.mul(16).round() / 16, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized(requires_grad):
    given = model()
    weight = given[0].weight.detach().as_subclass(Quantized)
    given[0].weight = nn.Parameter(weight, requires_grad=requires_grad)
    assert type(given[0].weight.data) is Quantized
    return given


def test_a_layer_with_a_weight_that_multiplies_by_itself_is_a_leaf_and_is_not_trained():
    """Hazard: a frozen base in 8 bits. A layer of ours would take its weight for a plain matrix."""
    given, x = quantized(False), torch.randn(4, 8)
    theirs = given[0](x).bfloat16()
    run = prepare(given, adamw(given), "bf16-mixed")
    assert torch.equal(given[0](x), theirs)
    text = "is a leaf, it holds `weight`, of the class Quantized, which multiplies by itself: runs as written"
    assert text in run.summary()
    assert not bool(run.step(lambda x: given(x).square().mean(), [x]).skipped)
    assert type(given[0].weight.data) is Quantized
    error = refused(quantized(True))
    assert "`0.weight` is trained, and its class Quantized rounds by its own rules" in error.message
    assert "requires_grad_(False)" in error.hint


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("tensorwise", "input e4m3 {0}, weight e4m3 {0}, grad_output e5m2 {0}".format("dynamic tensorwise")),
        (
            "rowwise_with_gw_hp",
            "input e4m3 dynamic axiswise, weight e4m3 dynamic axiswise, grad_output e4m3 dynamic axiswise, "
            "input for grad_weight wide, weight for grad_input e4m3 dynamic tensorwise, "
            "grad_output for grad_weight wide",
        ),
    ],
)
def test_layers_of_torchao_are_leaves_whose_recipe_is_shown(torchao, recipe, text):
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(given, config=config, module_filter_fn=lambda _, name: name == "0")
    kind, theirs = type(given[0]), copy.deepcopy(given[0])
    run = prepare(given, adamw(given), "bf16-mixed,param=fp32:split")
    assert f"1 Float8Linear (0): is torchao's, with {text}, emulated: runs as written" in run.summary()
    assert "fp8" not in str(run.conversion.masters["0.weight"])
    x = torch.randn(16, 32).bfloat16()
    assert torch.equal(given[0](x), theirs(x.float()).bfloat16())
    assert not bool(run.step(lambda x: given(x).square().mean(), [x]).skipped)
    assert type(run.unprepare()[0]) is kind


def test_a_base_that_torchao_quantized_is_left_to_it(torchao):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    given[0].requires_grad_(False)
    quantize_(given[0], Int8WeightOnlyConfig())
    theirs = copy.deepcopy(given[0])
    run = prepare(given, adamw(given), "bf16-mixed")
    x = torch.randn(16, 32)
    assert torch.equal(given[0](x), theirs(x).bfloat16())
    assert "holds `weight`, of the class Int8Tensor, which multiplies by itself" in run.summary()
    assert not bool(run.step(lambda x: given(x).square().mean(), [x]).skipped)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_what_fabric_set_up_is_refused_and_the_remedy_works(precision):
    lightning = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    given = model()
    first = adamw(given)
    wrapped, optimizer = fabric.setup(given, first)
    error = refused(wrapped, first)
    assert "the model, a _FabricModule, is set up by Fabric already" in error.message
    assert "prepare(model.module, ...)" in error.hint
    assert "`0` is set up by Fabric" in refused(nn.Sequential(wrapped), first).message
    error = refused(wrapped.module, optimizer)
    assert "the optimizer was prepared by Fabric already" in error.message
    assert "`optimizer.optimizer`" in error.hint
    run = prepare(wrapped.module, optimizer.optimizer, "bf16-mixed")
    assert not bool(run.step(lambda x: given(x).square().mean(), [torch.ones(2, 8)]).skipped)
    if precision == "bf16-mixed":  # code that still calls the wrapper is refused
        with pytest.raises(HalfstepError, match=r"under torch\.autocast"):
            wrapped(torch.ones(2, 8))


def test_routers_are_known_by_class_and_by_place():
    TopKRouter = type("TopKRouter", (nn.ModuleDict,), {})

    class Block(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.gate, self.gate_proj, self.experts = inside, nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    gated = nn.ModuleDict({"gate": nn.Linear(4, 4)})  # no experts: an ordinary gate
    given = nn.ModuleDict(
        {"a": Block(nn.Linear(4, 2)), "b": Block(TopKRouter({"layer": nn.Linear(4, 2)})), "c": gated}
    )
    assert routers(given) == {"a.gate", "b.gate", "b.gate.layer"}


@pytest.mark.parametrize("policy", ["bf16-mixed,router=bf16", "bf16-mixed; **: router=bf16"])
def test_a_router_in_bf16_is_refused(policy):
    given = model()
    with refuses(PolicyError, "router=bf16", "router=fp32"):
        prepare(given, adamw(given), policy)
