"""One small model in plain functions and in Flax nnx: trained, refused and ruled alike.

Embedding, layer norm, an MLP added to the stream, and a head. Each loss function takes a batch of tokens and
returns the loss and the logits.
"""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from halfstep.core.errors import UnmatchedRuleError, UnsupportedModelError
from halfstep.jax.convert.apply import Leaves
from halfstep.jax.run import init, make_step

VOCABULARY, WIDTH = 16, 8
TOKENS = np.arange(24, dtype=np.int32).reshape(3, 8) % VOCABULARY


def loss_of(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), (tokens + 1) % VOCABULARY
    ).mean()


def plain():
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)

    params = {
        "embed": {"weight": matrix(VOCABULARY, WIDTH)},
        "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        "up": {"kernel": matrix(WIDTH, 4 * WIDTH), "bias": jnp.zeros(4 * WIDTH)},
        "down": {"kernel": matrix(4 * WIDTH, WIDTH)},
        "head": {"kernel": matrix(WIDTH, VOCABULARY)},
    }

    def norm(x, p):
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(-1, keepdims=True)
        scaled = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
        return (scaled * p["scale"] + p["bias"]).astype(x.dtype)

    def loss_fn(p, tokens):
        x = p["embed"]["weight"][tokens]
        h = jax.nn.gelu(norm(x, p["norm"]) @ p["up"]["kernel"] + p["up"]["bias"])
        logits = (x + h @ p["down"]["kernel"]) @ p["head"]["kernel"]
        return loss_of(logits, tokens), logits

    return params, loss_fn


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)  # remembers the dtype its table had when it was made, and returns that
        return self.head(x + self.down(nnx.gelu(self.up(self.norm(x)))))


def flax_nnx():
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens)
        return loss_of(logits, tokens), logits

    return params, loss_fn


FRAMEWORKS = {"plain": plain, "nnx": flax_nnx}


# Gradient descent that keeps its gradients, as something that is not a moment.
OPTIMIZER = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda p: jnp.zeros((1, *p.shape)), params),
    lambda grads, state, params: (jax.tree.map(lambda g: -0.5 * g, grads), jax.tree.map(lambda g: g[None], grads)),
)


@cache
def built(name):
    params, loss_fn = FRAMEWORKS[name]()
    return params, loss_fn, make_step(loss_fn, OPTIMIZER)


# tests/jax/stock trains models of every framework.
@pytest.mark.parametrize(
    ("framework", "policy"),
    [
        ("plain", "bf16-mixed"),
        *(
            pytest.param(framework, policy, marks=pytest.mark.prove)
            for framework, policy in (("nnx", "bf16-mixed"), ("plain", "fp32"), ("nnx", "fp16-mixed"))
        ),
    ],
)
def test_it_learns_with_fp32_masters_and_fp32_weight_gradients(framework, policy):
    params, _, step = built(framework)
    state = init(params, OPTIMIZER, policy)
    losses = []
    for _ in range(6):
        state, result = step(state, TOKENS)
        losses.append(float(result.loss))
    assert losses[-1] < losses[0] - 0.1
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    compute = {"fp32": jnp.float32, "bf16-mixed": jnp.bfloat16, "fp16-mixed": jnp.float16}[policy]
    assert result.aux.dtype == compute  # the stream was not promoted: not by a norm, not by a bias
    for name, leaf in Leaves(state.params).trained.items():
        assert leaf.dtype == jnp.float32, name
    for name, grad in Leaves(state.opt_state).trained.items():
        if name.split(".")[0] in ("up", "down", "head") and grad.ndim == 3:
            narrow = np.asarray(grad).astype(jnp.bfloat16).astype(np.float32)
            assert not np.array_equal(narrow, grad), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rules_reach_a_module_by_its_path(framework):
    params, _, step = built(framework)

    def logits(policy):
        return step.eval_shape(init(params, OPTIMIZER, policy), TOKENS)[1].aux

    assert logits("bf16-mixed").dtype == jnp.bfloat16
    assert logits("bf16-mixed; head: compute=fp32").dtype == jnp.float32
    with pytest.raises(UnmatchedRuleError):
        logits("bf16-mixed; haed: compute=fp32")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_parameter_times_an_fp32_number_does_not_promote_the_stream(framework):
    params, loss_fn, _ = built(framework)

    def scaled(params, tokens):
        loss, logits = loss_fn(jax.tree.map(lambda leaf: leaf * np.float32(1), params), tokens)
        return loss, logits

    shapes = make_step(scaled, OPTIMIZER).eval_shape(init(params, OPTIMIZER, "bf16-mixed"), TOKENS)
    assert shapes[1].aux.dtype == jnp.bfloat16


def test_a_model_with_functions_among_its_leaves_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedModelError, match="`activation`") as caught:
        init(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), OPTIMIZER, "bf16-mixed")
    assert "eqx.partition" in caught.value.hint


def test_state_of_a_flax_module_that_is_not_a_parameter_passes_through():
    """Counters and keys of nnx's generators are leaves of its state, and no floats."""
    graph, params = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    everything = {"dropout": params, "w": jnp.ones((4, 4))}

    def loss_fn(p, x):
        dropped = nnx.merge(graph, p["dropout"])(x @ p["w"])
        return dropped.astype(jnp.float32).sum()

    optimizer = optax.sgd(0.1)
    state, result = make_step(loss_fn, optimizer)(
        init(everything, optimizer, "bf16-mixed"), np.ones((2, 4), np.float32)
    )
    assert not bool(result.skipped)
    kinds = [str(leaf.dtype) for leaf in jax.tree.leaves(state.params["dropout"])]
    assert kinds == [str(leaf.dtype) for leaf in jax.tree.leaves(params)]
