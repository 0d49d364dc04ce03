"""How others name, lay out and describe a model that our decoder is: `gpt2` and `qwen3` of transformers, and ours.

A layout says three things of an architecture:

    sources     where each of our parameters stands: the tensor, and whether it is held transposed, beside two
                others, or with another number of rows
    shown       the settings of our model that the tensors' shapes give away
    told        those that config.json states; what no setting of ours expresses is refused

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
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.schema import build
from halfstep.core.split import join
from halfstep.training.weights.safetensors import Tensor, WeightsError

Settings = dict[str, Any]
Table = Mapping[str, Any]
# Tensors by their names without a prefix; each knows its own.
Tensors = Mapping[str, Tensor]

# What a plain decoder does not have: to fit it, a recipe must not have it either.
PLAIN: Settings = {
    "norm_gain": True,
    "embedding_norm": False,
    "q_gain": False,
    "softcap": 0.0,
    "unet_skips": False,
    "value_residual": False,
    "embedding_shortcut": "none",
    "branch_scale": False,
}


@final
@dataclass(frozen=True)
class Source:
    """Where a parameter of ours stands in a file, and in which form."""

    name: str
    transposed: bool = False
    third: int | None = None
    """Which of three matrices side by side, along their last axis."""
    rows: Literal["equal", "fewer", "more"] = "equal"
    """How many rows there may be: `equal`; `fewer` than ours, which are then padded; or `more`, which are cut."""

    def fits(self, there: Shape, here: Shape) -> bool:
        """Whether a tensor of that shape can be the parameter."""
        if not there or self.rows == "equal":
            return there == self.shape(here)
        return there[1:] == here[1:] and (there[0] <= here[0] if self.rows == "fewer" else there[0] >= here[0])

    def shape(self, here: Shape) -> Shape:
        """The shape that the tensor of a parameter has in the file."""
        there = here[::-1] if self.transposed else here
        return there if self.third is None else (*there[:-1], 3 * there[-1])

    def take(self, numbers: NDArray[np.float32], here: Shape) -> NDArray[np.float32]:
        """The parameter, out of the tensor's numbers."""
        if self.third is not None:
            numbers = np.split(numbers, 3, axis=-1)[self.third]
        if self.transposed:
            numbers = numbers.T
        if self.rows != "equal":
            numbers = resized(numbers, here[0])
        return np.ascontiguousarray(numbers)


