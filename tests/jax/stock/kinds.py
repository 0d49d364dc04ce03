"""Stock models of many kinds, each as the documentation of its library writes it, for calls that look at a step.

Each function returns parameters, loss_fn(params, batch[, rng]), a batch, and whether the function takes an rng.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

WIDTH, CLASSES, WORDS, LENGTH, ROWS = 8, 4, 16, 6, 4
_RNG = np.random.default_rng(0)
X = {"x": _RNG.standard_normal((ROWS, WIDTH)).astype(np.float32), "y": np.arange(ROWS, dtype=np.int32) % CLASSES}
IMAGES = {"x": _RNG.standard_normal((ROWS, 8, 8, 1)).astype(np.float32), "y": X["y"]}
SERIES = {"x": _RNG.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32), "y": X["y"]}
TEXT = _RNG.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)


def classes(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def next_words(logits, text):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()


# --- Flax linen


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(linen.relu(linen.Dense(2 * WIDTH)(x)))


class LinenCNN(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(WIDTH, (3, 3))(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        x = linen.avg_pool(x, (2, 2), strides=(2, 2))
        x = linen.max_pool(linen.GroupNorm(4)(x), (2, 2), strides=(2, 2))
        return linen.Dense(CLASSES)(x.reshape(len(x), -1))


class LinenBlock(linen.Module):
    train: bool = True

    @linen.compact
    def __call__(self, x, _=None):
        mask = linen.make_causal_mask(x[..., 0])
        drawn = {"dropout_rate": 0.1, "deterministic": not self.train}
        x = x + linen.MultiHeadDotProductAttention(2, **drawn)(linen.LayerNorm()(x), mask=mask)
        h = linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.RMSNorm()(x))))
        return x + linen.Dropout(0.1, deterministic=not self.train)(h), None


class LinenLM(linen.Module):
    """Embeddings are tied, layers are scanned and computed again; or each is a module, with dropout."""

    scanned: bool

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(WORDS, WIDTH)
        x = embed(tokens) + linen.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        if self.scanned:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
            x, _ = linen.scan(linen.remat(LinenBlock), **split)(train=False)(x, None)
        else:
            x, _ = LinenBlock()(x)
        return embed.attend(linen.LayerNorm()(x))


class LinenGRU(linen.Module):
    @linen.compact
    def __call__(self, x):
        both = linen.Bidirectional(linen.RNN(linen.GRUCell(WIDTH)), linen.RNN(linen.LSTMCell(WIDTH)))
        return linen.Dense(CLASSES)(both(x)[:, -1])


class LinenMoE(linen.Module):
    """Every token goes to its two best experts, by one-hot dispatch, of which the default is fp32."""

    in_stream: bool

    @linen.compact
    def __call__(self, x):
        gates = jax.nn.softmax(linen.Dense(4, use_bias=False)(x))
        best, chosen = jax.lax.top_k(gates, 2)
        one_hot = jax.nn.one_hot(chosen, 4, dtype=x.dtype if self.in_stream else jnp.float32)
        shares = (one_hot * best[..., None]).sum(-2)
        init = linen.initializers.lecun_normal()
        up, down = self.param("up", init, (4, WIDTH, 16)), self.param("down", init, (4, 16, WIDTH))
        hidden = linen.silu(jnp.einsum("btd,edh->bteh", x, up))
        x = x + jnp.einsum("bteh,ehd,bte->btd", hidden, down, shares)
        return linen.Dense(CLASSES)(x.mean(1)), 4 * (gates.mean((0, 1)) * shares.mean((0, 1))).sum()


class LinenMapped(linen.Module):
    """An ensemble: a layer that is mapped over its parameters, and one of which the weight is normalized."""

    @linen.compact
    def __call__(self, x):
        several = linen.vmap(
            linen.Dense, in_axes=None, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=3
        )
        return linen.WeightNorm(linen.Dense(CLASSES))(linen.tanh(several(WIDTH)(x)).mean(0))


def linen_mlp():
    params = LinenMLP().init(jax.random.key(0), X["x"])["params"]
    return params, lambda p, b: classes(LinenMLP().apply({"params": p}, b["x"]), b), X, False


def linen_cnn():
    variables = LinenCNN().init(jax.random.key(0), IMAGES["x"], train=False)

    def loss_fn(params, batch):
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, updated = LinenCNN().apply(given, batch["x"], train=True, mutable=["batch_stats"])
        return classes(logits, batch), updated

    return variables["params"], loss_fn, IMAGES, False


def linen_dropout():
    model = LinenLM(scanned=False)
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, TEXT)["params"]
    return params, lambda p, b, r: next_words(model.apply({"params": p}, b, rngs={"dropout": r}), b), TEXT, True


def linen_scanned():
    model = LinenLM(scanned=True)
    params = model.init(jax.random.key(0), TEXT)["params"]
    return params, lambda p, b: next_words(model.apply({"params": p}, b), b), TEXT, False


def linen_gru():
    params = LinenGRU().init(jax.random.key(0), SERIES["x"])["params"]
    return params, lambda p, b: classes(LinenGRU().apply({"params": p}, b["x"]), b), SERIES, False


def _linen_moe(**options):
    def make():
        model = LinenMoE(**options)

        def loss_fn(params, batch):
            logits, balance = model.apply({"params": params}, batch["x"])
            return classes(logits, batch) + 0.01 * balance.astype(jnp.float32)

        return model.init(jax.random.key(0), SERIES["x"])["params"], loss_fn, SERIES, False

    return make


def linen_mapped():
    params = LinenMapped().init(jax.random.key(0), X["x"])["params"]
    return params, lambda p, b: classes(LinenMapped().apply({"params": p}, b["x"]), b), X, False


# --- Flax nnx


class NnxMLP(nnx.Module):
    """The first model of the documentation."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.dropout(self.norm(self.up(x)))))


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, WIDTH, (3, 3), rngs=rngs)
        self.turned = nnx.ConvTranspose(WIDTH, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.head = nnx.LinearGeneral((4, 4), CLASSES, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.first(x)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.silu(self.norm(self.turned(x))), (4, 2), strides=(4, 2))
        return self.head(x.max(1))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


class NnxLM(nnx.Module):
    """Layers are made by vmap and run by scan, each computed again; embeddings are tied."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return NnxLayer(rngs)

        self.embed, self.layers = nnx.Embed(WORDS, WIDTH, rngs=rngs), layers(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x, layer):
            return layer(x)

        return self.embed.attend(through(self.embed(tokens), self.layers))


class NnxGRU(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class NnxLoRA(nnx.Module):
    def __init__(self, rngs):
        self.adapted = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
        self.mixed = nnx.Einsum("bd,deh->beh", (WIDTH, 2, 4), (2, 4), rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.cond(x[0, 0] > 0, nnx.relu, nnx.tanh, self.adapted(x))
        return self.head(self.mixed(x).reshape(len(x), -1))


def _nnx(kind, batch, loss_of):
    def make():
        graph, params, rest = nnx.split(kind(nnx.Rngs(0)), nnx.Param, ...)

        def loss_fn(params, batch):
            model = nnx.merge(graph, params, rest, copy=True)
            model.train()
            loss = loss_of(model(batch["x"] if isinstance(batch, dict) else batch), batch)
            return loss, nnx.state(model, nnx.BatchStat)

        return params, loss_fn, batch, False

    return make


# --- Equinox


class EquinoxCNN(eqx.Module):
    """Batch norm with its state, as the example on stateful operations has it."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.conv, self.pool = eqx.nn.Conv2d(1, 4, 3, key=one), eqx.nn.MaxPool2d(2, 2)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        self.head = eqx.nn.Linear(36, CLASSES, key=two)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.head(self.pool(jax.nn.relu(x)).reshape(-1)), state


class EquinoxDropout(eqx.Module):
    embed: eqx.nn.Embedding
    attend: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    shared: eqx.nn.Shared

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        embed, head = eqx.nn.Embedding(WORDS, WIDTH, key=one), eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=two)
        self.shared = eqx.nn.Shared((embed, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        self.embed = embed
        self.attend = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.1, key=three)
        self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), eqx.nn.Dropout(0.1)

    def __call__(self, tokens, key):
        one, two = jax.random.split(key)
        embed, head = self.shared()
        x = jax.vmap(embed)(tokens)
        h = jax.vmap(self.norm)(x)
        x = x + self.attend(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)), key=one)
        return jax.vmap(head)(self.dropout(x, key=two))


