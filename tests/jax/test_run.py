"""One update: weights of micro-batches, the order of unscale and clip, skipped steps, the floor, storage."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.core.choice import Choice
from halfstep.core.errors import HalfstepError, RunStateError
from halfstep.core.policy import Policy
from halfstep.jax.run import Weighted, init, make_step
from halfstep.jax.state import load_state_dict, state_dict, summary

FP16 = "fp16-mixed,scale=dynamic:init=1024:interval=3:floor=256"
# Two fp32 sums of the same terms in another order: at most 36 positive terms, and a few products around them.
SUMMED = 2 * 48 * 2.0**-24
RATE = 0.1


def recorder():
    """Plain gradient descent that keeps its gradients, as something that is not a moment."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((1, *p.shape)), params),
        lambda grads, state, params: (
            jax.tree.map(lambda g: -RATE * g, grads),
            jax.tree.map(lambda g: g[None], grads),
        ),
    )


def weights(dtype=jnp.float32):
    return {"weight": jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), dtype)}


def data(rows, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)


def total(params, x):
    return Weighted(jnp.square((x @ params["weight"].T).astype(jnp.float32)).sum(), float(len(x)))


STEPS = {}


def run(policy="fp32", loss=total, dtype=jnp.float32, **options):
    """A fresh state, and the step for it, which is compiled once for all tests."""
    key = (loss, tuple(sorted(options.items())))
    if key not in STEPS:
        STEPS[key] = make_step(loss, recorder(), **options)
    return init(weights(dtype), recorder(), policy), STEPS[key]


def test_a_mean_loss_counts_each_micro_batch_alike():
    def mean(params, x):
        return jnp.square(x @ params["weight"].T).mean()

    state, step = run(loss=mean, micro_batches=2)
    x = data(8).reshape(2, 4, 4)
    _, result = step(state, x)
    w = np.asarray(weights()["weight"])
    assert float(result.loss) == pytest.approx(np.mean([np.square(part @ w.T).mean() for part in x]), rel=SUMMED)


def test_results_stay_on_the_device_and_the_state_is_used_up():
    given = weights()
    state = init(given, recorder(), "fp32")
    _, step = run()
    following, result = step(state, data(12))
    for value in (result.loss, result.skipped, result.scale, result.grad_norm, result.stuck):
        assert isinstance(value, jax.Array)
    assert state.params["weight"].is_deleted()
    assert not given["weight"].is_deleted()
    with pytest.raises(RunStateError) as caught:
        step(state, data(12))
    assert "state, result = step(state, batch)" in caught.value.hint
    assert following.policy == Policy.parse("fp32")


def test_results_are_not_kept_for_the_warning_of_a_falling_scale(monkeypatch):
    """An aux may be large: the activations of a layer, say. The warning needs two scalars of a result."""
    monkeypatch.setattr(type(jnp.zeros(())), "is_ready", lambda array: False)
    step = make_step(lambda params, x: (jnp.sum(params["weight"] * 1.0, dtype=jnp.float32), x), recorder())
    _, result = step(init(weights(), recorder(), FP16), data(4))
    aux = weakref.ref(result.aux)
    del result
    assert aux() is None


def test_how_a_state_came_about_compiles_nothing_again(monkeypatch):
    """`auto` measures again in each process, and never gets the same timings twice."""
    reasons = iter("ab")
    monkeypatch.setattr("halfstep.jax.run.measured_choice", lambda *_: Choice("fp32", next(reasons)))
    step = make_step(total, recorder())
    states = [init(weights(), recorder(), policy) for policy in ("auto", "auto", "fp32")]
    states.append(init(weights(jnp.bfloat16), recorder(), "fp32"))
    assert len({jax.tree.structure(state) for state in states}) == 1
    after = [step(state, data(4))[0] for state in states]
    assert step._cache_size() == 1
    assert [state.choice and state.choice.reason for state in after] == ["a", "b", None, None]
    assert [state.widened for state in after] == [(), (), (), ("weight",)]


