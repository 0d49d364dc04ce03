"""fp8 on a CPU: torch multiplies 8-bit floats there too, so the native path is the one that a GPU runs."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.core import rounding
from halfstep.core.formats import BF16, E4M3, E5M2
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.core.roles import Accumulator, Operand
from halfstep.torch.fp8 import linear as fp8
from halfstep.torch.fp8.linear import lower
from halfstep.torch.layers import casts_of, linear
from halfstep.torch.numerics import cast
from halfstep.torch.numerics.cast import amax_of
from halfstep.torch.numerics.dtypes import DTYPES, ROWS_INTO_FP32, product_failure, supported
from halfstep.torch.numerics.provenance import compiling
from halfstep.torch.numerics.split.parameter import make_split
from halfstep.torch.run import prepare
from tests.torch.nets import U32, bf16, draw, same

pytestmark = pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)

FP8 = "bf16-mixed,compute=e4m3,grad=e5m2"
ROWS = "bf16-mixed,compute=e4m3:row,grad=e4m3:row"
DELAYED = "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed"
# torch 2.11 has no product on a CPU that is scaled by rows, 2.13 has.
WITHOUT_ROWS = product_failure(E4M3, E4M3, torch.device("cpu"), rows=True) if supported(E4M3, "cpu") else ""
needs_rows = pytest.mark.skipif(bool(WITHOUT_ROWS), reason=WITHOUT_ROWS)


def policies(*texts):
    return [pytest.param(text, marks=needs_rows if ":row" in text else ()) for text in texts]


OTHERS = ("bf16-mixed,compute=e4m3,grad=e4m3:row", "bf16-mixed,compute=e4m3", "bf16-mixed,grad=e5m2")
POLICIES = policies(FP8, ROWS, *OTHERS)


def casts(policy, emulate=False):
    return casts_of(precisions(Policy.parse(policy + ",emulate=true" * emulate), ["a"])["a"])


def hostile():
    """(name, matrix): what a cast gets wrong first."""
    outlier = draw(32, 48)
    outlier[3, 5] = 1e30
    bad = {"inf": float("inf"), "-inf": -float("inf"), "nan": float("nan")}
    yield "random", draw(32, 48)
    yield "one row of zeros", draw(32, 48) * (torch.arange(32) != 4)[:, None]
    yield "zeros", torch.zeros(32, 48)
    yield "subnormals", draw(32, 48, scale=2.0**-130)
    yield "an outlier", outlier
    yield "rows of every size", draw(32, 48) * 2.0 ** torch.arange(-60, 68, 4)[:, None]
    yield "ties and the largest", (torch.arange(32 * 48).reshape(32, 48) - 700.0) * 0.5
    for name, value in bad.items():
        x = draw(32, 48)
        x[7, 7] = value
        yield name, x


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("name", "x"), list(hostile()), ids=[name for name, _ in hostile()])
def test_operands_and_scales_are_those_of_the_reference_natively_and_emulated(
    name, x, fmt, granularity, monkeypatch
):
    operand = Operand(fmt, granularity=granularity)
    x = x.bfloat16()
    wide = x.float().numpy()
    amax = np.abs(wide).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(wide).max()
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.clip(np.floor(np.log2(np.float64(fmt.max) / np.where(amax == 0, fmt.max, amax))), -126, 126)
    scale = np.where(np.isfinite(amax), 2.0 ** np.nan_to_num(power), np.nan).astype(np.float32)
    expected = rounding.cast(wide * scale, fmt, overflow="saturate")
    for emulate, at_once in ((False, x.numel()), (True, x.numel()), (False, 100), (True, 100)):
        monkeypatch.setattr(cast, "AT_ONCE", at_once)
        values, inv_scale = lower(x.float() if emulate else x, operand, casts(FP8, emulate))
        assert values.dtype == (torch.float32 if emulate else DTYPES[fmt])
        assert np.array_equal(inv_scale.reshape(scale.shape).numpy(), 1 / scale, equal_nan=True), name
        assert np.array_equal(values.float().numpy(), expected, equal_nan=True), name
        if np.isfinite(wide).all():
            assert np.abs(values.float().numpy()).max() <= fmt.max


@pytest.mark.prove
def test_compiled_casts_make_the_same_codes_and_a_scale_that_its_inverse_undoes():
    """Inductor fuses amax, scale, clamp and conversion into one or two loops; not one code may differ.

    What it fuses with the operation before is not rounded to bf16, in which 448.9 is 448: a scale of the one and
    an inverse of the other would be off by two.
    """
    x = torch.cat([x for _, x in hostile() if x.isfinite().all()]).bfloat16()
    wide = draw(32, 16).clamp(-1, 1)
    wide[0, 0] = 1.0
    operands = [Operand(E4M3), Operand(E5M2, granularity="row")]
    fused_with = [Operand(E4M3), Operand(E4M3, granularity="row")]

    def lowered(x, wide):
        made = [t for operand in operands for t in lower(x, operand, CASTS)]
        return made, [lower((wide * 448.9).bfloat16(), operand, CASTS) for operand in fused_with]

    made, fused = torch.compile(lowered, fullgraph=True)(x, wide)
    for eager, compiled in zip(lowered(x, wide)[0], made, strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.equal(eager.reshape(-1).view(torch.uint8), compiled.reshape(-1).view(torch.uint8))
    wide = wide * 448.9
    for values, inv_scale in fused:
        assert ((values.float() * inv_scale - wide).abs() <= 2.0**-4 * wide.abs() + 2.0**-10).all()


CASTS = casts(FP8)


def passed(policy, emulate, tokens=19, inputs=32, outputs=48, bias=None, weight=None, shape=None, x=None, g=None):
    """A layer, forward and backward: y and the gradients of x, the weight and the bias, as fp32."""
    c = casts(policy, emulate)
    x = draw(tokens, inputs) if x is None else x
    x = bf16(x).requires_grad_() if shape is None else bf16(x).reshape(shape).requires_grad_()
    w = (draw(outputs, inputs, seed=1, scale=0.1) if weight is None else weight.clone()).requires_grad_()
    b = None if bias is None else bias.clone().requires_grad_()
    y = linear(x, w, b, c)
    g = bf16(draw(*y.shape, seed=2, scale=1e-3) if g is None else g.reshape(y.shape))
    y.backward(g.to(y.dtype))
    assert w.grad.dtype == torch.float32
    return y.detach().float(), x.grad.float(), w.grad, None if b is None else b.grad


@pytest.mark.parametrize("policy", POLICIES)
def test_native_matmuls_are_the_emulated_ones_but_for_the_order_of_a_sum(policy):
    native, emulated = passed(policy, False, bias=draw(48, seed=5)), passed(policy, True, bias=draw(48, seed=5))
    x, w, g = bf16(draw(19, 32)), bf16(draw(48, 32, seed=1, scale=0.1)), bf16(draw(19, 48, seed=2, scale=1e-3))
    # No operand is more than twice what it was: the sums of magnitudes bound what an order can change.
    magnitudes = [4 * x.abs() @ w.abs().t(), 4 * g.abs() @ w.abs(), 4 * g.abs().t() @ x.abs()]
    for found, wanted, magnitude, terms, unit in zip(
        native, emulated, magnitudes, (32, 48, 19), (BF16.epsilon,) * 2 + (0,), strict=False
    ):
        bound = 2 * terms * U32 * magnitude + unit * wanted.abs()
        assert ((found - wanted).abs() <= bound).all()
    assert torch.equal(native[3], emulated[3])
    assert not torch.equal(native[2], bf16(native[2]))  # fp32 from the sum on


def calls(monkeypatch, run):
    found, real = [], torch._scaled_mm

    def spy(a, b, scale_a, scale_b, **rest):
        found.append((a, b, scale_a, scale_b, rest))
        return real(a, b, scale_a, scale_b, **rest)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    run()
    return found


@pytest.mark.parametrize("policy", policies(FP8, ROWS))
def test_the_hardware_gets_its_layout_sizes_and_results_and_zeros_a_finite_scale(policy, monkeypatch):
    monkeypatch.setitem(ROWS_INTO_FP32, "cpu", True)
    output, grad_input, grad_weight = calls(monkeypatch, lambda: passed(policy, False))
    for a, b, scale_a, scale_b, rest in (output, grad_input, grad_weight):
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0])
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32
        by_rows = policy == ROWS
        assert scale_a.shape == ((a.shape[0], 1) if by_rows else ())
        assert scale_b.shape == ((1, b.shape[1]) if by_rows else ())
        assert all(scale.is_contiguous() for scale in (scale_a, scale_b))
        assert rest["use_fast_accum"] is False
    assert [call[0].shape for call in (output, grad_input, grad_weight)] == [(19, 32), (19, 48), (48, 32)]
    dtypes = [call[4]["out_dtype"] for call in (output, grad_input, grad_weight)]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    forward, backward = (torch.float8_e4m3fn, torch.float8_e5m2 if policy == FP8 else torch.float8_e4m3fn)
    assert {call[1].dtype for call in (output, grad_input, grad_weight)} == {forward}
    assert [call[0].dtype for call in (output, grad_input, grad_weight)] == [forward, backward, backward]
    y, grad_x, grad_w, _ = passed(policy, False, x=torch.zeros(16, 32), g=torch.zeros(16, 48))
    for found in (y, grad_x, grad_w):
        assert torch.equal(found, torch.zeros_like(found))


def test_fast_accumulation_is_forward_alone_and_a_split_master_is_multiplied_by_its_half(monkeypatch):
    c = casts_of(replace(CASTS.precision, matmul=Accumulator(fast=True)))
    x, w = draw(16, 16).requires_grad_(), draw(16, 16, seed=1).requires_grad_()
    found = calls(monkeypatch, lambda: linear(x, w, None, c).sum().backward())
    assert [rest["use_fast_accum"] for *_, rest in found] == [True, False, False]
    wide = draw(48, 32, seed=1, scale=0.1)
    half = nn.Parameter(wide.bfloat16())
    make_split(half, torch.zeros_like(half, dtype=torch.int16))
    x = draw(19, 32)
    made = calls(monkeypatch, lambda: linear(x, half, None, CASTS).float().square().sum().backward())
    codes = lower(half.detach(), CASTS.precision.operand, CASTS).values
    assert torch.equal(made[0][1].view(torch.uint8), codes.t().view(torch.uint8))
    assert half.grad.dtype == torch.float32
    assert not torch.equal(half.grad, bf16(half.grad))


@needs_rows
def test_scales_of_rows_may_come_after_the_sum_and_x_is_kept_as_codes_where_it_can(monkeypatch):
    """Where no kernel gives fp32 with scales of rows: powers of two, so not a bit differs."""
    found = []
    for direct in (True, False):
        monkeypatch.setitem(ROWS_INTO_FP32, "cpu", direct)
        made = calls(monkeypatch, lambda: found.append(passed(ROWS, False)))
        assert made[2][2].dim() == (2 if direct else 0)
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)

    def kept(policy):
        dtypes = []
        keep = lambda t: dtypes.append((t.dtype, t.numel())) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            linear(draw(32, 48).requires_grad_(), draw(64, 48).requires_grad_(), None, casts(policy))
        return dtypes

    assert (torch.float8_e4m3fn, 32 * 48) in kept(FP8)
    assert (torch.bfloat16, 32 * 48) not in kept(FP8)
    assert (torch.bfloat16, 32 * 48) in kept(ROWS)


def test_layers_that_share_an_activation_share_its_codes_until_somebody_writes_to_it():
    def run(*inputs):
        kept = []
        keep = lambda t: (kept.append(t) if t.dtype == torch.float8_e4m3fn else None, t)[1]  # noqa: E731
        weights = [draw(16, 32, seed=seed).requires_grad_() for seed in (1, 2)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            ys = [linear(x, w, None, CASTS) for x, w in zip(inputs, weights, strict=True)]
        sum(y.float().square().sum() for y in ys).backward()
        return kept, [*(y.detach() for y in ys), *(w.grad for w in weights)]

    leaf = draw(2, 9, 32).bfloat16().requires_grad_()
    x = leaf * 2
    (one, other), shared = run(x, x)
    assert one.data_ptr() == other.data_ptr()
    (one, other), apart = run(leaf * 2, leaf * 2)
    assert one.data_ptr() != other.data_ptr()
    assert same(shared, apart)
    x = leaf * 2
    first = linear(x, draw(16, 32, seed=1), None, CASTS)
    x.mul_(3.0)
    assert torch.equal(
        linear(x, draw(16, 32, seed=1), None, CASTS), linear(x.clone(), draw(16, 32, seed=1), None, CASTS)
    )
    assert not torch.equal(linear(x, draw(16, 32, seed=1), None, CASTS), first)


@pytest.mark.parametrize("policy", policies(FP8, ROWS))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_tokens_that_fill_no_sixteen_are_as_many_zeros_more(policy, tokens):
    y, grad_x, grad_w, _ = passed(policy, False, tokens)
    drawn = (draw(tokens, 32), draw(tokens, 48, seed=2) * 1e-3)
    x, g = (torch.cat([t, torch.zeros(32 - tokens, t.shape[1])]) for t in drawn)
    filled = passed(policy, False, x=x, g=g)
    assert same((y, grad_x), (filled[0][:tokens], filled[1][:tokens]))
    assert ((grad_w - filled[2]).abs() <= 2 * 32 * U32 * 4 * bf16(g).abs().t() @ bf16(x).abs()).all()


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("policy", policies(FP8, ROWS))
def test_any_shape_of_tokens_and_no_tokens_at_all(policy, emulate):
    flat = passed(policy, emulate, tokens=12)
    for shape in [(3, 4, 32), (2, 1, 6, 32)]:
        y, grad_x, grad_w, _ = passed(policy, emulate, tokens=12, shape=shape)
        assert y.shape == (*shape[:-1], 48)
        assert same((y.flatten(0, -2), grad_x.flatten(0, -2), grad_w), (flat[0], flat[1], flat[2]))
    assert passed(policy, emulate, tokens=1, shape=(32,))[0].shape == (48,)
    # What an expert of a mixture may get.
    y, grad_x, grad_w, grad_b = passed(policy, emulate, tokens=0, bias=torch.ones(48))
    assert (y.shape, grad_x.shape) == ((0, 48), (0, 32))
    assert same((grad_w, grad_b), (torch.zeros(48, 32), torch.zeros(48)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(torch.tanh(self.mid(self.embed(index))))


def trained(policy, steps=3, model=None, batches=None, **options):
    torch.manual_seed(0)
    model = Tied() if model is None else model
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), policy, **options)
    index = torch.arange(24).reshape(2, 12) % 32
    batches = [index] * steps if batches is None else batches
    loss = lambda b: nn.functional.cross_entropy(model(b).flatten(0, 1), (b.flatten() + 1) % 32)  # noqa: E731
    results = [run.step(loss, [batch]) for batch in batches]
    return run, results


@pytest.mark.parametrize("scales", policies("", ":row"))
def test_tied_and_split_weights_train_the_same_natively_and_emulated(scales):
    policy = f"bf16-mixed,param=fp32:split,compute=e4m3{scales},grad=e5m2{scales}"
    (native, ours), (_, theirs) = trained(policy), trained(f"{policy},emulate=true")
    losses = [[float(r.loss) for r in results] for results in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=4 * BF16.epsilon)
    assert losses[0][-1] < losses[0][0]
    assert "multiplies in e4m3" in native.summary()
    assert native.model.embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", ["x", "weight", "gradient"])
@pytest.mark.parametrize("policy", policies(FP8, ROWS, DELAYED))
@pytest.mark.parametrize("emulate", ["", ",emulate=true"], ids=["native", "emulated"])
def test_what_is_not_finite_skips_the_step(policy, emulate, where, bad):
    """Saturation would make a number like any other of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), policy + emulate)
    x = draw(16, 16)
    assert not bool(run.step(lambda b: model(b).square().mean(), [x]).skipped)
    if where == "x":
        x[3, 3] = bad
    if where == "weight":
        model[1].weight.data[2, 2] = bad
    before = [p.detach().clone() for p in model.parameters()]
    spoil = torch.ones(16, 16)
    spoil[5, 5] = bad if where == "gradient" else 1.0
    result = run.step(lambda b: (model(b).square() * spoil).mean(), [x])
    assert bool(result.skipped)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old) or where == "weight"


