"""The decoder in JAX against the one in torch, from the same weights: every switch, in fp32 and emulated."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from halfstep.config.model import ModelConfig, module_names, parameter_shapes
from halfstep.config.weights import initial_weights
from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision
from halfstep.core.roles import Operand, print_value
from halfstep.jax.layers import COMPILER_OPTIONS, Layer, cross_entropy
from halfstep.jax.model import Decoder, rope_tables
from halfstep.torch import model as torch_model
from halfstep.torch.apply import apply as apply_to_torch

TINY = ModelConfig(vocabulary=32, context=16, layers=2, width=16, heads=4)
# Every value of every switch is in one of these: compiling a model each would take minutes.
CONFIGS = {
    "gpt2": replace(TINY, layers=1, norm="layer", bias=True, positions="learned"),
    "everything": replace(
        TINY,
        kv_heads=2,
        mlp="swiglu",
        rope_base=100.0,
        qk_norm="gain",
        q_gain=True,
        softcap=5.0,
        unet_skips=True,
        value_residual=True,
        embedding_shortcut="channel",
        branch_scale=True,
        embedding_norm=True,
        tied=False,
        zero_head=True,
    ),
    "otherwise": replace(
        TINY,
        layers=1,
        mlp="relu2",
        mlp_width=24,
        head_width=8,
        positions="none",
        qk_norm="plain",
        norm_gain=False,
        embedding_shortcut="scalar",
        zero_init=False,
    ),
    "exact": replace(TINY, layers=1, mlp="gelu_exact", qk_norm="plain", norm_epsilon=1e-2),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@cache
def weights(config):
    """First weights, none of them zero: what is zero would hide everything behind it."""
    found = dict(initial_weights(config, 0))
    for place, (name, value) in enumerate(found.items()):
        if not value.any() or value.ndim < 2:
            noise = np.random.default_rng(place).standard_normal(value.shape).astype(np.float32)
            found[name] = np.asarray(value + np.float32(0.1) * noise)
    return found


def tokens(config):
    """Three sequences; the third is the second, but for the last token that is read."""
    batch = np.random.default_rng(0).integers(0, config.vocabulary, (3, config.context + 1))
    batch[2] = batch[1]
    batch[2, -2] = (batch[1, -2] + 1) % config.vocabulary
    return batch


@cache
def ours(config, policy):
    """Logits of the batch, the loss, and the gradient of every parameter; two sequences that end differently."""
    decoder = Decoder(config).with_policy(Policy.parse(policy))

    def run(params, x, y):
        def loss(params):
            logits = decoder(params, x)
            return cross_entropy(logits, y, decoder.casts, config.softcap), logits

        (total, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, total, grads

    batch = jnp.asarray(tokens(config))
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(run, compiler_options=COMPILER_OPTIONS)(weights(config), batch[:, :-1], batch[:, 1:])
    return jax.tree.map(np.asarray, found)


@cache
def theirs(config, policy):
    """The same of torch: logits, the loss and the gradients."""
    model = torch_model.Decoder(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(weights(config)[name]))
    apply_to_torch(model, Policy.parse(policy), model.module_names())
    batch = torch.from_numpy(tokens(config))
    logits = model(batch[:, :-1])
    loss = model.loss(batch[:, :-1], batch[:, 1:])
    loss.backward()
    grads = {n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in model.named_parameters()}
    return logits.detach().float().numpy(), float(loss.detach()), grads


def error(found, expected, size=0.0):
    """Relative to the L2 norm of what is expected, or to `size`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), size, 1e-30)


def gradient_errors(found, expected):
    """Of every parameter, relative to its size, but for sums that cancel.

    The bias of keys has no effect on a softmax, and its gradient is rounding alone: the weight's is its measure.
    The gradient of a mix is one sum over all activations: those of all blocks are its measure.
    """

    def size(name):
        if name.endswith("k.bias"):
            return np.linalg.norm(expected[name.replace("bias", "weight")])
        kin = [grad for other, grad in expected.items() if name.endswith("_mix") and other.endswith("_mix")]
        return np.sqrt(sum(np.sum(np.square(grad)) for grad in kin))

    return {name: error(found[name], expected[name], size(name)) for name in found}


