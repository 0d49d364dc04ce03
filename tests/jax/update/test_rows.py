"""Losses that devices may share by rows: what is said to be one is one, in numbers; common ones are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.jax.run import Weighted
from halfstep.jax.update.rows import find_mixing

ROWS, WIDTH = 4, 4
PARAMS = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32)
KERNEL = np.ones((3, 1, 1), np.float32)


def h(p, x):
    return jnp.tanh(x @ p)


def log_probs(p, x):
    return jax.nn.log_softmax(h(p, x))


def labels(x):
    return jnp.argmax(x, -1)


def loop(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c.sum(-1)), h(p, x), p)


def conv(x):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x[..., None], KERNEL, (1,), "SAME", dimension_numbers=numbers)


def shown(p, x):
    jax.debug.print("{}", x)
    return h(p, x).mean()


APART = {
    "shown": shown,
    "mean": lambda p, x: jnp.square(h(p, x)).mean(),
    "sum over count": lambda p, x: h(p, x).sum() / len(x),
    "mean of means": lambda p, x: h(p, x).mean(-1).mean(),
    "each divided": lambda p, x: (h(p, x) / x.size).sum(),
    "full": lambda p, x: (h(p, x) * jnp.full((len(x), 1), 1 / len(x))).sum(),
    "two terms": lambda p, x: h(p, x).mean() - 0.5 * jnp.square(x @ p).mean() + 0.1 * jnp.square(p).sum(),
    "classes": lambda p, x: -jnp.take_along_axis(log_probs(p, x), labels(x)[:, None], -1).mean(),
    "one hot": lambda p, x: -(log_probs(p, x) * jax.nn.one_hot(labels(x), WIDTH)).sum(-1).mean(),
    "mapped": lambda p, x: jax.vmap(lambda row, y: -log_probs(p, row)[y])(x, labels(x)).mean(),
    "looked up": lambda p, x: p[labels(x)].mean(),
    "flattened": lambda p, x: h(p, x).reshape(-1).mean(),
    "in pieces": lambda p, x: h(p, x).reshape(len(x), 2, 2).swapaxes(0, 1).max(-1).mean(),
    "transposed": lambda p, x: (p.T @ x.T).T.mean(),
    "attention": lambda p, x: jax.nn.softmax(jnp.einsum("bi,bj->bij", h(p, x), x)).max(-1).mean(),
    "product with a count": lambda p, x: jnp.einsum("bi,b->i", h(p, x), jnp.full(len(x), 1 / len(x))).sum(),
    "loop": lambda p, x: loop(p, x)[0].mean() + loop(p, x)[1].mean(),
    "dot": lambda p, x: jnp.dot(h(p, x)[:, 0], x[:, 0]) / len(x),
    "remat": lambda p, x: jax.checkpoint(h)(p, x).mean(),
    "sorted along": lambda p, x: (jnp.sort(h(p, x))[:, 1:] * jnp.cumsum(x, -1)[:, :-1]).mean(),
    "convolved": lambda p, x: conv(h(p, x)).mean(),
    "first column": lambda p, x: h(p, x)[:, 0].mean(),
    "no batch": lambda p, x: jnp.square(p).sum(),
    "mixed beside": lambda p, x: (h(p, x).mean(), x.std(0)),
}
MIXED = {
    "sum": lambda p, x: h(p, x).sum(),
    "count": lambda p, x: h(p, x).mean() * len(x),
    "sum and decay": lambda p, x: h(p, x).sum() + jnp.square(p).sum(),
    "unbiased": lambda p, x: h(p, x).sum() / (len(x) - 1),
    "root": lambda p, x: jnp.sqrt(jnp.square(h(p, x)).mean()),
    "product of means": lambda p, x: h(p, x).mean() * x.mean(),
    "masked": lambda p, x: (h(p, x) * (x > 0)).sum() / (x > 0).sum(),
    "mean where": lambda p, x: h(p, x).mean(where=x > 0),
    "ignored labels": lambda p, x: (h(p, x) * (x > 0)).sum() / jnp.maximum((x > 0).sum(), 1),
    "standardized": lambda p, x: jnp.square((h(p, x) - x.mean(0)) / x.std(0) @ p).mean(),
    "softmax over rows": lambda p, x: jnp.square(jax.nn.softmax(h(p, x), axis=0)).mean(),
    "largest": lambda p, x: h(p, x).max(),
    "median": lambda p, x: jnp.median(h(p, x)),
    "similarity": lambda p, x: jax.nn.logsumexp(h(p, x) @ x.T, axis=-1).mean(),
    "covariance": lambda p, x: jnp.square(h(p, x).T @ x / len(x)).sum(),
    "rolled": lambda p, x: jnp.square(h(p, x) - jnp.roll(x, 1, 0)).mean(),
    "reversed": lambda p, x: jnp.square(h(p, x) - x[::-1]).mean(),
    "shuffled": lambda p, x: jnp.square(h(p, x) - jax.random.permutation(jax.random.key(0), x)).mean(),
    "first row": lambda p, x: jnp.square(h(p, x) - x[0]).mean(),
    "every other": lambda p, x: h(p, x)[::2].mean(),
    "row number": lambda p, x: (h(p, x) * jnp.arange(len(x))[:, None]).mean(),
    "cumulative": lambda p, x: jnp.square(jnp.cumsum(h(p, x), 0) / len(x)).mean(),
    "folded across": lambda p, x: jnp.prod(h(p, x).reshape(2, -1, WIDTH), 0).mean(),
    "halves": lambda p, x: jnp.prod(jnp.stack(jnp.split(h(p, x), 2)), 0).mean(),
    "padded": lambda p, x: (h(p, x) * jnp.pad(x, ((1, 0), (0, 0)))[:-1]).mean(),
    "scan over rows": lambda p, x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), None), p[0], h(p, x))[0].sum(),
    "branch by rows": lambda p, x: jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, h(p, x)).mean(),
    "while by rows": lambda p, x: jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, h(p, x)).mean(),
    "convolved rows": lambda p, x: jnp.square(conv(h(p, x).T)).mean(),
    "segments": lambda p, x: jnp.square(jax.ops.segment_sum(h(p, x), labels(x), WIDTH) / len(x)).mean(),
    "looked up by a sum": lambda p, x: jax.lax.dynamic_slice(p, ((x > 0).sum(), 0), (1, WIDTH)).mean(),
    "taken": lambda p, x: jnp.square(h(p, x) - x[labels(x)]).mean(),
    "by size": lambda p, x: (jnp.tanh(x @ p) if len(x) > 4 else jnp.sin(x @ p)).mean(),
    "a row is a parameter": lambda p, x: jnp.square(h(p, x) - jnp.repeat(x[:1], len(x), 0)).mean(),
}


def mixing(fn):
    return find_mixing(fn, lambda times: (PARAMS, jax.ShapeDtypeStruct((times * ROWS, WIDTH), jnp.float32)))


def value(fn, x):
    out = fn(PARAMS, x)
    return float(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("name", APART)
def test_a_mean_over_rows_is_known_and_is_the_mean_of_its_parts(name):
    fn, x = APART[name], np.random.default_rng(1).standard_normal((2 * ROWS, WIDTH), np.float32)
    assert mixing(fn) == ""
    parts = [value(fn, half) for half in (x[:ROWS], x[ROWS:])]
    # Means of at most 8 * 16 numbers below 8, of which another order changes each by a unit.
    assert value(fn, x) == pytest.approx(sum(parts) / 2, abs=8 * 16 * 8 * 2.0**-24)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_named_by_its_line(name):
    said = mixing(MIXED[name])
    assert said
    if name not in ("sum", "count", "by size"):
        assert "test_rows.py" in said


def test_a_weighted_sum_says_itself_that_it_adds_up():
    assert mixing(lambda p, x: Weighted(h(p, x).sum(), (x > 0).sum())) == ""
