"""State as flat arrays: names, bytes, round trips bit for bit, and states of other runs refused whole."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep.core.choice.layers import resumed
from halfstep.core.errors import HalfstepError, StateError
from halfstep.core.scaling import ScaleState
from halfstep.jax.run import init, make_step
from halfstep.jax.state import load_state_dict, restored, state_dict, stored

OPTIMIZER = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -0.1 / (1 + n)))
POLICY = "bf16-mixed,moments=bf16,param=bf16:stochastic"


def params(width=3):
    drawn = np.random.default_rng(0).standard_normal((width, 4)).astype(np.float32)
    return {
        "layer": {"weight": jnp.asarray(drawn), "bias": jnp.zeros(width)},
        "seen": jnp.int32(5),
        "key": jax.random.key(1),
    }


def loss(p, x):
    return jnp.square((x @ p["layer"]["weight"].T + p["layer"]["bias"]).astype(jnp.float32)).mean()


step = make_step(loss, OPTIMIZER)


def trained(count, policy=POLICY, state=None):
    state = init(params(), OPTIMIZER, policy, seed=3) if state is None else state
    for number in range(count):
        state, _ = step(state, np.random.default_rng(number).standard_normal((2, 4)).astype(np.float32))
    return state


def test_names_are_those_of_every_backend():
    assert set(state_dict(trained(0))) == {
        *("model.layer.weight", "model.layer.bias", "model.seen", "model.key", "applied"),
        *(f"optimizer.0.layer.{p}.{m}" for p in ("weight", "bias") for m in ("mu", "nu")),
        *("optimizer.0.count", "optimizer.1.count"),
        *("scale.scale", "scale.good_steps", "scale.tolerance", "scale.stuck"),
    }


def test_numpys_own_files_will_do(tmp_path):
    """np.savez writes bf16 as two bytes without a name."""
    one = trained(2)
    arrays = {name: np.asarray(array) for name, array in state_dict(one).items()}
    np.savez(tmp_path / "state.npz", **arrays)
    other = load_state_dict(trained(0), np.load(tmp_path / "state.npz"))
    assert {n: stored(x) for n, x in state_dict(other).items()} == {n: stored(x) for n, x in arrays.items()}


def test_what_is_no_mapping_of_arrays_is_refused():
    with pytest.raises(StateError, match="a str") as caught:
        load_state_dict(trained(0), "state.npz")
    assert "np.load" in caught.value.hint


def test_a_state_of_anything_can_be_printed():
    assert "float32" in str(jax.tree.map(lambda leaf: str(leaf.dtype), trained(0)))


SHARDED = """
import jax, optax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from halfstep.jax import init, make_step

optimizer = optax.adam(0.1)
step = make_step(lambda params, x: jnp.square((x @ params["w"]).astype(jnp.float32)).mean(), optimizer)
rows, whole = (NamedSharding(Mesh(jax.devices(), ("d",)), PartitionSpec(*axes)) for axes in (("d",), ()))
losses = []
for place in (rows, whole, None):
    weight = jnp.ones((4, 2)) if place is None else jax.device_put(jnp.ones((4, 2)), place)
    state = init({"w": weight}, optimizer, "fp16-mixed")
    before = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(2):
        state, result = step(state, jnp.ones((2, 4)) if place is None else jax.device_put(jnp.ones((2, 4)), rows))
    losses.append(float(result.loss))
    assert state.opt_state[0].mu["w"].sharding == state.params["w"].sharding
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), state, before))
assert len(set(losses)) == 1, losses
assert step._cache_size() == 3, step._cache_size()
"""


@pytest.mark.prove
def test_a_state_of_sharded_parameters_lies_where_they_do():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=os.environ | flags)


def test_the_scale_is_part_of_the_state():
    fresh = init(params(), OPTIMIZER, "fp16-mixed")
    moved = dataclasses.replace(fresh, scale=ScaleState(*map(jnp.asarray, (np.float32(8), 3, 1, True))))
    back = load_state_dict(fresh, state_dict(moved))
    assert [np.asarray(value).item() for value in back.scale] == [8, 3, 1, True]


def test_no_field_of_the_state_is_left_out():
    """A field that is added later must be stored too, or be one that the policy and the call give."""
    given = {"policy", "seed", "names", "origin", "decay"}
    kinds = {"params": "model.", "opt_state": "optimizer.", "scale": "scale.", "num_applied": "applied"}
    kinds |= {"ema": "average.", "remainders": "remainder.", "amaxes": "amax.", "measured": "narrow."}
    state = init(
        params(), OPTIMIZER, "bf16-mixed,param=fp32:split,emulate=true; layer: compute=e4m3:delayed", ema=0.9
    )
    state = dataclasses.replace(state, measured=resumed({"layer": True}))
    assert {field.name for field in dataclasses.fields(state)} == given | kinds.keys()
    assert all(any(name.startswith(kind) for name in state_dict(state)) for kind in kinds.values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_, jnp.uint8])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_stored_arrays_come_back_with_their_bits(dtype, shape):
    numbers = np.asarray(np.random.default_rng(0).standard_normal(shape) * 3)
    array = (np.abs(numbers) if dtype == jnp.uint8 else numbers).astype(dtype)
    back = restored(stored(jnp.asarray(array)))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    with pytest.raises(HalfstepError, match="dtype C64"):
        restored(("C64", (), b"12345678"))
