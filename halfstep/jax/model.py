"""The reference decoder in JAX: halfstep.config.model says what it computes, from which parameters.

The decoder holds no parameters and a policy does not change it: it is a function of {qualified name: array}, and
`with_policy` returns another function of the same parameters.

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from halfstep.config.model import ModelConfig, module_names, parameter_shapes
from halfstep.config.weights import Weights
from halfstep.config.weights import rope_tables as rope_tables
from halfstep.core.choice.layers import NO_LAYERS, Measured
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.jax.layers import (
    CastedLinear,
    Layer,
    Norm,
    Params,
    attention,
    broadcast,
    cap_logits,
    cross_entropy,
    pointwise,
    rotate,
    round_result,
    to_compute,
    with_weight_grad_format,
)

Angles = tuple[Array, Array]
At = Callable[[str], Precision]
"""Returns the formats of a module by its name."""


class Decoder(Layer):
    """A decoder-only transformer whose modules run in the formats that `at` returns for their names."""

    def __init__(
        self,
        config: ModelConfig,
        at: At = lambda name: Precision(),
        *,
        recompute: bool = False,
        lean: bool = False,
    ):
        super().__init__("", at(""))
        self.config = config
        self.recompute = recompute  # the backward pass runs blocks again instead of keeping their activations
        self.lean = lean  # the backward pass keeps what matmuls and attention return, and computes the rest again
        self.embed = Embedding("embed", at("embed"))
        self.positions = Embedding("positions", at("positions")) if config.positions == "learned" else None
        self.embed_norm = _norm(config, "embed_norm", at) if config.embedding_norm else None
        self.blocks = [Block(config, f"blocks.{layer}", at) for layer in range(config.layers)]
        self.final_norm = _norm(config, "final_norm", at)
        self.lm_head = CastedLinear("lm_head", at("lm_head"), weight="embed.weight" if config.tied else "")
        self.angles = rope_tables(config)

    def __call__(self, params: Params, tokens_BT: Array) -> Array:
        """Returns logits for the token after each, in the head's compute format, before the softcap."""
        config, casts = self.config, self.casts
        x_BTD = self.embed(params, tokens_BT)
        if self.positions is not None:
            x_BTD = round_result(x_BTD + self.positions.rows(params, x_BTD.shape), casts)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(params, x_BTD)
        x0_BTD, first_values = x_BTD, None
        skips: list[Array] = []
        cos_TK, sin_TK = (jnp.asarray(table[: tokens_BT.shape[1]]) for table in self.angles)
        for layer, block in enumerate(self.blocks):
            source = config.skip_into(layer)
            if source is not None:
                weight_BTD = broadcast(params["skip_weights"][source], x_BTD.shape, casts)
                x_BTD = round_result(x_BTD + round_result(weight_BTD * skips[source], casts), casts)
            through: Callable[..., Any] = block
            if self.recompute or self.lean:
                through = jax.checkpoint(block, policy=None if self.recompute else _is_product)
            x_BTD, values = through(params, x_BTD, x0_BTD, first_values, (cos_TK, sin_TK))
            first_values = values if first_values is None else first_values
            if layer < config.num_skips:
                skips.append(x_BTD)
        return self.lm_head(params, self.final_norm(params, x_BTD))

    def loss(self, params: Params, tokens_BT: Array, targets_BT: Array) -> Array:
        """Returns the sum over all targets of the negative log-likelihood, in the loss format."""
        logits = self(params, tokens_BT)
        return cross_entropy(logits, targets_BT, self.casts, self.config.softcap, head=self.lm_head.casts)

    def capped(self, logits: Array) -> Array:
        """Returns logits as the loss sees them: in fp32, after the softcap."""
        return cap_logits(logits, self.config.softcap)

    def module_names(self) -> list[str]:
        """Returns the names that rules match."""
        return module_names(self.config)

    def with_policy(self, policy: Policy, measured: Measured | None = None) -> "Decoder":
        """Returns the same function of the same parameters in a policy's precision; a wrong rule is an error.

        `measured` are the layers that stay wide because that is faster.
        """
        loose = [name for name in parameter_shapes(self.config) if "." not in name]
        by_name = (measured or NO_LAYERS).widen(precisions(policy, [*self.module_names(), *loose]))
        base = base_precision(policy)
        return Decoder(self.config, lambda name: by_name.get(name, base), recompute=self.recompute, lean=self.lean)

    def set_weights(self, weights: Weights) -> dict[str, Array]:
        """Returns every parameter at the value given for its name."""
        params = {name: jnp.asarray(value) for name, value in weights}
        assert {name: value.shape for name, value in params.items()} == parameter_shapes(self.config)
        return params


