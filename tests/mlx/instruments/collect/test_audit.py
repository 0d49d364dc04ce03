"""`halfstep.mlx.audit`: each planted fault of a model of eight layers is named, and nothing else is."""

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.mlx import audit, prepare
from halfstep.mlx.session import Session, _sum_and_count
from tests.refusals import refuses

WIDTH, WORDS = 8, 11


class HandNorm(nn.Module):
    """A norm that somebody wrote: it computes in the dtype of its input, unless it widens it."""

    def __init__(self, widens):
        super().__init__()
        self.weight, self.widens = mx.ones((WIDTH,)), widens

    def __call__(self, x):
        y = x.astype(mx.float32) if self.widens else x
        y = y * mx.rsqrt((y * y).mean(axis=-1, keepdims=True) + 1e-6)
        return (y * self.weight.astype(y.dtype)).astype(x.dtype)


class Island(nn.RMSNorm):
    """Fp32 inside, its input's dtype out."""

    def __call__(self, x):
        return super().__call__(x.astype(mx.float32)).astype(x.dtype)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_a, self.lora_b = mx.random.normal((WIDTH, 4)), mx.random.normal((4, WIDTH))

    def __call__(self, x):
        return (x @ self.lora_a.astype(x.dtype)) @ self.lora_b.astype(x.dtype)


class Experts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.router, self.up, self.dtype = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WIDTH), dtype

    def __call__(self, x):
        shares = mx.softmax(self.router(x.astype(self.dtype)).astype(mx.float32), axis=-1)
        return cast_linear(self.up, x) * shares.max(axis=-1, keepdims=True).astype(x.dtype)


def cast_linear(layer, x):
    return mx.addmm(layer.bias.astype(x.dtype), x, layer.weight.astype(x.dtype).T)


class Block(nn.Module):
    """Computes in bf16 with fp32 weights, as one would write it by hand."""

    def __init__(self, norm=None, middle=None):
        super().__init__()
        self.norm = norm or Island(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.middle = middle

    def __call__(self, x):
        y = nn.relu(cast_linear(self.up, self.norm(x)))
        return x + (y if self.middle is None else self.middle(y))


class Model(nn.Module):
    def __init__(self, planted=None, at=5):
        super().__init__()
        mx.random.seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = [(planted if planted and i == at else Block)() for i in range(8)]
        self.final = Island(WIDTH)

    def __call__(self, tokens):
        x = self.embed(tokens).astype(mx.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.final(x) @ self.embed.weight.astype(mx.bfloat16).T


def loss_fn(model, tokens):
    return nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:], reduction="mean")


TOKENS = mx.array(np.random.default_rng(0).integers(0, WORDS, (4, 7)))


def found(model, optimizer=None, loss=loss_fn, steps=1, **options):
    return {
        (f.rule, name)
        for f in audit(model, optimizer or optimizers.AdamW(1e-3), loss, TOKENS, steps=steps, **options)
        for name in f.where or [""]
    }


class Mixing(nn.Module):
    def __init__(self, precise):
        super().__init__()
        self.precise = precise

    def __call__(self, x):
        return mx.softmax(x @ x.swapaxes(-1, -2), axis=-1, precise=self.precise) @ x


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (Block, set()),
        (lambda: Block(HandNorm(widens=False)), {("HS401", "blocks.5.norm")}),
        (lambda: Block(HandNorm(widens=True)), set()),
        (lambda: Block(middle=Mixing(precise=False)), {("HS402", "blocks.5.middle")}),
        (lambda: Block(middle=Mixing(precise=True)), set()),
        (lambda: Block(middle=Experts(mx.float32)), set()),
        (lambda: Block(middle=LoRA()), set()),
    ],
)
def test_a_part_in_bf16_is_named_and_its_widened_twin_is_not(planted, named):
    assert found(Model(planted)) == named


