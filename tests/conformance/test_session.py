"""What the training loop calls: the same session on every backend, from the same weights and tokens.

A step takes seconds to compile on JAX, so some of it is a sample in the fast suite and all of it in `make prove`.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core import rounding, split
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.roles import ROLES
from halfstep.core.scaling import LAWS, DynamicScale, NoScale, Scale
from halfstep.core.state_format import convert, widen
from halfstep.training.run.manifest import held_formats
from halfstep.training.sampling import generate
from halfstep.training.session import open_session
from tests.token_batches import batch

U32 = 2.0**-24
SERIES = 72  # results one after another in two blocks, forward and backward, each with its rounding
TRAINING = ["training.batch=2", "training.micro_batches=2", "training.compile=false"]
RECIPE = [*TRAINING, "model.context=16", "model.layers=2", "model.width=32", "model.heads=2"]
RECIPE += ["model.vocabulary=64"]
SMALL = [*RECIPE, "model.context=8", "model.layers=1", "model.width=16", "optimizer.name=adamw"]
SMALL += ["model.qk_norm=none", "model.positions=none"]
prove = pytest.mark.prove


def session(backend, policy="fp32", *extra):
    return backend.open(load("tiny", [*SMALL, *extra]), policy, lambda applied, xp: 1.0 / (1.0 + applied))


def masters(state):
    """The fp32 numbers that a state's weights stand for, however they are held."""
    wide = {}
    for name, (dtype, shape, data) in state.items():
        if name.startswith("model."):
            name = name.removeprefix("model.")
            if dtype == "F32":
                flat = np.frombuffer(data, "<f4")
            elif f"remainder.{name}" in state:
                lo = np.frombuffer(state[f"remainder.{name}"][2], "<i2")
                flat = split.join(np.frombuffer(data, "<u2").astype(np.uint16), lo.astype(np.int16))
            else:
                flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            wide[name] = flat.reshape(shape)
    return wide


def as_bf16(x):
    return rounding.cast(np.ascontiguousarray(x, np.float32), BF16, overflow="inf")


def batches(config, steps):
    rng = np.random.default_rng(4)
    shape = (config.training.micro_batches, config.training.batch, config.model.context + 1)
    return [(rng.integers(0, 8, shape) * 8).astype(np.int32) for _ in range(steps)]


def trained(backend, policy, optimizer, steps):
    config = load("tiny", [*RECIPE, "optimizer.rate=0.003", f"optimizer.name={optimizer}"])
    session = backend.open(config, policy, lambda applied, xp: 1.0 / (1.0 + 0.1 * applied))
    first = {n: record for n, record in session.state().items() if n.startswith(("model.", "remainder."))}
    losses = [session.read(session.step(batch))["loss"] for batch in batches(config, steps)]
    return first, np.array(losses), session


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("fp32", "muon"),
        ("bf16-mixed", "adamw"),
        pytest.param("fp32", "adamw", marks=prove),
        pytest.param("bf16-mixed", "muon", marks=prove),
        pytest.param("fp16-mixed", "adamw", marks=prove),
        pytest.param("fp16-mixed", "muon", marks=prove),
    ],
)
def test_twenty_steps_of_training(slow_backend, torch_backend, policy, optimizer):
    """The same weights to begin with, bit for bit, and then the same losses at every step.

    In half precision to one rounding of the format: the logits of a loss are not known any better. In fp32
    to one rounding for each of a series of results, though the weights are those of twenty steps.
    """
    first, losses, session = trained(slow_backend, policy, optimizer, 20)
    expected_first, expected, _ = trained(torch_backend, policy, optimizer, 20)
    assert first == expected_first
    fmt = Policy.parse(policy).compute.format
    bound = SERIES * U32 if fmt == FP32 else 2.0 ** -(fmt.mantissa_bits + 1)
    assert (np.abs(losses - expected) <= bound * expected).all(), (losses - expected) / expected
    assert losses[-1] < losses[0] - 0.5
    assert session.applied() == 20


SHRUNK = {
    "speedrun": ["model.heads=2", "model.zero_init=false", "model.zero_head=false"],
    "golf": ["model.layers=3", "model.heads=4", "model.kv_heads=2", "model.mlp_width=64", "model.zero_init=false"],
}


