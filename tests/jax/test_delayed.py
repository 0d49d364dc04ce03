"""Delayed scaling: histories of amaxes that a pure step carries, and torch's numbers from them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.core.arrays.cast import HISTORY
from halfstep.core.errors import DelayedScaleError
from halfstep.core.formats import E4M3
from halfstep.jax import Monitor, init, load_state_dict, make_step, state_dict, summary
from halfstep.jax.numerics.cast import scale_for

DELAYED = "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed,emulate=true"
OPTIMIZER = optax.sgd(0.0)
WEIGHT = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
X, W, G = range(3)


def loss(params, batch):
    return ((batch["x"] @ params["up"]["weight"].T).astype(jnp.float32) * batch["g"]).sum()


def filled(*pairs):
    """Micro-batches with these largest inputs and gradients; torch's test has the same."""
    arrays = {
        name: np.stack([np.full((16, 16), pair[i] / 2, np.float32) for pair in pairs])
        for i, name in enumerate("xg")
    }
    for i, name in enumerate("xg"):
        arrays[name][:, 0, 0] = [pair[i] for pair in pairs]
    return arrays


STEPS = {count: make_step(loss, OPTIMIZER, micro_batches=count) for count in (1, 2)}


def started(policy=DELAYED, weight=WEIGHT):
    return init({"up": {"weight": jnp.asarray(weight)}}, OPTIMIZER, policy)


def step(state, *pairs):
    return STEPS[len(pairs)](state, filled(*pairs))


@pytest.mark.prove
def test_histories_move_by_applied_updates_alone_and_hold_the_largest_of_the_micro_batches():
    state = started()
    assert np.array_equal(state.amaxes["up"], np.zeros((3, HISTORY)))
    state, _ = step(state, (1.0, 8.0), (4.0, 2.0))
    weight = np.abs(WEIGHT.astype(jnp.bfloat16).astype(np.float32)).max()
    assert np.asarray(state.amaxes["up"])[:, 0].tolist() == [4.0, weight, 8.0]
    assert not np.asarray(state.amaxes["up"])[:, 1:].any()
    before = np.asarray(state.amaxes["up"])
    state, result = step(state, (np.inf, 1.0))
    assert bool(result.skipped)
    assert np.array_equal(state.amaxes["up"], before)
    state, _ = step(state, (2.0, 16.0))
    assert np.asarray(state.amaxes["up"])[X, :3].tolist() == [2.0, 4.0, 0.0]
    assert np.asarray(state.amaxes["up"])[G, :3].tolist() == [16.0, 8.0, 0.0]
    other = load_state_dict(started(), state_dict(state))
    assert np.array_equal(state_dict(other)["amax.up"], state.amaxes["up"])
    assert "delayed: 1 matmuls are scaled by the largest amax of their last 16 updates" in summary(state)


def test_what_is_larger_than_the_history_saturates():
    state = started(weight=np.eye(16, dtype=np.float32))
    state, _ = step(state, (1.0, 1.0))
    largest = E4M3.max / float(scale_for(1.0, E4M3))
    batch = {"x": np.full((1, 16, 16), 64.0, np.float32), "g": np.full((1, 16, 16), 2.0**-8, np.float32)}
    _, result = STEPS[1](state, batch)
    assert float(result.loss) == largest  # each of 256 outputs is the largest number
    assert largest < 64.0


@pytest.mark.prove
def test_losses_weights_and_histories_are_torchs():
    """Small whole numbers, four times larger at each update: sums of products are exact, and operands saturate."""
    torch = pytest.importorskip("torch")
    from halfstep.torch import prepare

    start = np.random.default_rng(5).integers(-16, 17, (16, 16)).astype(np.float32) / 8
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    model[0].weight.data = torch.from_numpy(start.copy())
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.125), DELAYED)
    optimizer = optax.sgd(0.125)
    state = init({"up": {"weight": jnp.asarray(start)}}, optimizer, DELAYED)
    jitted = make_step(loss, optimizer, micro_batches=2)
    for number in range(3):
        drawn = np.random.default_rng(number).integers(-4, 5, (2, 2, 16, 16)).astype(np.float32) * 4.0**number
        largest = 16 * np.abs(np.asarray(state.params["up"]["weight"])).max() * np.abs(drawn).max() ** 2
        parts = [tuple(map(torch.from_numpy, pair)) for pair in zip(*drawn, strict=True)]
        theirs = run.step(lambda part: (model(part[0]) * part[1]).sum(), parts)
        state, ours = jitted(state, {"x": drawn[0], "g": drawn[1]})
        assert np.array_equal(state.amaxes["up"], run.amaxes.named()["0"].numpy())
        assert np.array_equal(state.params["up"]["weight"], model[0].weight.detach().numpy())
        # the mean of two sums of 256 terms up to `largest`, each in fp32 in an order of its own
        assert abs(float(ours.loss) - float(theirs.loss)) <= 2 * 256 * 2.0**-24 * 256 * largest


@pytest.mark.prove
def test_a_monitor_sees_the_same_step_and_stacked_layers_are_refused():
    plain, monitor = started(), Monitor()
    watched = make_step(loss, OPTIMIZER, micro_batches=1, monitor=monitor)
    seen, _ = watched(started(), filled((1.0, 8.0)))
    plain, _ = step(plain, (1.0, 8.0))
    assert np.array_equal(seen.amaxes["up"], plain.amaxes["up"])
    assert [info.name for info in monitor.layers] == ["up"]

    def scanned(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), batch["x"], params["up"]["weight"])
        return x.astype(jnp.float32).sum()

    state = init({"up": {"weight": jnp.stack([WEIGHT, WEIGHT])}}, OPTIMIZER, DELAYED)
    with pytest.raises(DelayedScaleError, match=r"`up\.weight`") as caught:
        make_step(scanned, OPTIMIZER)(state, {"x": jnp.ones((4, 16))})
    assert "current" in caught.value.hint


def test_parameters_that_are_no_dict_have_no_place_for_amaxes():
    state = init([{"weight": jnp.asarray(WEIGHT)}], OPTIMIZER, DELAYED)
    with pytest.raises(DelayedScaleError):
        make_step(lambda p, x: jnp.float32(0) * p[0]["weight"].sum(), OPTIMIZER, cast=False)(state, 0)
