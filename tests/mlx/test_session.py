"""The session: steps, state, evaluation and sampling of the reference decoder on MLX."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.mlx import session as module
from halfstep.mlx.cast import join
from halfstep.mlx.session import Session
from halfstep.training.sampling import generate

SMALL = [
    "model.context=16",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
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
    return dict(session.model.named_parameters())


POLICIES = [
    "fp32",
    "bf16-mixed",
    "bf16-mixed,param=fp32:split",
    "bf16-true,param=bf16:stochastic",
    "fp16-mixed,scale=dynamic:init=1024",
    "fp16-mixed,emulate=true",
    "fp8-mixed,emulate=true",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_learns(policy):
    s = session(policy, "optimizer.rate=0.01")
    losses = [s.read(s.step(batch(0, s)))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("optimizer", "policy"), [*(("adamw", p) for p in POLICIES), *(("muon", p) for p in POLICIES[:4])]
)
def test_a_state_put_back_goes_on_bit_for_bit(policy, optimizer):
    one = session(policy, f"optimizer.name={optimizer}")
    for step in range(2):
        one.step(batch(step, one))
    saved = one.state()
    other = session(policy, f"optimizer.name={optimizer}")
    other.step(batch(9, other))  # elsewhere, so that anything left out of the state would show
    other.load(saved)
    for step in range(2, 4):
        left, right = (s.read(s.step(batch(step, s))) for s in (one, other))
        assert left == right
    assert one.state() == other.state()
    assert one.applied() == other.applied() == 4


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("fp32", "model.width=32"), "of shape"),
        (("bf16-true",), "bfloat16 of shape"),
        (("fp32", "model.layers=2"), "names differ"),
        (("fp32", "optimizer.name=muon"), "names differ"),
        (("fp32,moments=bf16",), "bfloat16 of shape"),
        (("fp32,param=fp32:split",), "names differ"),
    ],
)
def test_a_state_of_another_shape_or_precision_is_refused_whole(other, said):
    given = session("fp32").state()
    target = session(*other)
    before = target.state()
    with pytest.raises(HalfstepError, match=said):
        target.load(given)
    assert target.state() == before


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
def test_weights_alone_serve_evaluation_and_sampling(policy):
    trained, fresh = session(policy), session("fp32")
    trained.step(batch(0, trained))
    fresh.load_weights(trained.state())
    for name, place in trained.run.conversion.places.items():
        lo = trained.run.masters.remainders.get(name)
        wide = place.array if lo is None else join(place.array, lo)
        assert mx.array_equal(weights(fresh)[name], wide)
    assert fresh.applied() == 0


def test_evaluation_changes_nothing_and_is_in_the_eval_format():
    s = session("fp8-mixed,emulate=true")
    batches = [batch(1, s)[0]]
    before = s.state()
    total, count = s.evaluate(batches)
    assert count == 2 * 16
    # fp8-mixed evaluates in bf16: the same as bf16-mixed does
    reference = session("bf16-mixed,emulate=true")
    assert total == reference.evaluate(batches)[0]
    assert s.state() == before
    assert str(s.model.blocks[0].mlp.up.precision.operand.format) == "e4m3"


def test_evaluation_may_be_wider_than_training_and_sees_the_whole_of_split_masters():
    wide, split = session("fp32"), session("bf16-mixed,param=fp32:split,eval=fp32")
    batches = [batch(1, wide)[0]]
    assert wide.evaluate(batches) == split.evaluate(batches)  # of the same first weights
    assert weights(split)["blocks.0.mlp.up.weight"].dtype == mx.bfloat16
    split.read(split.step(batch(0, split)))  # and training goes on in bf16
    assert split.evaluate([]) == (0, 0)


def test_the_schedule_sees_skipped_steps():
    s = session()
    rates = []
    for step in range(4):
        tokens = batch(step, s)
        if step == 1:
            clean = s.model.embed.weight
            s.model.embed.weight = mx.where(mx.arange(256)[:, None] == 0, mx.nan, clean)
            tokens[...] = 0
        s.read(s.step(tokens))
        rates.append(s.run.optimizers[0].learning_rate.item() / 3e-3)
        if step == 1:
            s.model.embed.weight = clean
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])


def test_sampling_is_a_function_of_the_seed_and_greedy_at_zero():
    s = session()
    first = list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=256))
    assert first == list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=256))
    assert first != list(generate(s, [1, 2], 12, 1.0, 0, seed=4, alphabet=256))
    greedy = list(generate(s, [1, 2], 5, 0.0, 0, seed=0, alphabet=256))
    assert greedy == list(generate(s, [1, 2], 5, 1.0, 1, seed=9, alphabet=256))  # the top one of one
    assert all(0 <= token < 256 for token in first)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_decay_and_the_rest_does_not(optimizer):
    s = session(
        "fp32",
        f"optimizer.name={optimizer}",
        "model.layers=2",
        "model.unet_skips=true",
        "model.embedding_shortcut=channel",
        "model.bias=true",
    )
    names = {f"optimizer.{i}": o for i, o in enumerate(s.run.optimizers)}
    seen = set()
    for name, array in weights(s).items():
        owners = [o for prefix, o in names.items() if any(k.startswith(f"{prefix}.{name}.") for k in s.state())]
        assert len(owners) == 1
        matrix = array.ndim == 2 and name.endswith(".weight")
        in_blocks = optimizer == "muon" and matrix and name.startswith("blocks.")
        assert type(owners[0]).__name__ == ("Muon" if in_blocks else "AdamW"), name
        assert (owners[0].weight_decay > 0) == (matrix and not in_blocks), name
        seen.add(id(owners[0]))
    assert len(seen) == len(names)


def test_it_says_what_and_where_it_is():
    s = session()
    assert s.description.kind == "cpu"
    assert not s.asynchronous
    assert s.memory() > 10e6
    assert module.version == mx.__version__
    with pytest.raises(HalfstepError, match="no MLX device"):
        Session(s.config, s.policy, "cuda")


@cache
def trained(policy):
    s = session(policy, "model.layers=2")
    losses = [s.read(s.step(batch(step, s)))["loss"] for step in range(2)]
    return losses, s.state()


HONORED = [
    ("bf16-mixed", "bf16-mixed,param=bf16,grad_weight=bf16"),
    ("bf16-true", "bf16-true,param=bf16:stochastic"),
    ("bf16-true", "bf16-true,grad_weight=fp32"),
    ("bf16-mixed", "bf16-mixed,param=fp32:split"),
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
    ("bf16-mixed", "bf16-mixed; blocks.1.mlp.up: grad_weight=bf16"),
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
    ("fp16-mixed,emulate=true", "fp16-mixed,emulate=true,scale=static:value=2"),
]


@pytest.mark.parametrize(("base", "policy"), HONORED)
def test_every_value_that_is_accepted_changes_what_is_computed(base, policy):
    assert trained(policy) != trained(base)


REFUSED = [
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
    ("bf16-mixed,router=bf16", "router=bf16"),
    ("bf16-mixed,reduce=bf16", "reduce=bf16"),
    ("bf16-mixed,matmul=fp32:fast", "fast"),
    ("bf16-mixed,emulate=true,compute=e4m3:delayed", "delayed"),
    ("bf16-mixed; blocks.0.mlp.up: grad=fp32; lm_head: compute=fp32", "activation's own format"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; **.attn: compute=e4m3", "names no matmul"),
    ("bf16-mixed; lm_head: param=bf16", "no parameter is held"),
    ("bf16-mixed; lm_head: moments=bf16", "no parameter is held"),
    ("compute=tf32", "tf32 cannot run"),
    ("fp8-mixed", "MLX has no fp8 type"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_would_change_nothing_is_refused(policy, said):
    with pytest.raises(HalfstepError, match=said):
        session(policy)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("policy", ["compute=tf32,emulate=true", "compute=e6m9ieee,scale=dynamic,emulate=true"])
def test_any_format_runs_emulated_under_every_optimizer(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    assert np.isfinite(s.read(s.step(batch(0, s)))["loss"])


def test_emulated_bf16_true_rounds_the_gradients_that_native_bf16_true_has():
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        s = session(
            policy, "model.tied=false"
        )  # the two gradients of a tied weight are summed, in fp32 if emulated
        grads = s.run.value_and_grad(module._sum_and_count)(mx.array(batch(0, s)[0]))[1].arrays
        for name, g in grads.items():
            # of the sum of losses: 32 is a power of two, so that the mean has the same digits
            assert mx.array_equal(g, g.astype(mx.bfloat16).astype(mx.float32)), (policy, name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "policy", ["bf16-true", "bf16-true,emulate=true", "bf16-true,param=bf16:stochastic,emulate=true"]
)
def test_masters_stay_in_their_format_after_every_update(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    for step in range(2):
        before = weights(s)
        s.step(batch(step, s))
        after = weights(s)
        assert any(not mx.array_equal(before[name], after[name]) for name in after)
        assert all(mx.array_equal(p, p.astype(mx.bfloat16).astype(p.dtype)) for p in after.values())
