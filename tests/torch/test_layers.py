"""The casted matmul and the islands in torch, beyond what tests/conformance checks on every backend."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from halfstep.core.errors import FormatError, PolicyError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.torch.convert.apply import apply, restore
from halfstep.torch.layers import CastedLinear, Norm, casts_for, casts_of, linear
from halfstep.torch.numerics import matmul
from halfstep.torch.numerics.attention import attention, cast_mask, weighted_attention
from halfstep.torch.numerics.lowering import to_compute
from tests.torch.nets import bf16, draw, same

NATIVE = casts_for("bf16-mixed")
FULL = casts_of(Precision())
EMULATED = casts_for("bf16-mixed,emulate=true")


def test_a_linear_is_torchs_in_fp32_and_adds_its_bias_in_compute():
    x, w, b = draw(5, 8), draw(6, 8, seed=1), draw(6, seed=2)
    assert torch.equal(linear(x, w, b, FULL), F.linear(x, w, b))
    assert torch.equal(linear(x, w, b, EMULATED), bf16(linear(x, w, None, EMULATED) + bf16(b)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(768,), (128, 768), (2, 64, 768), (2, 1, 3, 768), (0, 768)], ids=str)
def test_an_fp32_linear_is_torchs_own_in_both_passes(monkeypatch, shape, transposed):
    x, bias = draw(*shape).requires_grad_(), draw(96, seed=2).requires_grad_()
    held = draw(768, 96, seed=1).requires_grad_() if transposed else draw(96, 768, seed=1).requires_grad_()
    monkeypatch.setattr(matmul.Linear, "forward", None)

    def results(y):
        return [y, *torch.autograd.grad(y, [x, held, bias], draw(*shape[:-1], 96, seed=3))]

    torchs = results(F.linear(x, held.t() if transposed else held, bias))
    assert all(map(torch.equal, results(linear(x, held, bias, FULL, transposed=transposed)), torchs))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_a_matrix_is_laid_out_as_the_matrix_is(transposed, bias):
    """Autograd would copy another, in each layer of a model that keeps its matrices as (inputs, outputs)."""
    x, held = draw(5, 8), (draw(8, 6, seed=1) if transposed else draw(6, 8, seed=1)).requires_grad_()
    strides = []
    held.register_hook(lambda g: strides.append(g.stride()))
    linear(x, held, draw(6) if bias else None, NATIVE, transposed=transposed).sum().backward()
    assert strides == [held.stride()]


def test_a_compiled_layer_keeps_its_rows_as_a_matrix_where_there_are_four_dimensions(monkeypatch):
    """In a model with convolutions inductor lays out anew what has four."""
    dims, x, w = [], draw(2, 3, 4, 8).bfloat16(), draw(6, 8, seed=1)
    apply_ = matmul.Linear.apply
    monkeypatch.setattr(matmul.Linear, "apply", lambda x, *rest: dims.append(x.dim()) or apply_(x, *rest))
    y = matmul.linear_in_graph(x, w.bfloat16(), w, None, None, torch.bfloat16)
    assert dims == [2]
    assert torch.equal(y, linear(x, w, None, NATIVE))


@pytest.mark.parametrize(
    "precision",
    [NATIVE, *(pytest.param(other, marks=pytest.mark.prove) for other in (EMULATED, FULL))],
    ids=["native", "emulated", "fp32"],
)
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


@pytest.mark.parametrize("casts", [NATIVE, EMULATED, FULL], ids=["native", "emulated", "fp32"])
def test_attention_in_steps_is_the_fused_one_and_gives_its_weights(casts):
    q, k, v = (to_compute(draw(2, 2, 5, 8, seed=s), casts) for s in range(3))
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


def test_scores_are_fp32_and_a_mask_of_numbers_stays_finite_where_it_was():
    """Scores of 50 in bf16 are off by an eighth: the weights would be by a tenth."""
    q, k = (bf16(draw(1, 1, 4, 16, seed=s) * 7).bfloat16().requires_grad_() for s in range(2))
    v = torch.eye(4, dtype=torch.bfloat16)[None, None]
    weights = weighted_attention(q, k, v, NATIVE, causal=False)[1]
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1).detach()
    assert ((weights.detach().double() - exact).abs() <= BF16.epsilon / 2 * exact + 2.0**-16).all()
    weights.sum(dtype=torch.float32).backward()
    assert q.grad.dtype == k.grad.dtype == torch.bfloat16
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.0, lowest, -float("inf"), 1.0])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = cast_mask(mask, dtype)
        assert narrow.dtype == dtype
        assert narrow.isfinite().tolist() == [True, True, False, True]
    assert cast_mask(mask, torch.float32) is mask
    q = torch.zeros(1, 1, 2, 8)
    for attend in (attention, weighted_attention):
        y = attend(q, q, draw(1, 1, 2, 8), NATIVE, mask=torch.full((2, 2), lowest))
        assert not (y if isinstance(y, torch.Tensor) else y[0]).isnan().any()


def test_modules_start_as_torchs_and_print_the_truth():
    torch.manual_seed(0)
    ours = CastedLinear(8, 4, bias=True)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(8, 4)
    assert isinstance(ours, torch.nn.Linear)
    assert same((ours.weight, Norm(8)(draw(2, 8))), (theirs.weight, F.rms_norm(draw(2, 8), (8,), eps=1e-6)))
    assert torch.equal(Norm(8, "layer", bias=True)(draw(2, 8)), F.layer_norm(draw(2, 8), (8,)))
    ours.precision = NATIVE.precision
    assert "bf16 operands" in repr(ours)
    assert "in the format of its input" in repr(Norm(8))


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)],
)
def test_a_casted_layer_without_a_policy_follows_its_input(dtype, compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(CastedLinear(8, 8, bias=True), Norm(8), CastedLinear(8, 4, bias=False)).to(dtype)
    for m in model.modules():
        if isinstance(m, CastedLinear):
            m.float()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = draw(5, 8).to(dtype).requires_grad_()
    y = forward(x)
    y.float().sum().backward()
    first, last = model[0], model[2]
    hidden = F.linear(x.float(), first.weight.to(dtype).float()).to(dtype) + first.bias.to(dtype)
    hidden = F.rms_norm(hidden.float(), (8,), eps=1e-6).to(dtype)
    assert torch.equal(y, F.linear(hidden.float(), last.weight.to(dtype).float()).to(dtype))
    assert {y.dtype, x.grad.dtype} == {dtype}
    assert {p.grad.dtype for p in (first.weight, first.bias, last.weight)} == {torch.float32}
    assert torch.equal(last.weight.grad, torch.ones(4, 5) @ hidden.float())


def test_a_casted_layer_may_name_its_format_and_refuses_what_it_cannot_follow():
    assert CastedLinear(8, 4, compute="bf16")(draw(2, 8)).dtype == torch.bfloat16
    layer = CastedLinear(8, 4, compute=torch.float16, bias=False, device="cpu")
    assert layer(draw(2, 8).bfloat16()).dtype == torch.float16
    assert "fp16 operands" in repr(layer)
    assert "in the format of its input" in repr(CastedLinear(8, 4))
    with pytest.raises(FormatError, match=r"the input is float64.*CastedLinear\(..., compute='bf16'\)"):
        CastedLinear(8, 4)(draw(2, 8).double())
    with pytest.raises(FormatError, match=r"compute=e4m3.*narrow operands come with a policy"):
        CastedLinear(8, 4, compute="e4m3")


def test_a_policy_does_not_replace_the_format_that_a_layer_names():
    model = torch.nn.Sequential(CastedLinear(4, 4), CastedLinear(4, 4, compute="fp32"))
    with pytest.raises(PolicyError, match=r"`1` was built with compute=fp32.*add the rule `1: compute=fp32`"):
        apply(model, Policy.parse("bf16-mixed"))
    applied = apply(model, Policy.parse("bf16-mixed; 1: compute=fp32"))
    assert (model[0](draw(1, 4)).dtype, model[1](draw(1, 4)).dtype) == (torch.bfloat16, torch.float32)
    restore(applied)
    assert (model[0](draw(1, 4)).dtype, model[1](draw(1, 4).bfloat16()).dtype) == (torch.float32, torch.float32)


def test_a_backward_pass_frees_a_weight_that_was_computed():
    """A parametrization's or a joined master: the graph of a loss that somebody keeps must not keep it too."""
    parameter, x = draw(8, 8).requires_grad_(), draw(2, 8)
    weight = parameter * 2
    kept = weakref.ref(weight)
    y = linear(x, weight, None, casts_for("bf16-mixed"))
    y.sum().backward()
    del weight
    assert y.grad_fn is not None
    assert kept() is None


