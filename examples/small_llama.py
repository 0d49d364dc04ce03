"""What the examples of FSDP2 train: a small Llama with bf16 weights, as many are loaded, and data made here.

A script of your own has `AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)` and `load_dataset` in
place of it.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS, LENGTH = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))], 16


def pretrained():
    """Returns a model with random weights in bf16, and other tensors in fp32, as `from_pretrained` has them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(LETTERS), **sizes, **ends))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def counting(count, seed):
    """Returns rows of tokens that count upwards, each from a start and by a stride of its own, modulo 64."""
    draw = torch.Generator().manual_seed(seed)
    starts, strides = torch.randint(1, 64, (2, count, 1), generator=draw)
    return (starts + strides % 4 * torch.arange(LENGTH)) % 64


def tokenizer():
    """Returns a tokenizer of letters."""
    letters = Tokenizer(models.WordLevel({text: i for i, text in enumerate(LETTERS)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=letters, **ends)
