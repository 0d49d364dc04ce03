"""The cross-entropy of a narrow layer's logits: the same numbers as the layer and then the loss."""

import pytest
import torch

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import E4M3
from halfstep.torch.fp8 import linear as fp8
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.layers import linear, linear_cross_entropy
from halfstep.torch.loss import plain as losses
from halfstep.torch.loss.plain import Terms
from halfstep.torch.numerics.dtypes import supported
from tests.torch.fp8.test_linear import DELAYED, FP8, OTHERS, ROWS, casts, policies
from tests.torch.nets import U32, draw, same

pytestmark = pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)

TERMS = Terms(7, 0.1, 5.0, 0.01)
OUTPUTS = 64


def history(policy):
    """Amaxes of an earlier update, such that some numbers of each operand saturate."""
    if policy != DELAYED:
        return None
    made = Amaxes(["a"], torch.device("cpu"))
    made.history[0, :, 3] = torch.tensor([1.0, 0.1, 0.1])
    return made.layers["a"]


def targets_of(tokens):
    """Some classes, one of them ignored."""
    targets = torch.arange(tokens) * 5 % OUTPUTS
    targets[3] = TERMS.ignore_index
    return targets


def passed(policy, incoming, *, fused):
    """The loss, its gradients, and the amaxes that wait for the history."""
    x, w = draw(19, 32).bfloat16().requires_grad_(), draw(OUTPUTS, 32, seed=1, scale=0.1).requires_grad_()
    b, past, c = draw(OUTPUTS, seed=2).requires_grad_(), history(policy), casts(policy)
    if fused:
        loss, _ = linear_cross_entropy(x, w, b, targets_of(19), c, TERMS, history=past)
    else:
        logits = linear(x, w, b, c, history=past)
        loss = losses.row_cross_entropy(logits, targets_of(19), TERMS, c.precision.kept_bits).sum()
    loss.backward(torch.tensor(incoming))
    assert w.grad.dtype == torch.float32
    return [loss.detach(), x.grad, w.grad, b.grad, *([past.pending] if past else [])]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("policy", policies(FP8, ROWS, *OTHERS))
def test_of_no_tokens_it_is_nothing(policy, chunks):
    x, w = torch.zeros(0, 32).bfloat16().requires_grad_(), draw(OUTPUTS, 32).requires_grad_()
    loss, _ = linear_cross_entropy(x, w, None, targets_of(4)[:0], casts(policy), TERMS, chunks)
    loss.backward()
    assert loss == 0
    assert x.grad.shape == x.shape
    assert not w.grad.any()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("policy", policies(FP8, ROWS, DELAYED, *OTHERS))
