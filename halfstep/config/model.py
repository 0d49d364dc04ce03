"""The reference decoder as numbers and switches, and the parameters they imply.

One description serves every backend: the names and shapes of `parameter_shapes` are what each of them builds, what
rules match and what checkpoints hold. A linear layer from n to m has a `weight` of shape (m, n), as in PyTorch.

One block, with every switch on (each is off or plain unless the recipe says so):

    x <- mix[0] x + mix[1] x0                     embedding shortcut: x0 is the embedded token
    x <- x + attn_scale * attention(norm(x))      values mixed with the first block's; queries and keys normalized
    x <- x + mlp_scale * mlp(norm(x))             down(gelu(up x)), down(relu(up x)^2), down(silu(gate x) * up x)
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from halfstep.config.schema import Bounds, Count, Positive, Rate
from halfstep.core.errors import SettingConflictError
from halfstep.core.rules import owner as owner

Shape = tuple[int, ...]
# The widest block that stands for another model: a wider one takes longer and compares the same.
WIDEST = 1024


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocabulary: Positive = 256
    """How many different tokens there are; 256 is bytes."""
    context: Positive = 256
    """The most tokens in a sequence."""
    layers: Annotated[int, Bounds(at_least=1, at_most=10_000)] = 4
    """Blocks of attention and MLP."""
    width: Positive = 128
    """Features of the residual stream."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: Count = 0
    """Heads of keys and values, shared by the query heads; 0 is as many as `heads`."""
    head_width: Count = 0
    """Features of a head; 0 is `width / heads`."""
    mlp: Literal["gelu", "gelu_exact", "relu2", "swiglu"] = "gelu"
    """The MLP's activation: GELU by its tanh formula or by the error function, squared ReLU, or a SiLU gate."""
    mlp_width: Count = 0
    """Features inside the MLP; 0 is four times `width`."""
    bias: bool = False
    """Whether linear layers and layer norms have biases."""
    norm: Literal["rms", "layer"] = "rms"
    """Root-mean-square or layer normalization."""
    norm_gain: bool = True
    """Whether norms have a learned gain."""
    norm_epsilon: Rate = 0.0
    """Added under the root of every norm; 0 is 1e-6 for `rms`, and for queries and keys, and 1e-5 for `layer`."""
    embedding_norm: bool = False
    """Whether the embedding is normalized before the first block."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """How a token gets its position."""
    rope_base: Annotated[float, Bounds(above=0)] = 10000.0
    """Longest wavelength of rotary positions, over two pi."""
    qk_norm: Literal["none", "plain", "gain"] = "none"
    """Normalizes the queries and keys of each head; `gain` with a learned gain."""
    q_gain: bool = False
    """A learned factor on the queries of each head."""
    q_gain_start: Annotated[float, Bounds(above=0)] = 1.0
    """Initial value of the learned factors on queries."""
    softcap: Rate = 0.0
    """Logits become cap * tanh(logits / cap); 0 is off."""
    unet_skips: bool = False
    """Adds the outputs of the first half of the blocks to the inputs of the second half, in reverse order, with
    learned weights; of an odd number of blocks the last gets none."""
    value_residual: bool = False
    """Mixes the first block's values into every block's, with a learned weight."""
    embedding_shortcut: Literal["none", "scalar", "channel"] = "none"
    """Mixes the embedding into every block's input, with learned weights: two numbers, or two per channel."""
    branch_scale: bool = False
    """A learned factor per channel on what attention and MLP add."""
    tied: bool = True
    """Whether the embedding is also the output head."""
    zero_init: bool = True
    """Whether the projections that write to the residual stream start at zero."""
    zero_head: bool = False
    """Whether an untied output head starts at zero: the first loss is then the logarithm of the vocabulary."""
    embedding_std: Annotated[float, Bounds(above=0)] = 0.02
    """Standard deviation of the initial embedding."""

    def __post_init__(self) -> None:
        if self.head_width == 0 and self.width % self.heads:
            raise SettingConflictError(
                f"model.width is {self.width}, which {self.heads} heads do not divide",
                hint="change model.heads or model.width, or set model.head_width",
            )
        if self.heads % self.num_kv_heads:
            raise SettingConflictError(
                f"model.heads is {self.heads}, which model.kv_heads {self.num_kv_heads} does not divide",
                hint=f"use a divisor of {self.heads}",
            )
        if self.positions == "rotary" and self.size_of_head % 2:
            raise SettingConflictError(
                f"rotary positions rotate pairs, and a head has {self.size_of_head} features",
                hint="set model.head_width to an even number",
            )
        if self.tied and self.zero_head:
            raise SettingConflictError(
                "model.zero_head is set, but the head is tied to the embedding, which cannot start at zero",
                hint="set model.tied = false, or leave zero_head out",
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Features of a head."""
        return self.head_width or self.width // self.heads

    @property
    def size_of_mlp(self) -> int:
        """Features inside the MLP."""
        return self.mlp_width or 4 * self.width

    def epsilon_of(self, norm: Literal["rms", "layer"]) -> float:
        """Returns what a norm adds under its root."""
        return self.norm_epsilon or {"rms": 1e-6, "layer": 1e-5}[norm]

    @property
    def num_skips(self) -> int:
        """How many pairs of blocks a U-net skip joins."""
        return self.layers // 2 if self.unet_skips else 0

    def skip_into(self, layer: int) -> int | None:
        """Returns the block whose output a U-net skip adds to the input of this one; also its row of weights."""
        source = 2 * self.num_skips - 1 - layer
        return source if 0 <= source < self.num_skips else None

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned; a tied head counts once."""
        # Block by block, for a number of layers that nothing could hold by name.
        return _size(_outside(self)) + self.layers * _size(_block(self))


def model_like(shapes: Iterable[Sequence[int]]) -> ModelConfig:
    """Returns a decoder as wide as a model with these parameters; its block is timed instead of the model."""
    weights: Counter[int] = Counter()
    for shape in shapes:
        for size in {shape[0], math.prod(shape[1:])} if len(shape) > 1 else ():
            weights[size] += math.prod(shape)
    width = max(weights, key=lambda size: (weights[size], -size), default=16)
    width = min(WIDEST, 16 * math.ceil(width / 16))
    return ModelConfig(width=width, heads=width // (64 if width % 64 == 0 else 16))


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Returns the name and shape of every parameter, in the order of the forward pass."""
    block = _block(model)
    blocks = {f"blocks.{layer}.{name}": shape for layer in range(model.layers) for name, shape in block.items()}
    outside = _outside(model)
    before = {name: outside.pop(name) for name in list(outside) if name.startswith(("embed", "positions"))}
    return before | blocks | outside


def module_names(model: ModelConfig) -> list[str]:
    """Returns the module names that rules can match, including containers and norms without a gain."""
    gains = replace(model, norm_gain=True, qk_norm="none" if model.qk_norm == "none" else "gain")
    names: dict[str, None] = {}
    for parameter in [*parameter_shapes(gains), "lm_head.weight"]:
        steps = parameter.split(".")[:-1]
        names |= dict.fromkeys(".".join(steps[: depth + 1]) for depth in range(len(steps)))
    return list(names)


def reach(model: ModelConfig) -> dict[str, list[str]]:
    """Returns the names at which a rule's role changes something; `operand` is a narrow operand of a matmul."""
    names, parameters = module_names(model), list(parameter_shapes(model))
    owners = [owner(name) for name in parameters]
    multiply = [owner(name) for name in [*parameters, "lm_head.weight"] if is_matmul(name)]
    compute = [name for name in names if name.rpartition(".")[2] not in ("blocks", "mlp")]
    return {
        "operand": multiply,
        "compute": compute,
        "grad": compute,
        "param": owners,
        "moments": owners,
        "grad_weight": [*owners, *multiply],
        "norm": [name for name in names if name.endswith("norm")],
        "softmax": [name for name in names if name.endswith(".attn")],
    }


def is_matmul(parameter: str) -> bool:
    """Whether a parameter multiplies activations as a matrix; an embedding is looked up, not multiplied."""
    *_, layer, kind = ("", *parameter.split("."))
    return kind == "weight" and layer in ("q", "k", "v", "o", "up", "gate", "down", "lm_head")


def _outside(model: ModelConfig) -> dict[str, Shape]:
    """Returns the parameters before and after the blocks."""
    shapes: dict[str, Shape] = {"embed.weight": (model.vocabulary, model.width)}
    if model.positions == "learned":
        shapes["positions.weight"] = (model.context, model.width)
    if model.embedding_norm:
        shapes |= _norm(model, "embed_norm")
    if model.num_skips:
        shapes["skip_weights"] = (model.num_skips, model.width)
    shapes |= _norm(model, "final_norm")
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocabulary, model.width)
    return shapes


def _size(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _block(model: ModelConfig) -> dict[str, Shape]:
    width, head = model.width, model.size_of_head
    queries, keys = model.heads * head, model.num_kv_heads * head
    shapes: dict[str, Shape] = {}
    if model.embedding_shortcut != "none":
        shapes["residual_mix"] = (2,) if model.embedding_shortcut == "scalar" else (2, width)
    shapes |= _norm(model, "attn_norm")
    shapes |= _linear(model, "attn.q", width, queries)
    shapes |= _linear(model, "attn.k", width, keys)
    shapes |= _linear(model, "attn.v", width, keys)
    if model.value_residual:
        shapes["attn.value_mix"] = ()
    if model.qk_norm == "gain":
        shapes |= {"attn.q_norm.weight": (head,), "attn.k_norm.weight": (head,)}
    if model.q_gain:
        shapes["attn.q_gain"] = (model.heads,)
    shapes |= _linear(model, "attn.o", queries, width)
    if model.branch_scale:
        shapes["attn_scale"] = (width,)
    shapes |= _norm(model, "mlp_norm")
    shapes |= _linear(model, "mlp.up", width, model.size_of_mlp)
    if model.mlp == "swiglu":
        shapes |= _linear(model, "mlp.gate", width, model.size_of_mlp)
    shapes |= _linear(model, "mlp.down", model.size_of_mlp, width)
    if model.branch_scale:
        shapes["mlp_scale"] = (width,)
    return shapes


def _linear(model: ModelConfig, name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if model.bias else weight


def _norm(model: ModelConfig, name: str) -> dict[str, Shape]:
    if not model.norm_gain:
        return {}
    gain: dict[str, Shape] = {f"{name}.weight": (model.width,)}
    return gain | {f"{name}.bias": (model.width,)} if model.bias and model.norm == "layer" else gain


def matmul_parameters(model: ModelConfig) -> int:
    """Counts the parameters that multiply activations, including the head's, tied or not."""
    shapes = {"lm_head.weight": (model.vocabulary, model.width)} | parameter_shapes(model)
    return sum(math.prod(shape) for name, shape in shapes.items() if is_matmul(name))


def flops_per_token(model: ModelConfig) -> int:
    """Returns the floating-point operations of forward and backward per token."""
    attended = model.layers * model.heads * model.size_of_head * model.context
    return 6 * matmul_parameters(model) + 12 * attended
