"""Names of any pytree's leaves, what rules match, what a policy says of a leaf, and what is refused at once."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from halfstep.core.errors import HalfstepError, PolicyError, UnsupportedModelError
from halfstep.core.policy import Policy
from halfstep.jax.convert.apply import Leaves, apply, modules_of
from halfstep.jax.run import init, make_step

TREE = {
    "blocks": [{"up": {"weight": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}}],
    "gain": np.ones(2, np.float32),
}
FLAT = {
    "blocks.0.up.weight": TREE["blocks"][0]["up"]["weight"],
    "blocks.0.up.bias": np.ones(2, np.float32),
    "gain": TREE["gain"],
}


class Pair(NamedTuple):
    value: Any
    scale: Any


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def names(params):
    return Leaves(params).names


def test_a_nested_tree_and_a_flat_one_read_the_same():
    assert sorted(names(TREE)) == sorted(names(FLAT)) == ["blocks.0.up.bias", "blocks.0.up.weight", "gain"]
    assert sorted(modules_of(names(TREE))) == ["blocks", "blocks.0", "blocks.0.up", "gain"]


def test_leaves_of_frameworks_are_named_by_their_modules():
    state = nnx.state(Nested(nnx.Rngs(0)))
    assert {"layers.0.kernel", "layers.0.bias", "dropout.rngs.key"} <= set(names(state))
    variables = jax.eval_shape(linen.Dense(3).init, jax.random.key(0), jnp.ones((1, 2)))
    assert names(variables) == ["params.bias", "params.kernel"]
    model = eqx.filter(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), eqx.is_array)
    assert names(model)[:2] == ["layers.0.weight", "layers.0.bias"]
    assert names(np.float32(1)) == ["params"]
    # a field of that name next to others is not a box around an array
    assert names({"a": Pair(np.float32(1), np.float32(2))}) == ["a.value", "a.scale"]


def test_two_leaves_of_one_name_and_integers_alone_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"`a\.b`"):
        Leaves({"a.b": np.float32(1), "a": {"b": np.float32(2)}})
    with pytest.raises(UnsupportedModelError):
        init({"n": np.int32(1)}, optax.sgd(0.1), "fp32")


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (jax.nn.relu, "not an array"),
        ("relu", "is a `str`, not an array"),
        (0.5, "is a `float`, not an array"),
        (np.float64(1), "`odd` is float64"),
        (np.complex64(1), "`odd` is complex64"),
        (jnp.zeros(2, jnp.float8_e4m3fn), "`odd` is float8_e4m3fn"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(leaf, said):
    with pytest.raises(HalfstepError, match=said) as caught:
        init({"w": np.ones(2, np.float32), "odd": leaf}, optax.sgd(0.1), "fp32")
    assert ("eqx.partition" in caught.value.hint) == said.endswith("array")


@pytest.mark.parametrize("params", [TREE, FLAT])
def test_rules_reach_the_leaves_of_a_module(params):
    applied = apply(params, Policy.parse("bf16-mixed; blocks.*.up: compute=fp32,param=bf16; gain: moments=bf16"))
    assert str(applied.precisions["blocks.0.up.weight"].compute) == "fp32"
    assert str(applied.precisions["gain"].compute) == "bf16"
    assert str(applied.masters["blocks.0.up.bias"].format) == "bf16"
    assert str(applied.masters["gain"].format) == "fp32"
    assert str(applied.moments["gain"]) == "bf16"
    assert str(applied.moments["blocks.0.up.bias"]) == "fp32"


def test_a_function_that_casts_by_itself_is_held_against_the_policy():
    """With cast=False the parameters are fp32: a function that does not cast runs in fp32, and is refused."""
    params = {"w": np.ones((4, 4), np.float32)}

    def forgetful(params, x):
        return jnp.square(x @ params["w"]).mean()

    def narrow_softmax(params, x):
        return jax.nn.softmax((x @ params["w"]).astype(jnp.bfloat16)).astype(jnp.float32).mean()

    def casting(params, x):
        return jnp.square((x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32)).mean()

    def traced(fn, policy):
        optimizer = optax.sgd(0.1)
        step = make_step(fn, optimizer, cast=False)
        return step.eval_shape(init(params, optimizer, policy), np.ones((2, 4), np.float32))

    traced(casting, "bf16-mixed")
    traced(forgetful, "fp32")
    traced(forgetful, "bf16-mixed; w: compute=fp32")
    with pytest.raises(PolicyError, match=r"`dot_general` multiplies float32\[2, 4\].*computes in bfloat16"):
        traced(forgetful, "bf16-mixed")
    with pytest.raises(PolicyError, match="`exp` of bfloat16"):
        traced(narrow_softmax, "fp32")
