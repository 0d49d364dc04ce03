"""Stock models, as their libraries' own documentation writes them: none knows of a policy, none casts for one.

Each function returns parameters and loss_fn(params, batch); `BATCHES` has a batch by kind.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

VOCABULARY, WIDTH, HEADS, TOKENS, CLASSES = 16, 8, 2, 6, 4
_RNG = np.random.default_rng(0)
TEXT = _RNG.integers(0, VOCABULARY, (3, TOKENS)).astype(np.int32)
IMAGES = {"x": _RNG.standard_normal((3, 8, 8, 1)).astype(np.float32), "y": np.arange(3, dtype=np.int32)}
SERIES = {"x": _RNG.standard_normal((3, TOKENS, 4)).astype(np.float32), "y": np.arange(3, dtype=np.int32)}
BATCHES = {"transformer": TEXT, "vit": IMAGES, "lstm": SERIES}


def inputs_of(batch):
    return batch["x"] if isinstance(batch, dict) else batch


def loss_of(logits, batch):
    """That of the class of each image or series, or of the next token of a text."""
    labels = (logits, batch["y"]) if isinstance(batch, dict) else (logits[:, :-1], batch[:, 1:])
    return optax.softmax_cross_entropy_with_integer_labels(*labels).mean()


def sinusoidal(tokens, width):
    """The table of "Attention is all you need", in fp32 as numpy makes it."""
    angle = np.arange(tokens)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)


# --- Flax linen


class LinenBlock(linen.Module):
    causal: bool
    force: bool = False

    @linen.compact
    def __call__(self, x):
        mask = linen.make_causal_mask(x[..., 0]) if self.causal else None
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, force_fp32_for_softmax=self.force)(h, mask=mask)
        h = linen.LayerNorm()(x)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(h)))


class LinenTransformer(linen.Module):
    force: bool = False

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + sinusoidal(TOKENS, WIDTH)
        x = LinenBlock(causal=True, force=self.force)(x)
        return embed.attend(linen.LayerNorm()(x))


class LinenViT(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(WIDTH, (4, 4), strides=(4, 4))(x).reshape(len(x), -1, WIDTH)
        first = self.param("cls", linen.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(first, (len(x), 1, 1)), x], axis=1)
        x = x + self.param("position", linen.initializers.normal(0.02), (1, 5, WIDTH))
        x = LinenBlock(causal=False)(x)
        return linen.Dense(CLASSES)(linen.LayerNorm()(x)[:, 0])


class LinenLSTM(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(linen.RNN(linen.OptimizedLSTMCell(WIDTH))(x)[:, -1])


def _linen(model, given):
    def make():
        params = jax.jit(model.init)(jax.random.key(0), given)["params"]

        def loss_fn(params, batch):
            return loss_of(model.apply({"params": params}, inputs_of(batch)), batch)

        return params, loss_fn

    return make


# --- Flax nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs, causal):
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.causal = causal

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0]) if self.causal else None
        x = x + self.attend(self.first(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs, causal=True)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NnxViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(1, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, 5, WIDTH)) * 0.02)
        self.block, self.norm = NnxBlock(rngs, causal=False), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), -1, WIDTH)
        x = jnp.concatenate([jnp.tile(self.cls[...], (len(x), 1, 1)), x], axis=1) + self.position[...]
        return self.head(self.norm(self.block(x))[:, 0])


class NnxLSTM(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(4, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


def _nnx(kind):
    def make():
        graph, params = nnx.split(kind(nnx.Rngs(0)))

        def loss_fn(params, batch):
            return loss_of(nnx.merge(graph, params)(inputs_of(batch)), batch)

        return params, loss_fn

    return make


# --- Equinox


class EquinoxBlock(eqx.Module):
    first: eqx.nn.LayerNorm
    second: eqx.nn.LayerNorm
    attend: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    rope: eqx.nn.RotaryPositionalEmbedding | None
    causal: bool

    def __init__(self, key, causal):
        one, two = jax.random.split(key)
        self.first, self.second = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attend = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=two)
        self.rope = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS) if causal else None
        self.causal = causal

    def __call__(self, x):
        h = jax.vmap(self.first)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.causal else None

        def turned(q, k, v):
            rope = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return rope(q), rope(k), v

        x = x + self.attend(h, h, h, mask=mask, process_heads=turned if self.causal else None)
        return x + jax.vmap(self.mlp)(jax.vmap(self.second)(x))


class EquinoxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two, *rest = jax.random.split(key, 3)
        self.embed, self.norm = eqx.nn.Embedding(VOCABULARY, WIDTH, key=one), eqx.nn.RMSNorm(WIDTH)
        self.blocks = [EquinoxBlock(each, causal=True) for each in rest]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=two)

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class EquinoxViT(eqx.Module):
    patches: eqx.nn.Conv2d
    cls: jax.Array
    position: jax.Array
    block: EquinoxBlock
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two, three, four = jax.random.split(key, 4)
        self.patches = eqx.nn.Conv2d(1, WIDTH, 4, 4, key=one)
        self.cls, self.position = jnp.zeros((1, WIDTH)), jax.random.normal(two, (5, WIDTH)) * 0.02
        self.block, self.norm = EquinoxBlock(three, causal=False), eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=four)

    def __call__(self, x):
        x = self.patches(jnp.moveaxis(x, -1, 0)).reshape(WIDTH, -1).T
        x = self.block(jnp.concatenate([self.cls, x]) + self.position)
        return self.head(self.norm(x[0]))


class EquinoxLSTM(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(4, WIDTH, key=one)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=two)

    def __call__(self, x):
        start = (jnp.zeros(WIDTH), jnp.zeros(WIDTH))
        (state, _), _ = jax.lax.scan(lambda carry, row: (self.cell(row, carry), None), start, x)
        return self.head(state)


def _equinox(kind):
    def make():
        params, static = eqx.partition(eqx.filter_jit(kind)(jax.random.key(0)), eqx.is_array)

        def loss_fn(params, batch):
            return loss_of(jax.vmap(eqx.combine(params, static))(inputs_of(batch)), batch)

        return params, loss_fn

    return make


MODELS = {
    ("linen", "transformer"): _linen(LinenTransformer(), TEXT),
    ("linen, force_fp32_for_softmax", "transformer"): _linen(LinenTransformer(force=True), TEXT),
    ("linen", "vit"): _linen(LinenViT(), IMAGES["x"]),
    ("linen", "lstm"): _linen(LinenLSTM(), SERIES["x"]),
    ("nnx", "transformer"): _nnx(NnxTransformer),
    ("nnx", "vit"): _nnx(NnxViT),
    ("nnx", "lstm"): _nnx(NnxLSTM),
    ("equinox", "transformer"): _equinox(EquinoxTransformer),
    ("equinox", "vit"): _equinox(EquinoxViT),
    ("equinox", "lstm"): _equinox(EquinoxLSTM),
}
