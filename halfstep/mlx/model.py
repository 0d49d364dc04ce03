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

from halfstep.config import weights
from halfstep.config.model import ModelConfig, module_names, parameter_shapes
from halfstep.config.weights import Weights
from halfstep.mlx.layers import (
    CastedLinear,
    Layer,
    Matmul,
    Norm,
    attention,
    cross_entropy,
    embedding,
    linear,
    parameter_to_compute,
    plus,
    rotate,
    round_to_compute,
    times,
    to_compute,
    with_weight_grad_format,
)


class Decoder(Layer):
    """A decoder-only transformer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocabulary, config.width)
        self.positions = Embedding(config.context, config.width) if config.positions == "learned" else None
        self.embed_norm = _norm(config) if config.embedding_norm else None
        self.blocks = [Block(config) for _ in range(config.layers)]
        self.skip_weights = _maybe(config.num_skips > 0, config.num_skips, config.width)
        self.final_norm = _norm(config)
        self.lm_head = Head(config)
        self._cos_TK, self._sin_TK = rope_tables(config)
        self.recompute = False  # the backward pass runs blocks again instead of keeping their activations
        assert {name: p.shape for name, p in self.named_parameters()} == parameter_shapes(config)

    def __call__(self, tokens_BT: mx.array) -> mx.array:
        """Returns logits for the token after each, in the head's compute format, before the softcap."""
        config, casts = self.config, self.casts
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = plus(x_BTD, self.positions.rows(tokens_BT.shape[1]), casts)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD)
        x0_BTD, first_values = x_BTD, None
        skips: list[mx.array] = []
        angles = (self._cos_TK[: tokens_BT.shape[1]], self._sin_TK[: tokens_BT.shape[1]])
        for layer, block in enumerate(self.blocks):
            source = config.skip_into(layer)
            if self.skip_weights is not None and source is not None:
                weight_D = to_compute(with_weight_grad_format(self.skip_weights, casts)[source], casts)
                x_BTD = round_to_compute(x_BTD + times(skips[source], weight_D, casts), casts)
            through = checkpoint(block) if self.recompute else block
            x_BTD, values = through(x_BTD, x0_BTD, first_values, angles)
            first_values = values if first_values is None else first_values
            if layer < config.num_skips:
                skips.append(x_BTD)
        return self.lm_head(self.final_norm(x_BTD), self.embed.weight)

    def loss(self, tokens_BT: mx.array, targets_BT: mx.array) -> mx.array:
        """Returns the sum over all targets of the negative log-likelihood, in the loss format."""
        return cross_entropy(self(tokens_BT), targets_BT, self.casts, self.config.softcap)

    def capped(self, logits: mx.array) -> mx.array:
        """Returns logits as the loss sees them: in fp32, after the softcap."""
        cap, wide = self.config.softcap, logits.astype(mx.float32)
        return cap * mx.tanh(wide / cap) if cap else wide

    def module_names(self) -> list[str]:
        """Returns the names that rules match."""
        return module_names(self.config)

    def set_weights(self, weights: Weights) -> None:
        """Sets every parameter to the value given for its name."""
        given = [(name, mx.array(value)) for name, value in weights]
        assert {name: value.shape for name, value in given} == parameter_shapes(self.config)
        self.update(tree_unflatten(given))

    def named_parameters(self) -> Iterator[tuple[str, mx.array]]:
        """Yields the name and array of every parameter."""
        yield from dict(tree_flatten(self.parameters())).items()


class Block(Layer):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        shortcut = {"none": (), "scalar": (2,), "channel": (2, config.width)}[config.embedding_shortcut]
        self.residual_mix = _maybe(bool(shortcut), *shortcut)
        self.attn_norm = _norm(config)
        self.attn = Attention(config)
        self.attn_scale = _maybe(config.branch_scale, config.width)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.mlp_scale = _maybe(config.branch_scale, config.width)

    def __call__(
        self, x_BTD: mx.array, x0_BTD: mx.array, first_values: mx.array | None, angles: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Returns the stream after the block, and the values of its attention."""
        casts = self.casts
        if self.residual_mix is not None:
            mix = parameter_to_compute(self.residual_mix, casts)
            x_BTD = round_to_compute(times(x_BTD, mix[0], casts) + times(x0_BTD, mix[1], casts), casts)
        y_BTD, values = self.attn(self.attn_norm(x_BTD), first_values, angles)
        x_BTD = self._add(x_BTD, y_BTD, self.attn_scale)
        return self._add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), self.mlp_scale), values

    def _add(self, x_BTD: mx.array, y_BTD: mx.array, scale_D: mx.array | None) -> mx.array:
        casts = self.casts
        y_BTD = to_compute(y_BTD, casts)
        if scale_D is not None:
            y_BTD = times(y_BTD, parameter_to_compute(scale_D, casts), casts)
        return round_to_compute(to_compute(x_BTD, casts) + y_BTD, casts)


class Attention(Layer):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        head = config.size_of_head
        self.q = CastedLinear(config.width, config.heads * head, config.bias)
        self.k = CastedLinear(config.width, config.num_kv_heads * head, config.bias)
        self.v = CastedLinear(config.width, config.num_kv_heads * head, config.bias)
        self.value_mix = _maybe(config.value_residual)
        self.q_norm, self.k_norm = (_head_norm(config) if config.qk_norm != "none" else None for _ in "qk")
        self.q_gain = _maybe(config.q_gain, config.heads)
        self.o = CastedLinear(config.heads * head, config.width, config.bias)

    def __call__(
        self, x_BTD: mx.array, first_values: mx.array | None, angles: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Returns what attention adds to the stream, and its values before they were mixed."""
        casts = self.casts
        q_BHTK, k_BHTK, v_BHTK = (self._heads(layer(x_BTD)) for layer in (self.q, self.k, self.v))
        values = v_BHTK
        if self.value_mix is not None and first_values is not None:
            mix = parameter_to_compute(self.value_mix, casts)
            v_BHTK = round_to_compute(
                v_BHTK + times(round_to_compute(first_values - v_BHTK, casts), mix, casts), casts
            )
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if self.config.positions == "rotary":
            q_BHTK, k_BHTK = rotate(q_BHTK, *angles, casts), rotate(k_BHTK, *angles, casts)
        if self.q_gain is not None:
            q_BHTK = times(q_BHTK, parameter_to_compute(self.q_gain, casts)[:, None, None], casts)
        y_BHTK = attention(q_BHTK, k_BHTK, v_BHTK, casts)
        return self.o(y_BHTK.swapaxes(1, 2).flatten(2)), values

    def _heads(self, x_BTD: mx.array) -> mx.array:
        return mx.unflatten(x_BTD, -1, (-1, self.config.size_of_head)).swapaxes(1, 2)


class MLP(Layer):
    """Two or three matmuls around a nonlinearity."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.up = CastedLinear(config.width, config.size_of_mlp, config.bias)
        self.gate = CastedLinear(config.width, config.size_of_mlp, config.bias) if config.mlp == "swiglu" else None
        self.down = CastedLinear(config.size_of_mlp, config.width, config.bias)

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


def _norm(config: ModelConfig) -> Norm:
    return Norm(config.width, config.norm, config.norm_gain, config.bias, config.epsilon_of(config.norm))


def _head_norm(config: ModelConfig) -> Norm:
    """Returns the root-mean-square normalization of each head's features."""
    return Norm(config.size_of_head, gain=config.qk_norm == "gain", eps=config.epsilon_of("rms"))


def _maybe(wanted: bool, *shape: int) -> mx.array | None:
    return mx.zeros(shape) if wanted else None
