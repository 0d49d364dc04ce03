"""An Equinox module under a precision policy: its arrays are in the state, its functions stay outside.

pip install '.[jax]' equinox
python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.jax import init, make_step

STEPS = 150


def train(policy: str) -> float:
    """Trains an MLP on noisy inputs to multiply two numbers, and returns its last loss."""
    model = eqx.nn.MLP(2, 1, 64, 2, activation=jax.nn.silu, key=jax.random.key(0))
    # Functions such as the activation are leaves of an Equinox module. Only arrays can be trained.
    params, static = eqx.partition(model, eqx.is_array)

    def loss_fn(params: eqx.Module, batch: dict, rng: jax.Array) -> jax.Array:
        """Computes the loss, mapping the model over the batch; the step's key draws noise on the inputs."""
        noise = 0.01 * jax.random.normal(rng, batch["x"].shape, batch["x"].dtype)
        predicted = jax.vmap(eqx.combine(params, static))(batch["x"] + noise)[:, 0]
        return jnp.mean((predicted.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2)

    optimizer = optax.adamw(1e-2)
    state, step = init(params, optimizer, policy), make_step(loss_fn, optimizer, clip_norm=1.0)
    rng, key = np.random.default_rng(0), jax.random.key(1)
    for number in range(STEPS):
        x = rng.uniform(-1, 1, (128, 2)).astype(np.float32)
        state, result = step(state, {"x": x, "y": x[:, 0] * x[:, 1]}, rng=jax.random.fold_in(key, number))
    trained = eqx.combine(state.params, static)  # the masters, in fp32, in a module again
    answer = float(trained(jnp.array([0.5, -0.8]))[0])
    print(f"{state}\n  loss {float(result.loss):.5f} after {STEPS} steps; 0.5 x -0.8 = {answer:.3f}\n")
    return float(result.loss)


if __name__ == "__main__":
    for name in ("fp32", "bf16-mixed", "bf16-mixed; layers.2: compute=fp32"):
        train(name)