@configs
def test_it_is_the_function_that_torch_computes(config):
    logits, loss, grads = ours(config, "fp32")
    their_logits, their_loss, their_grads = theirs(config, "fp32")
    # Hundreds of fp32 roundings one after the other, each of 2^-24, and what norms make of them.
    assert error(logits, their_logits) <= 1e-5
    assert loss == pytest.approx(their_loss, rel=1e-6)
    errors = gradient_errors(grads, their_grads)
    assert errors.keys() == parameter_shapes(config).keys()
    assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)


@configs
def test_emulated_it_rounds_where_torch_does(config):
    policy = "bf16-mixed,emulate=true"
    logits, loss, grads = ours(config, policy)
    their_logits, their_loss, their_grads = theirs(config, policy)
    # A rounding tips the other way where an fp32 sum lies closer to a tie than the order of its terms moves it,
    # which is rare; one that is missing changes about half of all numbers.
    assert (logits == their_logits).mean() > 0.9
    assert error(logits, their_logits) <= BF16.epsilon
    assert loss == pytest.approx(their_loss, rel=BF16.epsilon)
    errors = gradient_errors(grads, their_grads)
    assert max(errors.values()) <= 2 * BF16.epsilon, max(errors, key=errors.get)
    assert np.median(list(errors.values())) <= BF16.epsilon / 16


def test_the_native_decoder_agrees_with_the_emulated_one():
    """Natively attention's weights and their gradient are narrowed too; all else is the same."""
    config = CONFIGS["everything"]
    native, emulated = ours(config, "bf16-mixed"), ours(config, "bf16-mixed,emulate=true")
    assert native[0].dtype == jnp.bfloat16
    assert native[1].dtype == np.float32
    assert {grad.dtype for grad in native[2].values()} == {np.dtype(np.float32)}
    assert error(native[0].astype(np.float32), emulated[0]) <= 2 * BF16.epsilon
    assert native[1] == pytest.approx(emulated[1], rel=BF16.epsilon)
    errors = gradient_errors(native[2], emulated[2])
    assert np.median(list(errors.values())) <= 4 * BF16.epsilon
    # Weight gradients are summed in fp32 and stay so.
    grad = native[2]["lm_head.weight"]
    assert not np.array_equal(grad, grad.astype(jnp.bfloat16).astype(np.float32))


@configs
def test_every_parameter_learns_and_no_token_sees_the_future(config):
    logits, _, grads = ours(config, "fp32")
    for name, grad in grads.items():
        # The first block has nothing to mix its values with.
        assert name == "blocks.0.attn.value_mix" or np.abs(grad).max() > 0, name
    assert np.array_equal(logits[1, :-1], logits[2, :-1])
    assert not np.array_equal(logits[1, -1], logits[2, -1])


def test_skips_join_the_blocks_that_mirror_each_other():
    config = replace(TINY, layers=5, width=8, heads=2, unet_skips=True)
    model = torch_model.Decoder(config)
    params = weights(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(params[name]))
        expected = model(torch.from_numpy(tokens(config)[:, :4])).numpy()
    assert error(jax.jit(Decoder(config))(params, tokens(config)[:, :4]), expected) <= 1e-5


def test_every_switch_has_every_value_somewhere():
    for field in ("mlp", "norm", "positions", "qk_norm", "embedding_shortcut"):
        legal = set(ModelConfig.__dataclass_fields__[field].type.__args__)
        assert {getattr(config, field) for config in CONFIGS.values()} == legal
    for field, spec in ModelConfig.__dataclass_fields__.items():
        if spec.type is bool:
            assert {getattr(config, field) for config in CONFIGS.values()} == {True, False}, field


