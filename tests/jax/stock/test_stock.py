"""Stock models of Flax linen, Flax nnx and Equinox under every policy: as docs/backends.md lists them."""

from itertools import pairwise
from pathlib import Path

import jax
import jax.extend
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState

from halfstep.core.errors import HalfstepError, ParallelError, StateError, UnsupportedTransformError
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.run import init, make_step
from halfstep.jax.update.rows import find_mixing
from tests.jax.interpreted import interpreted
from tests.jax.stock.models import BATCHES, MODELS

POLICIES = ("bf16-mixed", "fp16-mixed", "fp8-mixed,emulate=true")
DOCS = Path(__file__).parents[3] / "docs" / "backends.md"
EVERYWHERE = [
    pytest.param(
        model, policy, marks=[] if (model, policy) == (("nnx", "lstm"), "bf16-mixed") else pytest.mark.prove
    )
    for model in MODELS
    for policy in POLICIES
]


def described(model):
    """The shapes of a model's parameters, and its loss function."""
    kept = []

    def params():
        made, loss_fn = MODELS[model]()
        kept.append(loss_fn)
        return made

    shapes = jax.eval_shape(params)
    return shapes, kept[0]


def traced(model, policy):
    """A model's loss as a jaxpr (emulated, all is fp32 and it says nothing), and the shapes of its gradient."""
    (shapes, loss_fn), batch = described(model), BATCHES[model[1]]

    def loss(params, batch):
        return interpreted(loss_fn, params, batch, policy)

    gradient = jax.eval_shape(jax.grad(loss, allow_int=True), shapes, batch) if policy != "fp16-mixed" else {}
    return None if "emulate" in policy else jax.make_jaxpr(loss)(shapes, batch), gradient


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize(("model", "policy"), EVERYWHERE)
def test_a_stock_model_runs_unchanged(model, policy):
    closed, gradient = traced(model, policy)
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(gradient) if leaf.dtype.kind == "f")
    if closed is not None:
        assert str(closed.out_avals[0].dtype) == "float32"
        compute = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}[policy]
        products = [
            eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated")
        ]
        assert products
        assert {str(atom.aval.dtype) for eqn in products for atom in eqn.invars} == {compute}


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=[] if each == ("nnx", "lstm") else pytest.mark.prove) for each in MODELS]
)
def test_devices_may_share_the_rows_of_a_stock_model(model):
    (params, loss_fn), batch = described(model), BATCHES[model[1]]

    def arguments(times):
        rows = (jax.ShapeDtypeStruct((times * len(leaf), *leaf.shape[1:]), leaf.dtype) for leaf in leaves)
        return params, jax.tree.unflatten(structure, rows)

    leaves, structure = jax.tree.flatten(batch)
    assert find_mixing(loss_fn, arguments) == ""


def test_the_docs_list_every_model_and_policy():
    """What the tests above show, cell by cell; a model that is refused needs its reason in the table."""
    names = {"transformer": "transformer", "vit": "ViT", "lstm": "LSTM"}
    table = DOCS.read_text(encoding="utf-8")
    assert f"| library | model | {' | '.join(f'`{policy}`' for policy in POLICIES)} |" in table
    for framework, kind in MODELS:
        assert f"| {framework} | {names[kind]} |{' runs |' * len(POLICIES)}" in table


