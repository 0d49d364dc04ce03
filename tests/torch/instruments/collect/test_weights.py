"""A model and its optimizers as an audit records them."""

import pytest
import torch
from torch import nn

from halfstep.core.audit.record import buffer_kind, weight_kind
from halfstep.torch import AdamW
from halfstep.torch.instruments.collect.weights import buffers_of, weights_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.ones(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def test_formats_kinds_and_moments_are_recorded():
    model = Block()
    model.up.to(torch.bfloat16).bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    model.tied = model.up
    weights = {w.name: w for w in weights_of(model, [optimizer])}
    assert list(weights) == ["norm.weight", "norm.bias", "up.weight", "up.bias"]
    up = weights["up.weight"]
    assert (up.format, up.kind, up.optimizer, up.grad_format, up.master) == (
        "bf16",
        "matrix",
        "AdamW",
        "bf16",
        None,
    )
    assert up.moments == {"exp_avg": "bf16", "exp_avg_sq": "bf16"}
    assert (weights["up.bias"].trainable, weights["up.bias"].optimizer) == (False, None)
    assert weights["norm.weight"].kind == "norm"
    assert [(b.name, b.kind, b.format) for b in buffers_of(model)] == [("inv_freq", "rope", "fp32")]


def test_masters_that_an_optimizer_keeps_apart_are_paired_with_their_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    copies = [p.detach().float() for p in model.parameters()]
    weights = weights_of(model, [torch.optim.SGD(copies, lr=0.1)])
    assert [(w.format, w.master, w.optimizer) for w in weights] == [("bf16", "fp32", "SGD")] * 4
    assert [w.master for w in weights_of(model, [torch.optim.SGD(copies[:2], lr=0.1)])] == [
        "fp32",
        "fp32",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("name", "shape", "module", "kind"),
    [
        ("layers.0.self_attn.q_proj.lora_A.default.weight", (4, 8), "Linear", "adapter"),
        ("layers.0.mlp.gate.weight", (4, 8), "Linear", "router"),
        ("blocks.0.mlp.gate.weight", (32, 8), "Linear", "matrix"),
        ("layers.0.mlp.gate_proj.weight", (4, 8), "Linear", "matrix"),
        ("layers.0.block_sparse_moe.router.weight", (4, 8), "Linear", "router"),
        ("h.0.ln_1.weight", (8,), "", "norm"),
        ("blocks.0.attn_norm.gain", (8,), "RMSNorm", "norm"),
        ("wte.weight", (50, 8), "Embedding", "embedding"),
        ("model.embed_tokens.weight", (50, 8), "", "embedding"),
        ("h.0.attn.c_attn.bias", (8,), "Conv1D", "bias"),
        ("scale", (), "", "other"),
    ],
)
def test_kinds_of_weights(name, shape, module, kind):
    assert weight_kind(name, shape, module) == kind


def test_kinds_of_buffers():
    assert buffer_kind("rotary_emb.inv_freq") == buffer_kind("attn.cos") == "rope"
    assert buffer_kind("bn.running_mean") == "running"
    assert buffer_kind("causal_mask") == buffer_kind("cosine") == "other"


class Kahan(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"kahan_comp": torch.zeros_like(p)}


def test_optimizers_that_keep_small_updates_are_known():
    def found(make):
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        optimizer = make(model.parameters())
        optimizer.step()
        return {(w.stochastic, *w.moments) for w in weights_of(model, [optimizer])}

    def rounds(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.bf16_stochastic_round = True  # torchao's name
        return optimizer

    assert found(Kahan) == {(True,)}  # and its compensation is no moment
    assert found(rounds) == {(True,)}
    assert found(lambda params: AdamW(params, masters="bf16:stochastic")) == {(True, "exp_avg", "exp_avg_sq")}
    assert found(torch.optim.SGD) == {(False,)}
