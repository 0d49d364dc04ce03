"""Small models as people write them for MLX, without a thought of precision: tied heads, fp32 masks and tables."""

import math

import mlx.core as mx
from mlx import nn
from mlx.nn.losses import cross_entropy

VOCABULARY, WIDTH, HEADS, LENGTH = 17, 16, 2, 6


def heads_of(x):
    return mx.unflatten(x, -1, (HEADS, -1)).transpose(0, 2, 1, 3)


class HandAttention(nn.Module):
    """Scores, an additive mask in fp32, and a softmax, all by hand."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def __call__(self, x, mask):
        q, k, v = (heads_of(t) for t in mx.split(self.qkv(x), 3, axis=-1))
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(0, 1, 3, 2)
        scores += mask
        scores = mx.softmax(scores, axis=-1)
        return self.out((scores @ v).transpose(0, 2, 1, 3).flatten(-2))


class Gpt2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), HandAttention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(nn.gelu_approx(self.up(self.norm2(x))))


class Gpt2(nn.Module):
    """Positions are rows of a table's weight, the mask has its dtype, and the head is its transpose."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Gpt2Block(), nn.LayerNorm(WIDTH)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])
        x = self.block(x, mask.astype(self.tokens.weight.dtype))
        return self.norm(x) @ self.tokens.weight.T


class OwnRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = mx.ones((WIDTH,))

    def __call__(self, x):
        wide = x.astype(mx.float32)
        return self.weight * (wide * mx.rsqrt(wide.square().mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.rope = OwnRMSNorm(), nn.RMSNorm(WIDTH), nn.RoPE(WIDTH // HEADS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (heads_of(layer(y)) for layer in (self.q, self.k, self.v))
        q, k, scale = self.rope(q), self.rope(k), (WIDTH // HEADS) ** -0.5
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        x = x + self.o(y.transpose(0, 2, 1, 3).flatten(-2))
        y = self.norm2(x)
        return x + self.down(nn.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.block, self.norm = nn.Embedding(VOCABULARY, WIDTH), LlamaBlock(), nn.RMSNorm(WIDTH)

    def __call__(self, tokens):
        return self.tokens.as_linear(self.norm(self.block(self.tokens(tokens))))


class Rotary(nn.Module):
    """Rotates by fp32 tables that it makes itself."""

    def __call__(self, x):
        half = x.shape[-1] // 2
        angles = mx.arange(x.shape[-2])[:, None] * mx.exp(-mx.arange(half) * (math.log(1e4) / half))
        cos, sin = mx.cos(angles), mx.sin(angles)
        one, two = x[..., :half], x[..., half:]
        return mx.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.rotary, self.head = Rotary(), nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        q, k, v = (heads_of(t) for t in mx.split(self.qkv(x), 3, axis=-1))
        q, k = self.rotary(q), self.rotary(k)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")
        return self.head(x + y.transpose(0, 2, 1, 3).flatten(-2))


class TransformerLM(nn.Module):
    """The layers of mlx.nn alone, with its sinusoidal positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.SinusoidalPositionalEncoding(WIDTH)
        self.encoder, self.head = nn.TransformerEncoder(1, WIDTH, HEADS), nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens):
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        return self.head(self.encoder(x, mask))


class Whisper(nn.Module):
    """An fp32 table of positions that is not a parameter, and an encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self._positions = mx.sin(mx.arange(LENGTH)[:, None] * mx.arange(WIDTH)[None])
        self.both = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self._positions[: tokens.shape[1]]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])
        return self.both(x, x, None, mask, None) @ self.tokens.weight.T


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.summary = nn.Conv2d(3, WIDTH, 4, 4), mx.zeros((WIDTH,))
        self.positions = mx.random.normal((5, WIDTH)) * 0.02
        self.encoder, self.head = nn.TransformerEncoder(1, WIDTH, HEADS), nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, images):
        x = mx.flatten(self.patches(images), 1, 2)
        x = mx.concatenate([mx.broadcast_to(self.summary, (len(x), 1, WIDTH)), x], axis=1) + self.positions
        return self.head(self.encoder(x, None)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, WIDTH), kind(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens):
        y = self.cell(self.tokens(tokens))
        return self.head(y[0] if isinstance(y, tuple) else y)


class Mixture(nn.Module):
    """A router with a softmax of its own, and experts weighted by it."""

    def __init__(self):
        super().__init__()
        self.tokens, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2, bias=False)
        self.experts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        shares = mx.softmax(self.router(x).astype(mx.float32), axis=-1)
        y = mx.stack([expert(x) for expert in self.experts], axis=-1)
        return self.head(x + (y * shares[..., None, :]).sum(-1))


class Adapter(nn.Module):
    """A low-rank update beside a layer that is not trained."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.a, self.b = mx.random.normal((WIDTH, 2)) * 0.1, mx.random.normal((2, WIDTH)) * 0.1

    def __call__(self, x):
        return self.linear(x) + (2.0 * ((x @ self.a) @ self.b)).astype(x.dtype)


def adapted():
    model = Llama()
    model.freeze()
    model.block.q, model.block.v = Adapter(model.block.q), Adapter(model.block.v)
    return model


def tokens_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def images_loss(model, images):
    return cross_entropy(model(images), mx.array([3, 5])).mean()


TOKENS = mx.array([[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1]])
IMAGES = mx.random.normal((2, 8, 8, 3), key=mx.random.key(0))
MODELS = {
    "GPT-2, by hand": (Gpt2, tokens_loss, TOKENS),
    "Llama": (Llama, tokens_loss, TOKENS),
    "rotary tables, by hand": (Rotated, tokens_loss, TOKENS),
    "nn.TransformerEncoder": (TransformerLM, tokens_loss, TOKENS),
    "nn.Transformer, Whisper's way": (Whisper, tokens_loss, TOKENS),
    "ViT": (ViT, images_loss, IMAGES),
    "LSTM": (lambda: Recurrent(nn.LSTM), tokens_loss, TOKENS),
    "GRU": (lambda: Recurrent(nn.GRU), tokens_loss, TOKENS),
    "mixture of experts": (Mixture, tokens_loss, TOKENS),
    "LoRA": (adapted, tokens_loss, TOKENS),
}
