"""How files name, lay out and describe a model that our decoder is: `gpt2` and `qwen3` of transformers, and ours.

    ours                       gpt2                                        qwen3
    embed.weight               wte.weight, fewer rows                      embed_tokens.weight, fewer rows
    positions.weight           wpe.weight, as many rows or more            (rotary)
    blocks.N.attn.q, k, v      h.N.attn.c_attn, thirds, transposed         layers.N.self_attn.q_proj, k_proj, ...
    blocks.N.attn.q_norm       -                                           layers.N.self_attn.q_norm
    blocks.N.attn.o            h.N.attn.c_proj, transposed                 layers.N.self_attn.o_proj
    blocks.N.mlp.up, gate      h.N.mlp.c_fc, transposed                    layers.N.mlp.up_proj, gate_proj
    blocks.N.mlp.down          h.N.mlp.c_proj, transposed                  layers.N.mlp.down_proj
    blocks.N.attn_norm         h.N.ln_1                                    layers.N.input_layernorm
    blocks.N.mlp_norm          h.N.ln_2                                    layers.N.post_attention_layernorm
    final_norm                 ln_f                                        norm
    lm_head.weight             lm_head.weight, unless tied                 the same

GPT-2's layers are convolutions of width one: their matrices are (in, out), ours (out, in). Rotary positions of
qwen3 turn the halves of a head against each other, as ours do, so q_proj and k_proj need no reordering. Names may
begin with `transformer.` (gpt2) or `model.` (qwen3, ours), or not.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.schema import build
from halfstep.config.weights import Weights
from halfstep.core.split import join
from halfstep.training.weights.safetensors import Tensor, WeightsError, WeightsFitError

Settings = dict[str, Any]
Table = Mapping[str, Any]
# Tensors by their names without a prefix; each knows its own.
Tensors = Mapping[str, Tensor]

HEAD = "lm_head.weight"  # has no prefix in any layout

# What a plain decoder lacks: a recipe must lack it too, to fit.
PLAIN: Settings = {"norm_gain": True, "softcap": 0.0, "embedding_shortcut": "none"}
PLAIN |= dict.fromkeys(("embedding_norm", "q_gain", "unet_skips", "value_residual", "branch_scale"), False)


@dataclass(frozen=True)
class Source:
    """The tensor of a file that holds one of our parameters, and in which form."""

    name: str
    transposed: bool = False
    third: int | None = None
    """Which of three matrices side by side, along their last axis."""
    rows: Literal["equal", "fewer", "more"] = "equal"
    """How many rows it may have: `equal`; `fewer` than ours, which are then padded; or `more`, which are cut."""

    def fits(self, there: Shape, here: Shape) -> bool:
        """Whether a tensor of that shape can be the parameter."""
        if not there or self.rows == "equal":
            return there == self.shape(here)
        return there[1:] == here[1:] and (there[0] <= here[0] if self.rows == "fewer" else there[0] >= here[0])

    def shape(self, here: Shape) -> Shape:
        """Returns the shape that the tensor of a parameter has in the file."""
        there = here[::-1] if self.transposed else here
        return there if self.third is None else (*there[:-1], 3 * there[-1])

    def extract(self, numbers: NDArray[np.float32], here: Shape) -> NDArray[np.float32]:
        """Returns the parameter, out of the tensor's numbers."""
        if self.third is not None:
            numbers = np.split(numbers, 3, axis=-1)[self.third]
        if self.transposed:
            numbers = numbers.T
        if self.rows != "equal":
            numbers = resize_rows(numbers, here[0])
        return np.ascontiguousarray(numbers)


