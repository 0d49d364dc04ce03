"""`nn.MultiheadAttention` and what is made of it, under a policy, against torch's own in fp32."""

import copy

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply, restore
from halfstep.torch.numerics.cast import carried
from tests.torch.nets import draw, exact, mixed, within

ATTENTION = {
    "self": ({}, {}, "self"),
    "self, no bias, batch first": ({"bias": False, "batch_first": True}, {}, "self"),
    "keys are values": ({}, {}, "memory"),
    "three inputs": ({"kdim": 6, "vdim": 10, "batch_first": True}, {}, "apart"),
    "learned and zero keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"causal": "bool"}, "self"),
    "causal by a mask": ({}, {"causal": "bool"}, "self"),
    "causal by numbers": ({"batch_first": True}, {"causal": "float"}, "self"),
    "causal by a hint": ({}, {"causal": "float", "is_causal": True}, "self"),
    "a mask for each head": ({}, {"causal": "each"}, "self"),
    "padded": ({"batch_first": True}, {"padding": "bool"}, "self"),
    "padded and causal": ({}, {"padding": "bool", "causal": "bool"}, "self"),
    "padded by numbers and causal": ({}, {"padding": "float", "causal": "float"}, "self"),
    "unbatched": ({}, {"causal": "bool", "unbatched": True}, "self"),
}
B, L, S, E, H = 2, 4, 4, 8, 2


def attention_inputs(options, how, kind, fmt):
    widths = (E, options.get("kdim", E), options.get("vdim", E))
    shape = (S,) if how.get("unbatched") else (B, S) if options.get("batch_first") else (S, B)
    q, k, v = (carried(draw(*shape, width, seed=i), fmt) for i, width in enumerate(widths))
    inputs = {"self": (q, q, q), "memory": (q, k, k), "apart": (q, k, v)}[kind]
    future = torch.ones(L, S, dtype=torch.bool).triu(1)
    added = torch.zeros(L, S).masked_fill(future, float("-inf"))
    padded = torch.tensor([[False] * S, [False] * (S - 1) + [True]])
    kwargs = {}
    if "causal" in how:
        kwargs["attn_mask"] = {"bool": future, "float": added, "each": added.expand(B * H, L, S)}[how["causal"]]
    if "padding" in how:
        added = torch.where(padded, float("-inf"), 0.0)
        kwargs["key_padding_mask"] = padded if how["padding"] == "bool" else added
    if how.get("is_causal"):
        kwargs["is_causal"] = True
    return inputs, kwargs


attentions = pytest.mark.parametrize(("options", "how", "kind"), ATTENTION.values(), ids=ATTENTION)


@pytest.mark.parametrize("need_weights", [False, True])
@attentions
def test_attention_in_fp32_is_torchs(options, how, kind, need_weights):
    attention = exact(nn.MultiheadAttention(E, H, **options), BF16)
    inputs, kwargs = attention_inputs(options, how, kind, BF16)
    kwargs |= {"need_weights": need_weights, "average_attn_weights": how.get("causal") != "bool"}
    with torch.no_grad():
        y, weights = within(attention, "fp32")(*inputs, **kwargs)
    theirs, their_weights = (t if t is None else t.detach() for t in attention(*inputs, **kwargs))
    torch.testing.assert_close(y, theirs, rtol=0, atol=64 * 2.0**-24 * float(theirs.abs().max()))
    assert (weights is None) == (their_weights is None)
    if weights is not None:
        assert weights.shape == their_weights.shape
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=64 * 2.0**-24)


