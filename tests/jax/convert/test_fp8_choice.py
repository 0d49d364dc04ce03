"""Layers that are narrow only if that is faster, as on torch; the timer is fake, so that it can be any device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.config.load import load
from halfstep.core.choice import Support
from halfstep.core.errors import HalfstepError, RunStateError
from halfstep.core.policy import Policy
from halfstep.jax import init, load_state_dict, make_step, state_dict, summary
from halfstep.jax.convert.apply import apply
from halfstep.jax.convert.fp8_choice import measure_products
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.measure import Product, time_product
from halfstep.jax.run import Step
from halfstep.jax.session import Session
from tests.conformance.fp8_device import Device

pytestmark = pytest.mark.prove  # each compiles several programs

MEASURED = "bf16-mixed,compute=e4m3:measured,grad=e5m2"
SHAPES = {"up": (16, 64), "down": (64, 16), "again": (16, 64), "head": (16, 16)}  # (in, out), as in torch's test
BATCH = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
OPTIMIZER = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """A CPU whose XLA is said to multiply fp8; it does so by widening the operands."""
    monkeypatch.setattr("halfstep.jax.convert.apply.supported", lambda fmt, device: Support(True, "as played"))


def loss(params, x):
    hidden = jax.nn.relu(x @ params["up"]["kernel"] + x @ params["again"]["kernel"])
    return jnp.square(hidden @ params["down"]["kernel"] @ params["head"]["kernel"]).astype(jnp.float32).mean()


def first(policy=MEASURED):
    rng = np.random.default_rng(1)
    params = {n: {"kernel": rng.standard_normal(s).astype(np.float32) * 0.1} for n, s in SHAPES.items()}
    return init(jax.tree.map(jnp.asarray, params), OPTIMIZER, policy)


def played(monkeypatch, device):
    monkeypatch.setitem(Step.measure.__kwdefaults__, "timer", device)


def narrow_layers(state):
    return {name for name, value in state.measured.narrow.items() if value}


STEP = make_step(loss, OPTIMIZER)


def test_the_first_step_times_each_size_once_and_runs_narrow_what_is_faster(monkeypatch):
    device = Device({(16, 64): 0.4e-3, (64, 16): 0.99e-3})
    played(monkeypatch, device)
    state = first()
    assert "measured: the first step times the matmuls that rules name" in summary(state)
    state, result = STEP(state, BATCH)
    assert narrow_layers(state) == {"up", "again"}
    # By size, the most work first: up and again are one size, twice.
    assert [work.matrix for work, _ in device.asked] == [(16, 64), (64, 16), (16, 16)]
    assert {(work.rows, work.split) for work, _ in device.asked if work.matrix[0] == 16} == {((24, 16), False)}
    wide, narrow = device.asked[0][1]
    assert wide == narrow.widened() != narrow
    text = summary(state)
    assert "(again, up): computes in bf16, multiplies in e4m3, with gradients in e5m2" in text
    assert "(down): computes in bf16, weight gradients in fp32 (measured: 0.99 ms in e4m3 and e5m2" in text
    assert f"measured: {state.measured.description}" in text
    why = {row.module: row.why for row in STEP.coverage(state, BATCH).rows if row.function == "dot_general"}
    assert why["up"].startswith("multiplies in e4m3, weight gradients in fp32 (measured: 0.4 ms")
    assert why["head"].startswith("multiplies in bf16, weight gradients in fp32 (measured: 2 ms")
    # The same numbers as with rules that name those layers: narrow is narrow, wide is wide.
    rules = "; ".join(f"{name}: compute=e4m3,grad=e5m2" for name in ("up", "again"))
    named, same = STEP(first(f"bf16-mixed; {rules}"), BATCH)
    assert result.loss == same.loss
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(named.params), strict=True):
        assert np.array_equal(one, two)
    assert float(result.loss) != float(STEP(first("bf16-mixed"), BATCH)[1].loss)
    state, _ = STEP(state, BATCH)
    assert len(device.asked) == 3
    assert "measured: 2 of the 4" in summary(state)


def test_what_needs_more_memory_than_there_is_stays_wide_and_says_so():
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 2 GiB")
    state = STEP.measure(first(), BATCH, timer=Device({(16, 64): full}, otherwise=0.5e-3))
    assert narrow_layers(state) == {"down", "head"}
    assert "not timed: 24 tokens take more memory than there is, so it stays bf16" in summary(state)


def test_only_what_a_rule_says_it_of_is_timed():
    device = Device()
    state = first("bf16-mixed; up: compute=e4m3:measured; down: compute=e4m3")
    state = STEP.measure(state, BATCH, timer=device)
    assert [work.matrix for work, _ in device.asked] == [(16, 64)]
    assert {n.partition(".")[0] for n, p in state.applied().precisions.items() if p.narrow} == {"down"}
    state = first("bf16-mixed; up: compute=e4m3")
    assert STEP.measure(state, BATCH, timer=device) is state
    assert "measured" not in summary(state)


def test_emulated_nothing_is_timed_and_all_is_narrow():
    state = STEP.measure(first(f"{MEASURED},emulate=true"), BATCH, timer=(device := Device()))
    assert not device.asked
    assert all(precision.narrow for precision in state.applied().precisions.values())
    assert "measured: nothing, since it is emulated: all matmuls of the rules are narrow" in summary(state)


def test_a_traced_step_cannot_measure_and_says_what_does():
    state = first()
    pure = jax.jit(STEP.__wrapped__, compiler_options=COMPILER_OPTIONS)
    with pytest.raises(RunStateError) as caught:
        pure(state, BATCH)
    assert "step.measure(state, batch)" in caught.value.hint
    state = STEP.measure(state, BATCH, timer=Device({(16, 64): 0.4e-3}))
    assert narrow_layers(pure(state, BATCH)[0]) == {"up", "again"}
    with pytest.raises(RunStateError, match="cast=False"):
        make_step(loss, OPTIMIZER, cast=False)(first(), BATCH)


def test_a_loaded_state_has_the_layers_of_the_run_that_saved_it(monkeypatch):
    state, other = Device({(16, 64): 0.4e-3}), Device({(16, 16): 0.4e-3})
    played(monkeypatch, state)
    then, _ = STEP(first(), BATCH)
    saved = {name: np.array(x) for name, x in state_dict(then).items()}
    assert {name: int(x) for name, x in saved.items() if name.startswith("narrow.")} == {
        "narrow.up": 1,
        "narrow.again": 1,
        "narrow.down": 0,
        "narrow.head": 0,
    }
    played(monkeypatch, other)
    fresh = load_state_dict(first(), saved)  # nothing was timed here
    assert "measured: 2 of the 4 matmuls that rules name are narrow, as in the run that is resumed" in summary(
        fresh
    )
    timed = STEP.measure(first(), BATCH, timer=other)
    assert narrow_layers(timed) == {"head"}
    before = summary(timed)
    adopted = load_state_dict(timed, saved)
    assert "(as in the run that is resumed; here measured: 2 ms in e4m3 and e5m2, 1 ms" in summary(adopted)
    assert "timed here, 3 of them would differ: 1 of the 4 matmuls" in summary(adopted)
    assert summary(load_state_dict(adopted, state_dict(timed))) == before
    asked = len(other.asked)
    following = [STEP(each, BATCH)[0] for each in (fresh, adopted, then)]
    assert len(other.asked) == asked
    for each in following[:2]:
        assert narrow_layers(each) == {"up", "again"}
        for name, x in state_dict(following[2]).items():
            assert np.array_equal(x, state_dict(each)[name]), name
    with pytest.raises(HalfstepError, match=r"narrow\."):
        load_state_dict(first("bf16-mixed"), saved)


def test_a_layer_with_delayed_operands_that_stays_wide_has_an_empty_history():
    policy = "bf16-mixed,compute=e4m3:delayed:measured,grad=e5m2:delayed"
    state = STEP.measure(first(policy), BATCH, timer=Device({(16, 64): 0.4e-3}))
    state, _ = STEP(state, BATCH)
    assert {name for name, history in state.amaxes.items() if np.asarray(history).any()} == {"up", "again"}
    assert "delayed: 2 matmuls are scaled by" in summary(state)


def test_stacked_layers_are_timed_as_one_of_them_runs_and_heads_as_one_matrix():
    def scanned(params, x):
        def body(x, kernel):
            heads = jnp.einsum("td,dhk->thk", x, kernel)
            return x + heads.reshape(x.shape), None

        return jnp.square(jax.lax.scan(body, x, params["blocks"]["kernel"])[0]).astype(jnp.float32).mean()

    state = init({"blocks": {"kernel": jnp.ones((3, 16, 2, 8))}}, OPTIMIZER, MEASURED)
    make_step(scanned, OPTIMIZER).measure(state, BATCH, timer=(device := Device()))
    assert {(work.rows, work.matrix) for work, _ in device.asked} == {((24, 16), (16, 16))}


def test_a_session_measures_its_own_micro_batch_and_a_resumed_one_takes_over(monkeypatch):
    device = Device({(128, 32): 0.4e-3})
    monkeypatch.setitem(measure_products.__kwdefaults__, "timer", device)
    sizes = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "training.batch=3"]
    config = load("tiny", ["backend=jax", *sizes])
    session = Session(config, Policy.parse("fp8-mixed"), "cpu")
    assert {work.tokens for work, _ in device.asked} == {48}
    assert (256, 32) in {work.matrix for work, _ in device.asked}  # the head is the embedding
    assert session.model.blocks[0].mlp.up.casts.precision.narrow
    assert not session.model.blocks[0].attn.q.casts.precision.narrow
    assert session.notes[0].startswith("measured: 1 of the 7 matmuls that rules name are faster")
    monkeypatch.setitem(measure_products.__kwdefaults__, "timer", Device({(256, 32): 0.4e-3}))
    resumed = Session(config, Policy.parse("fp8-mixed"), "cpu")
    assert resumed.model.lm_head.casts.precision.narrow
    resumed.load(session.state())
    assert not resumed.model.lm_head.casts.precision.narrow
    assert "adopted from the run that is resumed" in resumed.notes[0]
    tokens = jnp.zeros((3, 17), jnp.int32)
    one, two = (str(jax.make_jaxpr(s._made.__wrapped__)(s.run, tokens)) for s in (session, resumed))
    assert one == two
    assert "f8_e4m3" in one


def test_the_real_timer_times_both_forms_of_a_product():
    cpu = jax.devices("cpu")[0]
    policies = (MEASURED, "bf16-mixed,compute=e4m3:delayed")
    precisions = [apply({"a": jnp.ones((2, 2))}, Policy.parse(p)).precisions["a"] for p in policies]
    for rows, matrix, dims, stack in (
        ((24, 16), (16, 32), (((1,), (0,)), ((), ())), False),
        ((2, 24, 16), (2, 16, 32), (((2,), (1,)), ((0,), (0,))), True),
    ):
        times = time_product(Product(rows, matrix, dims, stack, cpu), (precisions[0].widened(), *precisions))
        assert len(times) == 3
        assert all(0 < seconds < 1 for seconds in times)