def narrow(model, *paths):
    for path in paths:
        module = model
        for part in path.split("."):
            module = module[int(part)] if isinstance(module, list) else module[part]
        module.set_dtype(mx.bfloat16)
    return model


def test_weights_without_a_master_are_named_with_what_they_lost():
    model = narrow(Model(), "blocks.5.up")
    findings = audit(model, optimizers.AdamW(1e-5, weight_decay=0.1), loss_fn, TOKENS, steps=3)
    both = ["blocks.5.up.bias", "blocks.5.up.weight"]
    assert {f.rule: sorted(f.where) for f in findings} == dict.fromkeys(("HS101", "HS102", "HS104"), both)
    lost = next(f for f in findings if f.rule == "HS101")
    assert lost.each["blocks.5.up.weight"]["lost_share"] > 0.5
    assert lost.confidence == "certain"
    assert f"{lost.evidence['lost_share']:.1%} of its intended updates were lost" in lost.message


def test_what_was_counted_as_lost_is_what_did_not_move():
    """Against a plain loop: elements of bf16 weights at 1 that AdamW should have moved by the rate."""
    model = narrow(Model(), "blocks.2.up")
    model.blocks[2].up.weight = mx.ones((WIDTH, WIDTH), mx.bfloat16)
    (finding,) = audit(model, optimizers.AdamW(1e-4), loss_fn, TOKENS, select=["HS101"], steps=3)
    weight = finding.each["blocks.2.up.weight"]
    assert weight["lost"] == weight["updates"] > 0
    assert weight["arrived"] == 0


def test_an_optimizer_that_mixes_elements_makes_a_weaker_finding():
    model = narrow(Model(), "blocks.5.up")
    findings = audit(model, optimizers.Adafactor(1e-3), loss_fn, TOKENS, steps=1, select=["HS101"])
    assert {f.confidence for f in findings} == {"weak"}


def test_an_adapter_that_never_moves_is_named():
    model = narrow(Model(lambda: Block(middle=LoRA())), "blocks.5.middle")
    model.blocks[5].middle.lora_a = mx.ones((WIDTH, 4), mx.bfloat16)
    still = found(model, optimizers.AdamW(1e-4, weight_decay=0.0), steps=3, select=["HS103"])
    assert still == {("HS103", "blocks.5.middle.lora_a")}


def test_one_norm_with_bf16_gains_is_named():
    class Bare(nn.RMSNorm):
        pass

    model = narrow(Model(lambda: Block(Bare(WIDTH))), "blocks.5.norm")
    assert found(model, select=["HS4"]) == {("HS401", "blocks.5.norm")}


def test_a_gain_in_fp32_that_promotes_is_named_with_the_matmuls_after_it():
    class Plain(Block):
        def __call__(self, x):
            return x + nn.relu(self.up(self.norm(x)))

    class All(Model):
        def __init__(self, promotes):
            super().__init__()
            self.blocks = [Plain(nn.RMSNorm(WIDTH)) for _ in range(8)]
            self.set_dtype(mx.bfloat16)
            if promotes:
                self.blocks[2].norm.set_dtype(mx.float32)

    (finding,) = audit(All(True), optimizers.AdamW(1e-3), loss_fn, TOKENS, steps=1, select=["HS406"])
    assert finding.where == ["blocks.2.norm", *(f"blocks.{i}.up" for i in range(2, 8))]
    assert "`blocks.2.norm` was given narrow numbers and returned fp32" in finding.message
    assert found(All(False), select=["HS4"]) == set()


def test_a_router_in_bf16_is_named():
    model = narrow(Model(lambda: Block(middle=Experts(mx.bfloat16))), "blocks.5.middle.router")
    assert found(model, select=["HS4"]) == {("HS403", "blocks.5.middle.router")}


def test_a_loss_in_bf16_is_named():
    def narrow_loss(model, tokens):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    assert found(Model(), loss=narrow_loss) == {("HS404", "")}


