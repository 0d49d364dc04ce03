"""The reference decoder of backends whose layers are modules (torch, MLX): its parts, and what its blocks compute.

A class of a backend inherits from one here and from the backend's `Layer`. `ops` is the backend's module `layers`:
`to_compute`, `round_to_compute`, `parameter_to_compute`, `times` and `plus` of an activation and a parameter.
config/model.py names the parameters, halfstep/torch/model.py has the formulas.

Shapes: B batch, T tokens of a sequence, D width.
"""

from collections.abc import Callable
from typing import Any

from halfstep.config.model import ModelConfig, module_names


class Part:
    """A module of the decoder."""

    ops: Any
    casts: Any

    def _maybe(self, wanted: bool, *shape: int) -> Any:
        return self.ops.empty_parameter(*shape) if wanted else None

    def _norm(self, config: ModelConfig) -> Any:
        eps = config.epsilon_of(config.norm)
        return self.ops.Norm(config.width, config.norm, config.norm_gain, config.bias, eps)


class Decoder(Part):
    """A decoder-only transformer."""

    def __init__(self, config: ModelConfig, embedding: Any, blocks: Any, head: Any):
        super().__init__()
        self.config = config
        self.embed = embedding(config.vocabulary, config.width)
        self.positions = embedding(config.context, config.width) if config.positions == "learned" else None
        self.embed_norm = self._norm(config) if config.embedding_norm else None
        self.blocks = blocks
        self.skip_weights = self._maybe(config.num_skips > 0, config.num_skips, config.width)
        self.final_norm = self._norm(config)
        self.lm_head = head
        self.skip_sources = tuple(config.skip_into(layer) for layer in range(config.layers))
        self.recompute = False  # whether the backward pass runs blocks again instead of keeping their activations

    def stream(self, tokens_BT: Any, angles: tuple[Any, Any], call: Callable[..., Any]) -> Any:
        """Returns what comes out of the last block; `call` calls a block with what it is given."""
        casts, ops = self.casts, self.ops
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = ops.plus(x_BTD, self.positions.rows(tokens_BT.shape[1]), casts)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD)
        x0_BTD, first_values = x_BTD, None
        skips: list[Any] = []
        for block, source in zip(self.blocks, self.skip_sources, strict=True):
            if self.skip_weights is not None and source is not None:
                weight_D = ops.to_compute(ops.with_weight_grad_format(self.skip_weights, casts)[source], casts)
                x_BTD = ops.round_to_compute(x_BTD + ops.times(skips[source], weight_D, casts), casts)
            x_BTD, values = call(block, x_BTD, x0_BTD, first_values, angles)
            first_values = values if first_values is None else first_values
            if self.skip_weights is not None and len(skips) < len(self.skip_weights):
                skips.append(x_BTD)
        return x_BTD

    def module_names(self) -> list[str]:
        """Returns the names that rules match."""
        return module_names(self.config)


class Block(Part):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Any, mlp: Any):
        super().__init__()
        shortcut = {"none": (), "scalar": (2,), "channel": (2, config.width)}[config.embedding_shortcut]
        self.residual_mix = self._maybe(bool(shortcut), *shortcut)
        self.attn_norm = self._norm(config)
        self.attn = attention
        self.attn_scale = self._maybe(config.branch_scale, config.width)
        self.mlp_norm = self._norm(config)
        self.mlp = mlp
        self.mlp_scale = self._maybe(config.branch_scale, config.width)

    def forward(self, x_BTD: Any, x0_BTD: Any, first_values: Any, angles: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns the stream after the block, and the values of its attention, if other blocks mix them in."""
        casts, ops = self.casts, self.ops
        if self.residual_mix is not None:
            mix = ops.parameter_to_compute(self.residual_mix, casts)
            x_BTD = ops.round_to_compute(ops.times(x_BTD, mix[0], casts) + ops.times(x0_BTD, mix[1], casts), casts)
        y_BTD, values = self.attn(self.attn_norm(x_BTD), first_values, angles)
        x_BTD = self._add(x_BTD, y_BTD, self.attn_scale)
        return self._add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), self.mlp_scale), values

    def _add(self, x_BTD: Any, y_BTD: Any, scale_D: Any) -> Any:
        casts, ops = self.casts, self.ops
        y_BTD = ops.to_compute(y_BTD, casts)
        if scale_D is not None:
            y_BTD = ops.times(y_BTD, ops.parameter_to_compute(scale_D, casts), casts)
        return ops.round_to_compute(ops.to_compute(x_BTD, casts) + y_BTD, casts)


class Attention(Part):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, head_norm: Any):
        super().__init__()
        linear, head, eps = self.ops.CastedLinear, config.size_of_head, config.epsilon_of("rms")
        normed, gain = config.qk_norm != "none", config.qk_norm == "gain"
        self.size_of_head, self.rotary = head, config.positions == "rotary"
        self.q = linear(config.width, config.heads * head, config.bias)
        self.k = linear(config.width, config.num_kv_heads * head, config.bias)
        self.v = linear(config.width, config.num_kv_heads * head, config.bias)
        self.value_mix = self._maybe(config.value_residual)
        self.q_norm, self.k_norm = (head_norm(head, gain=gain, eps=eps) if normed else None for _ in "qk")
        self.q_gain = self._maybe(config.q_gain, config.heads)
        self.o = linear(config.heads * head, config.width, config.bias)

    def mixed_values(self, values_BHTK: Any, first_values: Any) -> Any:
        """Returns the values of this block, with those of the first mixed in if the model mixes them."""
        casts, ops = self.casts, self.ops
        if self.value_mix is None or first_values is None:
            return values_BHTK
        mix = ops.parameter_to_compute(self.value_mix, casts)
        apart = ops.round_to_compute(first_values - values_BHTK, casts)
        return ops.round_to_compute(values_BHTK + ops.times(apart, mix, casts), casts)


class MLP(Part):
    """Two or three matmuls around a nonlinearity."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, linear = config.mlp, self.ops.CastedLinear
        self.up = linear(config.width, config.size_of_mlp, config.bias)
        self.gate = linear(config.width, config.size_of_mlp, config.bias) if config.mlp == "swiglu" else None
        self.down = linear(config.size_of_mlp, config.width, config.bias)