@pytest.mark.parametrize("recipe", ["speedrun", pytest.param("golf", marks=prove)])
def test_ten_steps_of_a_recipe_with_rates_of_its_own(slow_backend, torch_backend, recipe):
    """Each group at its rate, Muon's momentum on its way up: the same losses, bounded as above.

    Rates are for a model as small as this: at those of the recipe its loss is chaos after a few steps. And nothing
    starts at zero: the first gradients behind it are of the size of Adam's epsilon, where rounding decides.
    """
    rates = [f"optimizer.{kind}_rate={rate}" for kind, rate in RECIPE_RATES[recipe].items()]
    given = [*RECIPE, *SHRUNK[recipe], *rates, "optimizer.muon_momentum_warmup=8", "training.steps=10"]

    def losses(name):
        config = load(recipe, [*given, f"backend={name}"])
        session = open_session(config, Policy.parse("fp32"), "cpu")
        return np.array([session.read(session.step(batch))["loss"] for batch in batches(config, 10)])

    found, expected = losses(slow_backend.name), losses(torch_backend.name)
    assert (np.abs(found - expected) <= SERIES * U32 * expected).all(), (found - expected) / expected
    assert found[-1] < found[0] - 0.1


RECIPE_RATES = {
    "speedrun": {"embedding": 0.03, "head": 0.01, "scalar": 0.002, "muon": 0.002},
    "golf": {"embedding": 0.005, "scalar": 0.004, "muon": 0.004},
}


def test_stochastic_rounding_takes_the_same_words_everywhere(slow_backend, torch_backend):
    """After one step most weights are rounded from the same number by the same word: other words would make half
    of them differ."""
    left, right = (
        masters(trained(b, "bf16-true,param=bf16:stochastic", "adamw", 1)[2].state())["blocks.0.mlp.up.weight"]
        for b in (slow_backend, torch_backend)
    )
    assert (left == right).mean() > 0.95


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("policy", ["compute=tf32,emulate=true", "compute=e6m9ieee,scale=dynamic,emulate=true"])
def test_any_format_runs_emulated_under_every_optimizer(slow_backend, policy, optimizer):
    s = session(slow_backend, policy, f"optimizer.name={optimizer}")
    result, _ = slow_backend.fingerprint(s, batch(0, s))
    assert isinstance(result, str) or np.isfinite(result["loss"])  # JAX traces it


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("bf16-true", "adamw"),
        ("bf16-true,param=bf16:stochastic,emulate=true", "muon"),
        pytest.param("bf16-true", "muon", marks=prove),
        pytest.param("bf16-true,emulate=true", "adamw", marks=prove),
        pytest.param("bf16-true,emulate=true", "muon", marks=prove),
    ],
)
def test_masters_stay_in_their_format_after_every_update(slow_backend, policy, optimizer):
    s = session(slow_backend, policy, f"optimizer.name={optimizer}")
    for step in range(2):
        before = masters(s.state())
        s.step(batch(step, s))
        after = masters(s.state())
        assert any(not np.array_equal(before[name], after[name]) for name in after)
        assert all(np.array_equal(master, as_bf16(master)) for master in after.values())


RESUMED = ["fp32", "bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic", "fp16-mixed,emulate=true"]


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("bf16-true,param=bf16:stochastic", "muon"),
        *(pytest.param(policy, "adamw", marks=prove) for policy in (*RESUMED, "fp8-mixed,emulate=true")),
        *(pytest.param(policy, "muon", marks=prove) for policy in RESUMED[:2]),
    ],
)
def test_a_restored_state_continues_bit_for_bit(slow_backend, policy, optimizer):
    if slow_backend.name == "jax":
        policy = policy.replace(",param=fp32:split", "")
    one = session(slow_backend, policy, f"optimizer.name={optimizer}")
    for step in range(2):
        one.step(batch(step, one))
    saved = one.state()
    after = [one.read(one.step(batch(step, one))) for step in range(2, 4)]
    last = one.state()
    # On JAX the same programs: another session would compile its own.
    other = one if slow_backend.name == "jax" else session(slow_backend, policy, f"optimizer.name={optimizer}")
    other.step(batch(9, other))  # elsewhere, so that anything left out of the state would show
    other.load(saved)
    assert other.state() == saved
    assert after == [other.read(other.step(batch(step, other))) for step in range(2, 4)]
    assert {**other.state(), "rng.cpu": None} == {**last, "rng.cpu": None}
    assert other.applied() == 4
    assert after[0]["loss"] != after[1]["loss"]


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
def test_a_state_of_another_shape_or_precision_is_refused_whole(backend, other, said):
    given = session(backend).state()
    target = session(backend, *other)
    before = target.state()
    with pytest.raises(HalfstepError, match=said):
        target.load(given)
    assert target.state() == before


