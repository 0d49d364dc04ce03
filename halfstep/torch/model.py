"""The reference decoder in PyTorch: parameters named and shaped as `halfstep.config.model` lists them.

One block, with every switch on (each is off or plain unless the recipe says so):

    x <- mix[0] x + mix[1] x0                     embedding shortcut: x0 is the embedded token
    x <- x + attn_scale * attention(norm(x))      values mixed with the first block's; queries and keys normalized
    x <- x + mlp_scale * mlp(norm(x))             down(gelu(up x)), down(relu(up x)^2), down(silu(gate x) * up x)

U-net skips add the outputs of the first half of the blocks, times learned weights, to the inputs of the second
half, the last of them first; if the number of blocks is odd, the last gets none. The residual stream is in the
compute format; norms, softmax and the loss are islands (layers.py).

Shapes: B batch, T tokens of a sequence, D width, H heads, K features of a head, V vocabulary.
"""

from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.config import decoder, weights
from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.session import NOT_ASKED, SAYS_SO, Compilation
from halfstep.config.weights import Weights
from halfstep.torch import layers
from halfstep.torch.kernels.activations import gelu, squared_relu
from halfstep.torch.layers import Layer, Matmul, Norm, casts_like
from halfstep.torch.loss.coded import why_not_coded
from halfstep.torch.loss.plain import LEAN_CHUNKS, Terms, why_no_kernel
from halfstep.torch.numerics import attention
from halfstep.torch.numerics.lowering import Casts, round_to_compute, to_compute, with_weight_grad_format
from halfstep.torch.numerics.matmul import why_not_fused
from halfstep.torch.numerics.recompute import drop_recomputable, recompute_in_backward
from halfstep.torch.numerics.record import update_record

# Of blocks that are compiled one by one: dynamo compiles a function eight times at most, also without gradients.
MOST_KINDS = 3
LEAST_WORK = 2e11  # FLOPs of a block in both passes: an H200 takes some 0.3 ms, and the host to launch them