def test_transforms_of_gradients_see_true_ones_whatever_the_scale():
    """The place for clipping by hand or norms of layers: in front of the optimizer, in optax's own chain."""
    found = []
    for policy in ("fp32", FP16 + "; weight: compute=fp32,grad=fp32"):
        optimizer = optax.chain(optax.clip(0.01), recorder())
        step = make_step(total, optimizer, micro_batches=2)
        state, result = step(init(weights(), optimizer, policy), data(8).reshape(2, 4, 4))
        found.append((state.opt_state[1]["weight"], float(result.scale)))
    assert [scale for _, scale in found] == [1.0, 1024.0]
    assert float(jnp.abs(found[0][0]).max()) == np.float32(0.01)
    assert jnp.array_equal(found[0][0], found[1][0])


def test_the_step_below_the_jit_is_pure_and_runs_in_a_scan():
    batches = np.stack([data(4, seed) for seed in range(3)])
    state, step = run(FP16)
    together, results = jax.jit(lambda s, b: jax.lax.scan(step.__wrapped__, s, b))(state, batches)
    state, _ = run(FP16)
    for index, batch in enumerate(batches):
        state, result = step(state, batch)
        assert float(result.loss) == pytest.approx(float(results.loss[index]), rel=2.0**-10)
    assert jax.tree.structure(state) == jax.tree.structure(together)
    assert float(together.scale.scale) == float(state.scale.scale) == 2048
    assert together.policy.scale.floor == 256


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_a_step_is_fp32_where_jax_defaults_to_fp64_too(micro_batches):
    x, optimizer = data(8), optax.adam(0.1)
    x = x if micro_batches is None else x.reshape(2, 4, 4)
    with jax.enable_x64(True):
        step = make_step(total, optimizer, micro_batches=micro_batches)
        state, result = step(init(weights(), optimizer, FP16), x.astype(np.float64))
    floating = [leaf for leaf in jax.tree.leaves((state, result)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floating} == {np.dtype(np.float32)}


def test_aux_and_keys_come_one_per_micro_batch():
    def noisy(params, x, rng):
        return (x @ params["weight"].T).sum(), {"drawn": jax.random.uniform(rng), "rows": x[0]}

    key, x = jax.random.key(3), data(8).reshape(2, 4, 4)
    state, step = run(loss=noisy, micro_batches=2)
    _, result = step(state, x, rng=key)
    expected = [float(jax.random.uniform(jax.random.fold_in(key, index))) for index in range(2)]
    assert np.asarray(result.aux["drawn"]).tolist() == pytest.approx(expected, rel=2.0**-23)
    assert np.array_equal(result.aux["rows"], x[:, 0])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda params, x: x @ params["weight"][0], "float32 of shape \\(4,\\)"),
        (lambda params, x: (params["weight"].sum(1), x), "float32 of shape \\("),
    ],
)
def test_what_is_not_a_loss_is_refused(loss, said):
    with pytest.raises(HalfstepError, match=said):
        make_step(loss, recorder()).eval_shape(init(weights(), recorder(), "fp32"), data(4))


def test_integers_booleans_and_keys_pass_through_untouched():
    params = {**weights(), "count": jnp.int32(2**31 - 1), "mask": jnp.ones(3, bool), "key": jax.random.key(7)}

    def loss(params, x):
        kept = jnp.where(params["mask"], (x @ params["weight"].T).astype(jnp.float32), 0.0)
        return kept.sum() + (params["count"] > 0) * jax.random.uniform(params["key"])

    optimizer = optax.adam(0.1)
    state, result = make_step(loss, optimizer)(init(params, optimizer, "bf16-mixed"), data(4))
    assert not bool(result.skipped)
    assert not np.array_equal(state.params["weight"], params["weight"])
    for name in ("count", "mask"):
        assert state.params[name].dtype == params[name].dtype
        assert np.array_equal(state.params[name], params[name])
    assert np.array_equal(jax.random.key_data(state.params["key"]), jax.random.key_data(params["key"]))