def resize_rows(numbers: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """Returns the first rows; if there are not enough, adds rows that are the mean of all.

    Padding rows are tokens that no text has, and as rows of the output head must not draw probability. The logit
    of a mean row is the mean of the other logits z, and exp(mean z) <= mean exp(z): P of them next to V rows raise
    a loss by at most log(1 + P / V). Rows of zeros have no such bound: if all other logits are far below 0 they
    take everything.
    """
    missing = rows - len(numbers)
    if missing <= 0:
        return numbers[:rows]
    mean = numbers.mean(axis=0, dtype=np.float64).astype(np.float32)
    return np.concatenate([numbers, np.broadcast_to(mean, (missing, *mean.shape))])


@dataclass(frozen=True)
class Layout:
    """An architecture as a file holds it."""

    name: str
    prefix: str
    embedding: str
    mark: str  # a tensor that only files of this layout have
    sources: Callable[[ModelConfig], dict[str, Source]]  # where each parameter is
    from_shapes: Callable[[Tensors], Settings]  # the settings that shapes reveal
    from_config: Callable[[Table], Settings]  # those that a description states; refuses what we cannot express
    to_config: Callable[[ModelConfig], Settings]  # the description whose settings are nearest to a model's
    dropout: tuple[str, ...] = ()  # the rates of a description, which training ignores
    skip_reason: Callable[[str], str] = lambda _: ""  # why a tensor is skipped on purpose; empty if it must not be

    def notes(self, config: Table) -> list[str]:
        """Returns what a description states and training ignores."""
        rates = [f"{key} {config[key]}" for key in self.dropout if config.get(key)]
        return [f"config.json has dropout ({', '.join(rates)}), and our decoder has none"] if rates else []

    def pieces(self, tensors: Tensors, name: str) -> list[str]:
        """Returns the tensors of a parameter: itself, and the lower half of a split master of ours."""
        return [piece for piece in (name, f"remainder.{name}") if piece in tensors]

    def read(self, tensors: Tensors, name: str) -> NDArray[np.float32]:
        """Returns the numbers of a tensor, joined if it was held as two halves."""
        upper, *lower = (tensors[piece] for piece in self.pieces(tensors, name))
        return join(upper.bits("<u2"), lower[0].bits("<i2")) if lower else upper.read()

    def missing_settings(self, model: ModelConfig) -> list[str]:
        """Returns the settings of a model that the layout cannot express; none if it is such a model."""
        ours, theirs = resolve_settings(model), {**self.from_shapes({}), **self.from_config(self.to_config(model))}
        return [f"{key} = {format_setting(ours[key])}" for key, value in theirs.items() if ours[key] != value]

    def lay_out(self, model: ModelConfig, weights: Weights) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yields the tensors of a file, by their names there: what `sources` and `Source.extract` read back."""
        sources, parts = self.sources(model), dict[str, list[NDArray[np.float32]]]()
        for ours, numbers in weights:  # q, k and v come in the order of their thirds
            parts.setdefault(sources[ours].name, []).append(numbers.T if sources[ours].transposed else numbers)
        for name, pieces in parts.items():
            numbers = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
            yield name if name == HEAD else self.prefix + name, np.ascontiguousarray(numbers)

    def without_prefix(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by their names without the prefix."""
        return {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}


# --- GPT-2, of transformers --------------------------------------------------------------------------------

_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


def _gpt2_sources(model: ModelConfig) -> dict[str, Source]:
    matrices = {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    sources = {
        "embed.weight": Source("wte.weight", rows="fewer"),
        "positions.weight": Source("wpe.weight", rows="more"),
        "lm_head.weight": Source("lm_head.weight", rows="fewer"),
    }
    for kind in ("weight", "bias"):
        sources[f"final_norm.{kind}"] = Source(f"ln_f.{kind}")
        turned = kind == "weight"
        for layer in range(model.layers):
            ours, theirs = f"blocks.{layer}", f"h.{layer}"
            sources[f"{ours}.attn_norm.{kind}"] = Source(f"{theirs}.ln_1.{kind}")
            sources[f"{ours}.mlp_norm.{kind}"] = Source(f"{theirs}.ln_2.{kind}")
            for third, part in enumerate("qkv"):
                source = Source(f"{theirs}.attn.c_attn.{kind}", transposed=turned, third=third)
                sources[f"{ours}.attn.{part}.{kind}"] = source
            for part, name in matrices.items():
                sources[f"{ours}.{part}.{kind}"] = Source(f"{theirs}.{name}.{kind}", transposed=turned)
    return sources


def _gpt2_from_shapes(tensors: Tensors) -> Settings:
    at = {"vocabulary": "wte.weight:0", "width": "wte.weight:1"}
    at |= {"context": "wpe.weight:0", "mlp_width": "h.0.mlp.c_fc.bias:0"}
    plain = {**PLAIN, "norm": "layer", "bias": True, "positions": "learned", "qk_norm": "none"}
    return {**plain, **_sizes(tensors, "h", at)}


def _gpt2_from_config(config: Table) -> Settings:
    _require(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    _require(config, {"add_cross_attention": False})
    width, heads = config.get("n_embd", 768), config.get("n_head", 12)
    activation = config.get("activation_function", "gelu_new")
    return {
        "vocabulary": config.get("vocab_size", 50257),
        "context": config.get("n_positions", config.get("n_ctx", 1024)),
        "layers": config.get("n_layer", 12),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_width": _divide_exactly(width, heads),
        "mlp": _look_up(activation, "activation_function", _ACTIVATIONS),
        "mlp_width": config.get("n_inner") or 4 * width,
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "tied": config.get("tie_word_embeddings", True),
    }


def _gpt2_to_config(model: ModelConfig) -> Settings:
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_layer": model.layers,
        "n_embd": model.width,
        "n_head": model.heads,
        "n_inner": model.size_of_mlp,
        "activation_function": activations.get(model.mlp, "gelu_new"),
        "layer_norm_epsilon": model.epsilon_of("layer"),
        "tie_word_embeddings": model.tied,
        **dict.fromkeys(_GPT2_DROPOUT, 0.0),
    }


GPT2 = Layout(
    "gpt2",
    "transformer.",
    "wte.weight",
    "h.0.attn.c_attn.weight",
    _gpt2_sources,
    _gpt2_from_shapes,
    _gpt2_from_config,
    _gpt2_to_config,
    _GPT2_DROPOUT,
    lambda name: "attention masks, not weights" if _MASKS.fullmatch(name) else "",  # older versions saved them
)

# --- Qwen3, the dense ones, of transformers ----------------------------------------------------------------

_QWEN3_PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"attn.{part}": f"self_attn.{part}" for part in ("q_norm", "k_norm")},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "gate", "down")},
}