def test_the_loss_scale_of_another_policy_is_refused_and_may_be_left_out(slow_backend):
    """An fp32 run has a scale of 1, at which fp16 loses its small gradients."""
    plain, scaled = session(slow_backend).state(), session(slow_backend, "fp16-mixed,emulate=true")
    before = scaled.state()
    with pytest.raises(HalfstepError, match=r"a loss scale of 1, which `scale=dynamic` does not have"):
        scaled.load(plain)
    assert scaled.state() == before
    with pytest.raises(HalfstepError, match="a loss scale of 65536, which `scale=none` does not have"):
        session(slow_backend).load(before)
    scaled.load({name: value for name, value in plain.items() if not name.startswith("scale.")})
    assert scaled.state() == plain | {name: value for name, value in before.items() if name.startswith("scale.")}


@pytest.mark.parametrize("source", ["fp32", "param=fp32:split", "bf16-true"])
@pytest.mark.parametrize("target", ["fp32", "bf16-mixed,param=fp32:split", "bf16-true"])
def test_weights_are_loaded_from_a_state_however_they_are_held(backend, source, target):
    if backend.name == "jax" and "split" in source + target:
        pytest.skip("JAX holds no split masters")
    trained, fresh = session(backend, source), session(backend, target, "seed=5")
    fresh.load_weights(trained.state())
    expected = masters(trained.state())
    for name, found in masters(fresh.state()).items():
        assert np.array_equal(found, as_bf16(expected[name]) if target == "bf16-true" else expected[name]), name
    assert fresh.applied() == 0


CHANGED = [
    ("bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true"),
    *(
        pytest.param(before, after, marks=prove)
        for before, after in (
            ("fp32", "fp16-mixed,emulate=true"),
            ("fp16-mixed,emulate=true", "bf16-mixed,emulate=true,param=fp32:split"),
            ("bf16-true,emulate=true", "fp32"),
            ("bf16-mixed,emulate=true,moments=bf16", "fp8-mixed,emulate=true"),
            ("fp8-mixed,emulate=true", "bf16-true,emulate=true,param=fp32"),
        )
    ),
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=prove)])
def test_another_policy_keeps_masters_moments_and_counts_bit_for_bit(slow_backend, before, after, optimizer):
    """What it then does with them is a step from these very numbers, at the first scale of the new policy."""
    if slow_backend.name == "jax":
        before, after = (policy.replace(",param=fp32:split", "") for policy in (before, after))
    given = [f"optimizer.name={optimizer}", "training.ema=0.5"]
    one, other = session(slow_backend, before, *given), session(slow_backend, after, *given, "seed=5")
    for step in range(2):
        one.step(batch(step, one))
    saved, fresh = one.state(), other.state()
    other.load(convert(saved, fresh, held_formats(other.policy, other.config.model, fresh)))
    found = other.state()
    left, right = masters(saved), masters(found)
    assert all(np.array_equal(left[name], right[name]) for name in left)
    learned = [name for name in found if name.startswith(("optimizer.", "average.", "applied"))]
    floats = {"F32", "BF16", "F16"}
    for name in learned:
        if saved[name].dtype in floats:
            assert np.array_equal(widen(found[name]), widen(saved[name])), name
        else:
            assert found[name] == saved[name], name
    assert all(found[name] == fresh[name] for name in fresh if name.startswith("scale."))
    assert other.applied() == 2
    assert other.read(other.step(batch(2, other)))["skipped"] == 0
    assert masters(other.state()).keys() == left.keys()
    if "bf16-true" not in before and "moments" not in before:
        narrow = session(slow_backend, "bf16-true,emulate=true", *given)
        ours = narrow.state()
        with pytest.raises(HalfstepError, match="this policy would round what the run has learned: `model"):
            convert(saved, ours, held_formats(narrow.policy, narrow.config.model, ours))


def test_the_same_names_everywhere(backend, torch_backend):
    states = (session(b).state() for b in (backend, torch_backend))
    ours, theirs = ({n for n in state if n.startswith(("model.", "scale.", "applied"))} for state in states)
    assert ours == theirs