class Block(Layer):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, name: str, at: At):
        super().__init__(name, at(name))
        self.config = config
        self.attn_norm = _norm(config, f"{name}.attn_norm", at)
        self.attn = Attention(config, f"{name}.attn", at)
        self.mlp_norm = _norm(config, f"{name}.mlp_norm", at)
        self.mlp = MLP(config, f"{name}.mlp", at)

    def __call__(
        self, params: Params, x_BTD: Array, x0_BTD: Array, first_values: Array | None, angles: Angles
    ) -> tuple[Array, Array]:
        """Returns the stream after the block, and the values of its attention."""
        casts = self.casts
        if self.config.embedding_shortcut != "none":
            mix = self.parameter(params, "residual_mix")
            streams = enumerate((x_BTD, x0_BTD))
            kept, embedded = (round_result(broadcast(mix[n], x.shape, casts) * x, casts) for n, x in streams)
            x_BTD = round_result(kept + embedded, casts)
        y_BTD, values = self.attn(params, self.attn_norm(params, x_BTD), first_values, angles)
        x_BTD = self._add(params, x_BTD, y_BTD, "attn_scale")
        y_BTD = self.mlp(params, self.mlp_norm(params, x_BTD))
        return self._add(params, x_BTD, y_BTD, "mlp_scale"), values

    def _add(self, params: Params, x_BTD: Array, y_BTD: Array, scale: str) -> Array:
        casts = self.casts
        y_BTD = to_compute(y_BTD, casts)
        if self.config.branch_scale:
            y_BTD = round_result(broadcast(self.parameter(params, scale), y_BTD.shape, casts) * y_BTD, casts)
        return round_result(to_compute(x_BTD, casts) + y_BTD, casts)


class Attention(Layer):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, name: str, at: At):
        super().__init__(name, at(name))
        self.config = config
        self.q, self.k, self.v, self.o = (
            CastedLinear(f"{name}.{part}", at(f"{name}.{part}"), config.bias) for part in "qkvo"
        )
        gain, eps = config.qk_norm == "gain", config.epsilon_of("rms")
        self.q_norm, self.k_norm = (
            Norm(f"{name}.{part}", at(f"{name}.{part}"), "rms", gain, eps=eps) for part in ("q_norm", "k_norm")
        )

    def __call__(
        self, params: Params, x_BTD: Array, first_values: Array | None, angles: Angles
    ) -> tuple[Array, Array]:
        """Returns what attention adds to the stream, and its values before they were mixed."""
        config, casts = self.config, self.casts
        q_BHTK, k_BHTK, v_BHTK = (self._heads(layer(params, x_BTD)) for layer in (self.q, self.k, self.v))
        values = v_BHTK
        if config.value_residual and first_values is not None:
            mix = broadcast(self.parameter(params, "value_mix"), v_BHTK.shape, casts)
            v_BHTK = round_result(
                v_BHTK + round_result(mix * round_result(first_values - v_BHTK, casts), casts), casts
            )
        if config.qk_norm != "none":
            q_BHTK, k_BHTK = self.q_norm(params, q_BHTK), self.k_norm(params, k_BHTK)
        if config.positions == "rotary":
            q_BHTK, k_BHTK = rotate(q_BHTK, *angles, casts), rotate(k_BHTK, *angles, casts)
        if config.q_gain:
            gain_H11 = self.parameter(params, "q_gain")[:, None, None]
            q_BHTK = round_result(q_BHTK * broadcast(gain_H11, q_BHTK.shape, casts), casts)
        y_BTHK = jnp.swapaxes(attention(q_BHTK, k_BHTK, v_BHTK, casts), 1, 2)
        return self.o(params, y_BTHK.reshape(*y_BTHK.shape[:2], -1)), values

    def _heads(self, x_BTD: Array) -> Array:
        return jnp.swapaxes(x_BTD.reshape(*x_BTD.shape[:2], -1, self.config.size_of_head), 1, 2)


class MLP(Layer):
    """Two or three matmuls around a nonlinearity."""

    def __init__(self, config: ModelConfig, name: str, at: At):
        super().__init__(name, at(name))
        self.kind = config.mlp
        self.up, self.gate, self.down = (
            CastedLinear(f"{name}.{part}", at(f"{name}.{part}"), config.bias) for part in ("up", "gate", "down")
        )

    def __call__(self, params: Params, x_BTD: Array) -> Array:
        casts = self.casts
        hidden = to_compute(self.up(params, x_BTD), casts)
        if self.kind == "swiglu":
            gate = to_compute(self.gate(params, x_BTD), casts)
            hidden = round_result(pointwise(jax.nn.silu, gate, casts) * hidden, casts)
        else:
            hidden = pointwise(_NONLINEARITIES[self.kind], hidden, casts)
        return self.down(params, hidden)


class Embedding(Layer):
    """Rows of a table, looked up and cast to the compute format."""

    def __call__(self, params: Params, index: Array) -> Array:
        # An index beyond the table gives NaN; plain indexing would give the last row.
        table = with_weight_grad_format(self.parameter(params, "weight"), self.casts)
        return to_compute(jnp.take(table, index, axis=0, mode="fill"), self.casts)

    def rows(self, params: Params, shape: tuple[int, ...]) -> Array:
        """Returns the first rows, for positions, at the shape (B, T, D) of the tokens they are added to."""
        return broadcast(self.parameter(params, "weight")[: shape[1]], shape, self.casts)


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


# Named, so that each is traced once: a fresh `partial` would be another function at every call.
_NONLINEARITIES: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu2": _relu2,
}


def _norm(config: ModelConfig, name: str, at: At) -> Norm:
    return Norm(name, at(name), config.norm, config.norm_gain, config.bias, eps=config.epsilon_of(config.norm))


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a primitive is a matmul, or attention by a kernel: what `lean` keeps of a block."""
    return "dot" in primitive.name