def test_a_parameter_may_be_written_to_between_its_layer_and_the_backward_pass():
    parameter = torch.nn.Parameter(draw(8, 8))
    for weight in (parameter, parameter.t()):
        y = linear(draw(2, 8), weight, None, casts_for("bf16-mixed"))
        with torch.no_grad():
            parameter.clamp_(-1, 1)
        y.sum().backward()


@pytest.mark.prove
@pytest.mark.parametrize("compiled", [False, True])
def test_a_matrix_that_is_widened_for_the_tensor_cores_gives_the_same(monkeypatch, compiled):
    """Zeros that are multiplied along change no sum; of small integers all sums are exact."""

    def run():
        weight = torch.randint(-3, 4, (13, 8), generator=torch.Generator().manual_seed(0)).float().requires_grad_()
        x = torch.arange(-12.0, 12.0).reshape(3, 8).requires_grad_()

        def loss(x, weight):
            return linear(x, weight, None, casts_for("bf16-mixed")).float().square().sum()

        value = (torch.compile(loss, backend="aot_eager") if compiled else loss)(x, weight)
        first = torch.autograd.grad(value, (x, weight), create_graph=not compiled)
        second = () if compiled else torch.autograd.grad(first[0].sum(), (x, weight))
        return [value, *first, *second]

    plain = run()
    monkeypatch.setattr(matmul, "tensor_core_padding", lambda outputs, x: -outputs % 8)
    padded = run()
    assert all(map(torch.equal, plain, padded))
    assert padded[2].shape == (13, 8)


@pytest.mark.prove
def test_compiled_code_is_of_the_formats_that_a_layer_has_now():
    """Also of those that only the backward pass uses: the functions of two narrow formats have the same code."""
    layer, x = CastedLinear(32, 32, False), torch.randn(32, 32)
    compiled, found = torch.compile(layer, backend="aot_eager", fullgraph=True), []
    for grad in ("e5m2", "bf16", "e4m3"):
        policy = Policy.parse(f"bf16-mixed,emulate=true; **: compute=e4m3,grad={grad}")
        layer.precision = precisions(policy, ["a"])["a"]
        grads = []
        for module in (layer, compiled):
            layer.weight.grad = None
            module(x).square().sum().backward()
            grads.append(layer.weight.grad)
        assert torch.equal(*grads)
        found.append(grads[0])
    assert not torch.equal(found[0], found[1])
