"""The reference decoder in MLX: halfstep.config.model says what it computes, from which parameters.

GELU and SiLU are computed in fp32 and rounded once, as in torch's kernels; MLX's operations in bf16 would round at
every one. Tables of rotary positions have a leading underscore, so MLX does not count them among parameters.

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head, V vocabulary.
"""

import math
from collections.abc import Iterator

import mlx.core as mx
from mlx.nn.utils import checkpoint
from mlx.utils import tree_flatten, tree_unflatten

from halfstep.config import decoder, weights
from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.weights import Weights
from halfstep.mlx import layers
from halfstep.mlx.layers import (
    Layer,
    Matmul,
    Norm,
    attention,
    cross_entropy,
    embedding,
    linear,
    parameter_to_compute,
    rotate,
    round_to_compute,
    times,
    to_compute,
    with_weight_grad_format,
)


class Decoder(decoder.Decoder, Layer):
    """A decoder-only transformer."""

    ops = layers

    def __init__(self, config: ModelConfig):
        super().__init__(config, Embedding, [Block(config) for _ in range(config.layers)], Head(config))
        self._cos_TK, self._sin_TK = rope_tables(config)
        assert {name: p.shape for name, p in self.named_parameters()} == parameter_shapes(config)

    def __call__(self, tokens_BT: mx.array) -> mx.array:
        """Returns logits for the token after each, in the head's compute format, before the softcap."""
        angles = (self._cos_TK[: tokens_BT.shape[1]], self._sin_TK[: tokens_BT.shape[1]])
        x_BTD = self.stream(
            tokens_BT, angles, lambda block, *given: (checkpoint(block) if self.recompute else block)(*given)
        )
        return self.lm_head(self.final_norm(x_BTD), self.embed.weight)

    def loss(self, tokens_BT: mx.array, targets_BT: mx.array) -> mx.array:
        """Returns the sum over all targets of the negative log-likelihood, in the loss format."""
        return cross_entropy(self(tokens_BT), targets_BT, self.casts, self.config.softcap)

    def capped(self, logits: mx.array) -> mx.array:
        """Returns logits as the loss sees them: in fp32, after the softcap."""
        cap, wide = self.config.softcap, logits.astype(mx.float32)
        return cap * mx.tanh(wide / cap) if cap else wide

    def set_weights(self, weights: Weights) -> None:
        """Sets every parameter to the value given for its name."""
        given = [(name, mx.array(value)) for name, value in weights]
        assert {name: value.shape for name, value in given} == parameter_shapes(self.config)
        self.update(tree_unflatten(given))

    def named_parameters(self) -> Iterator[tuple[str, mx.array]]:
        """Yields the name and array of every parameter."""
        yield from dict(tree_flatten(self.parameters())).items()


class Block(decoder.Block, Layer):
    """Attention and MLP, each added to the residual stream."""

    ops, __call__ = layers, decoder.Block.forward

    def __init__(self, config: ModelConfig):
        super().__init__(config, Attention(config), MLP(config))


class Attention(decoder.Attention, Layer):
    """Causal self-attention."""

    ops = layers

    def __init__(self, config: ModelConfig):
        super().__init__(config, Norm)

    def __call__(
        self, x_BTD: mx.array, first_values: mx.array | None, angles: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Returns what attention adds to the stream, and its values before they were mixed."""
        casts = self.casts
        q_BHTK, k_BHTK, v_BHTK = (self._heads(layer(x_BTD)) for layer in (self.q, self.k, self.v))
        values, v_BHTK = v_BHTK, self.mixed_values(v_BHTK, first_values)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if self.rotary:
            q_BHTK, k_BHTK = rotate(q_BHTK, *angles, casts), rotate(k_BHTK, *angles, casts)
        if self.q_gain is not None:
            q_BHTK = times(q_BHTK, parameter_to_compute(self.q_gain, casts)[:, None, None], casts)
        y_BHTK = attention(q_BHTK, k_BHTK, v_BHTK, casts)
        return self.o(y_BHTK.swapaxes(1, 2).flatten(2)), values

    def _heads(self, x_BTD: mx.array) -> mx.array:
        return mx.unflatten(x_BTD, -1, (-1, self.size_of_head)).swapaxes(1, 2)


class MLP(decoder.MLP, Layer):
    """Two or three matmuls around a nonlinearity."""

    ops = layers

    def __call__(self, x_BTD: mx.array) -> mx.array:
        casts = self.casts
        hidden = to_compute(self.up(x_BTD), casts)
        if self.gate is not None:
            hidden = round_to_compute(
                to_compute(_silu(to_compute(self.gate(x_BTD), casts)), casts) * hidden, casts
            )
        elif self.kind == "relu2":
            hidden = round_to_compute(mx.maximum(hidden, 0).square(), casts)
        else:
            hidden = to_compute(_gelu(hidden) if self.kind == "gelu" else _gelu_exact(hidden), casts)
        return self.down(hidden)


class Embedding(Layer):
    """Rows of a table, looked up and cast to the compute format."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = mx.zeros((count, width))

    def __call__(self, index: mx.array) -> mx.array:
        return embedding(self.weight, index, self.casts)

    def rows(self, count: int) -> mx.array:
        """Returns the first rows, for positions."""
        return to_compute(with_weight_grad_format(self.weight, self.casts)[:count], self.casts)


class Head(Matmul):
    """The output head: its own matrix, or the embedding's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = None if config.tied else mx.zeros((config.vocabulary, config.width))

    def __call__(self, x_BTD: mx.array, tied: mx.array) -> mx.array:
        return linear(
            self.check_activation_dtype(x_BTD), tied if self.weight is None else self.weight, None, self.casts
        )


def rope_tables(config: ModelConfig) -> tuple[mx.array, mx.array]:
    """Returns cos and sin of the angle of each position (config.weights)."""
    cos_TK, sin_TK = map(mx.array, weights.rope_tables(config))
    return cos_TK, sin_TK


def _gelu(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu_exact(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


def _silu(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return x * mx.sigmoid(x)