class Decoder(decoder.Decoder, Layer):
    """A decoder-only transformer."""

    ops = layers
    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__(
            config, Embedding, nn.ModuleList(Block(config) for _ in range(config.layers)), Head(config)
        )
        cos_TK, sin_TK = rope_tables(config)
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)
        self.loss_chunks = 1  # in which the head's logits are made, if its loss is fused with it (plain.py)
        assert {name: tuple(p.shape) for name, p in self.named_parameters()} == parameter_shapes(config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Returns the logits of each next token, in the head's compute format, before the softcap.

        With targets, the sum over all of them of the negative log-likelihood instead, in the loss format.
        """
        again = self.recompute and torch.is_grad_enabled()

        def call(block: nn.Module, *given: Any) -> Any:
            if again:  # nothing in a block is random, so no RNG state is kept
                return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            return block(*given)

        angles = (self.cos_TK[: tokens_BT.shape[1]], self.sin_TK[: tokens_BT.shape[1]])
        return self.after_blocks(self.stream(tokens_BT, angles, call), targets_BT)

    def after_blocks(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        """Returns logits, or the loss, of what came out of the last block."""
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is not None and not self.lm_head.why_not_fused(x_BTD, self.casts):
            return self.lm_head.loss(x_BTD, self.embed.weight, targets_BT, self.loss_chunks)
        logits = self.lm_head(x_BTD, self.embed.weight)
        if targets_BT is None:
            return logits  # type: ignore[no-any-return]
        return layers.cross_entropy(logits, targets_BT, self.casts, self.config.softcap)

    def choose_compilation(
        self, asked: bool | Literal["block", "whole"], tokens: int, *, alone: bool = True
    ) -> Compilation:
        """Chooses how a step is compiled: block by block where that is left to us and later steps are as fast.

        `tokens` are those of a micro-batch; the process is `alone`, or shares the run with others. The policy is
        applied before: blocks in other formats differ.
        """
        if asked is not True:
            return Compilation(asked, SAYS_SO) if asked else Compilation("no", NOT_ASKED)
        count, kinds = len(self.blocks), len({_kind(block) for block in self.blocks}) + self.config.value_residual
        work = 6 * tokens * sum(parameter.numel() for parameter in self.blocks[0].parameters())
        if not alone:
            return Compilation("whole", "it has not been timed otherwise where processes share a run")
        if self.skip_weights is not None:
            return Compilation("whole", "U-net skips are added between its blocks")
        if self.recompute:
            return Compilation("whole", "a block that runs again by itself does more than its gradients need")
        if 2 * kinds > count or kinds > MOST_KINDS:
            return Compilation("whole", "the graph of a block would serve too few others")
        if work < LEAST_WORK:
            return Compilation("whole", "its blocks are so small that launching them takes longer")
        return Compilation("block", f"its {count} blocks are {f'of {kinds} kinds' if kinds > 1 else 'alike'}")

    def compile_blocks(self, **options: Any) -> None:
        """Compiles each block by itself, which is one compilation for all of them, and what follows the last."""
        for block in self.blocks:
            block.compile(**options)
        self.after_blocks = torch.compile(self.after_blocks, **options)  # type: ignore[method-assign]

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, called: nn.Module | None = None) -> Tensor:
        """Returns the sum over all targets of the negative log-likelihood, in the loss format.

        `called` is what wraps the model, if something does (DDP).
        """
        return (self if called is None else called)(tokens_BT, targets_BT)  # type: ignore[no-any-return]

    def capped(self, logits: Tensor) -> Tensor:
        """Returns the logits as the loss sees them: in fp32, after the softcap."""
        cap = self.config.softcap
        return cap * torch.tanh(logits.float() / cap) if cap else logits.float()

    def save_memory(self) -> tuple[str, ...]:
        """Makes the backward pass compute norms and activations again; returns what does so.

        A block that runs again whole does so anyway. A loss that is fused with the head makes a part of the logits
        at a time.
        """
        self.loss_chunks = LEAN_CHUNKS
        inside = {part for block in self.blocks for part in block.modules()} if self.recompute else set()
        for part in self.modules():
            if isinstance(part, Layer) and part not in inside:
                update_record(part, recomputed=True)
        named = [(name, part) for name, part in self.named_modules() if part not in inside]
        activated = [name for name, part in named if isinstance(part, MLP) and not part.keeps_one]
        return (*(name for name, part in named if isinstance(part, Norm)), *activated)

    def attention_kernels(self) -> list[str]:
        """Returns how the blocks compute attention; empty on devices where torch has one way to."""
        device = self.cos_TK.device
        if device.type not in attention.FUSED_ON:
            return []
        parts = (part for part in self.modules() if isinstance(part, Attention))
        return list(dict.fromkeys(part.kernel(self.config, device) for part in parts))

    def why_not_fused(self) -> str:
        """Returns why the loss is not fused with the head; empty if it is."""
        return self.lm_head.why_not_fused(self.cos_TK, self.casts)

    def why_gelu_apart(self) -> str:
        """Returns why compiled blocks compute their GELU apart from the matmuls; empty if they do not."""
        mlps = [part for part in self.modules() if isinstance(part, MLP)]
        return next(filter(None, (part.why_gelu_apart(self.cos_TK) for part in mlps)), "")

    @torch.no_grad()
    def set_weights(self, weights: Weights) -> None:
        """Sets every parameter to the value given for its name."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            parameters.pop(name).copy_(torch.from_numpy(value))
        assert not parameters, "some parameters were not given"


class Block(decoder.Block, Layer):
    """Attention and MLP, each added to the residual stream."""

    ops = layers

    def __init__(self, config: ModelConfig):
        super().__init__(config, Attention(config), MLP(config))


class Attention(decoder.Attention, Layer):
    """Causal self-attention."""

    ops = layers

    def __init__(self, config: ModelConfig):
        super().__init__(config, HeadNorm)

    def forward(
        self, x_BTD: Tensor, first_values: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what attention adds to the stream, and its values before they were mixed, if others need them.

        In memory, heads stay inside tokens, where matmuls leave and want them: attention returns its result as its
        queries are, and a norm of transposed ones would copy them, and so what follows.
        """
        heads = (-1, self.size_of_head)
        q_BTHK, k_BTHK, v_BTHK = [w(x_BTD).unflatten(-1, heads) for w in (self.q, self.k, self.v)]
        v_BHTK = v_BTHK.transpose(1, 2)
        values = None if self.value_mix is None else v_BHTK
        v_BHTK = self.mixed_values(v_BHTK, first_values)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        if self.rotary and self.halfstep.recomputed and self.q_norm is not None:
            q_BHTK = recompute_in_backward(self._place_heads, q_BTHK, *angles, self.q_gain)
            k_BHTK = recompute_in_backward(self._place_heads, k_BTHK, *angles)
        else:
            q_BHTK, k_BHTK = self._place_heads(q_BTHK, *angles, self.q_gain), self._place_heads(k_BTHK, *angles)
        with drop_recomputable(q_BHTK, k_BHTK) if self.halfstep.recomputed else nullcontext():
            y_BHTK = attention.attention(q_BHTK, k_BHTK, v_BHTK, self.casts)
        return self.o(y_BHTK.transpose(1, 2).flatten(2)), values

    def kernel(self, config: ModelConfig, device: torch.device) -> str:
        """Returns how it is computed in training."""
        shapes = [(1, config.context, heads, self.size_of_head) for heads in (config.heads, config.num_kv_heads)]
        q, k = (torch.empty(shape, device=device, requires_grad=True).transpose(1, 2) for shape in shapes)
        return attention.attention_kernel(q, k, k, self.casts)

    def _place_heads(self, x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor, gain_H: Tensor | None = None) -> Tensor:
        """Returns queries or keys turned by their positions, and times the gain of their head, head by head."""
        casts = self.casts
        if self.rotary:
            x_BTHK = layers.rotate(x_BTHK, cos_TK[:, None], sin_TK[:, None], casts)
        if gain_H is not None:
            x_BTHK = layers.times(x_BTHK, layers.parameter_to_compute(gain_H, casts)[:, None], casts)
        return x_BTHK.transpose(1, 2)


class MLP(decoder.MLP, Layer):
    """Two or three matmuls around a nonlinearity."""

    ops = layers

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns what the MLP adds to the stream."""
        gate = () if self.gate is None else (self.gate(x_BTD),)
        hidden = self.up(x_BTD)
        if self.halfstep.recomputed and not self.keeps_one:
            activated = recompute_in_backward(self._activate, hidden, *gate)
        else:
            activated = self._activate(hidden, *gate)
        return self.down(activated)  # type: ignore[no-any-return]

    @property
    def keeps_one(self) -> bool:
        """Whether its activation function keeps nothing but its result, which the second matmul keeps anyway."""
        return self.kind == "relu2" and self.casts.compute is torch.bfloat16

    def why_gelu_apart(self, beside: Tensor) -> str:
        """Returns why compiled code on the device of a tensor computes a GELU apart from the matmuls."""
        if not self.up.casts is self.down.casts is self.casts:
            return "its layers have formats of their own"
        if self.up._forward_hooks or self.down._forward_hooks:
            return "hooks see what is between its layers"
        return why_not_fused(beside, self.up.weight, self.down.weight, self.casts)

    def _activate(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns what enters the second matmul."""
        casts = self.casts
        hidden = to_compute(hidden, casts)
        if gate is not None:
            return round_to_compute(round_to_compute(F.silu(to_compute(gate, casts)), casts) * hidden, casts)
        if self.kind == "relu2":
            return round_to_compute(squared_relu(hidden), casts)
        return round_to_compute(gelu(hidden) if self.kind == "gelu" else F.gelu(hidden), casts)


class Embedding(Layer):
    """Rows of a table, looked up and cast to the compute format."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, index: Tensor) -> Tensor:
        """Returns the rows of the index."""
        return to_compute(F.embedding(index, with_weight_grad_format(self.weight, self.casts)), self.casts)

    def rows(self, count: int) -> Tensor:
        """Returns the first rows, for positions."""
        return to_compute(with_weight_grad_format(self.weight, self.casts)[:count], self.casts)


class Head(Matmul):
    """The output head: its own matrix, or the embedding's."""

    halfstep_watch: Any = None  # of a monitor, if there is one (instruments/observe/slots.py)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.size = (config.width, config.vocabulary)
        self.terms = Terms(softcap=config.softcap)  # of the loss, if it is computed here
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary, config.width))

    def forward(self, x_BTD: Tensor, tied: Tensor) -> Tensor:
        """Returns the logits."""
        weight = tied if self.weight is None else self.weight
        return layers.linear(x_BTD, weight, None, self.casts, history=self.halfstep.history)

    def loss(self, x_BTD: Tensor, tied: Tensor, targets_BT: Tensor, chunks: int) -> Tensor:
        """Returns the sum of the losses of its logits, which are never seen."""
        weight = tied if self.weight is None else self.weight
        watched = self.halfstep_watch
        size = 0 if watched is None else watched.slice
        total, sample = layers.linear_cross_entropy(
            x_BTD, weight, None, targets_BT, self.casts, self.terms, chunks, size, self.halfstep.history
        )
        return total if watched is None or sample is None else watched.observe_loss(x_BTD, total, sample)

    def why_not_fused(self, beside: Tensor, model: Casts, casts: Casts | None = None) -> str:
        """Returns why the loss is computed of logits that this layer returns; empty if `loss` computes both.

        On the device of a tensor, with the casts of the model, and others of this layer than it has now, if given.
        """
        casts = casts or self.casts
        if not (casts.plain or casts.direct or casts.wide is not None):
            return "lm_head has operands or gradients in 16-bit formats of their own"
        watched = self.halfstep_watch is not None  # by a hook that needs no logits
        if len(self._forward_hooks) > watched or self._forward_pre_hooks:
            return "lm_head has hooks, which see its logits"
        return why_no_kernel(beside, casts.compute, model)

    def gradient_codes(self) -> str:
        """Returns how `loss` narrows the logits' gradient, in words; empty if its matmuls are wide."""
        if self.casts.wide is None:
            return ""
        why = why_not_coded(self.casts, self.terms)
        return f", and scaled by its amax: {why}" if why else ", as codes scaled by its bound"

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """Returns the size of its own matrix, or the embedding's."""
        return [self.size]


class HeadNorm(Norm):
    """Root-mean-square normalization of each head's features."""

    def forward(self, x_BTHK: Tensor) -> Tensor:
        """Returns the normalized heads."""
        # Compiled code fuses the norm with the turning that follows, which is marked: torch keeps what is between.
        if torch.compiler.is_compiling():
            return layers.rms_norm(x_BTHK, self.weight, self.casts or casts_like(x_BTHK), self.eps)
        return super().forward(x_BTHK)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the angle of each position (config.weights)."""
    cos_TK, sin_TK = map(torch.tensor, weights.rope_tables(config))
    return cos_TK, sin_TK


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Returns what blocks have in common if one graph serves them: shapes and formats."""
    shapes = tuple((name, parameter.shape, parameter.dtype) for name, parameter in block.named_parameters())
    return shapes, tuple(part.casts for part in block.modules() if isinstance(part, Layer))