@mixed
@pytest.mark.parametrize("need_weights", [False, True])
@attentions
def test_attention_is_within_its_roundings_of_fp32(options, how, kind, need_weights, policy, fmt, dtype):
    attention = exact(nn.MultiheadAttention(E, H, **options), fmt, scale=0.15)
    inputs, kwargs = attention_inputs(options, how, kind, fmt)
    layer = within(attention, policy)
    y, weights = layer(*(x.to(dtype) for x in inputs), need_weights=need_weights, **kwargs)
    theirs, their_weights = (t.detach() for t in attention(*inputs, **kwargs))
    bound, off = attention_bounds(attention, inputs, fmt.epsilon / 2)
    assert y.dtype == dtype
    assert bound < float(theirs.abs().max()) * (0.6 if fmt == BF16 else 0.1)  # or it would prove nothing
    assert float((y.detach().float() - theirs).abs().max()) <= bound
    if need_weights:
        assert weights.dtype == dtype
        assert float((weights.detach().float() - their_weights).abs().max()) <= off
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def attention_bounds(attention, inputs, u):
    """How far roundings of u take the output and the weights: each is counted at the magnitudes it meets."""
    if attention.in_proj_weight is not None:
        matrices = attention.in_proj_weight.detach().chunk(3)
    else:
        matrices = [getattr(attention, f"{n}_proj_weight").detach() for n in "qkv"]
    biases = [torch.zeros(E)] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.detach().chunk(3)
    products = [x @ m.t() for x, m in zip(inputs, matrices, strict=True)]
    # the product is rounded, and its sum with the bias: at most twice the larger of the two
    q, k, v = (torch.maximum(p.abs(), (p + b).abs()).flatten(0, -2) for p, b in zip(products, biases, strict=True))
    if attention.bias_k is not None:
        k, v = (torch.cat([t, b.detach().abs()[0]]) for t, b in ((k, attention.bias_k), (v, attention.bias_v)))
    by_head = zip(q.chunk(H, -1), k.chunk(H, -1), strict=True)
    score = 4 * u * max(float((a @ b.t()).max()) for a, b in by_head) / (E // H) ** 0.5
    # the softmax of scores that are off by d is off by a factor of e^2d; it is rounded, and averaged
    factor = (1 + 2 * u) * torch.tensor(2 * score).exp().item() - 1
    values = float(v.max())
    gathered = (factor + 4 * u) * values  # values are rounded twice, the weights once, the result once
    out = float(attention.out_proj.weight.detach().abs().sum(1).max())
    added = 0.0 if attention.out_proj.bias is None else float(attention.out_proj.bias.detach().abs().max())
    return out * gathered + 2 * u * (out * values + added), factor


def test_weight_gradients_are_not_rounded_a_causal_hint_is_causal_and_what_is_no_mask_is_refused():
    layer, x = within(nn.MultiheadAttention(E, H), "bf16-mixed"), draw(S, B, E)
    layer(x, x, x, need_weights=False)[0].float().sum().backward()
    for grad in (layer.in_proj_weight.grad, layer.out_proj.weight.grad):
        assert not torch.equal(grad, carried(grad, BF16))
    with pytest.raises(HalfstepError, match=r"torch\.int64; it must be boolean, or floating-point numbers"):
        layer(x, x, x, attn_mask=torch.ones(L, S, dtype=torch.int64))
    changed = torch.cat([x[:-1], x[-1:] + 1])
    for kwargs in ({}, {"need_weights": False}, {"key_padding_mask": torch.zeros(B, S, dtype=torch.bool)}):
        one, other = (layer(t, t, t, is_causal=True, **kwargs)[0] for t in (x, changed))
        assert torch.equal(one[:-1], other[:-1])
        assert not torch.equal(one[-1], other[-1])


def test_the_weights_are_those_of_the_fused_kernel_and_a_softmax_in_bf16_and_dropout_reach_it():
    """In steps or fused, attention is the same function; the steps round the weights once more."""
    layer, x = within(nn.MultiheadAttention(E, H), "bf16-mixed"), draw(S, B, E)
    with torch.no_grad():
        fused, steps = layer(x, x, x, need_weights=False)[0], layer(x, x, x)[0]
        values = carried(x, BF16) @ carried(layer.in_proj_weight, BF16).chunk(3)[2].t()
        reach = float(values.abs().max() * layer.out_proj.weight.abs().sum(1).max())
    # weights, result and projection are each rounded once
    assert float((fused - steps).abs().max()) <= 3 * BF16.epsilon * reach
    assert 3 * BF16.epsilon * reach < float(fused.abs().max()) / 4
    attention, x = nn.MultiheadAttention(E, H), draw(S, B, E)
    wide, narrow = (within(attention, f"bf16-mixed{softmax}") for softmax in ("", ",softmax=bf16"))
    for need_weights in (False, True):
        y, z = (layer(x, x, x, need_weights=need_weights)[0] for layer in (wide, narrow))
        assert y.dtype == z.dtype == torch.bfloat16
        assert not torch.equal(y, z)
    layer, x = within(nn.MultiheadAttention(E, H, dropout=0.5), "bf16-mixed"), draw(S, B, E)
    for need_weights in (False, True):
        one, other = (layer(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(one, other)
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers_evaluate_in_the_precision_they_train_in(norm_first):
    """Hazard: torch's kernel for inference takes the parameters as they are held."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    x, padded = draw(B, S, E), torch.tensor([[False] * S, [False] * (S - 1) + [True]])
    applied = apply(encoder, Policy.parse("bf16-mixed"))
    trained = encoder(x, src_key_padding_mask=padded).detach()
    encoder.eval()
    with torch.no_grad():
        assert torch.equal(encoder(x, src_key_padding_mask=padded), trained)
    if not norm_first:  # a residual on the model's own fp32 input is as wide as that
        assert torch.equal(trained, carried(trained, BF16))
    forms = {change.kind: change.form for change in applied.changes}
    assert "kernels for inference are off" in forms["TransformerEncoderLayer"]
    restore(applied)
    assert encoder.layers[0].activation_relu_or_gelu == 1
    assert encoder.use_nested_tensor == (not norm_first)


def test_a_whole_transformer_trains():
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 16, dropout=0.0)
    wide = copy.deepcopy(model)
    apply(model, Policy.parse("bf16-mixed"))
    source, target = draw(5, B, E), draw(4, B, E, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    y = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    assert y.dtype == torch.float32  # what a model returns is in the loss format
    # Four norms in a row bring every stream back to unit size, so roundings do not grow: some thirty of u each.
    theirs = wide(source, target, tgt_mask=mask).detach()
    assert float((y.detach() - theirs).norm() / theirs.norm()) <= 30 * BF16.epsilon / 2
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
