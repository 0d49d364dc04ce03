"""Faults of other libraries, each as a test that the step here does not have it.

Functions here multiply elementwise, so that no test depends on a guard of another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.core.formats import E4M3
from halfstep.core.roles import Operand
from halfstep.jax.numerics.cast import quantize_scaled
from halfstep.jax.run import init, make_step


def loss_fn(params, x):
    """Its gradient is x."""
    return (params["w"] * x).astype(jnp.float32).sum()


def trained(policy, optimizer, *batches):
    step, state = make_step(loss_fn, optimizer), init({"w": jnp.ones(4)}, optimizer, policy)
    for x in batches:
        before = jax.device_get((state.params, state.opt_state))
        state, result = step(state, np.float32(x))
    return before, state, result


def test_a_skipped_step_leaves_no_trace_in_the_optimizer():
    """Zeroing the gradients of a bad step is not a skip: moments decay and counters advance."""
    before, state, result = trained("bf16-mixed", optax.adam(0.1), [1, 2, -3, 4], [np.nan] * 4)
    assert bool(result.skipped)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, (state.params, state.opt_state)))


def test_native_fp8_operands_beyond_the_largest_number_saturate():
    """XLA's own cast makes NaN of 465, 1000 and infinity in e4m3."""
    x = jnp.asarray([464.0, 465.0, 1000.0, jnp.inf, -1000.0])
    assert np.isnan(np.asarray(x.astype(jnp.float8_e4m3fn), np.float32)[1:]).all()
    native, _ = quantize_scaled(x, Operand(E4M3, amax="delayed"), amax=jnp.float32(448.0), native=True)
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
