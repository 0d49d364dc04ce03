"""A GPT-2 as people write it, in torch alone: nn.Linear, nn.Embedding, nn.LayerNorm, a tied head.

Modules have the names of OpenAI's release. Called with inputs and targets, it returns the mean cross-entropy of
fp32 logits. B batch, T time, D width, H heads, E width of a head, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come out of one matrix."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        parts = self.c_attn(x_BTD).split(D, dim=2)
        q_BHTE, k_BHTE, v_BHTE = (part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in parts)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.c_proj(y_BHTE.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Four times as wide inside, with the tanh form of GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """Norms before, residuals around."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class GPT2(nn.Module):
    """The decoder. Its parameters are drawn from torch's global generator."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, context: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.wte(inputs_BT) + self.wpe(positions_T)
        for block in self.h:
            x_BTD = block(x_BTD)
        return self.loss(x_BTD, targets_BT)

    def loss(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the mean cross-entropy, given what came out of the last block."""
        logits_BTV = self.lm_head(self.ln_f(x_BTD)).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
