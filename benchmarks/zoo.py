"""Small versions of widely used models for tests, docs/models.md and benchmarks, with a few thousand weights each.

`FAMILIES[name].make(attention)` returns a model, built by its own package (transformers or diffusers), and
`loss(model)`, the loss of one small batch. `attention` is "sdpa" or "eager", two implementations of the same
function. Nothing is downloaded. Every call gives the same weights and the same batch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about the sizes of tiny models
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

ATTENTION = ("sdpa", "eager")
_SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_DECODER = {**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    name: str  # as people call it
    package: str
    build: Callable[[str], tuple[nn.Module, Loss]]

    def make(self, attention: str = "sdpa") -> tuple[nn.Module, Loss]:
        """Returns the model in training mode and its loss function, with the same random numbers at every call."""
        torch.manual_seed(0)
        model, loss = self.build(attention)

        def seeded(model: nn.Module) -> Tensor:
            torch.manual_seed(0)
            return loss(model)

        return model.train(), seeded


def tokens(length: int = 8) -> Tensor:
    """Returns two sequences of ordinary tokens."""
    return torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(5))


def padding(length: int = 8) -> Tensor:
    """Returns the mask of two sequences, one of them shorter."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length - 3 :] = 0
    return mask


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _language(model: Any) -> tuple[nn.Module, Loss]:
    inputs = {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens()}
    return model, lambda model: model(**inputs).loss


def _gpt2(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM", **_TOKENS)
    return _language(GPT2LMHeadModel._from_config(config, attn_implementation=attention))


def _llama(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_DECODER, **_TOKENS)
    return _language(LlamaForCausalLM._from_config(config, attn_implementation=attention))


def _qwen3(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=True, **_TOKENS)
    return _language(Qwen3ForCausalLM._from_config(config, attn_implementation=attention))


def _mixtral(attention: str, experts: str = "grouped_mm") -> tuple[nn.Module, Loss]:
    from transformers import MixtralConfig, MixtralForCausalLM

    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(**_DECODER, **mixture, **_TOKENS)
    ways = {"attn_implementation": attention, "experts_implementation": experts}
    return _language(MixtralForCausalLM._from_config(config, **ways))


def _t5(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    way = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration._from_config(
        T5Config(**sizes, **way, **_TOKENS), attn_implementation=attention
    )
    inputs = {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens(6)}
    return model, lambda model: model(**inputs).loss


def _bert(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = BertConfig(**_SIZES, num_attention_heads=2, max_position_embeddings=16, **dropout, pad_token_id=2)
    return _language(BertForMaskedLM._from_config(config, attn_implementation=attention))


def _vit(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "num_labels": 5}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = ViTConfig(**sizes, **image, **dropout)
    pixels, labels = _noise(3, 3, 8, 8), torch.tensor([0, 3, 4])
    model = ViTForImageClassification._from_config(config, attn_implementation=attention)
    return model, lambda model: model(pixel_values=pixels, labels=labels).loss


def _whisper(attention: str) -> tuple[nn.Module, Loss]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"vocab_size": 48, "d_model": 16, "num_mel_bins": 8, "dropout": 0, "decoder_start_token_id": 0}
    sizes |= {"max_source_positions": 8, "max_target_positions": 16}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    model = WhisperForConditionalGeneration._from_config(
        WhisperConfig(**sizes, **_TOKENS), attn_implementation=attention
    )
    sound, labels = _noise(2, 8, 16), tokens(6)
    return model, lambda model: model(input_features=sound, labels=labels).loss


def _unet(attention: str) -> tuple[nn.Module, Loss]:
    from diffusers import UNet2DModel

    sizes = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = _with_attention(UNet2DModel(**sizes, **blocks, attention_head_dim=8), attention)
    image, noise, times = _noise(2, 3, 8, 8), _noise(2, 3, 8, 8, seed=2), torch.tensor([3, 500])
    return model, lambda model: nn.functional.mse_loss(model(image, times).sample, noise)


def _dit(attention: str) -> tuple[nn.Module, Loss]:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
    model = DiTTransformer2DModel(**sizes, sample_size=8, patch_size=2, num_embeds_ada_norm=10, dropout=0.0)
    image, noise, times = _noise(2, 4, 8, 8), _noise(2, 4, 8, 8, seed=2), torch.tensor([3, 500])
    inputs = {"timestep": times, "class_labels": torch.tensor([1, 2])}
    return _with_attention(model, attention), lambda model: nn.functional.mse_loss(
        model(image, **inputs).sample, noise
    )


def _with_attention(model: nn.Module, attention: str) -> nn.Module:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(AttnProcessor() if attention == "eager" else AttnProcessor2_0())
    return model


FAMILIES = {
    "gpt2": Family("GPT-2", "transformers", _gpt2),
    "llama": Family("Llama", "transformers", _llama),
    "qwen3": Family("Qwen3", "transformers", _qwen3),
    "t5": Family("T5", "transformers", _t5),
    "bert": Family("BERT", "transformers", _bert),
    "vit": Family("ViT", "transformers", _vit),
    "mixtral": Family("Mixtral", "transformers", _mixtral),
    "whisper": Family("Whisper", "transformers", _whisper),
    "unet": Family("U-Net (UNet2DModel)", "diffusers", _unet),
    "dit": Family("DiT (DiTTransformer2DModel)", "diffusers", _dit),
}
