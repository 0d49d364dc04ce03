"""The session: steps, state, evaluation and sampling of the reference decoder on JAX.

A step takes seconds to compile, so what a policy's values change is looked for in the program, not in its numbers.
"""

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.jax.session import Session
from halfstep.training.sampling import generate
from halfstep.training.session import open_session

SMALL = [
    "model.context=8",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.vocabulary=64",
    "model.qk_norm=none",
    "model.positions=none",
    "training.batch=2",
    "training.micro_batches=2",
    "training.compile=false",
    "optimizer.name=adamw",
]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


def batch(step, session):
    model, training = session.config.model, session.config.training
    rng = np.random.default_rng(step)
    shape = (training.micro_batches, training.batch, model.context + 1)
    return rng.integers(0, 64, shape).astype(np.int32)


def weights(session):
    return {name: np.asarray(leaf) for name, leaf in session.run.params.items()}


def same(left, right):
    return all(np.array_equal(left[name], right[name]) for name in left | right)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("bf16-true", "muon"), ("fp8-mixed,emulate=true", "adamw")],
)
def test_it_learns_and_a_state_put_back_goes_on_bit_for_bit(policy, optimizer):
    one = session(policy, f"optimizer.name={optimizer}", "optimizer.rate=0.01", "optimizer.muon_rate=0.1")
    first = one.read(one.step(batch(0, one)))["loss"]
    for _ in range(5):
        last = one.read(one.step(batch(0, one)))["loss"]
    assert last < first - 0.1
    saved, before = one.state(), weights(one)
    after = [one.read(one.step(batch(step, one))) for step in range(2)]
    trained = weights(one)
    assert not same(before, trained)
    if policy == "bf16-true":
        assert {x.dtype.name for x in trained.values()} == {"bfloat16"}
    one.load(saved)  # the same programs: another session would compile its own
    assert same(before, weights(one))
    assert one.state() == saved
    assert after == [one.read(one.step(batch(step, one))) for step in range(2)]
    assert same(trained, weights(one))
    assert one.applied() == 8


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("fp32", "model.width=32"), "of shape"),
        (("bf16-true",), "bfloat16 of shape"),
        (("fp32", "model.layers=2"), "names differ"),
        (("fp32", "optimizer.name=muon"), "names differ"),
        (("fp32,moments=bf16",), "bfloat16 of shape"),
    ],
)
def test_a_state_of_another_shape_or_precision_is_refused_whole(other, said):
    given = session("fp32").state()
    target = session(*other)
    before = weights(target)
    with pytest.raises(HalfstepError, match=said):
        target.load(given)
    assert same(before, weights(target))


def test_evaluation_changes_nothing_and_is_in_the_eval_format():
    s, reference = session("fp8-mixed,emulate=true"), session("bf16-mixed,emulate=true")
    batches = [batch(1, s)[0]]
    before = s.state()
    total, count = s.evaluate(batches)
    assert count == 2 * 8
    # fp8-mixed evaluates in bf16: the same as bf16-mixed does
    assert total == reference.evaluate(batches)[0]
    assert s.state() == before
    assert str(s.model.blocks[0].mlp.up.precision.operand.format) == "e4m3"


def test_sampling_weights_and_the_schedule_of_skipped_steps():
    s = session("fp32")
    first = list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first == list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first != list(generate(s, [1, 2], 12, 1.0, 0, seed=4, alphabet=64))
    greedy = list(generate(s, [1, 2], 5, 0.0, 0, seed=0, alphabet=64))
    assert greedy == list(generate(s, [1, 2], 5, 1.0, 1, seed=9, alphabet=64))  # the top one of one
    assert s._next._cache_size() == 1  # one program for every length

    # after a prefix, what the model expects next does not depend on the padding
    tokens = [3, 1, 4, 1, 5]
    whole = s.model.capped(s.model(s.run.params, np.asarray([tokens]))[0, -1])
    assert (
        np.abs(s.logits(tokens) - np.asarray(whole)).max() <= 2.0**-18 * np.abs(np.asarray(whole)).max() + 2.0**-20
    )

    state = s.state()
    spoiled = {
        **state,
        "model.embed.weight": (*state["model.embed.weight"][:2], b"\xff" * len(state["model.embed.weight"][2])),
    }
    s.step(batch(0, s))
    saved = s.state()
    s.load_weights(spoiled)
    assert s.state()["optimizer.0.count"] == saved["optimizer.0.count"]
    assert s.read(s.step(batch(1, s)))["skipped"] == 1
    assert s.applied() == 1
    count = {
        name: np.frombuffer(record[2], np.int32)[0] for name, record in s.state().items() if name.endswith("count")
    }
    assert set(count.values()) == {1}  # Adam's, and the schedule's


