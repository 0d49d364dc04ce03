"""The decoder in JAX: names, dtypes and rules. tests/conformance/test_model.py compares it with torch's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.config.model import module_names, parameter_shapes
from halfstep.config.weights import initial_weights
from halfstep.core.policy import Policy
from halfstep.jax.layers import Layer
from halfstep.jax.model import Decoder
from tests.conformance.decoders import CONFIGS, TINY, awake_weights

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


pytestmark = pytest.mark.usefixtures("strict")


def layers_of(module):
    found = [module]
    for value in vars(module).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Layer):
                found += layers_of(inner)
    return found


@configs
def test_modules_parameters_and_first_weights_are_those_of_the_description(config):
    decoder = Decoder(config)
    names = {layer.name for layer in layers_of(decoder)}
    # Containers without a precision have names too, and modules that are switched off do no harm.
    assert set(module_names(config)) <= names | {"blocks"}
    assert decoder.module_names() == module_names(config)
    params = decoder.set_weights(initial_weights(config, 3))
    assert {name: p.shape for name, p in params.items()} == parameter_shapes(config)
    for name, value in initial_weights(config, 3):
        assert params[name].dtype == jnp.float32
        assert np.array_equal(params[name], value)


def test_a_token_that_does_not_exist_is_not_another_token():
    decoder = Decoder(TINY)
    params = {"embed.weight": jnp.asarray(awake_weights(TINY)["embed.weight"])}
    assert jnp.isnan(decoder.embed(params, jnp.array([[32]]))).all()
    assert np.array_equal(decoder.embed(params, jnp.array([[31]]))[0, 0], params["embed.weight"][31])


def shapes_of(decoder):
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in parameter_shapes(decoder.config).items()}
    batch = jax.ShapeDtypeStruct((2, decoder.config.context), jnp.int32)
    return params, batch


def test_the_stream_is_in_compute_and_a_head_may_be_in_fp32():
    config = CONFIGS["everything"]
    decoder = Decoder(config).with_policy(Policy.parse("bf16-mixed; lm_head: compute=fp32"))
    params, batch = shapes_of(decoder)
    streams = []
    for block in decoder.blocks:
        call = type(block).__call__

        def kept(params, *inputs, block=block, call=call):
            streams.append(call(block, params, *inputs)[0].dtype)
            return call(block, params, *inputs)

        decoder.blocks[decoder.blocks.index(block)] = kept
    assert jax.eval_shape(decoder, params, batch).dtype == jnp.float32
    assert streams == [jnp.bfloat16] * config.layers


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("everything", "bf16-mixed,norm=bf16,softmax=bf16"),
        ("gpt2", "fp16-mixed"),
        ("gpt2", "fp8-mixed"),
        ("otherwise", "fp8-mixed,emulate=true"),
        *((name, policy) for name in CONFIGS for policy in ("fp32", "bf16-mixed", "bf16-mixed,emulate=true")),
    ],
)
def test_every_policy_traces_under_strict_promotion(name, policy):
    decoder = Decoder(CONFIGS[name]).with_policy(Policy.parse(policy))
    params, batch = shapes_of(decoder)
    loss, grads = jax.eval_shape(jax.value_and_grad(decoder.loss), params, batch, batch)
    assert loss.dtype == jnp.float32
    assert {name: (g.shape, g.dtype) for name, g in grads.items()} == {
        name: (p.shape, p.dtype) for name, p in params.items()
    }


def test_bf16_parameters_have_bf16_gradients():
    decoder = Decoder(CONFIGS["everything"]).with_policy(Policy.parse("bf16-true"))
    params, batch = shapes_of(decoder)
    params = {name: p.update(dtype=jnp.bfloat16) for name, p in params.items()}
    grads = jax.eval_shape(jax.grad(decoder.loss), params, batch, batch)
    assert {grad.dtype for grad in grads.values()} == {jnp.dtype(jnp.bfloat16)}


def test_a_rule_may_name_a_parameter_that_no_module_holds():
    skips = Decoder(replace(TINY, unet_skips=True))
    assert skips.with_policy(Policy.parse("bf16-mixed; skip_weights: param=bf16"))
