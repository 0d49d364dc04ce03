"""Logits that become codes of their gradient: the bits of a scale by its amax, and a bound where they differ."""

import pytest
import torch

from halfstep.core.formats import E4M3, E5M2
from halfstep.core.roles import Operand
from halfstep.torch.fp8 import linear as fp8
from halfstep.torch.fp8.linear import lower
from halfstep.torch.layers import linear, linear_cross_entropy
from halfstep.torch.loss import coded as coded_loss
from halfstep.torch.loss import fp8 as loss
from halfstep.torch.loss import plain as losses
from halfstep.torch.loss.coded import coded_row_losses_, gradient_scale, why_not_coded
from halfstep.torch.loss.plain import Terms
from halfstep.torch.numerics.dtypes import DTYPES, supported
from tests.torch.fp8.test_linear import DELAYED, FP8, OTHERS, ROWS, casts
from tests.torch.nets import draw, same

pytestmark = pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)

TERMS = Terms(7, 0.1, 5.0)
OUTPUTS = 64
NARROW_GRADS = "bf16-mixed,compute=e4m3,grad=e4m3"
IN_FP16 = "fp16-mixed,compute=e4m3,grad=e5m2"


def targets_of(tokens):
    """Some classes, one of them ignored."""
    targets = torch.arange(tokens) * 5 % OUTPUTS
    targets[3] = TERMS.ignore_index
    return targets


def passed(policy, tokens=19, terms=TERMS, chunks=1, size=0, incoming=2.0**-9, function=linear_cross_entropy):
    """The loss, a part of the logits' gradient, and the gradients of input and weight."""
    c = casts(policy)
    # A weight in bf16: inductor drops the cast to bf16 before that to fp8.
    w = draw(OUTPUTS, 32, seed=1, scale=0.1).bfloat16().float().requires_grad_()
    x = draw(tokens, 32).to(c.compute).requires_grad_()
    total, sample = function(x, w, None, targets_of(tokens), c, terms, chunks, size)
    total.backward(torch.tensor(incoming))
    assert (x.grad.dtype, w.grad.dtype) == (c.grad, torch.float32)
    assert w.grad.any()
    return [total.detach(), sample, x.grad, w.grad]


def by_amax(monkeypatch):
    """From now on the gradient is scaled by its amax (loss.py)."""
    monkeypatch.setattr(loss, "why_not_coded", lambda *_, **__: "asked")


@pytest.mark.parametrize("policy", [FP8, NARROW_GRADS, IN_FP16])
@pytest.mark.parametrize(
    ("tokens", "terms", "size"),
    [(19, TERMS, 0), (64, Terms(7), 3 * OUTPUTS), (80, Terms(7, softcap=3.0), 5), (33, Terms(7, 0.05), 0)],
    ids=str,
)
def test_the_bits_are_those_of_a_scale_by_the_amax(policy, tokens, terms, size, monkeypatch):
    """Tokens that are padded, as many as outputs, and more, which are transposed some outputs at a time."""
    monkeypatch.setattr(fp8, "CODES", 80 * 16)
    made = []
    real = coded_loss.coded_gradients
    monkeypatch.setattr(coded_loss, "coded_gradients", lambda *args: made.append(1) or real(*args))
    coded = passed(policy, tokens, terms, size=size)
    assert made
    by_amax(monkeypatch)
    for found, wanted in zip(coded, passed(policy, tokens, terms, size=size), strict=True):
        assert torch.equal(found, wanted)
    assert len(made) == 1


@pytest.mark.parametrize(("policy", "normal", "error"), [(FP8, -29, -32), (NARROW_GRADS, -14, -18)])
def test_without_a_surprise_small_numbers_are_off_by_what_an_amax_of_one_allows(policy, normal, error):
    """All targets have a share of more than 1/8, so the amax would give a larger scale."""
    c, targets = casts(policy), torch.arange(48) % OUTPUTS
    logits = draw(48, OUTPUTS, scale=3.0)
    logits[torch.arange(48), targets] = 12.0
    logits = logits.bfloat16()
    wide = logits.clone()
    losses.row_losses_(wide, targets, OUTPUTS, *Terms(), 1.0, c.precision.kept_bits)
    operand = c.precision.grad_operand
    scaled = lower(wide, operand, c)
    assert scaled.inv_scale < 1 / gradient_scale(c)
    coded_row_losses_(logits, targets, c.words, -100, 0.0, 0.0)
    found = logits.view(DTYPES[operand.format])[:, :OUTPUTS].float() / gradient_scale(c)
    wanted, large = scaled.values.float() * scaled.inv_scale, wide.float().abs() >= 2.0**normal
    assert torch.equal(found[large], wanted[large])
    assert ((found - wide.float()).abs()[~large] <= 2.0**error).all()
    assert large.any()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_one_has_the_scale_of_every_amax_that_its_binade_holds(fmt):
    c = casts(FP8 if fmt == E5M2 else NARROW_GRADS)
    for amax in (0.875 + 2.0**-9, 1.0, 1.75):
        assert lower(torch.tensor([[amax]]), Operand(fmt), c).inv_scale == 1 / gradient_scale(c)
    for amax in (0.875, 1.75 + 2.0**-8):
        assert lower(torch.tensor([[amax]]), Operand(fmt), c).inv_scale != 1 / gradient_scale(c)


