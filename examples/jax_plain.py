"""Plain functions under a precision policy: a dictionary of parameters, an optax optimizer, and three lines.

    pip install '.[jax]'
    python examples/jax_plain.py

A small MLP learns the sine, in fp32, in bf16, and in fp16 with a loss scale, over two micro-batches per update.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.jax import init, make_step

WIDTH, STEPS = 64, 200


def parameters(seed: int) -> dict:
    """Returns the parameters of two hidden layers and an output."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = [(1, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    return {
        f"layer{i}": {"w": jax.random.normal(k, size) / np.sqrt(size[0]), "b": jnp.zeros(size[1])}
        for i, (k, size) in enumerate(zip(keys, sizes, strict=True))
    }


def loss_fn(params: dict, batch: dict) -> jax.Array:
    """Computes the loss; the only cast is the loss itself, which must be fp32."""
    h = batch["x"]
    for name in ("layer0", "layer1"):
        h = jnp.tanh(h @ params[name]["w"] + params[name]["b"])
    predicted = h @ params["layer2"]["w"] + params["layer2"]["b"]
    return jnp.mean((predicted.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2)


def train(policy: str) -> float:
    """Trains under a policy and returns the last loss."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    state = init(parameters(0), optimizer, policy)
    step = make_step(loss_fn, optimizer, clip_norm=1.0, micro_batches=2)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.uniform(-3, 3, (2, 64, 1)).astype(np.float32)
        state, result = step(state, {"x": x, "y": np.sin(x)})  # nothing waits for the device
    print(state)
    applied = int(state.num_applied)
    print(f"  loss {float(result.loss):.6f}, scale {float(result.scale):g}, {applied} updates applied\n")
    return float(result.loss)


if __name__ == "__main__":
    for name in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-mixed; layer2: compute=fp32"):
        train(name)