class EquinoxScanned(eqx.Module):
    """Layers in one tree, scanned and computed again, as the page of tricks has it."""

    layers: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=key))(keys[:2])
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=keys[2])

    def __call__(self, x):
        dynamic, static = eqx.partition(self.layers, eqx.is_array)

        @eqx.filter_checkpoint
        def through(x, layer):
            return x + eqx.combine(layer, static)(x), None

        return self.head(jax.lax.scan(through, x, dynamic)[0])


class EquinoxGRU(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.cell, self.head = eqx.nn.GRUCell(WIDTH, WIDTH, key=one), eqx.nn.Linear(WIDTH, CLASSES, key=two)

    def __call__(self, x):
        return self.head(jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(WIDTH), x)[0])


class EquinoxSpectral(eqx.Module):
    """Normalized weights: by power iterations, whose vectors are state, and by their own norm."""

    spectral: eqx.nn.SpectralNorm
    weighted: eqx.nn.WeightNorm

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(WIDTH, WIDTH, key=one), "weight", key=two)
        self.weighted = eqx.nn.WeightNorm(eqx.nn.Linear(WIDTH, CLASSES, key=three))

    def __call__(self, x, state):
        x, state = self.spectral(x, state)
        return self.weighted(jnp.tanh(x)), state


def _equinox(kind, batch, loss_of, *, first=lambda x: x):
    def make():
        params, static = eqx.partition(kind(jax.random.key(0)), eqx.is_inexact_array)

        def loss_fn(params, batch):
            model = eqx.combine(params, static)
            return loss_of(jax.vmap(model)(first(batch["x"])), batch)

        return params, loss_fn, batch, False

    return make