def _qwen3_sources(model: ModelConfig) -> dict[str, Source]:
    sources = {
        "embed.weight": Source("embed_tokens.weight", rows="fewer"),
        "final_norm.weight": Source("norm.weight"),
        "lm_head.weight": Source("lm_head.weight", rows="fewer"),
    }
    for layer in range(model.layers):
        for ours, theirs in _QWEN3_PARTS.items():
            sources[f"blocks.{layer}.{ours}.weight"] = Source(f"layers.{layer}.{theirs}.weight")
    return sources


def _qwen3_from_shapes(tensors: Tensors) -> Settings:
    at = {"vocabulary": "embed_tokens.weight:0", "width": "embed_tokens.weight:1"}
    at |= {"mlp_width": "layers.0.mlp.up_proj.weight:0", "head_width": "layers.0.self_attn.q_norm.weight:0"}
    at |= {"heads": "layers.0.self_attn.q_proj.weight:0", "kv_heads": "layers.0.self_attn.k_proj.weight:0"}
    sizes = _sizes(tensors, "layers", at)
    for count in sizes.keys() & {"heads", "kv_heads"}:
        sizes[count] = _divide_exactly(sizes[count], sizes.get("head_width", 0))
    plain = {**PLAIN, "norm": "rms", "bias": False, "positions": "rotary", "qk_norm": "gain", "mlp": "swiglu"}
    return {**plain, **{setting: size for setting, size in sizes.items() if size}}


def _qwen3_from_config(config: Table) -> Settings:
    kinds = set(config.get("layer_types") or [])
    _require(config, {"attention_bias": False, "use_sliding_window": False})
    if kinds - {"full_attention"}:
        raise _unlike_error("layer_types", sorted(kinds - {"full_attention"})[0])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for table in (rope, config.get("rope_scaling") or {}):
        if (kind := table.get("rope_type", table.get("type", "default"))) != "default":
            raise _unlike_error("rope_type", kind)
        _require(table, {"partial_rotary_factor": 1.0})
    _require(config, {"partial_rotary_factor": 1.0})  # where versions before rope_parameters had it
    heads = config.get("num_attention_heads", 32)
    return {
        "vocabulary": config.get("vocab_size", 151936),
        "context": config.get("max_position_embeddings", 32768),
        "layers": config.get("num_hidden_layers", 32),
        "width": config.get("hidden_size", 4096),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim", 128),
        "mlp": _look_up(config.get("hidden_act", "silu"), "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
        "mlp_width": config.get("intermediate_size", 22016),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "tied": config.get("tie_word_embeddings", False),
    }


def _qwen3_to_config(model: ModelConfig) -> Settings:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context,
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.size_of_head,
        "hidden_act": "silu",
        "intermediate_size": model.size_of_mlp,
        "rms_norm_eps": model.epsilon_of("rms"),
        "rope_theta": model.rope_base,  # for readers that do not know the next
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    }