def test_it_is_the_layer_and_then_the_loss_bit_for_bit(policy, parts, monkeypatch):
    """Powers of two commute with every rounding; nineteen tokens are padded."""
    apart = passed(policy, 2.0**-9, fused=False)
    monkeypatch.setattr(fp8, "CODES", 32 * OUTPUTS // parts)
    monkeypatch.setattr(fp8, "TILE", 8)
    for found, wanted in zip(passed(policy, 2.0**-9, fused=True), apart, strict=True):
        assert torch.equal(found, wanted)
    assert apart[2].any()


@pytest.mark.parametrize("policy", policies(FP8, ROWS, *OTHERS))
def test_any_incoming_gradient_multiplies_the_sums_before_they_are_rounded(policy):
    """The codes are those of a gradient of 1; a CPU multiplies them by their scales before it sums."""
    one, some = passed(policy, 1.0, fused=True), passed(policy, 0.37, fused=True)
    x, w, b = draw(19, 32).bfloat16(), draw(OUTPUTS, 32, seed=1, scale=0.1), draw(OUTPUTS, seed=2)
    g = linear(x, w, b, casts(policy))
    losses.row_losses_(g, targets_of(19), OUTPUTS, *TERMS, 1.0)
    x, w, g = x.float().abs(), w.abs(), g.float().abs()
    # No operand is more than twice what it was: the sums of magnitudes bound what roundings inside can change.
    magnitudes = (4 * g @ w, 4 * g.t() @ x, g.sum(0))
    units = (torch.finfo(torch.bfloat16).eps, 0.0, 0.0)
    for found, unscaled, magnitude, unit in zip(some[1:], one[1:], magnitudes, units, strict=True):
        wanted = 0.37 * unscaled.float()
        bound = 2 * OUTPUTS * U32 * 0.37 * magnitude + unit * wanted.abs()
        assert ((found.float() - wanted).abs() <= bound).all()
    assert torch.equal(one[0], some[0])


@pytest.mark.parametrize("policy", policies(FP8, ROWS, *OTHERS))
def test_in_chunks_logits_are_the_same_and_the_gradient_of_each_is_scaled_by_its_own_amax(policy):
    """A chunk alone has the same gradients, if its tokens have the amax of all; their weight gradients add up."""
    x, w = draw(32, 32).bfloat16(), draw(OUTPUTS, 32, seed=1, scale=0.1)
    x[0, 0] = x[20, 3] = 8.0
    targets, c = torch.arange(32), casts(policy)

    def run(rows, chunks):
        given = [
            x[rows].clone().requires_grad_(),
            w.clone().requires_grad_(),
            draw(OUTPUTS, seed=2).requires_grad_(),
        ]
        loss, sample = linear_cross_entropy(*given, targets[rows], c, TERMS, chunks, OUTPUTS)
        (loss * 0.5).backward()
        return loss.detach(), sample, *(t.grad for t in given)

    loss, sample, *grads = run(slice(None), 2)
    (first, first_sample, *head), (second, _, *tail) = run(slice(16), 1), run(slice(16, 32), 1)
    assert torch.equal(loss, first + second)
    assert torch.equal(sample, first_sample)
    assert [t.dtype for t in grads] == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.equal(grads[0], torch.cat([head[0], tail[0]]))
    for found, one, other in zip(grads[1:], head[1:], tail[1:], strict=True):
        assert torch.equal(found, one + other)


def test_delayed_operands_have_one_chunk_because_their_scale_needs_what_comes_in():
    found = []
    for chunks in (1, 3):
        w, past = draw(OUTPUTS, 32, seed=1, scale=0.1).requires_grad_(), history(DELAYED)
        given = (draw(19, 32).bfloat16(), w, None, targets_of(19), casts(DELAYED), TERMS, chunks)
        linear_cross_entropy(*given, history=past)[0].backward(torch.tensor(0.25))
        found.append((w.grad, past.pending))
    assert same(*found)


@pytest.mark.parametrize("incoming", [0.0, float("nan"), float("inf")])
def test_a_delayed_gradient_of_nothing_is_nothing_and_one_that_is_not_finite_stays_so(incoming):
    _, *grads, pending = passed(DELAYED, incoming, fused=True)
    for grad in grads:
        assert not grad.any() if incoming == 0.0 else not grad.isfinite().all()
    assert pending[2] == 0.0 if incoming == 0.0 else not pending[2].isfinite()


def test_without_gradients_it_is_the_same_number_and_a_graph_may_be_kept_but_not_differentiated_twice():
    x, w, targets = draw(16, 32).bfloat16(), draw(OUTPUTS, 32, seed=1).requires_grad_(), torch.arange(16)
    with torch.no_grad():
        expected, sample = linear_cross_entropy(x, w, None, targets, casts(FP8))
    assert sample is None
    loss, sample = linear_cross_entropy(x, w, None, targets, casts(FP8), size=OUTPUTS)
    assert torch.equal(loss.detach(), expected)
    assert sample.shape == (OUTPUTS,)
    once, again = (torch.autograd.grad(loss, [w], retain_graph=True) for _ in range(2))
    assert same(once, again)
    (grad,) = torch.autograd.grad(loss, [w], create_graph=True)
    with pytest.raises(HalfstepError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.prove
@pytest.mark.parametrize(("policy", "chunks"), [(FP8, 1), (FP8, 2), (DELAYED, 1)])
def test_it_compiles_into_one_graph_and_another_policy_into_another(policy, chunks):
    """Two heads of one shape, whose casts differ: to dynamo, functions of the same code are the same function."""

    def run(function, text):
        x, w = draw(16, 32).bfloat16().requires_grad_(), draw(OUTPUTS, 32, seed=1, scale=0.1).requires_grad_()
        loss = function(x, w, None, torch.arange(16), casts(text), TERMS, chunks, history=history(text))[0]
        loss.backward()
        return loss.detach(), x.grad, w.grad

    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for text in (policy, "bf16-mixed,compute=e4m3"):
        assert same(run(linear_cross_entropy, text), run(compiled, text))
