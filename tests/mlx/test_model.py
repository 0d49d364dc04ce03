"""The decoder in MLX: the dtypes of its stream. tests/conformance/test_model.py compares it with torch's."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from halfstep.config.model import ModelConfig, module_names, parameter_shapes
from halfstep.core.formats import BF16, FP16
from halfstep.core.policy import Policy
from halfstep.core.precision import base_precision, precisions
from halfstep.mlx.layers import to_compute
from halfstep.mlx.model import Decoder, _gelu, _silu
from halfstep.mlx.numerics.lowering import casts_of
from tests.conformance.decoders import EVERYTHING as EVERY_SWITCH
from tests.conformance.decoders import awake_weights

TINY = ModelConfig(vocabulary=32, context=16, layers=3, width=16, heads=4)
EVERYTHING = replace(TINY, **{**EVERY_SWITCH, "rope_base": TINY.rope_base, "zero_head": False})
CONFIGS = {
    "everything": EVERYTHING,
    "gpt2": replace(TINY, norm="layer", bias=True, positions="learned"),
    "otherwise": replace(TINY, mlp="relu2", positions="none", norm_gain=False, embedding_shortcut="scalar"),
    "exact": replace(TINY, mlp="gelu_exact", qk_norm="plain", head_width=8),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
# Each switch of `everything` alone: the bound of a comparison with emulation is that of one switch.
ALONE = ["kv_heads", "mlp", "qk_norm q_gain", "softcap", "unet_skips", "value_residual", "embedding_norm", "tied"]
ALONE += ["embedding_shortcut branch_scale"]
SINGLE = {n: replace(TINY, **{s: getattr(EVERYTHING, s) for s in n.split()}) for n in ALONE}
SINGLE |= {"plain": TINY, **{name: CONFIGS[name] for name in ("gpt2", "otherwise", "exact")}}


def build(config, policy="fp32"):
    model, policy = Decoder(config), Policy.parse(policy)
    model.set_weights(awake_weights(config).items())
    found = {**precisions(policy, model.module_names()), "": base_precision(policy)}
    for name, module in model.named_modules():
        if hasattr(module, "precision"):
            module.precision = found[name]
    return model


def tokens(config, batch=2, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocabulary, (batch, config.context + 1), dtype=np.int32)


def halves(batch):
    return mx.array(batch[:, :-1]), mx.array(batch[:, 1:])


def loss_and_gradients(model, batch):
    def loss(parameters):
        model.update(parameters)
        return model.loss(*halves(batch))

    value, found = mx.value_and_grad(loss)(model.trainable_parameters())
    return value, dict(tree_flatten(found))


def distance(found, expected, size=None):
    """The L2 norm of the difference, against that of what is expected."""
    found, expected = (np.asarray(t).astype(np.float64) for t in (found, expected))
    return np.linalg.norm(found - expected) / (np.linalg.norm(expected) if size is None else size)


@configs
def test_parameters_and_modules_are_those_of_the_description(config):
    model = Decoder(config)
    assert {name: p.shape for name, p in tree_flatten(model.parameters())} == parameter_shapes(config)
    # MLX has no module for a list.
    assert {name for name, _ in model.named_modules() if name} == set(module_names(config)) - {"blocks"}


@pytest.mark.parametrize(
    ("policy", "fmt"), [("bf16-mixed", BF16), pytest.param("fp16-mixed", FP16, marks=pytest.mark.prove)]
)
@pytest.mark.parametrize("config", SINGLE.values(), ids=SINGLE)
def test_native_and_emulated_are_one_policy(config, policy, fmt):
    native, emulated, batch = build(config, policy), build(config, f"{policy},emulate=true"), tokens(config)
    logits = native(mx.array(batch[:, :-1]))
    assert logits.dtype == {BF16: mx.bfloat16, FP16: mx.float16}[fmt]
    assert distance(logits.astype(mx.float32), emulated(mx.array(batch[:, :-1]))) <= fmt.epsilon
    loss, found = loss_and_gradients(native, batch)
    assert loss.dtype == mx.float32
    (_, expected), (_, exact) = (loss_and_gradients(model, batch) for model in (emulated, build(config)))
    for name, gradient in expected.items():
        assert found[name].dtype == mx.float32, name
        size = np.linalg.norm(np.array(exact[name.replace(".bias", ".weight")])) or 1.0
        # Where a tensor is used twice, MLX sums its two gradients in the format and emulation in fp32: half an
        # epsilon for each. Where the sum over a batch nearly cancels, as for a factor of the whole stream, that is
        # a larger share of what is left; rounding itself is then as far from fp32.
        lost = distance(gradient, exact[name], size)
        assert distance(found[name], gradient, size) <= config.layers * fmt.epsilon + lost, name


@configs
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true"])
def test_the_stream_is_in_compute_everywhere(config, policy, monkeypatch):
    """Every layer knows which dtype may arrive and refuses another, so a promotion anywhere would show."""
    model = build(config, policy)
    compute = mx.float32 if "emulate" in policy else mx.bfloat16
    for name, module in model.named_modules():
        module.name, module.streams = name, frozenset({compute})
    streams = []
    plain = type(model.blocks[0]).__call__

    def watched(self, *given):
        y, values = plain(self, *given)
        streams.append(y)
        return y, values

    monkeypatch.setattr(type(model.blocks[0]), "__call__", watched)
    assert model.loss(*halves(tokens(config))).dtype == mx.float32
    assert len(streams) == config.layers
    for stream in streams:
        assert stream.dtype == compute
        assert mx.array_equal(stream.astype(mx.float32), stream.astype(mx.bfloat16).astype(mx.float32))


@pytest.mark.prove
def test_compiled_it_is_the_same_function():
    """One plain block, forward: on a CPU each kernel costs a run of the C++ compiler."""
    config = replace(TINY, layers=1, mlp="relu2", norm_gain=False, positions="none")
    model = build(config, "bf16-mixed")
    x, y = halves(tokens(config))
    assert mx.array_equal(mx.compile(model.loss)(x, y), model.loss(x, y))


@pytest.mark.parametrize("activation", [_gelu, _silu])
def test_activations_are_rounded_once(activation):
    x = mx.linspace(-6, 6, 1001).astype(mx.bfloat16)
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    cubic = wide + 0.044715 * wide**3
    share = (1 + np.tanh(np.sqrt(2 / np.pi) * cubic)) / 2 if activation is _gelu else 1 / (1 + np.exp(-wide))
    found = np.array(
        to_compute(activation(x), casts_of(base_precision(Policy.parse("bf16-mixed")))).astype(mx.float32)
    )
    # What is left besides is a handful of fp32 roundings of numbers up to |x|.
    bound = BF16.epsilon / 2 * np.abs(wide * share) + 16 * 2.0**-24 * (np.abs(wide) + 1)
    assert (np.abs(found - wide * share) <= bound).all()
