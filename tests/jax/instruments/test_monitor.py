"""The monitor in one's own loop: no bit of a step changes, and its numbers are those of the tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep.jax
from halfstep.core.errors import ArgumentError, RunStateError
from halfstep.core.formats import parse
from halfstep.core.observed import AMAX, COUNT, OVERFLOW, Observation, first_rows
from halfstep.core.policy import as_policy
from halfstep.core.roles import Operand
from halfstep.jax.convert.apply import apply
from halfstep.jax.instruments.gradient import find_layers, row_of, watched_gradient
from halfstep.jax.instruments.monitor import Monitor
from halfstep.jax.numerics.cast import quantize_scaled
from tests.columns import row_of as reference

OPTIMIZER = optax.adamw(1e-3)
TOKENS = jax.random.randint(jax.random.key(1), (2, 5), 0, 8)


def params(dtype=jnp.float32):
    key = iter(jax.random.split(jax.random.key(0), 3))
    return {
        "embed": {"weight": jax.random.normal(next(key), (8, 4), dtype)},
        "norm": {"gain": jnp.ones(4, dtype)},
        "head": {"kernel": jax.random.normal(next(key), (4, 8), dtype)},
    }


def loss(params, tokens):
    x = params["embed"]["weight"][tokens[:, :-1]]
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * params["norm"]["gain"]
    logits = (wide.astype(x.dtype) @ params["head"]["kernel"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def trained(policy, monitor, steps=2, **options):
    state = halfstep.jax.init(params(), OPTIMIZER, policy, mesh=options.get("mesh"))
    step = halfstep.jax.make_step(loss, OPTIMIZER, monitor=monitor, **options)
    batch = jnp.stack([TOKENS, TOKENS + 1]) % 8 if options.get("micro_batches") else TOKENS
    losses = []
    for _ in range(steps):
        state, result = step(state, batch)
        losses.append(np.asarray(result.loss))
    return step, state, losses


@pytest.mark.prove
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("fp16-mixed", {}),
        ("bf16-mixed", {"micro_batches": 2, "clip_norm": 0.1}),
        ("bf16-mixed", {"mesh": 1}),
    ],
)
def test_no_bit_changes_and_the_step_is_compiled_once(policy, options):
    if "mesh" in options:
        options = {"mesh": jax.make_mesh((options["mesh"],), ("data",))}
    monitor = Monitor()
    plain, (step, state, losses) = trained(policy, None, **options), trained(policy, monitor, **options)
    assert np.array_equal(plain[2], losses)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(plain[1]), strict=True):
        assert np.array_equal(ours, theirs)
    assert step._cache_size() == 1
    assert [layer.name for layer in monitor.layers] == ["embed", "norm", "head"]
    numbers = monitor.layer_numbers().read()
    seen = 2 * 32 * options.get("micro_batches", 1)
    assert numbers[:, :, COUNT].tolist() == [[seen, seen], [seen, seen], [seen, 2 * seen]]
    assert (numbers[:, :, AMAX] > 0).all()
    assert not monitor.layer_numbers().read().any()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_a_row_is_the_reference_bit_for_bit(name):
    fmt = parse(name)
    random = np.random.default_rng(0)
    x = np.ldexp(random.standard_normal(4096), random.integers(-149, 127, 4096)).astype(np.float32)
    for special in ([], [np.inf, -np.nan, 0.0, -0.0, 1e-45, 65520.0, 65519.996, 464.0, 448.0]):
        given = np.concatenate([x, np.array(special, np.float32)])
        want = reference(given, fmt, scaled=fmt.bits <= 8)
        assert np.array_equal(jax.jit(row_of, static_argnums=1)(given, fmt), want.astype(np.float32))


def names(loss, params, *rest):
    closed = jax.make_jaxpr(loss)(params, *rest)
    given = [*sorted(params), *[None] * len(jax.tree.leaves(rest))]
    return [(site.name, site.kind, site.turns) for site in jax.tree.leaves(find_layers(closed, given))]


def test_a_loop_over_stacked_layers_has_one_per_turn_and_a_reused_weight_is_one():
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ params["again.w"], None), x, params["blocks.w"])
        return jnp.sum(x), None

    params = {"again.w": jnp.ones((4, 4)), "blocks.w": jnp.ones((3, 4, 4))}
    assert names(loss, params, jnp.ones((2, 4))) == [
        ("blocks", "matmul", ((3, True),)),
        ("again", "matmul", ((3, False),)),
    ]
    applied = apply(params, as_policy("fp32"))
    _, _, watched, rows = watched_gradient(loss, params, (jnp.ones((2, 4)),), applied, 4096)
    numbers = watched.numbers(rows)
    assert [layer.name for layer in watched.layers] == ["blocks[0]", "blocks[1]", "blocks[2]", "again"]
    assert numbers[:, 0, COUNT].tolist() == [8, 8, 8, 24]
    assert numbers[:, 0, AMAX].tolist()[:3] == [1.0, pytest.approx(4, rel=1e-2), pytest.approx(4, rel=1e-2)]
    assert numbers[3, 0, AMAX] < 1.0001  # the largest of the turns, not their sum


@pytest.mark.prove
def test_layers_that_are_computed_again_are_seen_once():
    def loss(params, x):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, params["up.w"]))

    params, x = {"up.w": jnp.ones((4, 4))}, jnp.ones((2, 4))
    assert names(loss, params, x) == [("up", "matmul", ())]
    _, _, watched, rows = watched_gradient(
        lambda p, x: (loss(p, x), None), params, (x,), apply(params, as_policy("fp32")), 4096
    )
    assert watched.numbers(rows)[0, :, COUNT].tolist() == [8, 8]


def test_overflow_is_counted_at_the_layer_that_meets_it():
    monitor = Monitor()
    state = halfstep.jax.init(params(), OPTIMIZER, "fp16-mixed")

    def loss(params, x):
        return jnp.sum((x * 60000 @ params["head"]["kernel"]).astype(jnp.float32))

    step = halfstep.jax.make_step(loss, OPTIMIZER, monitor=monitor)
    asked = monitor.weight_numbers()
    _, result = step(state, jnp.full((2, 4), 2.0))
    assert bool(result.skipped)
    assert monitor.layer_numbers().read()[0, 0, OVERFLOW] == 8
    assert np.isnan(asked.read()[0, 3])


@pytest.mark.prove
def test_lost_updates_of_narrow_masters():
    monitor, optimizer = Monitor(), optax.sgd(1e-9)
    state = halfstep.jax.init(params(), optimizer, "bf16-mixed,param=bf16")
    step = halfstep.jax.make_step(loss, optimizer, monitor=monitor)
    asked = monitor.weight_numbers()
    state, _ = step(state, TOKENS)
    norm, gradient, update, lost = asked.read()[2]
    kernel = np.asarray(state.params["head"]["kernel"], np.float64)
    assert norm == pytest.approx(np.linalg.norm(kernel), rel=32 * 2**-24)  # a sum of 32 squares in fp32
    assert (gradient > 0, update, lost) == (True, 0, 1)


def test_a_sample_says_what_the_cast_of_the_same_tensors_loses():
    state = halfstep.jax.init(params(), OPTIMIZER, "bf16-mixed")
    sample = halfstep.jax.make_step(loss, OPTIMIZER, monitor=Monitor()).sample(state, TOKENS)
    assert {name: set(roles) for name, roles in sample.items()} == {
        name: {"activation", "gradient", "weight"} for name in ("embed", "norm", "head")
    }
    weight = np.asarray(state.params["head"]["kernel"])
    native, inv_scale = quantize_scaled(weight, Operand(parse("e4m3")))
    noise = np.sum(np.square(weight.astype(np.float64) - np.asarray(native, np.float64) * np.asarray(inv_scale)))
    observed = Observation.of(weight, parse("fp32"))
    assert observed.what_if["e4m3"].noise == noise
    assert sample["head"]["weight"] == observed.sample()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_what_is_asked_for_wrongly_is_refused_with_a_remedy():
    with pytest.raises(ArgumentError, match="slice=0"):
        Monitor(0)
    with pytest.raises(RunStateError) as error:
        halfstep.jax.make_step(loss, OPTIMIZER).sample(None, TOKENS)
    assert "monitor=halfstep.jax.Monitor()" in error.value.hint


def test_a_share_of_a_batch_is_one_row_at_least():
    batch = {"x": np.zeros((32, 3)), "y": np.zeros(32), "temperature": np.zeros(())}
    cut, share = first_rows(batch, 1 / 16, jax.tree.leaves(batch), jax.tree.map)
    assert {name: np.shape(x) for name, x in cut.items()} == {"x": (2, 3), "y": (2,), "temperature": ()}
    assert share == 1 / 16
    x = np.zeros((3, 2))
    assert first_rows(x, 1 / 16, [x], jax.tree.map)[0].shape == (1, 2)
