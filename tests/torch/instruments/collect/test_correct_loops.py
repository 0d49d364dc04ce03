"""Loops that are right: nothing is found in them, whatever they are made of."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.torch import AdamW, prepare
from halfstep.torch.instruments.collect.watch import Watch
from tests.torch.nets import Decoder

WIDTH, TOKENS = 16, 11


class Block(nn.Module):
    """Attention with an additive mask, and a gated MLP: a gate is no router."""

    def __init__(self, mask):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), mask), 1), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(WIDTH) + self.mask.to(q.dtype)
        x = x + self.out(F.softmax(scores, -1) @ v)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def decoder(*, tied=False, recompute=False, mask=-math.inf):
    torch.manual_seed(0)
    model = Decoder(lambda: Block(mask), 2, WIDTH, TOKENS, recompute=recompute)
    if tied:
        model.head.weight = model.embed.weight
    return model


class Lora(nn.Module):
    """As PEFT writes it: the adapter computes in its own format, and the result has that of the base."""

    def __init__(self, base):
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(WIDTH, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        y = self.base(x)
        return (y + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))).to(y.dtype)


def adapted():
    model = decoder().to(torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        block.up = Lora(block.up)
    return model


def frozen():
    model = decoder()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def stochastic(params):
    return AdamW(params, masters="bf16:stochastic")


def train(model, autocast=None, optimizer=torch.optim.AdamW, call=None, steps=4):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(params)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast == torch.float16)
    region = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (2, 5))
        with region:
            logits = (model if call is None else call)(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()


def compiled(autocast):
    torch._dynamo.reset()
    model = decoder()
    train(model, autocast, call=torch.compile(model, backend="aot_eager"))


def prepared(policy):
    model = decoder()
    run = prepare(model, AdamW(model.parameters()), policy)
    tokens = torch.randint(TOKENS, (2, 5))
    for _ in range(4):
        run.step(lambda t: F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()), [tokens])


bf16, fp16 = torch.bfloat16, torch.float16
LOOPS = {
    "bf16 autocast": lambda: train(decoder(), bf16),
    "fp16 autocast": lambda: train(decoder(), fp16),
    "fp32": lambda: train(decoder()),
    "a mask of finite numbers": lambda: train(decoder(mask=torch.finfo(fp16).min), fp16),
    "tied": lambda: train(decoder(tied=True), bf16),
    "checkpointing": lambda: train(decoder(recompute=True), bf16),
    "frozen layers": lambda: train(frozen(), bf16),
    "fp32 adapters": lambda: train(adapted()),
    "fp32 adapters, autocast": lambda: train(adapted(), bf16),
    "bf16, rounded stochastically": lambda: train(decoder().to(bf16), optimizer=stochastic),
    "compiled": lambda: compiled(bf16),
    "compiled, fp16": lambda: compiled(fp16),
    "prepared": lambda: prepared("bf16-mixed"),
    "prepared, fp16": lambda: prepared("fp16-mixed"),
    "prepared, fp8": lambda: prepared("fp8-mixed,emulate=true"),
    "prepared, bf16": lambda: prepared("bf16-true,param=bf16:stochastic"),
}
FAST = ("bf16 autocast", "fp16 autocast", "fp32 adapters", "prepared")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.prove]) for name in LOOPS]
)
def test_nothing_is_found(name):
    with Watch() as watch:
        LOOPS[name]()
    record = watch.record()
    assert [(f.rule, f.message) for f in check(record)] == []
    assert record.operations
