from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from halfstep.core.policy import Policy
from halfstep.torch import layers
from halfstep.torch.convert.apply import apply
from halfstep.torch.model import Decoder
from tests.conformance.decoders import CONFIGS, EVERYTHING, TINY, awake_weights

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(config, policy="fp32"):
    model = Decoder(config)
    model.set_weights(awake_weights(config).items())
    apply(model, Policy.parse(policy), model.module_names())
    return model


def tokens(config, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)


@configs
@pytest.mark.parametrize(
    "policy",
    [
        *("bf16-mixed", "fp8-mixed,emulate=true"),
        pytest.param("bf16-mixed,emulate=true", marks=pytest.mark.prove),
    ],
)
def test_the_stream_is_in_compute_and_the_loss_in_fp32(config, policy):
    model = build(config, policy)
    batch = tokens(config)
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: streams.append(out[0]))
    loss = model.loss(batch[:, :-1], batch[:, 1:])
    assert loss.dtype == torch.float32
    for stream in streams:
        assert stream.dtype == (torch.float32 if "emulate" in policy else torch.bfloat16)
        assert torch.equal(stream.float(), stream.to(torch.bfloat16).float())
    exact = build(config).loss(batch[:, :-1], batch[:, 1:])
    # A loss near log(32) with a few percent of noise in the logits: far off would be a wrong formula.
    assert abs(float((loss - exact).detach())) / batch[:, 1:].numel() < 0.1


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        pytest.param(replace(TINY, **EVERYTHING), "bf16-mixed", marks=pytest.mark.prove),
        (replace(TINY, layers=1, norm="layer", bias=True, positions="learned"), "fp16-mixed"),
        pytest.param(replace(TINY, layers=1), "bf16-mixed,emulate=true", marks=pytest.mark.prove),
    ],
    ids=["everything", "gpt2", "emulated"],
)
def test_compiled_whole_it_is_the_same_function(config, policy):
    model = build(config, policy)
    batch = tokens(config)
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch[:, :-1], batch[:, 1:]), model.loss(batch[:, :-1], batch[:, 1:]))


HEADS = {"qk_norm": "gain", "q_gain": True, "kv_heads": 2}


@pytest.mark.prove
def test_compiled_attention_copies_nothing_and_gets_no_gradient_that_nobody_uses():
    model = build(replace(TINY, **HEADS), "bf16-mixed")
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    block = torch.compile(model.blocks[0], backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    x = torch.randn(2, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    stream, values = block(x, x, None, (model.cos_TK, model.sin_TK))
    stream.float().sum().backward()
    assert values is None
    forward, backward = ([str(node.target) for node in graph.graph.nodes] for graph in graphs)
    assert any("attention" in target for target in forward)
    assert [target for target in forward + backward if "clone" in target or "contiguous" in target] == []
    assert sum("tangents" in target for target in backward) == 1


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_heads_inside_tokens_have_the_bits_of_tokens_inside_heads(policy):
    model = build(replace(TINY, **HEADS), policy)
    attn, angles = model.blocks[0].attn, (model.cos_TK, model.sin_TK)
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(attn.casts.compute)

    def head_by_head(x):
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2).contiguous() for w in (attn.q, attn.k, attn.v))
        q, k = (layers.rotate(norm(t), *angles, attn.casts) for norm, t in ((attn.q_norm, q), (attn.k_norm, k)))
        q = q * attn.q_gain.to(q.dtype)[:, None, None]
        return attn.o(layers.attention(q, k, v, attn.casts).transpose(1, 2).flatten(2))

    def results(function):
        attn.zero_grad()
        given = x.clone().requires_grad_()
        y = function(given)
        y.float().square().sum().backward()
        return [y, given.grad, attn.q.weight.grad.clone(), attn.k.weight.grad.clone(), attn.v.weight.grad.clone()]

    pairs = zip(results(lambda x: attn(x, None, angles)[0]), results(head_by_head), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
