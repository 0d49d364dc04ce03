"""State as flat arrays: names, bits, and what is refused whole."""

import copy

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from halfstep.core.errors import HalfstepError
from halfstep.mlx import prepare
from halfstep.mlx.state import DTYPE_NAMES, load_weights, restored, stored


def draw(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def run(policy="bf16-mixed", width=4, drop=0.5):
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(drop), nn.Linear(width, 2, bias=False))
    for index in (0, 2):
        model.layers[index].weight = draw(*model.layers[index].weight.shape, seed=index)
    return prepare(model, mlx.optimizers.AdamW(0.01), policy)


def train(r, steps):
    for step in steps:
        result = r.step(lambda model, x: mx.square(model(x)).mean(), [draw(3, 4, seed=step)])
    return result.loss.item()


def through_bytes(state):
    return {name: restored(stored(array)) for name, array in state.items()}


POLICIES = ["fp32", "bf16-mixed,param=fp32:split,moments=bf16", "bf16-true,param=bf16:stochastic", "fp16-mixed"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_state_continues_bit_for_bit(policy):
    mx.random.seed(1)
    one = run(policy)
    train(one, range(3))
    saved = through_bytes(one.state_dict())
    other = run(policy)
    train(other, [9])  # elsewhere, so that anything left out of the state would show
    mx.random.seed(99)
    other.load_state_dict(saved)
    right = train(other, range(3, 6))
    ours = through_bytes(other.state_dict())
    one.load_state_dict(saved)  # there is one random key in a process: this run's dropout continues from it
    assert train(one, range(3, 6)) == right
    for name, array in one.state_dict().items():
        assert mx.array_equal(ours[name], array), name
        assert ours[name].dtype == array.dtype, name


def test_names_are_those_of_every_backend_and_what_mlx_adds():
    names = set(run("bf16-mixed,param=fp32:split").state_dict())
    trained = ("0.weight", "0.bias", "2.weight")
    assert names == {
        *(f"model.layers.{p}" for p in trained),
        *("remainder.layers.0.weight", "remainder.layers.2.weight", "applied", "rng.mlx"),
        *(f"optimizer.0.layers.{p}.{m}" for p in trained for m in "mv"),
        *("optimizer.0.step", "optimizer.0.learning_rate"),
        *("scale.scale", "scale.good_steps", "scale.tolerance", "scale.stuck"),
    }


def test_mlx_saves_and_loads_it_directly(tmp_path):
    one, other = (run("bf16-mixed,param=fp32:split", drop=0.0) for _ in range(2))
    train(one, range(2))
    mx.save_safetensors(str(tmp_path / "state.safetensors"), one.state_dict())
    other.load_state_dict(mx.load(str(tmp_path / "state.safetensors")))
    assert train(one, [5]) == train(other, [5])


def test_a_state_without_remainders_and_weights_of_another_shape_are_refused():
    with pytest.raises(HalfstepError, match=r"`layers\.0\.weight` has the shape"):
        load_weights(run().masters, run(width=6).state_dict())
    given, target = through_bytes(run().state_dict()), run("bf16-mixed,param=fp32:split")
    before = through_bytes(target.state_dict())
    with pytest.raises(HalfstepError, match="lacks `remainder"):
        target.load_state_dict(given)
    after = target.state_dict()
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def test_restoring_a_state_drops_earlier_gradients():
    r = run(drop=0.0)
    saved = through_bytes(r.state_dict())
    r.accumulate(r.value_and_grad(lambda model, x: model(x).sum())(draw(3, 4))[1])
    r.load_state_dict(saved)
    with pytest.raises(HalfstepError, match="no gradients"):
        r.update()


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_stored_arrays_come_back_with_their_bits(dtype, shape):
    with mx.stream(mx.cpu):  # which alone has float64
        array = (draw(*shape) * 3).astype(dtype)
        array = array / 3 if dtype == mx.float64 else array  # what fp32 does not hold
        array = array.T if len(shape) == 2 else array  # rows that do not follow one another in memory
        back = restored(stored(array))
        assert back.dtype == dtype
        assert back.shape == array.shape
        assert mx.array_equal(back, array)


def test_a_nan_keeps_its_bits_and_a_dtype_that_mlx_lacks_is_refused():
    patterns = mx.array(np.array([0x7FC1, 0xFF80, 0x8000, 0x0001], np.uint16))
    assert mx.array_equal(restored(stored(patterns.view(mx.bfloat16))).view(mx.uint16), patterns)
    assert stored(patterns.view(mx.bfloat16))[2] == np.array(patterns).tobytes()
    with pytest.raises(HalfstepError, match="F8_E4M3"):
        restored(("F8_E4M3", (1,), b"\0"))


@pytest.mark.parametrize("given", ["state.npz", {"applied": np.ones(())}])
def test_what_is_no_state_is_refused_with_the_way_to_read_one(given):
    with pytest.raises(HalfstepError, match="dict of MLX's arrays") as caught:
        run().load_state_dict(given)
    assert "mx.load" in caught.value.hint


SPLIT = "bf16-mixed,param=fp32:split"


def exact(found, masters):
    return found.keys() == masters.keys() and all(mx.array_equal(found[n], a).item() for n, a in masters.items())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.prove)])  # g++ takes long