def test_the_bound_is_reached_and_not_passed():
    """A sure row whose target is another class, and one whose target is that class, all smoothed away."""
    for smoothing in (0.0, 0.3, 1.0):
        z = torch.zeros(2, 16, dtype=torch.float64)
        z[:, 0] = 1e4
        z.requires_grad_()
        targets = torch.tensor([1, 0])
        torch.nn.functional.cross_entropy(z, targets, label_smoothing=smoothing, reduction="sum").backward()
        assert 1 - 1 / 16 <= z.grad.abs().max() <= 1


def test_in_chunks_each_has_the_codes_it_has_alone():
    """Their scale is the same; the weight gradients of chunks add up in fp32."""
    total, sample, dx, dw = passed(FP8, 80, chunks=3, size=OUTPUTS)
    x, w = draw(80, 32).bfloat16(), draw(OUTPUTS, 32, seed=1, scale=0.1).bfloat16().float()
    whole = passed(FP8, 80, size=OUTPUTS)
    assert torch.equal(dx, whole[2])
    logits, sums = linear(x, w, None, casts(FP8)), 0.0
    assert (total - whole[0]).abs() <= 80 * 2.0**-24 * whole[0]
    magnitudes = 0.0
    for rows in (slice(0, 32), slice(32, 64), slice(64, 80)):  # a multiple of 16 tokens each
        some = logits[rows].clone()
        coded_row_losses_(some, targets_of(80)[rows], casts(FP8).words, *TERMS[:3])
        g = some.view(torch.float8_e5m2)[:, :OUTPUTS].float() / gradient_scale(casts(FP8))
        operand = lower(x, Operand(E4M3), casts(FP8))
        of_x = (operand.values.float() * operand.inv_scale)[rows]
        sums, magnitudes = sums + g.t() @ of_x, magnitudes + g.abs().t() @ of_x.abs()
    assert ((dw - sums * 2.0**-9).abs() <= 2 * 80 * 2.0**-24 * 2.0**-9 * magnitudes).all()
    first = logits[:32].clone()
    losses.row_losses_(first, targets_of(80)[:32], OUTPUTS, *TERMS, 1.0)
    assert torch.equal(sample, losses.sample_gradient(first, OUTPUTS, 1.0))


@pytest.mark.parametrize("policy", [FP8, IN_FP16])
def test_what_comes_in_multiplies_the_sums_before_they_are_rounded(policy):
    one, some = passed(policy, incoming=1.0), passed(policy, incoming=0.37)
    assert torch.equal(one[0], some[0])
    wanted = 0.37 * one[3]
    # A CPU multiplies the codes by their scales before it sums: an fp32 rounding of each product.
    bound = 2 * 32 * 2.0**-24 * 0.37 * 4 * draw(19, 32).abs().sum(0)
    assert ((some[3] - wanted).abs() <= bound).all()
    eps = torch.finfo(casts(policy).grad).eps
    assert ((some[2] - 0.37 * one[2].float()).abs() <= eps * one[2].float().abs() + 2.0**-24).all()


def test_only_what_needs_a_gradient_gets_one_and_a_graph_may_be_kept():
    c, targets = casts(FP8), torch.arange(16)
    for needs in ((True, False), (False, True)):
        for chunks in (1, 2):
            x = draw(16 * chunks, 32).bfloat16().requires_grad_(needs[0])
            w = draw(OUTPUTS, 32, seed=1).requires_grad_(needs[1])
            total, _ = linear_cross_entropy(x, w, None, targets.repeat(chunks), c, chunks=chunks)
            given = [x if needs[0] else w]
            once, again = (torch.autograd.grad(total, given, retain_graph=True) for _ in range(2))
            assert same(once, again)


@pytest.mark.parametrize(
    ("policy", "terms", "bias", "why"),
    [
        (FP8, TERMS, False, ""),
        (NARROW_GRADS, Terms(), False, ""),
        (FP8, Terms(z_loss=0.1), False, "without a bound"),
        (FP8, TERMS, True, "bias"),
        (DELAYED, TERMS, False, "earlier updates"),
        (ROWS, TERMS, False, "one scale"),
        *((policy, TERMS, False, "one scale") for policy in OTHERS),
    ],
)
def test_what_keeps_its_amax_says_why(policy, terms, bias, why):
    said = why_not_coded(casts(policy), terms, bias=bias)
    assert why in said
    assert bool(said) is bool(why)
    assert why_not_coded(casts(FP8, emulate=True), Terms()) == "it is emulated"


@pytest.mark.prove
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_it_compiles_into_one_graph_with_the_same_bits(chunks, backend):
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    total, *others = passed(FP8, 32, chunks=chunks, size=OUTPUTS)
    found, *found_others = passed(FP8, 32, chunks=chunks, size=OUTPUTS, function=compiled)
    assert (found - total).abs() <= 32 * 2.0**-24 * total  # inductor adds up the rows in another order
    assert all(torch.equal(one, other) for one, other in zip(found_others, others, strict=True))
