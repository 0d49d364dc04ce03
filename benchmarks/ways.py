"""One GPT-2 in several ways of writing, as people do: the same functions, in other words.

`make(way, **sizes)` returns a model and its loss function, a function of the model, inputs and targets. Weights
are those of torch's global generator. B batch, T time, D width, H heads, E width of a head, V vocabulary.

    plain         nn.LayerNorm, nn.Linear, F.gelu, the loss inside of the model (benchmarks/gpt2.py)
    custom norm   a subclass of LayerNorm that casts its gain to the input's dtype
    written out   the GELU in several operations, matrices held transposed and multiplied by addmm
    outside       the model returns logits; the compiled function computes their loss
    shifted       the model returns logits of all tokens, the loss leaves out the last, as Hugging Face's does
    nanogpt       the custom norm, and torch's default GELU, which is exact
    nanochat      norms without gains, rotary positions, relu^2, a softcap, a padded vocabulary
    speedrun      the same idea with F.linear of weights, logits capped by a sigmoid
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import gpt2

Loss = Callable[[Any, Tensor, Tensor], Tensor]
PADDED = 47  # columns that pad the vocabulary of `nanochat`


class CastNorm(nn.LayerNorm):
    """As code that is written for narrow streams does it."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class Transposed(nn.Module):
    """A linear layer that holds its matrix as (inputs, outputs)."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().t().contiguous())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], self.weight.shape[1])


def gelu_written_out(x: Tensor) -> Tensor:
    """Returns the tanh form of GELU, as transformers' `gelu_new` does."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _replace_norms(model: gpt2.GPT2) -> None:
    for part in [*model.modules()]:
        for name, child in part.named_children():
            if type(child) is nn.LayerNorm:
                setattr(part, name, CastNorm(child.normalized_shape[0]))


def _transpose(model: gpt2.GPT2) -> None:
    for block in model.h:
        for part, name in (
            (block.attn, "c_attn"),
            (block.attn, "c_proj"),
            (block.mlp, "c_fc"),
            (block.mlp, "c_proj"),
        ):
            setattr(part, name, Transposed(getattr(part, name)))


class WithActivation(nn.Module):
    """The two layers of an MLP around another activation function."""

    def __init__(self, mlp: gpt2.MLP, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.c_fc, self.c_proj, self.activation = mlp.c_fc, mlp.c_proj, activation

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the MLP adds to the stream."""
        return self.c_proj(self.activation(self.c_fc(x)))


def _activate(model: gpt2.GPT2, activation: Callable[[Tensor], Tensor]) -> None:
    for block in model.h:
        block.mlp = WithActivation(block.mlp, activation)


class Logits(gpt2.GPT2):
    """Returns logits."""

    def forward(self, inputs_BT: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the logits of each token."""
        return super().forward(inputs_BT, inputs_BT)

    def loss(self, x_BTD: Tensor, _: Tensor) -> Tensor:
        """Returns the logits that `forward` asks for."""
        return self.lm_head(self.ln_f(x_BTD))


def _flat(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1), ignore_index=-1)


def _shifted(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets[..., :-1].contiguous().view(-1))


def norm(x: Tensor) -> Tensor:
    """Returns the input over its root mean square."""
    return F.rms_norm(x, (x.size(-1),))


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys."""

    def __init__(self, width: int, heads: int, *, functional: bool):
        super().__init__()
        self.heads, self.functional = heads, functional
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, angles_TE: tuple[Tensor, Tensor]) -> Tensor:
        """Returns what attention adds to the stream."""
        B, T, D = x_BTD.shape
        qkv = F.linear(x_BTD, self.qkv.weight) if self.functional else self.qkv(x_BTD)
        q, k, v = qkv.view(B, T, 3, self.heads, D // self.heads).unbind(2)
        q, k = (rotate(norm(part), angles_TE) for part in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def rotate(x_BTHE: Tensor, angles_TE: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the halves of each head by their position's angle."""
    cos, sin = (part[None, :, None].to(x_BTHE.dtype) for part in angles_TE)
    left, right = x_BTHE.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


class Modern(nn.Module):
    """A decoder in the idiom of nanochat, or of the speedrun if it is `functional`."""

    def __init__(
        self, *, layers: int, width: int, heads: int, vocabulary: int, context: int, functional: bool = False
    ):
        super().__init__()
        self.vocabulary, self.functional = vocabulary, functional
        self.embed = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(RotaryAttention(width, heads, functional=functional) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary if functional else vocabulary + PADDED, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context).float(), 10000.0 ** -(torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the mean loss."""
        T = inputs_BT.shape[1]
        x, angles = norm(self.embed(inputs_BT)), (self.cos[:T], self.sin[:T])
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(norm(x), angles)
            x = x + down(F.relu(up(norm(x))).square())
        x = norm(x)
        if self.functional:
            logits = F.linear(x, self.head.weight).float()
            logits = 30 * torch.sigmoid(logits / 7.5)
        else:
            logits = self.head(x)[..., : self.vocabulary].float()
            logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets_BT.view(-1))


def _own(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, targets)


def _of_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda model, inputs, targets: loss(model(inputs), targets)


WAYS: dict[str, tuple[type[nn.Module], tuple[Callable[[Any], None], ...], Loss]] = {
    "plain": (gpt2.GPT2, (), _own),
    "custom norm": (gpt2.GPT2, (_replace_norms,), _own),
    "written out": (gpt2.GPT2, (_transpose, lambda m: _activate(m, gelu_written_out)), _own),
    "outside": (Logits, (), _of_logits(_flat)),
    "shifted": (Logits, (_replace_norms,), _of_logits(_shifted)),
    "exact": (gpt2.GPT2, (lambda m: _activate(m, F.gelu),), _own),
    "nanogpt": (gpt2.GPT2, (_replace_norms, lambda m: _activate(m, F.gelu)), _own),
    "nanochat": (Modern, (), _own),
    "speedrun": (Modern, (), _own),
}


def make(way: str, **sizes: int) -> tuple[nn.Module, Loss]:
    """Returns a model in one of the ways, and its loss function."""
    kind, changes, loss = WAYS[way]
    options = {"functional": True} if way == "speedrun" else {}
    model = kind(**sizes, **options)
    for change in changes:
        change(model)
    return model.train(), loss