@pytest.mark.prove
@pytest.mark.parametrize("policy", [DELAYED, *policies(FP8, ROWS)])
def test_it_is_one_graph_that_no_scale_compiles_again(policy):
    """With AOTAutograd's own eager kernels nothing is fused, so compiled and not it is the same, bit for bit."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), f"{policy},param=fp32:split")
        forward = torch.compile(model, fullgraph=True, backend=counter) if compiled else model
        xs = [draw(19, 16, seed=i, scale=10.0**i) for i in range(4)]
        losses = [run.step(lambda b: forward(b).square().mean(), [x]).loss for x in xs]  # noqa: B023
        found.append(torch.stack([*losses, *(w.sum() for w in run.weights().values())]))
    assert torch.equal(*found)
    assert counter.frame_count == 1


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return self.q(x) + self.k(x)


def compiled_graphs(model, policy, x):
    """The graphs of a forward and a backward pass."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=backend)(bf16(x).requires_grad_()).sum().backward()
    return graphs


@pytest.mark.prove
@pytest.mark.parametrize(
    ("policy", "forward", "backward"),
    [
        (FP8, (1, 1), (1, 1)),
        # Each has its own history, so each casts for itself; the current amax of x is taken once.
        (DELAYED, (2, 1), (2, 1)),
    ],
)
def test_layers_on_one_x_share_its_cast_in_compiled_code(policy, forward, backward):
    """AOTAutograd takes equal operations for one, unless they are of a NaN constant, which differs from itself."""
    graphs = compiled_graphs(Branches(), policy, draw(48, 16))
    for graph, width, expected in zip(graphs, (16, 32), (forward, backward), strict=True):
        made = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        casts = [n for n in made if n.target is torch.ops.aten._to_copy.default and n.meta["val"].itemsize == 1]
        looks = [n for n in made if n.target is torch.ops.aten.amax.default]
        of_x = [n for n in casts if n.meta["val"].shape == (48, width)]
        assert (len(of_x), sum(n.args[0].meta["val"].shape == (48, width) for n in looks)) == expected


