"""`halfstep.jax.audit` on third-party trainings: what is planted is named, and what is right is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep.jax
from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.audit import engine
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.jax.instruments.collect.record import record_of
from halfstep.jax.model import Decoder
from halfstep.jax.optim.optimizers import build_optimizers
from tests.jax.instruments.collect.models import loss_of, parameters, tokens

ADAMW = optax.adamw(1e-5, weight_decay=0.1)


def found(findings):
    return {(finding.rule, *finding.where) for finding in findings}


def linear(params, batch):
    return jnp.mean(jnp.square((batch @ params["up"]["kernel"]).astype(jnp.float32)))


def test_lost_updates_and_decay_are_counted_by_the_optimizer_itself():
    kernel = jnp.full((4, 4), 1.0, jnp.bfloat16)
    record = record_of(linear, {"up": {"kernel": kernel}}, jnp.ones((2, 4), jnp.bfloat16), ADAMW, steps=2)
    [weight] = record.weights
    counts = weight.updates
    assert (weight.name, weight.format, weight.master) == ("up.kernel", "bf16", None)
    assert weight.moments == {"0.mu": "bf16", "0.nu": "bf16"}
    assert (counts.intended, counts.lost, counts.decay_intended, counts.decay_lost) == (32, 32, 32, 32)
    assert (counts.moved, counts.applied_fraction) == (False, 0.0)
    findings = halfstep.jax.audit(
        linear, {"up": {"kernel": kernel}}, jnp.ones((2, 4), jnp.bfloat16), ADAMW, steps=2
    )
    assert found(findings) >= {("HS101", "up.kernel"), ("HS102", "up.kernel"), ("HS104", "up.kernel")}


def test_fp32_weights_lose_nothing_and_the_arrays_passed_stay():
    params = {"up": {"kernel": jnp.full((4, 4), 1.0)}}
    before = np.array(params["up"]["kernel"])
    record = record_of(linear, params, jnp.ones((2, 4)), ADAMW, steps=2)
    counts = record.weights[0].updates
    assert (counts.intended, counts.lost, counts.moved) == (32, 0, True)
    assert counts.applied_fraction == pytest.approx(1, abs=2**-24 / 1e-5)  # half an ulp of 1 in an update of 1e-5
    assert np.array_equal(params["up"]["kernel"], before)


def test_what_an_optimizer_does_not_step_is_not_trained():
    frozen = optax.multi_transform(
        {"train": ADAMW, "keep": optax.set_to_zero()}, {"up": {"kernel": "keep", "bias": "train"}}
    )
    params = {"up": {"kernel": jnp.ones((4, 4), jnp.bfloat16), "bias": jnp.zeros(4)}}

    def loss(params, batch):
        return jnp.mean(jnp.square(batch @ params["up"]["kernel"] + params["up"]["bias"]))

    record = record_of(loss, params, jnp.ones((2, 4), jnp.bfloat16), frozen, steps=1)
    assert {w.name: w.trainable for w in record.weights} == {"up.kernel": False, "up.bias": True}


def test_masters_in_the_state_of_an_optimizer_are_seen():
    def init(params):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return wide, ADAMW.init(wide)

    def update(grads, state, params):
        wide, inner = state
        updates, inner = ADAMW.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), inner, wide)
        wide = optax.apply_updates(wide, updates)
        moved = jax.tree.map(lambda w, p: w - p.astype(jnp.float32), wide, params)
        return moved, (wide, inner)

    params = {"up": {"kernel": jax.random.normal(jax.random.key(0), (4, 4)).astype(jnp.bfloat16)}}
    record = record_of(linear, params, jnp.ones((2, 4), jnp.bfloat16), optax.GradientTransformation(init, update))
    assert record.weights[0].master == "fp32"
    assert set(record.weights[0].moments.values()) == {"fp32"}


def test_an_optimizer_that_refuses_fp64_is_judged_in_fp32_and_its_sums_are_seen():
    params = {"up": {"kernel": jnp.ones((4, 4), jnp.bfloat16)}}
    optimizer = optax.MultiSteps(optax.sgd(1e-9), 2)
    record = record_of(linear, params, jnp.ones((2, 4), jnp.bfloat16), optimizer, steps=2)
    counts = record.weights[0].updates
    assert (counts.intended, counts.lost) == (16, 16)  # of two calls one steps
    assert [op.inside for op in record.operations if op.kind == "accumulation"] == ["fp32"]
    assert record.weights[0].moments == {}
    assert any("refuses" in text for text in record.unseen)


@pytest.mark.prove
def test_a_model_of_equinox_is_audited_with_the_functions_in_it():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))  # fields are not in the order of their names

    def loss(model, batch):
        return jnp.mean(jnp.square(jax.vmap(model)(batch)))

    record = record_of(loss, model, jnp.ones((2, 4)), ADAMW, steps=2)
    assert [weight.name for weight in record.weights] == [
        *("layers.0.weight", "layers.0.bias"),
        *("layers.1.weight", "layers.1.bias"),
    ]
    assert engine.check(record) == []


@pytest.mark.prove
def test_a_norm_of_flax_is_named_by_its_scope():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        narrow: bool

        @nn.compact
        def __call__(self, x):
            dtype = jnp.bfloat16 if self.narrow else jnp.float32
            h = nn.LayerNorm(dtype=dtype, force_float32_reductions=not self.narrow)(x)
            return x + nn.Dense(4, dtype=jnp.bfloat16)(h)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in range(2):
                x = Block(layer == 1, name=f"blocks_{layer}")(x)
            return x

    x = jnp.ones((2, 4), jnp.bfloat16)
    params = Model().init(jax.random.key(0), x)

    def loss(params, batch):
        return jnp.mean(jnp.square(Model().apply(params, batch).astype(jnp.float32)))

    assert found(halfstep.jax.audit(loss, params, x, ADAMW, steps=1)) == {("HS401", "params.blocks_1.LayerNorm_0")}


@pytest.mark.prove
def test_our_own_recipes_have_no_findings():
    policy = "bf16-mixed"
    small = ["model.context=8", "model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=64"]
    config = load("speedrun", small)
    plain = Decoder(config.model)
    model, optimizer = (
        plain.with_policy(Policy.parse(policy)),
        build_optimizers(config.model, config.optimizer),
    )

    def loss(params, batch):
        return model.loss(params, batch[:, :-1], batch[:, 1:]) / batch[:, 1:].size

    params = plain.set_weights(initial_weights(config.model, 0))
    options = {"policy": policy, "cast": False, "steps": 2}
    assert halfstep.jax.audit(loss, params, tokens(), optimizer, **options) == []


def test_overflow_names_the_first_layer_and_skips_the_updates():
    def loss(params, batch):
        hidden = (batch @ params["up"]["kernel"]) * 60000
        return jnp.mean((hidden @ params["down"]["kernel"]).astype(jnp.float32))

    params = {name: {"kernel": jnp.ones((4, 4), jnp.float16)} for name in ("up", "down")}
    record = record_of(loss, params, jnp.ones((2, 4), jnp.float16), ADAMW, steps=1)
    assert [(op.module, op.function) for op in record.operations if op.overflow] == [("up", "mul")]
    assert record.weights[0].updates.steps == 0
    assert record.losses == [None]


def test_a_loop_over_stacked_layers_names_the_turn():
    def loss(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, batch, params["blocks"]["kernel"])
        return jnp.mean(x.astype(jnp.float32))

    kernels = jnp.stack([jnp.full((4, 4), scale, jnp.float16) for scale in (1, 1, 60000, 1)])
    record = record_of(loss, {"blocks": {"kernel": kernels}}, jnp.ones((2, 4), jnp.float16), ADAMW, steps=1)
    assert [op.module for op in record.operations if op.overflow] == ["blocks[2]"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (({}, tokens(), ADAMW), "nothing to audit"),
        (({"w": jnp.ones(2)}, tokens(), "adam"), "not an optax transform"),
        (({"w": jnp.ones(2)}, None, ADAMW), "has shape"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(args, words):
    with pytest.raises(HalfstepError, match=words) as error:
        halfstep.jax.audit(lambda params, batch: params["w"], *args)
    assert error.value.hint


@pytest.mark.prove
def test_everything_planted_in_eight_layers_is_named_and_a_clean_twin_is_silent():
    planted = loss_of(narrow_norm=(3,), narrow_router=True)
    params = parameters(8, router=6, bf16_layers=(5,), adapter=4)
    assert found(halfstep.jax.audit(planted, params, tokens(), ADAMW, ignore=["HS104"])) == {
        ("HS101", "block_4.lora_a", "block_4.lora_b"),  # two mistakes of one rule
        ("HS101", "block_5.down.kernel", "block_5.up.kernel"),
        ("HS102", "block_4.lora_a", "block_4.lora_b"),
        ("HS102", "block_5.down.kernel", "block_5.up.kernel"),
        ("HS103", "block_4.lora_a", "block_4.lora_b"),
        ("HS401", "block_3.norm"),
        ("HS403", "block_6.router"),
    }
    assert found(halfstep.jax.audit(loss_of(), parameters(8, router=6), tokens(), ADAMW)) == set()


@pytest.mark.prove
def test_fp16_that_overflows_or_underflows_in_one_of_eight_layers_is_named():
    def run(**planted):
        findings = halfstep.jax.audit(loss_of(compute="fp16", **planted), parameters(8), tokens(), ADAMW, steps=2)
        return found(findings)

    assert {each for each in run(overflow=2) if each[0] == "HS409"} == {("HS409", "block_2.up")}
    assert run(underflow=1) == {("HS410", "block_1.down")}
