"""Losses of a whole batch, as users write them: some are means over rows, and some are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, FEATURES, WIDTH, WORDS = 16, 6, 8, 5


def weights():
    draw = np.random.default_rng(0).standard_normal
    shapes = {"up": (FEATURES, WIDTH), "down": (WIDTH, WORDS), "gain": (WIDTH,)}
    return {name: draw(shape, np.float32) * np.float32(0.4) for name, shape in shapes.items()}


def batch_of(micro=None):
    """Rows whose masks have different sums on each of four devices."""
    generator, lead = np.random.default_rng(1), () if micro is None else (micro,)
    return {
        "x": generator.standard_normal((*lead, ROWS, FEATURES), np.float32),
        "y": generator.integers(0, WORDS, (*lead, ROWS), np.int32),
        "mask": np.broadcast_to(np.arange(ROWS) % 7 < np.arange(ROWS) // 4 + 1, (*lead, ROWS)),
    }


def _hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["up"])


def _losses(params, hidden, batch):
    logits = (hidden @ params["down"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def mean(params, batch, rng=None):
    return _losses(params, _hidden(params, batch), batch).mean()


def decayed_mean(params, batch, rng=None):
    decay = 0.01 * sum(jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(params))
    return _losses(params, _hidden(params, batch), batch).sum() / len(batch["y"]) + decay


def summed(params, batch, rng=None):
    return _losses(params, _hidden(params, batch), batch).sum()


def masked_mean(params, batch, rng=None):
    mask = batch["mask"].astype(jnp.float32)
    return (_losses(params, _hidden(params, batch), batch) * mask).sum() / mask.sum()


def contrastive(params, batch, rng=None):
    """InfoNCE: the other rows are the negatives."""
    one = _hidden(params, batch)
    other = jnp.tanh(one * params["gain"])
    return optax.softmax_cross_entropy_with_integer_labels(
        (one @ other.T).astype(jnp.float32), jnp.arange(len(one))
    ).mean()


def triplet(params, batch, rng=None):
    """The next row of the batch is the negative."""
    one = _hidden(params, batch).astype(jnp.float32)
    return jnp.maximum(1.0 - jnp.square(one - jnp.roll(one, 1, axis=0)).sum(-1), 0.0).mean()


def batch_norm(params, batch, rng=None, synced=lambda x: x):
    hidden = _hidden(params, batch).astype(jnp.float32)
    mean = synced(hidden.mean(0))
    normal = (hidden - mean) * jax.lax.rsqrt(synced(jnp.square(hidden - mean).mean(0)) + 1e-3) * params["gain"]
    return _losses(params, normal.astype(params["down"].dtype), batch).mean()


def synced_batch_norm(params, batch, rng=None):
    """As `axis_name` of Flax's: what it needs of other devices it asks for itself."""
    return batch_norm(params, batch, synced=lambda x: jax.lax.pmean(x, "data"))


def noisy_contrastive(params, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, (len(batch["y"]), WIDTH))
    one = jnp.where(kept, _hidden(params, batch), 0)
    return jax.nn.logsumexp((one @ one.T).astype(jnp.float32))


def root_mean_square(params, batch, rng=None):
    return jnp.sqrt(jnp.square(_hidden(params, batch).astype(jnp.float32)).mean())


def dropout(params, batch, rng):
    """As Equinox does it: a key for each row."""

    def one(x, y, key):
        hidden = jnp.tanh(x @ params["up"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
        logits = (hidden @ params["down"]).astype(jnp.float32)
        return -jax.nn.log_softmax(logits)[y]

    return jax.vmap(one)(batch["x"], batch["y"], jax.random.split(rng, len(batch["y"]))).mean()


APART = {each.__name__: each for each in (mean, decayed_mean, dropout)}
WHOLE = {
    each.__name__: each
    for each in (
        summed,
        masked_mean,
        contrastive,
        triplet,
        batch_norm,
        noisy_contrastive,
        root_mean_square,
    )
}
SYNCED = {"synced_batch_norm": synced_batch_norm}