FRAMEWORKS, KINDS = ("linen", "nnx", "equinox"), ("transformer", "vit", "lstm")
# Each framework, each kind of model and each policy three times, none of them twice with another.
SQUARE = [
    ((framework, kind), POLICIES[(1 + row - column) % 3])
    for row, framework in enumerate(FRAMEWORKS)
    for column, kind in enumerate(KINDS)
]
# Steps that run a few times: LLVM's optimizations would take longer than they save.
QUICKLY = {**COMPILER_OPTIONS, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def drawn(shapes):
    """Weights of a normal distribution: a model's own would have to be compiled."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, shapes)


@pytest.mark.prove
@pytest.mark.parametrize(("model", "policy"), SQUARE)
def test_a_stock_model_learns(model, policy):
    (shapes, loss_fn), optimizer = described(model), optax.adam(1e-2)
    state = init(drawn(shapes), optimizer, policy)
    step = jax.jit(make_step(loss_fn, optimizer).__wrapped__, compiler_options=QUICKLY)
    losses = []
    for _ in range(16):  # fp16 may have to find its scale first
        state, result = step(state, BATCHES[model[1]])
        losses += [] if result.skipped else [float(result.loss)]
    assert len(losses) >= 5
    assert all(after < before for before, after in pairwise(losses[:5]))


def dense(params, x):
    return linen.Dense(3).apply({"params": params}, x)


X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8


def squares(params, x):
    return (dense(params, x) ** 2).mean()


@jax.jit
def stepped(train):
    return train.apply_gradients(grads=jax.grad(squares)(train.params, X))


def begun(steps=2):
    """A TrainState of Flax after some steps of its own."""
    params = {"kernel": np.eye(4, 3, dtype=np.float32), "bias": np.zeros(3, np.float32)}
    train = TrainState.create(apply_fn=dense, params=params, tx=optax.adam(1e-2))
    for _ in range(steps):
        train = stepped(train)
    return train


def test_a_train_state_of_flax_continues_where_it_was():
    train = begun()
    state = init(train, train.tx, "fp32")
    for ours, theirs in ((state.params, train.params), (state.opt_state, train.opt_state)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert int(state.num_applied) == 2
    state, _ = make_step(squares, train.tx)(state, X)
    theirs = stepped(train)
    back = train.replace(step=state.num_applied, params=state.params, opt_state=state.opt_state)
    assert jax.tree.structure(back.params) == jax.tree.structure(theirs.params)
    assert int(back.step) == int(theirs.step)
    for one, two in zip(jax.tree.leaves(back.params), jax.tree.leaves(theirs.params), strict=True):
        # two fp32 steps of 1e-2, whose gradients were summed in another order
        assert np.abs(one - two).max() <= 1e-2 * 2.0**-10


def test_a_train_state_with_another_optimizer_is_refused():
    train = begun(0)
    with pytest.raises(StateError):
        init(train, optax.sgd(0.1), "fp32")


def seeded(seed):
    return init(
        {"kernel": jax.random.normal(jax.random.key(seed), (4, 3)), "bias": jax.numpy.zeros(3)}, SGD, "bf16-mixed"
    )


SGD = optax.sgd(0.1)


def test_a_step_runs_inside_jit_scan_and_vmap():
    """As `step.__wrapped__`, which the refusal of the compiled step names."""
    step = make_step(squares, SGD)
    states = jax.vmap(seeded)(np.arange(2))
    several = jax.jit(jax.vmap(lambda state, x: jax.lax.scan(step.__wrapped__, state, x), in_axes=(0, None)))
    _, result = several(states, np.stack([X, X]))
    assert result.loss.shape == (2, 2)
    assert (result.loss[:, 1] < result.loss[:, 0]).all()
    with pytest.raises(UnsupportedTransformError) as caught:
        jax.vmap(step, in_axes=(0, None))(states, X)
    assert "step.__wrapped__" in caught.value.hint


def test_shard_map_is_refused_with_the_way_out():
    mesh, axis = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)), jax.sharding.PartitionSpec("data")
    everywhere = jax.sharding.PartitionSpec()
    step = make_step(squares, SGD).__wrapped__
    around = jax.shard_map(step, mesh=mesh, in_specs=(everywhere, axis), out_specs=(everywhere, everywhere))
    with pytest.raises(ParallelError, match="`data`") as caught:
        jax.eval_shape(around, seeded(0), X)
    assert "pass the mesh to init and make_step" in caught.value.hint

    def inside(params, x):
        mean = jax.shard_map(
            lambda p, x: jax.lax.pmean(squares(p, x), "data"),
            mesh=mesh,
            in_specs=(everywhere, axis),
            out_specs=everywhere,
        )
        return mean(params, x)

    with pytest.raises(HalfstepError, match=r"enters `shard_map` at .* cannot be opened") as caught:
        make_step(inside, SGD).eval_shape(seeded(0), X)
    assert "pass the mesh" in caught.value.hint
