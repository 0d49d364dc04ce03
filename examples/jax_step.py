"""One mixed-precision training step, written by hand in JAX, and the same step with halfstep.jax.

    pip install '.[jax]' flax
    python examples/jax_step.py

Masters are fp32 and outside the loss. Inside it parameters, inputs and targets are cast to bf16, the loss is
computed in bf16, cast to fp32 and scaled. Gradients are cast to fp32 and unscaled, and the optimizer runs in fp32.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from halfstep.jax import init, make_step


def step(seed: float, x: jax.Array, y: jax.Array, lr: float, loss_scale: float) -> jax.Array:
    """Makes one gradient descent update of a `Dense(1)` on (x, y); returns the loss after it, fp32, shape (1,)."""
    model = nn.Dense(1)
    x, y = jnp.asarray(x), jnp.asarray(y)
    params = model.init(jax.random.PRNGKey(int(seed)), x.astype(jnp.float32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))

    def mse(params):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        predicted = state.apply_fn({"params": params}, x.astype(jnp.bfloat16)).reshape(-1)
        return jnp.mean((predicted - y.astype(jnp.bfloat16)) ** 2)

    grads = jax.grad(lambda params: mse(params).astype(jnp.float32) * loss_scale)(state.params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)
    state = state.apply_gradients(grads=grads)
    return mse(state.params).astype(jnp.float32).reshape(1)


def step_by_halfstep(seed: float, x: jax.Array, y: jax.Array, lr: float) -> jax.Array:
    """Makes the same update under a policy: no explicit cast or scale, and weight gradients stay fp32."""
    model = nn.Dense(1)
    params = model.init(jax.random.PRNGKey(int(seed)), x)["params"]

    def loss_fn(params, batch):
        predicted = model.apply({"params": params}, batch["x"]).reshape(-1)
        return jnp.mean((predicted - batch["y"]) ** 2)

    optimizer = optax.sgd(lr)
    update = make_step(loss_fn, optimizer)
    # loss=bf16, as above: by default, a loss that is not computed in fp32 is refused
    state, _ = update(init(params, optimizer, "bf16-mixed,loss=bf16"), {"x": x, "y": y})
    _, result = update(state, {"x": x, "y": y})
    return result.loss.reshape(1)


def main() -> None:
    """Prints a table over scales. In bf16, which has fp32's range, a power of two changes nothing."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 4)).astype(np.float32)
    y = (x @ np.float32([1, -2, 0.5, 3]) + 0.1).astype(np.float32)
    print(f"{'loss scale':<16}loss after one step")
    for scale in (1.0, 64.0, 256.0, 65536.0, 1000.0):
        print(f"{scale:<16g}{float(step(0, x, y, 0.05, scale)[0]):.6f}")
    print(f"{'halfstep':<16}{float(step_by_halfstep(0, x, y, 0.05)[0]):.6f}")


if __name__ == "__main__":
    main()
