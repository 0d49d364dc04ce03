"""What tests of the torch backend share: random numbers, policies, and a module inside a model."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.core.formats import BF16, FP16
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply
from halfstep.torch.numerics.cast import carried

MIXED = {
    "bf16": ("bf16-mixed", BF16, torch.bfloat16),
    "fp16": ("fp16-mixed", FP16, torch.float16),
    "bf16 emulated": ("bf16-mixed,emulate=true", BF16, torch.float32),
    "fp16 emulated": ("fp16-mixed,emulate=true", FP16, torch.float32),
}
mixed = pytest.mark.parametrize(("policy", "fmt", "dtype"), MIXED.values(), ids=MIXED)
native = pytest.mark.parametrize(("policy", "fmt", "dtype"), list(MIXED.values())[:2], ids=list(MIXED)[:2])
U32 = 2.0**-24


def draw(*shape, seed=0, scale=1.0, requires_grad=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.requires_grad_(requires_grad)


def bf16(x):
    return x.bfloat16().float()


def exact(module, fmt, scale=0.5):
    """The module with parameters that the format holds."""
    with torch.no_grad():
        for index, p in enumerate(module.parameters()):
            p.copy_(carried(draw(*p.shape, seed=index + 7) * scale, fmt))
    return module


class Net(nn.Module):
    """One module in a model, so that it is not the model itself and its output is not widened."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class Decoder(nn.Module):
    """Blocks between an embedding and a head; `recompute` checkpoints the blocks."""

    def __init__(self, block, layers, width, vocabulary, *, recompute=False):
        super().__init__()
        self.embed, self.recompute = nn.Embedding(vocabulary, width), recompute
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def within(module, policy):
    net = Net(copy.deepcopy(module))
    if not any(p.requires_grad for p in net.parameters()):
        net.spare = nn.Linear(1, 1)
    net.applied = apply(net, Policy.parse(policy))
    return net.layer


def same(*pairs):
    return all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def same_by_name(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def seeded_net():
    """Two layers and a norm between them, always of the same numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
