"""A Flax linen module under a precision policy: the module is unchanged, its parameters are in the state.

pip install '.[jax]' flax
python examples/flax_linen.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from halfstep.jax import init, make_step

VOCABULARY, LENGTH, WIDTH, STEPS = 16, 8, 32, 100


class Reverser(nn.Module):
    """Embeddings of tokens and positions, one block of attention and MLP, and a head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of every position."""
        positions = self.param("positions", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens) + positions
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return nn.Dense(VOCABULARY, name="head")(x + nn.Dense(WIDTH)(h))


MODEL = Reverser()


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of writing the tokens backwards."""
    logits = MODEL.apply({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ::-1]).mean()


def train(policy: str) -> float:
    """Trains under a policy and returns the last loss."""
    keys = jax.random.split(jax.random.key(0), STEPS + 1)
    params = jax.jit(MODEL.init)(keys[0], jnp.zeros((1, LENGTH), jnp.int32))["params"]
    optimizer = optax.adamw(1e-2)
    state, step = init(params, optimizer, policy), make_step(loss_fn, optimizer, clip_norm=1.0)
    for key in keys[1:]:
        state, result = step(state, jax.random.randint(key, (16, LENGTH), 0, VOCABULARY))
    print(f"{state}\n  loss {float(result.loss):.4f} after {STEPS} steps, scale {float(result.scale):g}\n")
    return float(result.loss)


if __name__ == "__main__":
    for name in ("bf16-mixed", "fp16-mixed; head: compute=fp32"):
        train(name)