PROGRAMS = {}


def program(policy, *extra):
    """The step, as it goes to XLA."""
    if (policy, extra) not in PROGRAMS:
        s = session(policy, "training.micro_batches=1", *extra)
        PROGRAMS[policy, extra] = s._step.lower(s.run, batch(0, s)[0]).as_text()
    return PROGRAMS[policy, extra]


HONORED = [
    ("bf16-mixed", "bf16-mixed,param=bf16,grad_weight=bf16"),
    ("bf16-true", "bf16-true,param=bf16:stochastic"),
    ("bf16-true", "bf16-true,grad_weight=fp32"),
    ("fp32", "bf16-mixed"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=tf32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e6m9ieee,scale=dynamic"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,grad=fp32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true; blocks.0.mlp.up: grad=e5m2"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e4m3"),
    ("bf16-mixed,emulate=true; **: compute=e4m3", "bf16-mixed,emulate=true; **: compute=e4m3:row"),
    ("bf16-mixed", "bf16-mixed,grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; blocks.0.mlp.up: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed,accumulate=bf16"),
    ("bf16-mixed", "bf16-mixed,moments=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: moments=bf16"),
    ("bf16-mixed", "bf16-mixed,norm=bf16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,norm=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: norm=bf16"),
    ("bf16-mixed", "bf16-mixed,softmax=bf16"),
    ("bf16-mixed", "bf16-mixed,loss=bf16"),
    ("bf16-mixed", "bf16-mixed; lm_head: compute=fp32"),
    ("bf16-mixed", "bf16-mixed; embed: param=bf16,grad_weight=bf16"),
]


@pytest.mark.parametrize(("base", "policy"), HONORED)
def test_every_value_that_is_accepted_changes_what_is_computed(base, policy):
    assert program(policy) != program(base)


def test_the_scale_of_the_loss_is_where_the_step_starts():
    base, other = session("fp16-mixed"), session("fp16-mixed,scale=static:value=2")
    assert float(base.run.scale.scale) == 65536
    assert float(other.run.scale.scale) == 2


REFUSED = [
    ("bf16-mixed,param=fp32:split", "split"),
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
    ("bf16-mixed,router=bf16", "router=bf16"),
    ("bf16-mixed,reduce=bf16", "reduce=bf16"),
    ("bf16-mixed,matmul=fp32:fast", "fast"),
    ("bf16-mixed,emulate=true,compute=e4m3:delayed", "delayed"),
    ("bf16-mixed; blocks.0.mlp.up: grad=fp32; lm_head: compute=fp32", "activation's own dtype"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; **.attn: compute=e4m3", "names no matmul"),
    ("bf16-mixed; lm_head: param=bf16", "no parameter is held"),
    ("bf16-mixed; lm_head: moments=bf16", "no parameter is held"),
    ("compute=tf32", "tf32 cannot run"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_would_change_nothing_is_refused(policy, said):
    with pytest.raises(HalfstepError, match=said):
        session(policy)


def test_the_loop_opens_it_and_a_wrong_number_of_micro_batches_is_refused():
    config = load("tiny", [*SMALL, "backend=jax"])
    s = open_session(config, Policy.parse("fp32"), "cpu")
    assert isinstance(s, Session)
    assert s.asynchronous
    assert s.description.kind == "cpu"
    assert s.memory() > 2**20
    with pytest.raises(HalfstepError, match="3 micro-batches were given"):
        s.step(np.zeros((3, 2, 9), np.int32))
