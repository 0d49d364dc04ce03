"""Hazards that are planted in a model of eight layers are found by rule and layer, and nothing else is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.torch.instruments.collect.watch import Watch
from tests.planted import PLANTED
from tests.torch.nets import Decoder

WIDTH, EXPERTS = 8, 2


class Norm(nn.Module):
    inside = torch.float32

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x.to(self.inside)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(x.dtype)


class Router(nn.Linear):
    inside = torch.float32

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.to(self.inside), self.weight.to(self.inside))


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.full((4, WIDTH), 0.25, dtype=torch.bfloat16))
        self.lora_B = nn.Parameter(torch.zeros(4 * WIDTH, 4, dtype=torch.bfloat16))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


class Block(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router = Router(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        h = self.norm(x)
        share = F.softmax(self.router(h), -1).to(h.dtype)
        mixed = sum(share[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        return x + mixed + self.down(F.gelu(self.up(h))) * self.scale


def plant(what, model):
    """Plants a hazard, and returns the parameters that have their own group, and its learning rate."""
    block = model.blocks[int(PLANTED[what].layer.split(".")[1])]
    if what == "overflow":
        block.up.bias.data[0] = 1e5
    elif what == "underflow":
        block.scale = 1e-9
    elif what == "norm":
        block.norm.inside = torch.bfloat16
    elif what == "no master":
        matrices = [p for p in block.parameters() if p.ndim == 2]
        for p in matrices:
            p.data = p.data.bfloat16()
        return matrices, 1e-5
    elif what == "adapter":
        block.up = Lora(block.up)
        return [block.up.lora_A, block.up.lora_B], 1e-5
    elif what == "router":
        block.router.inside = torch.bfloat16
    elif what == "decay":
        block.down.weight.data = block.down.weight.data.bfloat16()
    return [], 1e-3


def train(what, compute):
    torch.manual_seed(0)
    model = Decoder(Block, 8, WIDTH, 11)
    apart, rate = plant(what, model)
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is each for each in apart)]
    groups = [{"params": rest}, *([{"params": apart, "lr": rate}] if apart else [])]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=compute == "fp16", init_scale=2.0**12)
    for batch in torch.randint(11, (4, 2, 5)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16 if compute == "bf16" else torch.float16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# Those that other tests see in smaller models too.
REST = ("no master", "adapter", "decay", "router")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.prove] if what in REST else []) for what in PLANTED]
)
def test_a_planted_hazard_is_named_by_rule_and_layer(what, monkeypatch):
    monkeypatch.setattr("halfstep.torch.instruments.collect.log.SHARE", 1.0)
    planted = PLANTED[what]
    with Watch() as watch:
        train(what, planted.compute)
    found = check(watch.record())
    named = {f.rule for f in found if any(name.startswith(planted.layer) for name in f.where)}
    assert planted.rule in named
    layer = planted.layer.split(".")[1]
    others = {(f.rule, *f.where) for f in found if f.rule not in (planted.rule, *planted.also)}
    assert not others
    assert all(name.startswith(f"blocks.{layer}") for f in found for name in f.where)
