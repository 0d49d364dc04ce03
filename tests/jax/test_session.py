"""What only JAX's session does. tests/conformance/session holds the rest."""

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import BatchError
from halfstep.core.policy import Policy
from halfstep.jax.session import Session
from halfstep.jax.state import state_dict
from tests.token_batches import batch

SMALL = ["model.context=8", "model.layers=1", "model.width=16", "model.heads=2", "optimizer.name=adamw"]
SMALL += ["model.vocabulary=64", "model.qk_norm=none", "model.positions=none"]
SMALL += ["training.batch=2", "training.micro_batches=2", "training.compile=false"]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


@pytest.mark.prove
def test_sampling_is_one_program_for_every_length():
    s = session("fp32")
    tokens = [3, 1, 4, 1, 5]
    # After a prefix, what the model expects next does not depend on the padding.
    whole = np.asarray(s.model.capped(s.model(s.run.params, np.asarray([tokens]))[0, -1]))
    assert np.abs(s.logits(tokens) - whole).max() <= 2.0**-18 * np.abs(whole).max() + 2.0**-20
    s.logits(tokens[:2])
    assert s._next._cache_size() == 1


def test_the_schedule_does_not_count_skipped_steps():
    s = session("fp32")
    state = s.state()
    dtype, shape, data = state["model.embed.weight"]
    s.step(batch(0, s))
    saved = s.state()
    s.load_weights({**state, "model.embed.weight": (dtype, shape, b"\xff" * len(data))})
    assert s.state()["applied"] == saved["applied"]
    assert s.read(s.step(batch(1, s)))["skipped"] == 1
    assert s.applied() == 1
    counts = [int(count) for name, count in state_dict(s.run).items() if name.endswith("count")]
    assert {*counts} == {1}  # Adam's, and the schedule's
    s.load(s.state())
    assert [int(count) for name, count in state_dict(s.run).items() if name.endswith("count")] == counts


def test_the_step_starts_at_the_scale_and_refuses_a_wrong_number_of_micro_batches():
    base, other = session("fp16-mixed"), session("fp16-mixed,scale=static:value=2")
    assert float(base.run.scale.scale) == 65536
    assert float(other.run.scale.scale) == 2
    assert base.asynchronous
    with pytest.raises(BatchError, match="3"):
        base.step(np.zeros((3, 2, 9), np.int32))


def test_layers_have_the_names_of_the_model_also_without_parameters():
    s = session(
        "bf16-mixed; lm_head: compute=fp32", "model.norm_gain=false", "model.qk_norm=plain", "model.tied=true"
    )
    layers = {layer.name: layer for layer in s.watch(4096)}
    assert {name: layer.kind for name, layer in layers.items()} == {
        "embed": "embedding",
        **dict.fromkeys(("blocks.0.attn_norm", "blocks.0.mlp_norm", "final_norm"), "norm"),
        **dict.fromkeys(("blocks.0.attn.q_norm", "blocks.0.attn.k_norm"), "norm"),
        **dict.fromkeys((f"blocks.0.attn.{part}" for part in "qkvo"), "matmul"),
        **dict.fromkeys(("blocks.0.mlp.up", "blocks.0.mlp.down", "lm_head"), "matmul"),
    }
    assert layers["lm_head"].formats["activation"] == "fp32"
    assert layers["blocks.0.attn.q"].formats == {"activation": "bf16", "gradient": "bf16", "weight": "fp32"}


@pytest.mark.prove
def test_a_session_that_is_watched_trains_to_the_same_bits():
    plain, watched = (session("bf16-mixed", "training.recompute_blocks=true") for _ in range(2))
    layers = watched.watch(4096)
    asked = watched.weight_numbers()
    results = [(plain.step(batch(i, plain)), watched.step(batch(i, watched))) for i in range(2)]
    for one, other in results:
        assert plain.read(one) == watched.read(other)
    assert plain.state() == watched.state()
    assert watched._step._cache_size() == 1
    numbers = watched.layer_numbers().read()
    assert numbers.shape == (len(layers), 2, 5)
    assert (numbers[:, :, :2] > 0).all()
    weights = asked.read()
    assert weights.shape == (len(layers), 4)
    assert np.isfinite(weights[[layer.name == "blocks.0.attn.q" for layer in layers]]).all()
    sample = watched.sample(batch(0, watched))
    assert set(sample) == {layer.name for layer in layers}
    assert set(sample["blocks.0.attn.q"]) == {"activation", "gradient", "weight"}


@pytest.mark.prove
def test_delayed_operands_have_histories_of_the_model_a_tied_head_too():
    policy = "bf16-mixed,emulate=true; **.mlp.*: compute=e4m3:delayed; lm_head: compute=e4m3:delayed"
    s = session(policy, "model.tied=true", "model.zero_init=false")
    assert {*s.run.amaxes} == {"blocks.0.mlp.up", "blocks.0.mlp.down", "lm_head"}
    for number in range(2):
        s.step(batch(number, s))
    saved = s.state()
    for name, history in s.run.amaxes.items():
        assert (np.asarray(history)[:2, :2] > 0).all(), name
        assert saved[f"amax.{name}"].dtype == "F32"
    after = s.read(s.step(batch(2, s)))
    s.load(saved)
    assert s.read(s.step(batch(2, s))) == after
    assert np.isfinite(s.evaluate(iter([batch(0, s)[0]]))[0])
    assert np.isfinite(s.logits([1, 2])).all()
    assert s.blame(batch(3, s)) is not None
