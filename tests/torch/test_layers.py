"""The casted matmul and the islands: formats in and out, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.core.formats import BF16, FP16, FP32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.precision import base_precision as base
from halfstep.torch.cast import quantize, quantize_scaled
from halfstep.torch.layers import (
    CastedLinear,
    Norm,
    additive,
    attention,
    casts_for,
    casts_of,
    cross_entropy,
    embedding,
    enter,
    layer_norm,
    linear,
    rms_norm,
    rotate,
    softmax,
    weighted_attention,
)


def base_precision(policy):
    return casts_of(base(policy))


NATIVE = base_precision(Policy.parse("bf16-mixed"))
FULL = casts_of(Precision())
EMULATED = base_precision(Policy.parse("bf16-mixed,emulate=true"))


def draw(*shape, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_(requires_grad)


def bf16(x):
    return x.to(torch.bfloat16).float()


def backward(y, g):
    y.backward(g.to(y.dtype))


def test_fp32_is_torchs_own_linear_bit_for_bit():
    x, w, b = draw(5, 8), draw(6, 8, seed=1), draw(6, seed=2)
    assert torch.equal(linear(x, w, b, FULL), F.linear(x, w, b))


@pytest.mark.parametrize("precision", [NATIVE, EMULATED], ids=["native", "emulated"])
def test_the_three_matmuls_have_exact_operands_and_fp32_sums(precision):
    x, w = draw(7, 8, requires_grad=True), draw(6, 8, seed=1, requires_grad=True)
    g = bf16(draw(7, 6, seed=2))
    y = linear(x, w, None, precision)
    backward(y, g)
    # Products of bf16 numbers are exact in fp32 and in fp64; only the order of the fp32 sum is open.
    exact = bf16(x.detach()).double() @ bf16(w.detach()).double().t()
    magnitude = bf16(x.detach()).abs().double() @ bf16(w.detach()).abs().double().t()
    assert_rounded_sum(y, exact, magnitude, terms=8)
    exact = g.double() @ bf16(w.detach()).double()
    assert_rounded_sum(x.grad, exact, g.abs().double() @ bf16(w.detach()).abs().double(), terms=6)
    exact = g.double().t() @ bf16(x.detach()).double()
    magnitude = g.abs().double().t() @ bf16(x.detach()).abs().double()
    # The weight gradient keeps fp32: only the summation error, no rounding to bf16.
    assert w.grad.dtype == torch.float32
    assert ((w.grad.double() - exact).abs() <= 7 * 2.0**-24 * magnitude).all()
    assert not torch.equal(w.grad, bf16(w.grad))


def assert_rounded_sum(result, exact, magnitude, terms):
    """A sum of `terms` exact products in fp32, then rounded once to bf16."""
    summed = terms * 2.0**-24 * magnitude
    bound = summed + (exact.abs() + summed) * BF16.epsilon / 2
    assert ((result.double() - exact).abs() <= bound).all()
    assert torch.equal(result.float(), bf16(result.float()))


def test_bf16_true_rounds_the_weight_gradient():
    precision = base_precision(Policy.parse("bf16-true"))
    w = draw(4, 8, requires_grad=True)
    backward(linear(draw(5, 8, seed=1), w, None, precision), draw(5, 4, seed=2))
    assert torch.equal(w.grad, bf16(w.grad))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
def test_the_format_is_the_layers_own_whatever_the_operands_are(x_dtype, w_dtype):
    x, w = draw(3, 8).to(x_dtype), draw(4, 8, seed=1).to(w_dtype)
    assert linear(x, w, None, NATIVE).dtype == torch.bfloat16
    assert linear(x, w, None, FULL).dtype == torch.float32


def test_the_bias_is_added_in_the_compute_format():
    x, w, b = draw(3, 8), draw(4, 8, seed=1), draw(4, seed=2)
    without = linear(x, w, None, EMULATED)
    assert torch.equal(linear(x, w, b, EMULATED), bf16(without + bf16(b)))


def test_narrow_operands_are_scaled_and_the_result_is_in_compute():
    policy = Policy.parse("fp8-mixed,emulate=true")
    precision = casts_of(precisions(policy, ["a"])["a"])
    x, w = draw(5, 16) * 1e-4, draw(6, 16, seed=1)
    x.requires_grad_(), w.requires_grad_()
    g = bf16(draw(5, 6, seed=2) * 1e-3)
    y = linear(x, w, None, precision)
    backward(y, g)
    (xq, x_inv), (wq, w_inv) = (quantize_scaled(bf16(t.detach()), precision.precision.operand) for t in (x, w))
    gq, g_inv = quantize_scaled(g, precision.precision.grad_operand)
    assert torch.equal(y, bf16(xq @ wq.t() * x_inv * w_inv))
    assert torch.equal(x.grad, bf16(gq @ wq * g_inv * w_inv))
    assert torch.equal(w.grad, gq.t() @ xq * g_inv * x_inv)
    # Without a scale, 1e-4 is below the smallest e4m3 and the whole product would vanish.
    assert quantize(x.detach(), precision.precision.operand.format, overflow="saturate").abs().max() == 0
    assert y.abs().max() > 0


def test_row_wise_scales_give_each_row_its_own_range():
    precision = casts_of(
        precisions(Policy.parse("bf16-mixed,compute=e4m3:row,grad=e4m3:row,emulate=true"), ["a"])["a"]
    )
    x = draw(4, 16) * torch.tensor([1e-6, 1.0, 1e3, 1e6])[:, None]
    w = draw(8, 16, seed=1)
    exact = x @ w.t()
    y = linear(x, w, None, precision)
    relative = (y - exact).norm(dim=1) / exact.norm(dim=1)
    # Each operand is within 2^-4 of itself, relatively; random signs make the sum better, never worse.
    assert (relative < 2 * 2.0**-4).all()


@pytest.mark.parametrize("precision", [NATIVE, EMULATED], ids=["native", "emulated"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_is_fp32_inside_and_compute_out_forward_and_backward(precision, kind):
    x, gain, g = bf16(draw(4, 64) * 100), draw(64, seed=1) + 1, bf16(draw(4, 64, seed=2))

    def run(precision, dtype):
        x_, gain_ = x.clone().to(dtype).requires_grad_(), gain.clone().requires_grad_()
        y = rms_norm(x_, gain_, precision) if kind == "rms" else layer_norm(x_, gain_, None, precision)
        backward(y, g)
        return y, x_.grad, gain_.grad

    wide = run(FULL, torch.float32)
    y, x_grad, gain_grad = run(precision, torch.float32 if precision.emulate else torch.bfloat16)
    assert y.dtype == (torch.float32 if precision.emulate else torch.bfloat16)
    assert torch.equal(y.float(), bf16(wide[0]))  # one rounding, at the end
    assert gain_grad.dtype == torch.float32
    assert torch.equal(gain_grad, wide[2])  # nothing inside was rounded
    if not precision.emulate:
        assert torch.equal(x_grad.float(), bf16(wide[1]))


def test_a_norm_asked_for_in_bf16_is_another_number():
    x = draw(4, 64) * 100
    asked = base_precision(Policy.parse("bf16-mixed,norm=bf16"))
    assert not torch.equal(rms_norm(x, draw(64), asked), rms_norm(x, draw(64), NATIVE))


def test_an_island_asked_for_in_bf16_is_the_same_native_and_emulated():
    x, gain = bf16(draw(4, 64) * 100), draw(64, seed=1)
    native, emulated = (
        base_precision(Policy.parse(f"bf16-mixed,norm=bf16,loss=bf16{e}")) for e in ("", ",emulate=true")
    )
    # torch computes both norms of bf16 tensors in fp32 and rounds what goes in and what comes out
    assert torch.equal(layer_norm(x, gain, None, native).float(), layer_norm(x, gain, None, emulated))
    targets = torch.tensor([0, 1, 2, 3])
    one, other = (cross_entropy(x, targets, casts) for casts in (native, emulated))
    assert other == bf16(other)
    assert abs(float(one) - float(other)) <= 4 * BF16.epsilon * abs(float(other))


def test_the_loss_is_fp32_whatever_the_logits_are():
    precision = base_precision(Policy.parse("fp16-mixed"))
    logits, targets = (draw(4, 32) * 100).half(), torch.tensor([0, 1, 2, 3])
    loss = cross_entropy(logits, targets, precision)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))
    assert torch.isfinite(loss * 65536)  # in fp16 this is inf


def test_softcap_bounds_the_logits():
    logits, targets = torch.tensor([[1e4, 0.0]]), torch.tensor([1])
    assert cross_entropy(logits, targets, FULL, softcap=30.0) == pytest.approx(30.0, rel=1e-6)


@pytest.mark.parametrize("precision", [NATIVE, EMULATED], ids=["native", "emulated"])
def test_attention_returns_compute_and_sees_no_future(precision):
    q, k, v = (draw(1, 2, 6, 8, seed=s) for s in range(3))
    y = attention(q, k, v, precision)
    assert y.dtype == (torch.float32 if precision.emulate else torch.bfloat16)
    changed = v.clone()
    changed[:, :, -1] += 100
    assert torch.equal(attention(q, k, changed, precision)[:, :, :-1], y[:, :, :-1])


def test_grouped_heads_share_keys_and_values():
    q, k, v = draw(1, 4, 5, 8), draw(1, 2, 5, 8, seed=1), draw(1, 2, 5, 8, seed=2)
    wide = attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), FULL)
    torch.testing.assert_close(attention(q, k, v, FULL), wide, rtol=0, atol=8 * 2.0**-24 * float(v.abs().max()))


def test_softmax_in_bf16_is_what_was_asked_for():
    precision = base_precision(Policy.parse("bf16-mixed,softmax=bf16,emulate=true"))
    q, k, v = (draw(1, 2, 6, 8, seed=s) for s in range(3))
    y, wide = attention(q, k, v, precision), attention(q, k, v, EMULATED)
    assert not torch.equal(y, wide)
    # scores, weights and result are each within half an ulp; the sum of weights is one
    assert (y - wide).abs().max() <= 8 * BF16.epsilon * v.abs().max()


def test_rotation_keeps_the_norm_and_turns_by_relative_position():
    from halfstep.config.model import ModelConfig
    from halfstep.torch.model import rope_tables

    cos, sin = rope_tables(ModelConfig(width=16, heads=1, context=64))
    x = draw(1, 1, 1, 16).expand(1, 1, 64, 16)
    turned = rotate(x, cos, sin, FULL)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=2.0**-20, atol=0)
    dots = (turned[0, 0, :-3] * turned[0, 0, 3:]).sum(-1)
    torch.testing.assert_close(dots, dots[:1].expand_as(dots), rtol=0, atol=2.0**-18 * float(x.square().sum()))


def test_rounding_reaches_gradients_too():
    x = draw(64, requires_grad=True)
    backward(enter(x, EMULATED), draw(64, seed=1))
    assert torch.equal(x.grad, bf16(draw(64, seed=1)))


def test_fp16_emulation_overflows_to_infinity_as_hardware_does():
    precision = base_precision(Policy.parse("fp16-mixed,emulate=true"))
    assert enter(torch.tensor([7e4, -7e4]), precision).tolist() == [float("inf"), -float("inf")]
    assert quantize(torch.tensor([65504.0]), FP16, overflow="inf").item() == 65504


@pytest.mark.parametrize("precision", [NATIVE, EMULATED, FULL], ids=["native", "emulated", "fp32"])
def test_layers_compile_whole(precision):
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = CastedLinear(8, 8, bias=False), Norm(8)
            for p in self.parameters():
                torch.nn.init.normal_(p)

        def forward(self, x):
            return self.norm(self.linear(x))

    torch.manual_seed(0)
    model = Both()
    model.linear.precision = model.norm.precision = precision.precision
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = draw(4, 8)
    y = model(x)
    assert torch.equal(compiled(x), y)
    y.float().sum().backward()
    eager = model.linear.weight.grad.clone()
    model.zero_grad()
    compiled(x).float().sum().backward()
    assert torch.equal(model.linear.weight.grad, eager)


def test_casts_for_a_policy_are_those_of_its_base():
    assert casts_for("bf16-mixed") is NATIVE
    assert casts_for(Policy.parse("bf16-mixed,emulate=true")) is EMULATED


def test_a_bias_gradient_is_an_fp32_sum():
    """256 ones and a bf16 sum that stays at 256 are a hazard of accumulation; this is the sum over tokens."""
    x, w, b = draw(1000, 4), draw(3, 4, seed=1), torch.zeros(3, requires_grad=True)
    g = torch.full((1000, 3), 1 + BF16.epsilon)
    for casts in (NATIVE, EMULATED):
        b.grad = None
        backward(linear(x, w, b, casts), g)
        assert torch.equal(b.grad, g.sum(0))
        assert not torch.equal(b.grad, bf16(b.grad))
    rounding = base_precision(Policy.parse("bf16-mixed,grad_weight=bf16,emulate=true"))
    b.grad = None
    backward(linear(x, w, b, rounding), g)
    assert torch.equal(b.grad, bf16(g.sum(0)))


def test_a_mask_of_numbers_stays_finite_where_it_was():
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.0, lowest, -float("inf"), 1.0])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = additive(mask, dtype)
        assert narrow.dtype == dtype
        assert narrow.isfinite().tolist() == [True, True, False, True]
    assert additive(mask, torch.float32) is mask
    q = torch.zeros(1, 1, 2, 8)
    for attend in (attention, weighted_attention):
        y = attend(q, q, draw(1, 1, 2, 8), NATIVE, mask=torch.full((2, 2), lowest))
        assert not (y if isinstance(y, torch.Tensor) else y[0]).isnan().any()


@pytest.mark.parametrize("casts", [NATIVE, EMULATED, FULL], ids=["native", "emulated", "fp32"])
def test_attention_in_steps_is_the_fused_one_and_gives_its_weights(casts):
    q, k, v = (enter(draw(2, 2, 5, 8, seed=s), casts) for s in range(3))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:, 0] = True
    fused = attention(q, k, v, casts, mask=mask)
    steps, weights = weighted_attention(q, k, v, casts, mask=mask)
    exact = torch.softmax((q.double() @ k.double().mT / 8**0.5).masked_fill(~mask, float("-inf")), -1)
    # fp32 scores, so weights are rounded once; a fused kernel may round its weights as well
    u = 2.0**-20 if casts is FULL else BF16.epsilon / 2
    assert ((weights.double() - exact).abs() <= u * exact + 2.0**-20).all()
    bound = 3 * u * float(v.abs().max())
    assert float((steps.double() - exact @ v.double()).abs().max()) <= bound
    assert float((fused.double() - exact @ v.double()).abs().max()) <= bound


def test_scores_are_fp32_and_their_gradients_those_of_a_matmul():
    """Scores of 50 in bf16 are off by an eighth: the weights would be by a tenth."""
    q, k = (bf16(draw(1, 1, 4, 16, seed=s) * 7).bfloat16().requires_grad_() for s in range(2))
    v = torch.eye(4, dtype=torch.bfloat16)[None, None]
    weights = weighted_attention(q, k, v, NATIVE, causal=False)[1]
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1).detach()
    assert ((weights.detach().double() - exact).abs() <= BF16.epsilon / 2 * exact + 2.0**-16).all()
    weights.sum(dtype=torch.float32).backward()
    assert q.grad.dtype == k.grad.dtype == torch.bfloat16


def test_softmax_returns_compute_of_an_fp32_inside():
    x = bf16(draw(4, 32) * 10)
    for casts in (NATIVE, EMULATED):
        assert torch.equal(softmax(x.to(casts.compute), casts).float(), bf16(torch.softmax(x, -1)))


def test_rows_are_cast_to_compute_and_their_gradients_summed_in_fp32():
    table, index = draw(5, 8, requires_grad=True), torch.tensor([1, 1, 1, 4])
    y = embedding(index, table, NATIVE)
    assert torch.equal(y, table.detach()[index].bfloat16())
    g = bf16(draw(4, 8, seed=1))
    backward(y, g)
    assert torch.equal(table.grad[1], g[0] + g[1] + g[2])


def test_modules_to_build_with_start_as_torchs_do():
    torch.manual_seed(0)
    ours = CastedLinear(8, 4, bias=True)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(8, 4)
    assert isinstance(ours, torch.nn.Linear)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(Norm(8)(draw(2, 8)), F.rms_norm(draw(2, 8), (8,), eps=1e-6))
    assert torch.equal(Norm(8, "layer", bias=True)(draw(2, 8)), F.layer_norm(draw(2, 8), (8,)))


def test_printing_tells_the_truth():
    layer = CastedLinear(8, 4, bias=False)
    layer.precision = NATIVE.precision
    assert "bf16 operands" in repr(layer)
    assert FP32.name in repr(Norm(8))