def resized(numbers: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """The first rows; where there are not enough, more that are the mean of all.

    Padding rows are tokens that no text has. As rows of the output head they must not draw probability. The logit
    of a mean row is the mean of the other logits z, and exp(mean z) <= mean exp(z): P of them beside V rows never
    lower a loss, and raise it by at most log(1 + P / V), 0.00094 for 47 rows beside GPT-2's 50,257. Rows of zeros
    have no such bound: their logit is 0, and where all others are far below 0 they take all of the probability.
    """
    missing = rows - len(numbers)
    if missing <= 0:
        return numbers[:rows]
    mean = numbers.mean(axis=0, dtype=np.float64).astype(np.float32)
    return np.concatenate([numbers, np.broadcast_to(mean, (missing, *mean.shape))])


class Layout(ABC):
    """An architecture as a file holds it."""

    name: str
    prefix: str
    embedding: str
    mark: str
    """A tensor that files of this layout alone have."""

    @abstractmethod
    def sources(self, model: ModelConfig) -> dict[str, Source]:
        """Where every parameter of the model stands."""

    @abstractmethod
    def shown(self, tensors: Tensors) -> Settings:
        """The settings that shapes give away."""

    @abstractmethod
    def told(self, config: Table) -> Settings:
        """The settings that a description of the model states."""

    def skipped(self, name: str) -> str:
        """Why a tensor is left out on purpose; empty where it must not be."""
        return ""

    def pieces(self, tensors: Tensors, name: str) -> list[str]:
        """The tensors that a parameter is made of."""
        return [name]

    def read(self, tensors: Tensors, name: str) -> NDArray[np.float32]:
        """The numbers of a tensor."""
        return tensors[name].read()

    def notes(self, config: Table) -> list[str]:
        """What the description states and training does not follow."""
        return []

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by their names without the prefix."""
        return {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}


@final
class Gpt2(Layout):
    """GPT-2, of transformers."""

    name, prefix, embedding, mark = "gpt2", "transformer.", "wte.weight", "h.0.attn.c_attn.weight"
    _masks = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
    _activations: Mapping[str, str] = {
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "gelu": "gelu_exact",
    }

    def sources(self, model: ModelConfig) -> dict[str, Source]:
        """Where every parameter of the model stands."""
        matrices = {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        found = {
            "embed.weight": Source("wte.weight", rows="fewer"),
            "positions.weight": Source("wpe.weight", rows="more"),
            "lm_head.weight": Source("lm_head.weight", rows="fewer"),
        }
        for kind in ("weight", "bias"):
            found[f"final_norm.{kind}"] = Source(f"ln_f.{kind}")
            turned = kind == "weight"
            for layer in range(model.layers):
                ours, theirs = f"blocks.{layer}", f"h.{layer}"
                found[f"{ours}.attn_norm.{kind}"] = Source(f"{theirs}.ln_1.{kind}")
                found[f"{ours}.mlp_norm.{kind}"] = Source(f"{theirs}.ln_2.{kind}")
                for third, part in enumerate("qkv"):
                    source = Source(f"{theirs}.attn.c_attn.{kind}", transposed=turned, third=third)
                    found[f"{ours}.attn.{part}.{kind}"] = source
                for part, name in matrices.items():
                    found[f"{ours}.{part}.{kind}"] = Source(f"{theirs}.{name}.{kind}", transposed=turned)
        return found

    def shown(self, tensors: Tensors) -> Settings:
        """The settings that shapes give away."""
        return {
            **PLAIN,
            "norm": "layer",
            "bias": True,
            "positions": "learned",
            "qk_norm": "none",
            **_sizes(tensors, "h", {"vocabulary": "wte.weight:0", "width": "wte.weight:1"}),
            **_sizes(tensors, "h", {"context": "wpe.weight:0", "mlp_width": "h.0.mlp.c_fc.bias:0"}),
        }

    def told(self, config: Table) -> Settings:
        """The settings that config.json states."""
        _refuse(
            config,
            {
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
        )
        width, heads = config.get("n_embd", 768), config.get("n_head", 12)
        activation = config.get("activation_function", "gelu_new")
        return {
            "vocabulary": config.get("vocab_size", 50257),
            "context": config.get("n_positions", config.get("n_ctx", 1024)),
            "layers": config.get("n_layer", 12),
            "width": width,
            "heads": heads,
            "kv_heads": heads,
            "head_width": _divided(width, heads),
            "mlp": _known(activation, "activation_function", self._activations),
            "mlp_width": config.get("n_inner") or 4 * width,
            "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "tied": config.get("tie_word_embeddings", True),
        }

    def skipped(self, name: str) -> str:
        """Masks that older versions wrote with the weights."""
        return "masks of attention, no weights" if self._masks.fullmatch(name) else ""

    def notes(self, config: Table) -> list[str]:
        """Dropout."""
        rates = {key: config.get(key) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if config.get(key)}
        told = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        return [f"config.json has dropout ({told}), and our decoder none"] if rates else []


@final
class Qwen3(Layout):
    """Qwen3, the dense ones, of transformers."""

    name, prefix, embedding = "qwen3", "model.", "embed_tokens.weight"
    mark = "layers.0.self_attn.q_norm.weight"
    _parts: Mapping[str, str] = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
        **{f"attn.{part}": f"self_attn.{part}" for part in ("q_norm", "k_norm")},
        **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "gate", "down")},
    }

    def sources(self, model: ModelConfig) -> dict[str, Source]:
        """Where every parameter of the model stands."""
        found = {
            "embed.weight": Source("embed_tokens.weight", rows="fewer"),
            "final_norm.weight": Source("norm.weight"),
            "lm_head.weight": Source("lm_head.weight", rows="fewer"),
        }
        for layer in range(model.layers):
            for ours, theirs in self._parts.items():
                found[f"blocks.{layer}.{ours}.weight"] = Source(f"layers.{layer}.{theirs}.weight")
        return found

    def shown(self, tensors: Tensors) -> Settings:
        """The settings that shapes give away."""
        at = {"vocabulary": "embed_tokens.weight:0", "width": "embed_tokens.weight:1"}
        at |= {"mlp_width": "layers.0.mlp.up_proj.weight:0", "head_width": "layers.0.self_attn.q_norm.weight:0"}
        at |= {"heads": "layers.0.self_attn.q_proj.weight:0", "kv_heads": "layers.0.self_attn.k_proj.weight:0"}
        found = _sizes(tensors, "layers", at)
        for count in found.keys() & {"heads", "kv_heads"}:
            found[count] = _divided(found[count], found.get("head_width", 0))
        found = {setting: size for setting, size in found.items() if size}
        plain = {**PLAIN, "norm": "rms", "bias": False, "positions": "rotary", "qk_norm": "gain", "mlp": "swiglu"}
        return {**plain, **found}

    def told(self, config: Table) -> Settings:
        """The settings that config.json states."""
        kinds = set(config.get("layer_types") or [])
        _refuse(config, {"attention_bias": False, "use_sliding_window": False})
        if kinds - {"full_attention"}:
            raise _unlike("layer_types", sorted(kinds - {"full_attention"})[0])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        for told in (rope, config.get("rope_scaling") or {}):
            if (kind := told.get("rope_type", told.get("type", "default"))) != "default":
                raise _unlike("rope_type", kind)
            _refuse(told, {"partial_rotary_factor": 1.0})
        _refuse(config, {"partial_rotary_factor": 1.0})  # where versions before rope_parameters had it
        heads = config.get("num_attention_heads", 32)
        return {
            "vocabulary": config.get("vocab_size", 151936),
            "context": config.get("max_position_embeddings", 32768),
            "layers": config.get("num_hidden_layers", 32),
            "width": config.get("hidden_size", 4096),
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_width": config.get("head_dim", 128),
            "mlp": _known(config.get("hidden_act", "silu"), "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
            "mlp_width": config.get("intermediate_size", 22016),
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "rope_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            "tied": config.get("tie_word_embeddings", False),
        }

    def notes(self, config: Table) -> list[str]:
        """Dropout."""
        rate = config.get("attention_dropout")
        return [f"config.json has attention_dropout {rate}, and our decoder none"] if rate else []


@final
class Own(Layout):
    """Our decoder's: a checkpoint, or its weights alone."""

    name, prefix, embedding, mark = "halfstep", "model.", "embed.weight", "blocks.0.attn.q.weight"
    _states: Mapping[str, str] = {
        "optimizer.": "moments, which a new run begins anew",
        "average.": "averages of weights",
        "scale.": "the loss scale",
        "rng.": "random state",
        "amax.": "the history that delayed operands were scaled by",
        "narrow.": "which layers were measured to be faster in fp8",
        "applied": "the count of updates",
    }

    def sources(self, model: ModelConfig) -> dict[str, Source]:
        """Where every parameter of the model stands."""
        found = {name: Source(name) for name in parameter_shapes(model)}
        found |= {name: Source(name, rows="fewer") for name in ("embed.weight", "lm_head.weight")}
        return found | {"positions.weight": Source("positions.weight", rows="more")}

    def shown(self, tensors: Tensors) -> Settings:
        """The settings that shapes give away."""
        return _sizes(tensors, "blocks", {"vocabulary": "embed.weight:0", "width": "embed.weight:1"})

    def told(self, config: Table) -> Settings:
        """The settings of the run that wrote it. How its weights began makes no difference any more."""
        model = build(ModelConfig, {key: config[key] for key in config if key != "model_type"}, "model.")
        return {key: value for key, value in resolved(model).items() if key != "zero_init"}

    def skipped(self, name: str) -> str:
        """What a checkpoint holds besides weights."""
        return next((reason for start, reason in self._states.items() if name.startswith(start)), "")

    def pieces(self, tensors: Tensors, name: str) -> list[str]:
        """A master, and its lower half where it is split."""
        return [piece for piece in (name, f"remainder.{name}") if piece in tensors]

    def read(self, tensors: Tensors, name: str) -> NDArray[np.float32]:
        """The numbers of a master, joined where it was held as two halves."""
        upper, *lower = (tensors[piece] for piece in self.pieces(tensors, name))
        return join(upper.bits("<u2"), lower[0].bits("<i2")) if lower else upper.read()


LAYOUTS: tuple[Layout, ...] = (Gpt2(), Qwen3(), Own())


def resolved(model: ModelConfig) -> Settings:
    """The settings of a model, with the numbers that a zero stands for."""
    return asdict(model) | {
        "kv_heads": model.num_kv_heads,
        "head_width": model.size_of_head,
        "mlp_width": model.size_of_mlp,
        "norm_epsilon": model.epsilon_of(model.norm),
    }


def _sizes(tensors: Tensors, blocks: str, at: Mapping[str, str]) -> Settings:
    """The number of blocks, and sizes that are an axis of some tensor, of those that are there."""
    numbers = [int(found[1]) for name in tensors if (found := re.match(rf"{blocks}\.(\d+)\.", name))]
    sizes: Settings = {"layers": max(numbers) + 1} if numbers else {}
    for setting, place in at.items():
        name, _, axis = place.partition(":")
        shape = tensors[name].shape if name in tensors else ()
        if int(axis) < len(shape):
            sizes[setting] = shape[int(axis)]
    return sizes


def _divided(whole: Any, parts: Any) -> Any:
    """A size divided evenly; 0 where it cannot be."""
    ok = isinstance(whole, int) and isinstance(parts, int) and parts > 0 and whole % parts == 0
    return whole // parts if ok else 0


def _refuse(config: Table, expected: Settings) -> None:
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise _unlike(key, config[key])


def _known(value: Any, key: str, names: Mapping[str, str]) -> str:
    if value not in names:
        raise _unlike(key, value)
    return names[value]


def _unlike(key: str, value: Any) -> WeightsError:
    return WeightsError(
        f"config.json says {key} = {value!r}, which no setting of our decoder expresses",
        hint="train such a model as its own library has it, by `prepare` of halfstep.torch",
    )