QWEN3 = Layout(
    "qwen3",
    "model.",
    "embed_tokens.weight",
    "layers.0.self_attn.q_norm.weight",
    _qwen3_sources,
    _qwen3_from_shapes,
    _qwen3_from_config,
    _qwen3_to_config,
    ("attention_dropout",),
)

# --- ours: a checkpoint, or its weights alone -------------------------------------------------------------

_STATES = {
    "optimizer.": "moments, which a new run starts anew",
    "average.": "averages of weights",
    "scale.": "the loss scale",
    "rng.": "random state",
    "amax.": "the history that delayed operands were scaled by",
    "narrow.": "which layers were measured to be faster in fp8",
    "applied": "the count of updates",
}


def _own_sources(model: ModelConfig) -> dict[str, Source]:
    sources = {name: Source(name) for name in parameter_shapes(model)}
    sources |= {name: Source(name, rows="fewer") for name in ("embed.weight", "lm_head.weight")}
    return sources | {"positions.weight": Source("positions.weight", rows="more")}


def _own_from_config(config: Table) -> Settings:
    """How the weights of the run were initialized makes no difference any more."""
    model = build(ModelConfig, {key: config[key] for key in config if key != "model_type"}, "model.")
    return {key: value for key, value in resolve_settings(model).items() if key != "zero_init"}


OWN = Layout(
    "halfstep",
    "model.",
    "embed.weight",
    "blocks.0.attn.q.weight",
    _own_sources,
    lambda tensors: _sizes(tensors, "blocks", {"vocabulary": "embed.weight:0", "width": "embed.weight:1"}),
    _own_from_config,
    lambda model: {"model_type": "halfstep", **asdict(model)},
    skip_reason=lambda name: next((why for start, why in _STATES.items() if name.startswith(start)), ""),
)
LAYOUTS = (GPT2, QWEN3, OWN)


def hugging_face(model: ModelConfig) -> Layout:
    """Returns the layout of transformers that a model has; refuses one that has none, with the reasons."""
    missing = {layout: layout.missing_settings(model) for layout in LAYOUTS if layout is not OWN}
    if fitting := [layout for layout, settings in missing.items() if not settings]:
        return fitting[0]
    reasons = "; ".join(f"{layout.name} has no {', '.join(settings)}" for layout, settings in missing.items())
    raise WeightsFitError(
        f"the model has no Hugging Face layout: {reasons}",
        hint="export it `--to safetensors`, `onnx`, `int8` or `int4`; the recipes gpt2 and qwen3 have one",
    )


def resolve_settings(model: ModelConfig) -> Settings:
    """Returns the settings of a model, with the numbers that a zero stands for."""
    return asdict(model) | {
        "kv_heads": model.num_kv_heads,
        "head_width": model.size_of_head,
        "mlp_width": model.size_of_mlp,
        "norm_epsilon": model.epsilon_of(model.norm),
    }


def _sizes(tensors: Tensors, blocks: str, at: Mapping[str, str]) -> Settings:
    """Returns the number of blocks, and sizes that are an axis of some tensor, if those are there."""
    numbers = [int(match[1]) for name in tensors if (match := re.match(rf"{blocks}\.(\d{{1,9}})\.", name))]
    sizes: Settings = {"layers": max(numbers) + 1} if numbers else {}
    for setting, place in at.items():
        name, _, axis = place.partition(":")
        shape = tensors[name].shape if name in tensors else ()
        if int(axis) < len(shape):
            sizes[setting] = shape[int(axis)]
    return sizes


def format_setting(value: Any) -> str:
    """Returns a setting as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _divide_exactly(whole: Any, parts: Any) -> Any:
    ok = isinstance(whole, int) and isinstance(parts, int) and parts > 0 and whole % parts == 0
    return whole // parts if ok else 0


def _require(config: Table, expected: Settings) -> None:
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise _unlike_error(key, config[key])


def _look_up(value: Any, key: str, names: Mapping[str, str]) -> str:
    if value not in names:
        raise _unlike_error(key, value)
    return names[value]


def _unlike_error(key: str, value: Any) -> WeightsError:
    return WeightsFitError(
        f"config.json has {key} = {value!r}, which no setting of our decoder expresses",
        hint="train such a model with its own library, through `prepare` of halfstep.torch",
    )
