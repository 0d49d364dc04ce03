"""What a session saves and loads: bit for bit, of another policy too, or refused."""

import numpy as np
import pytest

from halfstep.config.weights import held_formats
from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import OF_BACKEND, convert, widen
from tests.conformance.session.sessions import as_bf16, masters, prove, session
from tests.token_batches import batch

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
    given = [f"optimizer.name={optimizer}", "training.ema=0.5"]
    one = session(slow_backend, policy, *given)
    for step in range(2):
        one.step(batch(step, one))
    saved = one.state()
    after = [one.read(one.step(batch(step, one))) for step in range(2, 4)]
    last = one.state()
    # On JAX the same programs: another session would compile its own.
    other = one if slow_backend.name == "jax" else session(slow_backend, policy, *given)
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


def test_weights_are_loaded_from_a_state_however_they_are_held(slow_backend):
    held = ["fp32", "bf16-true", "bf16-mixed,param=fp32:split"]
    for source in held:
        state = session(slow_backend, source).state()
        expected = masters(state)
        for target in held:
            fresh = session(slow_backend, target, "seed=5")
            fresh.load_weights(state)
            for name, found in masters(fresh.state()).items():
                wanted = as_bf16(expected[name]) if target == "bf16-true" else expected[name]
                assert np.array_equal(found, wanted), (source, target, name)
            assert fresh.applied() == 0


SPLIT, HALF = "bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true"
CHANGED = [
    (SPLIT, HALF, "adamw"),
    *(
        pytest.param(before, after, optimizer, marks=prove)
        for before, after, optimizer in (
            (SPLIT, HALF, "muon"),
            ("fp32", HALF, "muon"),
            (HALF, SPLIT, "muon"),
            (HALF, SPLIT, "adamw"),
            ("bf16-true,emulate=true", "fp32", "muon"),
            ("bf16-mixed,emulate=true,moments=bf16", "fp8-mixed,emulate=true", "adamw"),
            ("fp8-mixed,emulate=true", "bf16-true,emulate=true,param=fp32", "adamw"),
        )
    ),
]


@pytest.mark.parametrize(("before", "after", "optimizer"), CHANGED)
def test_another_policy_keeps_masters_moments_and_counts_bit_for_bit(slow_backend, before, after, optimizer):
    """What it then does with them is a step from these very numbers, at the first scale of the new policy."""
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


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_state_has_the_same_names_shapes_and_dtypes_everywhere(backend, torch_backend, optimizer):
    """Rates of their own make groups of their own: a name must not depend on them."""
    given = [f"optimizer.name={optimizer}", "training.ema=0.5", "optimizer.embedding_rate=0.01"]
    ours, theirs = (
        {name: (held.dtype, held.shape) for name, held in session(b, "fp32", *given).state().items()}
        for b in (backend, torch_backend)
    )
    assert {n: d for n, d in ours.items() if not n.startswith("rng.")} == {
        n: d for n, d in theirs.items() if not n.startswith("rng.")
    }


@pytest.mark.parametrize(("policy", "optimizer"), [(HALF, "muon"), pytest.param("fp32", "adamw", marks=prove)])
def test_a_state_comes_over_from_torch_and_back_bit_for_bit(slow_backend, torch_backend, policy, optimizer):
    """Masters, moments, averages, the loss scale and its counts; each backend keeps its own random state."""
    given = [f"optimizer.name={optimizer}", "training.ema=0.5"]
    one, other = session(torch_backend, policy, *given), session(slow_backend, policy, *given, "seed=5")
    for source, target in ((one, other), (other, one)):
        for step in range(2):
            source.step(batch(step, source))
        saved, fresh = source.state(), target.state()
        target.load(convert(saved, fresh, held_formats(target.policy, target.config.model, fresh), OF_BACKEND))
        found = target.state()
        drawn = {name for name in saved.keys() | found if name.startswith("rng.")}
        assert {n: v for n, v in found.items() if n not in drawn} == {
            n: v for n, v in saved.items() if n not in drawn
        }
        assert {n: v for n, v in found.items() if n in drawn} == {n: v for n, v in fresh.items() if n in drawn}
        assert target.applied() == source.applied()
    assert one.applied() == 4
