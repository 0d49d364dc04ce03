"""The reference decoder: one function on every backend, from the same weights, in fp32 and by policy.

Each of `series` results carries the error of its own rounding; errors of random sign add up as the root of their
number. What differs on purpose is listed in docs/backends.md.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from halfstep.config.model import ModelConfig, module_names, parameter_shapes
from halfstep.core import rounding
from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16, E5M2, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision
from halfstep.core.roles import print_value
from tests.conformance.decoders import CONFIGS, EVERYTHING, TINY, awake_weights

U32 = 2.0**-24
prove = pytest.mark.prove
configs = pytest.mark.parametrize(
    "name", ["everything", *(pytest.param(name, marks=prove) for name in ("otherwise", "gpt2", "exact"))]
)
# Two layers have every cast of four, and XLA compiles them in half the time.
ALL = CONFIGS | {"everything, shallow": replace(TINY, **EVERYTHING)}


def unit(fmt: Format) -> float:
    return 2.0 ** -(fmt.mantissa_bits + 1)


@cache
def decoded(backend, name, policy):
    """Logits, loss and the gradient of every parameter; of three sequences the last two differ in one token."""
    config = ALL[name]
    batch = np.random.default_rng(11).integers(0, config.vocabulary, (3, config.context + 1))
    batch[2] = batch[1]
    batch[2, -2] = (batch[1, -2] + 1) % config.vocabulary
    _, run = backend.decoder(config, policy, awake_weights(config))
    return run(batch[:, :-1].copy(), batch[:, 1:].copy())


def build(backend, policy, name="gpt2"):
    return backend.decoder(CONFIGS[name], policy, awake_weights(CONFIGS[name]))[0]


def series(config: ModelConfig) -> int:
    """Stored results one after another, from the tokens to a gradient: some 16 a block, there and back."""
    return 2 * (16 * config.layers + 4)


def distance(found, expected, at_least=0.0):
    off = np.linalg.norm(np.float64(found) - np.float64(expected))
    return off / max(np.linalg.norm(np.float64(expected)), at_least) if off else 0.0


def assert_gradients(found, expected, bound):
    """Each within `bound` of the expected one, in norm.

    Some gradients are zero in exact arithmetic, such as that of a key's bias, which softmax does not see. What is
    left is the error of what was canceled, so it is held against a share of all gradients together.
    """
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(np.square(np.float64(grad)).sum() for grad in expected.values()))
    for parameter in found:
        assert distance(found[parameter], expected[parameter], whole / 1024) <= bound, parameter


@configs
def test_in_fp32_it_is_one_function_on_every_backend(backend, torch_backend, name):
    """Each of `series` results carries the error of sums of at most 64 terms, whose signs are random."""
    bound = series(CONFIGS[name]) * np.sqrt(128) * U32
    logits, loss, grads = decoded(backend, name, "fp32")
    expected_logits, expected_loss, expected_grads = decoded(torch_backend, name, "fp32")
    assert distance(logits, expected_logits) <= bound
    assert abs(loss - expected_loss) <= bound * expected_loss
    assert grads.keys() == parameter_shapes(CONFIGS[name]).keys()
    assert_gradients(grads, expected_grads, 4 * bound)


@configs
def test_every_parameter_learns_and_no_token_sees_the_future(backend, name):
    logits, _, grads = decoded(backend, name, "fp32")
    for parameter, grad in grads.items():
        # The first block has nothing to mix its values with.
        assert parameter == "blocks.0.attn.value_mix" or np.abs(grad).max() > 0, parameter
    assert np.array_equal(logits[1, :-1], logits[2, :-1])
    assert not np.array_equal(logits[1, -1], logits[2, -1])


POLICIES = ["bf16-mixed", "bf16-mixed,emulate=true", "fp16-mixed", "fp8-mixed,emulate=true"]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(pytest.param("otherwise", policy, marks=prove) for policy in POLICIES[:2]),
        *(("otherwise", policy) for policy in POLICIES[2:]),
        ("everything, shallow", POLICIES[1]),
        pytest.param("everything, shallow", POLICIES[3], marks=prove),
    ],
)
def test_in_half_precision_it_is_torchs_emulation(slow_backend, torch_backend, name, policy):
    """Both round each of `series` results once; where an fp32 sum came out on the other side of a tie they differ
    by one unit."""
    config = ALL[name]
    emulated = policy if "emulate" in policy else f"{policy},emulate=true"
    fmt = E5M2 if policy.startswith("fp8") else Policy.parse(policy).compute.format
    bound = 2 * unit(fmt) * np.sqrt(series(config))
    logits, loss, grads = decoded(slow_backend, name, policy)
    expected_logits, expected_loss, expected_grads = decoded(torch_backend, name, emulated)
    exact_logits, exact_loss, _ = decoded(torch_backend, name, "fp32")
    assert distance(logits, expected_logits) <= bound
    if policy == "bf16-mixed,emulate=true":
        # A rounding that is missing would change about half of all numbers.
        assert (logits == expected_logits).mean() > 0.8
    assert distance(logits, exact_logits) > unit(FP32) * 64  # it did run in another precision
    assert abs(loss - expected_loss) <= bound * expected_loss
    assert_gradients(grads, expected_grads, 4 * bound)
    assert abs(loss - exact_loss) <= 2 * bound * exact_loss


def test_every_switch_has_every_value_somewhere():
    for field in ("mlp", "norm", "positions", "qk_norm", "embedding_shortcut"):
        legal = set(ModelConfig.__dataclass_fields__[field].type.__args__)
        assert {getattr(config, field) for config in CONFIGS.values()} == legal
    for field, spec in ModelConfig.__dataclass_fields__.items():
        if spec.type is bool:
            assert {getattr(config, field) for config in CONFIGS.values()} == {True, False}, field


def test_rules_change_what_they_name(slow_backend):
    rules = "blocks.1.mlp.*: compute=fp32; lm_head: compute=tf32"
    model = build(slow_backend, f"bf16-mixed,emulate=true; {rules}")
    assert str(model.blocks[1].mlp.up.precision.compute) == "fp32"
    assert str(model.blocks[0].mlp.up.precision.compute) == "bf16"
    assert print_value(model.lm_head.precision.operand) == "tf32"
    assert str(model.precision.compute) == "bf16"
    assert build(slow_backend, "fp32").blocks[0].attn.q.precision == Precision()
    head = decoded(slow_backend, "exact", "bf16-mixed; lm_head: compute=fp32")[0]
    plain = decoded(slow_backend, "exact", "bf16-mixed")[0]
    assert np.array_equal(plain, rounding.cast(plain, BF16, overflow="inf"))
    assert not np.array_equal(head, rounding.cast(head, BF16, overflow="inf"))
    with pytest.raises(PolicyError, match="matches none"):
        build(slow_backend, "bf16-mixed; nothing.*: compute=fp32")


def test_names_tables_and_capped_logits(backend, torch_backend):
    model = build(backend, "fp32", "everything")
    assert model.module_names() == module_names(CONFIGS["everything"])
    config = ModelConfig(width=96, heads=6, context=1024, rope_base=1e6)
    ours, theirs = (
        [b.numpy(b.array(table)) for table in b.model.rope_tables(config)] for b in (backend, torch_backend)
    )
    assert np.array_equal(ours, theirs)
    assert {table.dtype for table in ours} == {np.dtype(np.float32)}
    kind, capped = backend.named(model.capped(backend.as_dtype(np.float32([1e4, -1e4, 1.0]), BF16)))
    assert kind == "float32"
    np.testing.assert_allclose(capped, [5.0, -5.0, 5 * np.tanh(0.2)], rtol=1e-6)
    assert build(backend, "fp32").capped(backend.as_dtype(np.float32([7.0]), BF16)) == 7.0