# --- names and tables ------------------------------------------------------------------------------------


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
    # Containers without a precision have a name all the same, and modules that are switched off do no harm.
    assert set(module_names(config)) <= names | {"blocks"}
    assert decoder.module_names() == module_names(config)
    params = decoder.initialize(3)
    assert {name: p.shape for name, p in params.items()} == parameter_shapes(config)
    for name, value in initial_weights(config, 3):
        assert params[name].dtype == jnp.float32
        assert np.array_equal(params[name], value)
    assert list(decoder.matrices()) == [name for name, _ in torch_model.Decoder(config).matrices()]


@pytest.mark.parametrize("changes", [{}, {"width": 96, "heads": 6, "context": 1024, "rope_base": 1e6}])
def test_rope_tables_are_those_of_torch_bit_for_bit(changes):
    config = replace(TINY, **changes)
    for ours, theirs in zip(rope_tables(config), torch_model.rope_tables(config), strict=True):
        assert ours.dtype == np.float32
        assert np.array_equal(ours, theirs.numpy())


def test_logits_are_capped_as_the_loss_sees_them():
    capped = Decoder(CONFIGS["everything"]).capped(jnp.array([1e4, -1e4, 1.0], jnp.bfloat16))
    assert capped.dtype == jnp.float32
    np.testing.assert_allclose(capped, [5.0, -5.0, 5 * np.tanh(0.2)], rtol=1e-6)
    assert Decoder(TINY).capped(jnp.array([7.0], jnp.bfloat16)) == 7.0


def test_a_token_that_does_not_exist_is_not_another_token():
    decoder = Decoder(TINY)
    params = {"embed.weight": jnp.asarray(weights(TINY)["embed.weight"])}
    assert jnp.isnan(decoder.embed(params, jnp.array([[32]]))).all()
    assert np.array_equal(decoder.embed(params, jnp.array([[31]]))[0, 0], params["embed.weight"][31])


# --- precision -------------------------------------------------------------------------------------------


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
    assert streams == [jnp.bfloat16] * 2


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("everything", "bf16-mixed,norm=bf16,softmax=bf16"),
        ("gpt2", "fp16-mixed"),
        ("gpt2", "fp8-mixed"),
        ("otherwise", "fp8-mixed,emulate=true"),
    ],
)
def test_other_policies_trace_under_strict_promotion(name, policy):
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


def test_rules_reach_the_modules_they_name():
    policy = Policy.parse("bf16-mixed,emulate=true; blocks.1.mlp.*: compute=fp32; lm_head: compute=tf32")
    decoder = Decoder(TINY).with_policy(policy)
    assert str(decoder.blocks[1].mlp.up.precision.compute) == "fp32"
    assert str(decoder.blocks[0].mlp.up.precision.compute) == "bf16"
    assert print_value(decoder.lm_head.precision.operand) == "tf32"
    assert str(decoder.precision.compute) == "bf16"
    plain = decoder.with_policy(Policy.parse("fp32"))
    assert all(layer.precision == Precision() for layer in layers_of(plain))


def test_precisions_by_name_and_the_base_for_the_rest():
    precision = Precision(compute=BF16, operand=Operand(BF16), grad=BF16, grad_operand=Operand(BF16))
    decoder = Decoder(TINY, {"embed": precision})
    assert decoder.embed.precision == precision
    assert decoder.lm_head.precision == Precision()
    assert Decoder(TINY, base=precision).blocks[0].attn.q.precision == precision


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(PolicyError, match="matches none"):
        Decoder(TINY).with_policy(Policy.parse("bf16-mixed; nothing.*: compute=fp32"))
    skips = Decoder(replace(TINY, unet_skips=True))
    assert skips.with_policy(Policy.parse("bf16-mixed; skip_weights: param=bf16"))