def test_split_masters_are_saved_shown_and_loaded_whole(tmp_path, compile):
    one, file = run(SPLIT), str(tmp_path / "weights.safetensors")
    one.compile = compile
    train(one, range(2))
    masters = one.masters.wide()
    one.model.save_weights(file)
    assert exact(mx.load(file), masters)
    assert exact(dict(tree_flatten(one.model.parameters())), masters)
    assert exact(dict(tree_flatten(copy.deepcopy(one.model).parameters())), masters)
    other = run(SPLIT)
    other.model.load_weights(file)
    assert exact(other.masters.wide(), masters)
    assert train(other, [7]) > 0
    other.model.load_weights([(n, a.astype(mx.bfloat16)) for n, a in masters.items()])
    assert exact(other.masters.wide(), {n: a.astype(mx.bfloat16).astype(mx.float32) for n, a in masters.items()})
    plain = one.unprepare()
    assert exact(dict(tree_flatten(plain.parameters())), masters)


def test_parts_of_a_model_show_save_and_load_split_masters_whole(tmp_path):
    def nested():
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
        return prepare(model, mlx.optimizers.SGD(0.1), SPLIT)

    r, file = nested(), str(tmp_path / "part.safetensors")
    masters = r.masters.wide()
    part = {name.removeprefix("layers.0."): a for name, a in masters.items() if name.startswith("layers.0.")}
    for shown in (r.model.layers[0].parameters(), r.model.layers[0].trainable_parameters()):
        assert exact(dict(tree_flatten(shown)), part)
    assert exact(dict(tree_flatten(r.model.trainable_parameters())), masters)
    assert exact(r.model.layers[0].layers[0].parameters(), {n.rpartition(".")[2]: a for n, a in part.items()})
    r.model.layers[0].save_weights(file)
    other = nested()
    other.model.layers[0].load_weights(file)
    assert exact(other.masters.wide(), other.masters.wide() | {f"layers.0.{name}": a for name, a in part.items()})
    assert train(other, [0]) > 0


def test_halves_of_split_masters_are_not_written_by_hand():
    r = run(SPLIT)
    r.model.update(tree_map(lambda p: p * 0.999, r.model.trainable_parameters()))
    with pytest.raises(HalfstepError, match=r"`layers\.0\.weight` was written by hand") as caught:
        train(r, [0])
    assert "load_weights" in caught.value.hint


def test_split_masters_are_shown_with_their_bits():
    """A zero keeps its sign, and the largest number has an infinite half."""
    r = run(SPLIT)
    given = mx.array([[-0.0, 3.4028235e38, -3.4028235e38, 1e-40], [mx.inf, -mx.inf, 3.39e38, -1e-45]])
    r.model.load_weights([("layers.2.weight", given)], strict=False)
    assert mx.array_equal(r.model.parameters()["layers"][2]["weight"].view(mx.uint32), given.view(mx.uint32))


def test_a_loss_of_the_parameters_themselves_has_fp32_gradients():
    r = run(SPLIT)
    name, master = "layers.2.weight", r.masters.wide()["layers.2.weight"]

    def decay(model, x):
        return sum(mx.square(p).sum() for _, p in tree_flatten(model.parameters()))

    gradient = r.value_and_grad(decay)(draw(1, 4))[1].arrays[name]
    assert gradient.dtype == mx.float32
    assert mx.array_equal(gradient, 2 * master)