def test_narrow_parameters_are_widened_and_the_summary_says_so():
    state = init(weights(jnp.float16), recorder(), "bf16-mixed")
    assert state.params["weight"].dtype == jnp.float32
    assert "widened to their masters: 1 parameters that were narrower (weight)" in summary(state)
    assert "widened" not in str(init(weights(), recorder(), "bf16-true"))


def test_bf16_moments_are_stored_in_bf16_and_computed_in_fp32():
    optimizer = optax.adam(1e-2)
    step = make_step(total, optimizer)
    narrow, wide = (
        step(init(weights(), optimizer, policy), data(4))[0] for policy in ("fp32,moments=bf16", "fp32")
    )
    assert narrow.opt_state[0].mu["weight"].dtype == jnp.bfloat16
    assert np.array_equal(narrow.opt_state[0].mu["weight"], wide.opt_state[0].mu["weight"].astype(jnp.bfloat16))
    assert narrow.opt_state[0].count.dtype == jnp.int32
    # the first step does not read a rounded moment
    assert np.array_equal(narrow.params["weight"], wide.params["weight"])


def sum_of_weights(params, _):
    return Weighted(params["w"].sum(), jnp.ones(3))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p, o: make_step(total, o, micro_batches=2.0), "micro_batches=2.0"),
        (lambda p, o: make_step(total, o, clip_norm=float("nan")), "0 or more"),
        (
            lambda p, o: make_step(total, o, micro_batches=3)(init(p, o, "fp32"), data(4)),
            "there are 3 micro-batches",
        ),
        (lambda p, o: init(p, optax.adam(1, mu_dtype=jnp.bfloat16), "fp32"), "itself keeps a moment in bfloat16"),
        (lambda p, o: init(p, o, 5), "unknown preset `5`"),
        (lambda p, o: make_step(total, optax.sgd(1.0))(init(p, o, "fp32"), None), "another optimizer"),
        (lambda p, o: make_step(sum_of_weights, o)(init(p, o, "fp32"), None), "one number"),
    ],
)
def test_settings_that_cannot_work_are_refused(call, said):
    with pytest.raises(HalfstepError, match=said):
        call({"w": jnp.ones((4, 2))}, optax.adam(1e-3))


@pytest.mark.parametrize(
    "policy",
    ["bf16-mixed,emulate=true", pytest.param("bf16-true,param=bf16:stochastic", marks=pytest.mark.prove)],
)
def test_averages_of_the_masters_follow_applied_updates_alone(policy):
    optimizer, params = optax.sgd(0.5), {"w": jnp.asarray([[1.0, 2.0]]), "seen": jnp.int32(3)}
    step = make_step(lambda p, g: jnp.sum(p["w"] * g), optimizer)
    state = init(params, optimizer, policy, ema=0.75)
    expected = np.asarray(state.params["w"], np.float32)
    for g in (1.0, np.inf, -3.0):
        state, result = step(state, np.float32([[g, 1.0]]))
        moved = expected + np.float32(0.25) * (np.asarray(state.params["w"], np.float32) - expected)
        expected = expected if bool(result.skipped) else moved
    assert int(state.num_applied) == 2
    assert np.array_equal(state.ema["w"], expected)
    assert np.array_equal(state.averaged()["w"], expected)
    assert state.averaged()["seen"] == 3
    assert "averages of the masters in fp32, decay 0.75" in summary(state)
    other = load_state_dict(init(params, optimizer, policy, ema=0.75), state_dict(state))
    assert np.array_equal(other.ema["w"], expected)
    with pytest.raises(HalfstepError, match="holds averages of the weights, and the run keeps none"):
        load_state_dict(init(params, optimizer, policy), state_dict(state))
    with pytest.raises(RunStateError):
        init(params, optimizer, policy).averaged()