def test_evaluation_changes_nothing_and_is_in_the_eval_format(backend):
    s, reference = session(backend, "fp8-mixed,emulate=true"), session(backend, "bf16-mixed,emulate=true")
    evaluated = [batch(1, s)[0]]
    before = s.state()
    total, count = s.evaluate(evaluated)
    assert count == 2 * 8
    # fp8-mixed evaluates in bf16: the same as bf16-mixed does
    assert total == reference.evaluate(evaluated)[0]
    assert s.state() == before
    assert str(s.model.blocks[0].mlp.up.precision.operand.format) == "e4m3"
    assert s.evaluate([]) == (0, 0)


def test_sampling_is_a_function_of_the_seed_and_greedy_at_zero(backend):
    s = session(backend)
    first = list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first == list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first != list(generate(s, [1, 2], 12, 1.0, 0, seed=4, alphabet=64))
    greedy = list(generate(s, [1, 2], 5, 0.0, 0, seed=0, alphabet=64))
    assert greedy == list(generate(s, [1, 2], 5, 1.0, 1, seed=9, alphabet=64))  # the top one of one
    assert all(0 <= token < 64 for token in first)


def test_it_says_what_and_where_it_is(backend):
    s = open_session(load("tiny", [*SMALL, f"backend={backend.name}"]), Policy.parse("fp32"), "cpu")
    assert isinstance(s, backend.session.Session)
    assert s.description.kind == "cpu"
    assert s.memory() > 2**20
    with pytest.raises(HalfstepError, match="`nothing` is"):
        backend.session.Session(s.config, s.policy, "nothing")


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
    ("bf16-mixed,emulate=true,grad=e4m3", "bf16-mixed,emulate=true,grad=e4m3:row"),
    ("bf16-mixed", "bf16-mixed,emulate=true"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,grad_weight=fp16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,norm=fp16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,softmax=fp16"),
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
    ("fp16-mixed,emulate=true", "fp16-mixed,emulate=true,scale=static:value=2"),
]
# What one backend refuses, with a part of the reason.
REFUSED_BY = {
    ("torch", "bf16-true,grad_weight=fp32"): "torch keeps its gradient in that too",
    ("jax", "bf16-mixed,param=fp32:split"): "split",
    ("mlx", "fp8-mixed"): "MLX has no fp8 type",
}
FINGERPRINTS = {}


def fingerprint(backend, policy):
    if (backend, policy) not in FINGERPRINTS:
        one = ["training.micro_batches=1"] if backend.name == "jax" else []
        s = session(backend, policy, "model.zero_init=false", *one)
        FINGERPRINTS[backend, policy] = backend.fingerprint(s, batch(0, s))
    return FINGERPRINTS[backend, policy]


def assert_honored(backend, base, policy):
    if (backend.name, policy) in REFUSED_BY:
        pytest.skip("refused, with the reason")
    assert fingerprint(backend, policy) != fingerprint(backend, base)


@pytest.mark.parametrize(("base", "policy"), HONORED[::4])
def test_an_accepted_value_changes_what_is_computed(backend, base, policy):
    assert_honored(backend, base, policy)


@pytest.mark.parametrize(("base", "policy"), HONORED)
def test_every_accepted_value_changes_what_is_computed(slow_backend, base, policy):
    assert_honored(slow_backend, base, policy)


EVALUATED = [
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,eval=fp32"),
    ("fp32,emulate=true", "fp32,emulate=true,eval=bf16"),
    ("fp32,emulate=true", "fp32,emulate=true,eval=fp16"),
]


@pytest.mark.parametrize(("base", "policy"), EVALUATED)
def test_an_accepted_value_changes_how_it_evaluates(slow_backend, base, policy):
    losses = []
    for each in (base, policy):
        s = session(slow_backend, each, "model.zero_init=false")
        losses.append(s.evaluate(iter([batch(0, s)[0]])))
    assert losses[0] != losses[1]


# What other tests show, with the file.
ELSEWHERE = {
    **{(role, "delayed"): "torch/fp8/test_delayed.py" for role in ("compute", "grad")},
    **{(role, "measured"): "torch/convert/test_fp8_choice.py" for role in ("compute", "grad")},
    **{("scale", field.name.removesuffix("_scale")): "core/test_scaling.py" for field in fields(DynamicScale)},
}


def _words(kind):
    """The modifiers that a kind of value has."""
    for each in fields(kind) if kind not in (Format, bool) else ():
        hint = get_type_hints(kind)[each.name]
        if get_origin(hint) is Literal:
            yield from (word for word in get_args(hint) if word != each.default)
        elif each.name != "format":
            yield each.name.removesuffix("_scale")


