"""A Flax nnx module under a precision policy: split into its graph and its state, and merged inside the loss.

    pip install '.[jax]' flax
    python examples/flax_nnx.py

Counters and generator keys are leaves of the state too; they pass through untouched.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from halfstep.jax import init, make_step

WIDTH, STEPS = 32, 120


class Classifier(nnx.Module):
    """Decides which of three rings a point is in."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = self.enter(x)
        return self.head(x + nnx.gelu(self.hidden(self.norm(nnx.gelu(x)))))


def train(policy: str) -> float:
    """Trains under a policy and returns the share of points that are classified correctly."""
    graph, params = nnx.split(Classifier(nnx.Rngs(0)))

    def loss_fn(params: nnx.State, batch: dict) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params)(batch["x"]).astype(jnp.float32)
        right = (logits.argmax(-1) == batch["ring"]).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ring"]).mean(), right

    optimizer = optax.adam(1e-2)
    state, step = init(params, optimizer, policy), make_step(loss_fn, optimizer)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.uniform(-1, 1, (256, 2)).astype(np.float32)
        ring = np.minimum((2.5 * np.hypot(*x.T)).astype(np.int32), 2)
        state, result = step(state, {"x": x, "ring": ring})
    print(f"{state}\n  loss {float(result.loss):.4f}, {float(result.aux):.1%} right after {STEPS} steps\n")
    return float(result.aux)


if __name__ == "__main__":
    for name in ("fp32", "bf16-mixed", "bf16-true,param=bf16:stochastic"):
        train(name)
