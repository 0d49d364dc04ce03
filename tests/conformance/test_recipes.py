"""Every recipe on every backend: all parameters by shape, and the first loss at a small width."""

import math

import numpy as np
import pytest

from halfstep.config.load import load, recipe_names
from halfstep.config.model import parameter_shapes
from halfstep.core.policy import Policy
from halfstep.training.session import open_session
from tests.conformance.decoders import awake_weights
from tests.token_batches import batch

COUNTS = {"gpt2": 124_475_904, "qwen3": 596_049_920, "speedrun": 162_201_636, "golf": 17_059_912}
prove = pytest.mark.prove


class Recording(dict):
    """Parameters that note which of them a model asks for."""

    def __init__(self, params):
        super().__init__(params)
        self.asked = set()

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)


def shapes_on(backend, model):
    """The shapes of all parameters of a model that computes a loss, without a number computed."""
    tokens = np.zeros((1, 8), np.int32)
    if backend.name == "torch":
        with backend.torch.device("meta"):
            decoder, held = backend.model.Decoder(model), backend.torch.zeros(1, 8, dtype=backend.torch.int64)
            assert decoder.loss(held, held).shape == ()
        return {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    if backend.name == "mlx":  # lazy: nothing is evaluated
        decoder = backend.model.Decoder(model)
        assert decoder.loss(backend.array(tokens), backend.array(tokens)).shape == ()
        return {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    decoder, asked = backend.model.Decoder(model), set()

    def loss(params):
        recording = Recording(params)
        total = decoder.loss(recording, tokens, tokens)
        asked.update(recording.asked)
        return total

    struct = {n: backend.jax.ShapeDtypeStruct(s, np.float32) for n, s in parameter_shapes(model).items()}
    assert backend.jax.eval_shape(loss, struct).shape == ()
    return {name: struct[name].shape for name in asked}


@pytest.mark.parametrize(
    "recipe", ["golf", *(pytest.param(name, marks=prove) for name in COUNTS if name != "golf")]
)
def test_every_parameter_of_a_recipe_is_there_on_every_backend(slow_backend, recipe):
    model = load(recipe).model
    found = shapes_on(slow_backend, model)
    # JAX asks for what it uses: the first block has no earlier values to mix.
    idle = {"blocks.0.attn.value_mix"} if model.value_residual else set()
    assert found.keys() | idle == parameter_shapes(model).keys()
    found |= {name: parameter_shapes(model)[name] for name in idle}
    assert sum(math.prod(shape) for shape in found.values()) == COUNTS[recipe]
    assert {*COUNTS, "tiny"} == {*recipe_names()}


SMALL = ["model.vocabulary=64", "model.context=8", "model.width=16", "training.batch=2", "training.compile=false"]
NARROW = {
    "gpt2": ["model.layers=1", "model.heads=2"],
    "qwen3": ["model.layers=1", "model.heads=2", "model.kv_heads=1", "model.head_width=8", "model.mlp_width=32"],
    "speedrun": ["model.layers=2", "model.heads=2"],
    "golf": ["model.layers=3", "model.heads=4", "model.kv_heads=2", "model.mlp_width=32"],
}


@pytest.mark.parametrize("recipe", NARROW)
def test_the_first_loss_of_a_recipe_is_the_same_on_every_backend(slow_backend, torch_backend, recipe):
    """No weight is zero here: a head that is would make every first loss that of a guess.

    The bound is one rounding of fp32 for each of the results between tokens and loss, some 16 a block.
    """

    def first(backend):
        config = load(recipe, [*SMALL, *NARROW[recipe], f"backend={backend.name}", "training.micro_batches=1"])
        weights = awake_weights(config.model)
        session = open_session(config, Policy.parse("fp32"), "cpu", weights=list(weights.items()))
        total, count = session.evaluate([batch(0, session)[0]])
        return total / count, config.model

    (found, model), (expected, _) = first(slow_backend), first(torch_backend)
    assert abs(found - expected) <= (16 * model.layers + 4) * 2.0**-24 * expected
    assert abs(expected - math.log(model.vocabulary)) > 1e-3