def test_activations_that_overflow_are_named():
    class Large(nn.Module):
        def __call__(self, x):
            return ((x.astype(mx.float16) + 1) * 6e4 * 6e4).astype(x.dtype)

    names = found(Model(lambda: Block(middle=Large())), select=["HS409"])
    assert names == {("HS409", "blocks.5.middle")}  # what comes after it was given infinities


def test_everything_is_as_it_was_afterwards():
    model, optimizer = Model(), optimizers.AdamW(1e-3)
    classes = [type(module) for module in model.modules()]
    functions = mx.softmax, mx.array.__matmul__, nn.losses.cross_entropy
    before = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    state, key = optimizer.state, np.array(mx.random.state[0])
    audit(model, optimizer, loss_fn, TOKENS, steps=2)
    assert all(np.array_equal(before[name], array) for name, array in tree_flatten(model.parameters()))
    assert optimizer.state is state
    assert sorted(state) == ["learning_rate", "step"]
    assert state["step"].item() == 0
    assert np.array_equal(key, mx.random.state[0])
    assert [type(module) for module in model.modules()] == classes
    assert (mx.softmax, mx.array.__matmul__, nn.losses.cross_entropy) == functions


def test_misuse_is_refused():
    run = prepare(Model(), optimizers.SGD(0.1), "bf16-mixed")
    for given, steps, said, hint in (
        ((Model(), None), 1, "an audit takes a model and an optimizer of MLX", "optimizer"),
        ((Model(), optimizers.SGD(0.1)), 0, "at least one update", "10"),
        ((run.model, run.optimizer), 1, "a run has this optimizer", "run.audit"),
    ):
        with refuses(HalfstepError, said, hint):
            audit(*given, loss_fn, TOKENS, steps=steps)


# --- prepared runs

SMALL = ["model.context=16", "model.layers=2", "model.width=16", "model.heads=2", "training.compile=false"]
SMALL += ["training.batch=2", "training.micro_batches=1"]


@pytest.mark.parametrize(
    "policy",
    ["bf16-mixed"]
    + [
        pytest.param(policy, marks=pytest.mark.prove)
        for policy in ("fp32", "bf16-mixed,param=fp32:split", "fp16-mixed,emulate=true", "fp8-mixed,emulate=true")
    ],
)
@pytest.mark.parametrize("recipe", ["tiny", "gpt2", "qwen3", "speedrun", "golf"])
def test_our_recipes_have_no_finding(recipe, policy):
    extra = {
        "qwen3": ["model.kv_heads=1", "model.head_width=8", "model.mlp_width=32"],
        "golf": ["model.kv_heads=1"],
    }.get(recipe, [])
    config = load(recipe, [*SMALL, *extra, "model.vocabulary=64", "data.source=stdlib"])
    s = Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0)
    before = {name: np.array(array.astype(mx.float32)) for name, array in s.run.state_dict().items()}
    tokens = mx.array(np.random.default_rng(0).integers(0, 64, (2, 17)))
    assert s.run.audit(loss_fn=_sum_and_count, batch=tokens, steps=2) == []
    after = {name: np.array(array.astype(mx.float32)) for name, array in s.run.state_dict().items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_policy_without_masters_is_named_by_tensor():
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(8)))
    run = prepare(
        model, optimizers.AdamW(1e-5), "bf16-mixed; layers.5.**: param=bf16; layers.2.layers.0: norm=bf16"
    )
    findings = run.audit(loss_fn=lambda model, x: mx.square(model(x)).mean(), batch=mx.ones((2, WIDTH)), steps=2)
    weights = {f"layers.5.layers.{name}" for name in ("0.weight", "1.weight", "1.bias")}
    (lost,) = [f for f in findings if f.rule == "HS101"]
    assert set(lost.where) == weights
    assert [f.where for f in findings if f.rule == "HS401"] == [["layers.2.layers.0"]]
    assert lost.each["layers.5.layers.0.weight"]["lost_share"] == 1
    assert {f.rule for f in run.audit()} >= {"HS101", "HS401"}  # known without a step
