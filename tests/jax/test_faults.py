"""Faults of other libraries, each as a test that the step here does not have it.

Each test fails when the line that guards against its fault is taken out, and it alone; a script plants them one by
one. Functions here multiply elementwise, so that no test depends on a guard of another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from halfstep.core.formats import E4M3, E5M2
from halfstep.core.policy import Policy
from halfstep.core.roles import Operand
from halfstep.jax.numerics.cast import quantize, quantize_scaled
from halfstep.jax.run import Weighted, init, make_step

FP16 = "fp16-mixed,scale=dynamic:init=1024:interval=2:floor=32"


def recorder():
    """Gradient descent that keeps its gradients, as something that is not a moment."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros((1, 4)),
        lambda grads, state, params: (jax.tree.map(lambda g: -0.01 * g, grads), grads["w"][None]),
    )


def loss_fn(params, batch):
    """sum(w x) * factor, as a sum over one token: its gradient is x * factor. The aux is what it was given."""
    total = (params["w"] * batch["x"]).astype(jnp.float32).sum() * batch["factor"].astype(jnp.float32)
    return Weighted(total, 1.0), batch


STEP = make_step(loss_fn, recorder())


def run(policy):
    return init({"w": jnp.ones(4), "n": jnp.int32(257)}, recorder(), policy), STEP


def batch(factor=1.0):
    return {"x": np.float32([1, 2, -3, 4]), "factor": np.float32(factor), "token": np.int32(257)}


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_the_floor_of_the_scale_is_kept_under_jit():
    """jmp's scale forgot its floor when it was flattened: a floor of 32 fell to 1."""
    state, step = run(FP16)
    for _ in range(9):
        state, result = step(state, batch(np.inf))
    assert float(state.scale.scale) == 32
    assert bool(result.stuck)
    assert float(jax.jit(lambda s: s)(state).scale.scale) == 32


def test_the_policy_is_not_lost_from_the_state():
    """A state that passes through jit, scan and tree functions is still of its policy."""
    state, step = run("bf16-true")
    assert step(state, batch())[0].policy == Policy.parse("bf16-true")
    state, _ = run("bf16-true")
    doubled = jax.tree.map(lambda leaf: leaf, jax.jit(lambda s: s)(state))
    assert doubled.policy == Policy.parse("bf16-true")


def test_the_loss_and_aux_are_not_scaled():
    state, step = run(FP16)
    _, result = step(state, batch(0.5))
    assert float(result.loss) == 2.0
    assert float(result.aux["factor"]) == 0.5


def test_integers_are_not_cast():
    """257 is not a bf16 number: a token or a counter that is cast becomes another."""
    state, step = run("bf16-mixed")
    state, result = step(state, batch())
    for value in (state.params["n"], result.aux["token"]):
        assert value.dtype == jnp.int32
        assert int(value) == 257


def test_a_skipped_step_leaves_no_trace_in_the_optimizer():
    """Zeroing the gradients of a bad step is not a skip: moments decay and counters advance."""
    optimizer = optax.adam(0.1)
    step = make_step(loss_fn, optimizer)
    state = init({"w": jnp.ones(4)}, optimizer, "bf16-mixed")
    state, _ = step(state, batch())
    before = jax.device_get((state.params, state.opt_state))
    state, result = step(state, batch(np.nan))
    assert bool(result.skipped)
    after = jax.device_get((state.params, state.opt_state))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_a_norm_with_an_fp32_gain_does_not_promote_the_stream():
    """Flax's LayerNorm returns fp32 for a bf16 input and an fp32 scale; here its scale appears in bf16."""
    norm = linen.LayerNorm()
    params = {"norm": norm.init(jax.random.key(0), jnp.ones((1, 4)))["params"]}
    assert norm.apply({"params": params["norm"]}, jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.float32

    def promoted(params, x):
        y = norm.apply({"params": params["norm"]}, x)
        return y.astype(jnp.float32).sum(), y

    optimizer = optax.sgd(0.1)
    step = make_step(promoted, optimizer)
    _, result = step.eval_shape(init(params, optimizer, "bf16-mixed"), np.ones((2, 4), np.float32))
    assert result.aux.dtype == jnp.bfloat16


def test_fp8_casts_beyond_the_largest_number_follow_the_stated_rule():
    """XLA's own cast makes NaN of 465, 1000 and infinity in e4m3, and infinity of 61440 in e5m2."""
    x = jnp.asarray([464.0, 465.0, 1000.0, jnp.inf, -1000.0])
    assert np.isnan(np.asarray(x.astype(jnp.float8_e4m3fn), np.float32)[1:]).all()
    assert quantize(x, E4M3, overflow="saturate").tolist() == [448, 448, 448, 448, -448]
    assert quantize(jnp.asarray([61440.0]), E5M2, overflow="saturate").tolist() == [57344]
    operand = Operand(E4M3, amax="delayed")
    native, _ = quantize_scaled(x, operand, amax=jnp.float32(448.0), native=True)
    assert native.dtype == jnp.float8_e4m3fn
    assert np.asarray(native, np.float32).tolist() == [448, 448, 448, 448, -448]


def test_emulated_casts_are_not_dropped_by_the_compiler():
    """XLA may take a conversion to bf16 and back for nothing, and does on GPUs; a CPU run hides it.

    So the program is read: it rounds by an operation that is never dropped, and nothing in it is bf16.
    """

    def cubes(params, x):
        return jnp.tanh(x * params["w"] + 2.0**-9).astype(jnp.float32).sum(), x

    optimizer = optax.sgd(0.1)
    state = init({"w": jnp.ones(8)}, optimizer, "bf16-mixed,emulate=true")
    text = make_step(cubes, optimizer).lower(state, np.ones(8, np.float32)).as_text()
    assert text.count("reduce_precision") >= 4  # the batch, the parameter, a product, a sum
    assert "bf16" not in text