@pytest.mark.prove
@pytest.mark.parametrize("policy", [FP8, DELAYED])
def test_compiled_code_keeps_no_codes_of_what_it_computes_again(policy):
    """ReLU's result is made of what is kept for its gradient; codes beside that would be memory for nothing."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    forward, backward = compiled_graphs(model, policy, draw(48, 16))
    kept = [n.meta["val"] for n in forward.output_node().args[0] if isinstance(n, torch.fx.Node)]
    assert not [t for t in kept if t.itemsize == 1 and t.shape == (48, 64)]
    turned = [n for n in backward.nodes if n.target is torch.ops.halfstep.transpose_codes.default]
    shapes = sorted(tuple(n.meta["val"].shape) for n in turned)
    # Of the second layer x, W and g; of the first W and g.
    assert shapes == sorted([(64, 48), (64, 16), (16, 48), (16, 64), (64, 48)])


def test_what_dynamo_takes_as_it_is_knows_that_it_is_compiled(monkeypatch):
    """Where autograd traces what dynamo left alone, torch 2.11 says that nothing is compiled: so it does here."""
    seen = []

    def watched(x, operand):
        with mock.patch.object(torch.compiler, "_is_compiling_flag", False):
            seen.append(compiling())
            return amax_of(x, operand)

    monkeypatch.setattr(fp8, "amax_of", watched)
    x, w = bf16(draw(16, 32)).requires_grad_(), draw(48, 32, seed=1).requires_grad_()

    def passes():
        return linear(x, w, None, CASTS).float().square().sum()

    torch.compile(passes, backend="aot_eager", fullgraph=True)().backward()
    assert len(seen) >= 3  # x, the weight and the gradient, each as often as it was traced
    assert all(seen)
    seen.clear()
    passes().backward()
    assert seen == [False] * 3