def _stateful(kind, batch, first=lambda x: x):
    def make():
        model, state = eqx.nn.make_with_state(kind)(jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss_fn(params, batch):
            model = eqx.combine(params, static)
            mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            logits, updated = mapped(first(batch["x"]), state)
            return classes(logits, batch), updated

        return params, loss_fn, batch, False

    return make


def equinox_dropout():
    params, static = eqx.partition(EquinoxDropout(jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params, batch, rng):
        keys = jax.random.split(rng, len(batch))
        return next_words(jax.vmap(eqx.combine(params, static))(batch, keys), batch)

    return params, loss_fn, TEXT, True


# --- JAX alone


@jax.custom_vjp
def rounded(x):
    """A straight-through estimator, as for quantized training."""
    return jnp.round(x * 8) / 8


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@jax.custom_vjp
def fixed_point(w, x):
    """Solves z = tanh(w z + x) by a while loop, as JAX's page on custom derivatives does."""

    def changes(carry):
        before, now = carry
        return jnp.abs(before - now).max() > 1e-2

    return jax.lax.while_loop(changes, lambda c: (c[1], jnp.tanh(c[1] @ w + x)), (x, jnp.tanh(x)))[1]


def _fixed_backward(kept, g):
    w, x, z = kept
    _, pull = jax.vjp(lambda w, x: jnp.tanh(z @ w + x), w, x)
    return pull(g)


fixed_point.defvjp(lambda w, x: (z := fixed_point(w, x), (w, x, z)), _fixed_backward)


def dense():
    draw, sizes = np.random.default_rng(0).standard_normal, ((WIDTH, WIDTH), (WIDTH, CLASSES))
    layers = [{"w": draw(size, np.float32) / 3, "b": np.zeros(size[1], np.float32)} for size in sizes]
    return {f"layer{number}": layer for number, layer in enumerate(layers)}


def _own_derivatives(weight_of):
    def loss_fn(p, batch):
        x = rounded(batch["x"] @ p["layer0"]["w"] + p["layer0"]["b"])
        return classes(x @ rounded(weight_of(p["layer1"]["w"])) + p["layer1"]["b"], batch)

    return lambda: (dense(), loss_fn, X, False)


def equilibrium():
    params = dense()

    def loss_fn(p, batch):
        return classes(fixed_point(p["layer0"]["w"] / 4, batch["x"]) @ p["layer1"]["w"], batch)

    return params, loss_fn, X, False


def branches_and_loops():
    """Stochastic depth, a loop with a bound, segments, sorts and a Fourier transform."""
    params = dense()

    def loss_fn(p, batch, rng):
        def layer(x):
            return jnp.tanh(x @ p["layer0"]["w"] + p["layer0"]["b"])

        x = jax.lax.cond(jax.random.bernoulli(rng), layer, lambda x: x, batch["x"])
        x = jax.lax.fori_loop(0, 2, lambda i, x: x + layer(x) / (i + 1), x)
        x = jax.lax.map(layer, x)
        x = x + jnp.sort(x, -1) + jax.ops.segment_sum(x, batch["y"], ROWS)[batch["y"]]
        x = x + jnp.fft.rfft(x.astype(jnp.float32)).real.sum(-1, keepdims=True).astype(x.dtype)
        depth = jax.lax.stop_gradient(jax.lax.while_loop(lambda n: n < 3.0, lambda n: n + 1.0, jnp.float32(0)))
        return classes(x @ p["layer1"]["w"], batch) / depth

    return params, loss_fn, X, True


KINDS = {
    "linen mlp": linen_mlp,
    "linen cnn with batch norm": linen_cnn,
    "linen transformer with dropout": linen_dropout,
    "linen scanned, remat, tied": linen_scanned,
    "linen gru and lstm": linen_gru,
    "linen moe": _linen_moe(in_stream=True),
    "linen moe with fp32 shares": _linen_moe(in_stream=False),
    "linen vmap and weight norm": linen_mapped,
    "nnx mlp with batch norm and dropout": _nnx(NnxMLP, X, classes),
    "nnx cnn": _nnx(NnxCNN, IMAGES, classes),
    "nnx scanned, remat, tied": _nnx(NnxLM, TEXT, next_words),
    "nnx gru": _nnx(NnxGRU, SERIES, classes),
    "nnx lora, einsum and cond": _nnx(NnxLoRA, X, classes),
    "equinox mlp": _equinox(lambda key: eqx.nn.MLP(WIDTH, CLASSES, 16, 2, key=key), X, classes),
    "equinox cnn with batch norm": _stateful(EquinoxCNN, IMAGES, lambda x: jnp.moveaxis(x, -1, 1)),
    "equinox transformer with dropout, tied": equinox_dropout,
    "equinox scanned, remat": _equinox(EquinoxScanned, X, classes),
    "equinox gru": _equinox(EquinoxGRU, SERIES, classes),
    "equinox spectral norm": _stateful(EquinoxSpectral, X),
    "custom_vjp": _own_derivatives(lambda w: w),
    "custom_vjp of fp32": _own_derivatives(lambda w: w.astype(jnp.float32)),
    "custom_vjp with while": equilibrium,
    "cond, loops, segments, fft": branches_and_loops,
}