def _offered():
    """Every role with each format and each modifier that it may have besides the default."""
    for role, spec in ROLES.items():
        kinds = LAWS if spec.kind is Scale else [spec.kind]
        yield from ((role, word) for kind in kinds for word in _words(kind))
        yield from ((role, law.word) for law in kinds if spec.kind is Scale and law is not NoScale)
        yield from ((role, name) for name in spec.allowed or () if name != "fp32" or role == "eval")


def test_every_role_with_every_value_it_offers_is_shown_to_change_something_or_refused():
    """A new role, format or modifier needs a pair of policies above, or the file of a test that shows it."""
    shown = {
        (role, word.partition("=")[0])
        for policy in [policy for pairs in (HONORED, EVALUATED) for _, policy in pairs] + [p for p, _ in REFUSED]
        for role, value in re.findall(r"(\w+)=([\w:=]+)", policy)
        for word in value.split(":")
    }
    assert [offered for offered in _offered() if offered not in shown | ELSEWHERE.keys()] == []
    assert {("emulate", "true"), ("compute", "fp32"), ("grad", "fp32")} <= shown
    for name in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / name).exists()


REFUSED = [
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
    ("bf16-mixed,router=bf16", "router=bf16"),
    ("bf16-mixed,reduce=bf16", "reduce=bf16"),
    ("bf16-mixed,export=bf16", "unknown role `export`"),
    ("bf16-mixed; blocks.0.mlp: compute=fp32", r"names no module that computes.*add `\.\*\*`"),
    ("bf16-mixed; blocks: grad_weight=bf16", r"names no module that holds a parameter.*add `\.\*\*`"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: grad=fp32", "names no module that computes"),
    ("bf16-mixed; blocks.0.mlp.up: norm=bf16", "names no norm"),
    ("bf16-mixed; final_norm: softmax=bf16", "names no softmax"),
    ("bf16-mixed,matmul=fp32:fast", "fast"),
    ("bf16-mixed,emulate=true,compute=e4m3:row:delayed", "delayed"),
    ("bf16-mixed,compute=e3m2", "emulate=true"),
    ("bf16-mixed; nowhere.*: compute=fp32", "nowhere"),
    ("bf16-mixed; blocks.0.mlp.up: grad=fp32; lm_head: compute=fp32", "activation's own (dtype|format)"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; **.attn: compute=e4m3", "names no matmul"),
    ("bf16-mixed; blocks.0.attn_norm: compute=e4m3", "names no matmul|emulate=true"),
    ("bf16-mixed; lm_head: param=bf16", "holds a parameter"),
    ("bf16-mixed; lm_head: moments=bf16", "holds a parameter"),
    ("compute=tf32", "tf32 cannot run"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_would_change_nothing_is_refused_with_the_reason(backend, policy, said):
    with pytest.raises(HalfstepError, match=said) as caught:
        session(backend, policy)
    assert caught.value.hint


def test_what_one_backend_lacks_is_refused_with_the_reason(backend):
    for (name, policy), said in REFUSED_BY.items():
        if name == backend.name:
            with pytest.raises(HalfstepError, match=said):
                session(backend, policy)


GIVEN = [*TRAINING, "training.steps=4", "model.vocabulary=32", "model.context=8", "model.layers=2"]
GIVEN += ["model.width=16", "model.heads=2", "model.kv_heads=1", "model.mlp_width=16"]
GIVEN += ["model.value_residual=true", "model.zero_init=false"]


def opened(name, policy, *extra):
    return open_session(load("golf", [*GIVEN, f"backend={name}", *extra]), Policy.parse(policy), "cpu")


def three_batches():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32, (2, 2, 9)).astype(np.int32) for _ in range(3)]


def floats(state, prefix):
    return {
        name.removeprefix(prefix): np.frombuffer(data, "<f4").reshape(shape)
        for name, (dtype, shape, data) in state.items()
        if name.startswith(prefix) and dtype == "F32"
    }


def test_recomputed_blocks_give_the_same_gradients(slow_backend):
    """Bit for bit on torch; where a compiler or a graph orders sums anew, to their rounding."""
    states = {}
    for again in ("false", "true"):
        session = opened(slow_backend.name, "fp32", f"training.recompute_blocks={again}")
        for tokens in three_batches():
            session.step(tokens)
        states[again] = session.state()
    if slow_backend.name == "torch":
        assert all(states["true"][n] == states["false"][n] for n in states["true"])
    found, expected = (floats(states[again], "model.") for again in ("true", "false"))
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value), name


def test_blocks_are_recomputed(backend, monkeypatch):
    """Traced or called twice as often; on JAX the program says so."""
    block, entry, counts = backend.model.Block, "forward" if backend.name == "torch" else "__call__", {}
    original, tokens = getattr(block, entry), np.zeros((2, 9), np.int32)
    for again in ("false", "true"):
        calls = []
        monkeypatch.setattr(
            block, entry, lambda self, *given, calls=calls: calls.append(self) or original(self, *given)
        )
        session = opened(backend.name, "fp32", f"training.recompute_blocks={again}", "training.micro_batches=1")
        if backend.name == "jax":
            trace = backend.jax.make_jaxpr(lambda p, t, s=session: s._loss(p, t).total)
            jaxpr = str(trace(session.run.params, tokens))
            counts[again] = 2 * (1 + ("checkpoint" in jaxpr or "remat" in jaxpr))
        else:
            session.read(session.step(three_batches()[0][:1]))
            counts[again] = len(calls)
    assert counts == {"false": 2, "true": 4}


def test_averages_follow_the_weights_and_are_what_is_evaluated(slow_backend):
    session = opened(slow_backend.name, "fp32", "training.ema=0.75")
    expected = floats(session.state(), "model.")
    for tokens in three_batches():
        session.step(tokens)
        weights = floats(session.state(), "model.")
        expected = {n: a + np.float32(0.25) * (weights[n] - a) for n, a in expected.items()}
    state = session.state()
    averages = floats(state, "average.")
    assert averages.keys() == weights.keys()
    for name, value in expected.items():
        assert np.allclose(averages[name], value, rtol=1e-5, atol=1e-7), name
    evaluated = [three_batches()[0][0]]
    averaged, plain = session.evaluate(evaluated), session.evaluate(evaluated, averaged=False)
    assert averaged != plain
    assert session.state() == state  # evaluating changes nothing
    bare = opened(slow_backend.name, "fp32")
    bare.load_weights({f"model.{name}": ("F32", v.shape, v.tobytes()) for name, v in averages.items()})
    assert bare.evaluate(evaluated)[0] == pytest.approx(averaged[0], rel=1e-6)
    bare.load_weights({name: record for name, record in state.items() if name.startswith("model.")})
    assert bare.evaluate(evaluated)[0] == pytest.approx(plain[0], rel=1e-6)


def test_averages_are_saved_and_resumed(slow_backend):
    session = opened(slow_backend.name, "fp32", "training.ema=0.75")
    first, second, third = three_batches()
    session.step(first)
    other = opened(slow_backend.name, "fp32", "training.ema=0.75")
    other.step(third)
    other.load(session.state())
    for each in (session, other):
        each.step(second)
    left, right = session.state(), other.state()
    assert all(left[name] == right[name] for name in left if name.startswith(("model.", "average.")))
    with pytest.raises(Exception, match="average"):
        opened(slow_backend.name, "fp32").load(left)


def test_a_skipped_step_moves_no_average(slow_backend):
    small = ["model.layers=1", "model.value_residual=false", "model.unet_skips=false"]
    session = opened(slow_backend.name, "fp16-mixed", "training.ema=0.75", *small)
    first, second, _ = three_batches()
    assert session.read(session.step(first))["skipped"] == 0  # so that averages and weights differ
    session.load(session.state() | {"scale.scale": ("F32", (), np.float32(2.0**40).tobytes())})
    before = session.state()
    assert session.read(session.step(second))["skipped"] == 1
    after = session.state()
    assert before["average.embed.weight"] != before["model.embed.weight"]
    assert all(before[name] == after[name] for name in before if name.startswith(("model.", "average.")))


def test_the_momentum_of_muon_warms_up(slow_backend):
    """Constant where both ends are the same; another course of the weights where they are not."""

    def after(*extra):
        one = ("model.layers=1", "model.value_residual=false", "optimizer.muon_momentum=0.5")
        session = opened(slow_backend.name, "fp32", *one, *extra)
        for tokens in three_batches():
            session.step(tokens)
        return floats(session.state(), "model.")["blocks.0.mlp.up.weight"]

    constant = after("optimizer.muon_momentum_warmup=0")
    level = after("optimizer.muon_momentum_start=0.5", "optimizer.muon_momentum_warmup=7")
    rising = after("optimizer.muon_momentum_start=0.0", "optimizer.muon_momentum_warmup=7")
    assert np.allclose(level, constant, rtol=1e-5, atol=1e-6)
    assert not np.allclose(rising, constant, rtol=1e-3, atol=1e-4)
