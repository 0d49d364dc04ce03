"""The kernels against fp64, within the roundings of fp32. Without a GPU, interpreted, which truncates to bf16."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from halfstep.torch.layers import casts_for, layer_norm, rms_norm
from halfstep.torch.numerics import norms

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NARROW = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
# Less than a block of columns, some rows per block, a power of two, several blocks of rows.
SHAPES = [(3, 7, 5), (2, 11, 64), (2, 768), (1, 1500)]


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def passes(function, tensors, g):
    """The result and every gradient."""
    given = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y = function(*given)
    y.backward(g.to(y.dtype))
    return [y.detach(), *(t.grad for t in given if t is not None)]


# Every kernel with all it may be given on every shape, and with less on the smallest.
CASES = [(0, True, SHAPES[0]), (1, True, SHAPES[0]), (0, False, SHAPES[0])]
CASES += [(2, True, SHAPES[0]), (1, False, SHAPES[0])]
CASES += [
    pytest.param(gains, centered, shape, marks=pytest.mark.prove)
    for gains, centered in ((2, True), (1, False))
    for shape in SHAPES[1:]
]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("gains", "centered", "shape"), CASES, ids=str)
def test_results_and_gradients_are_those_of_fp64_rounded_once(shape, dtype, gains, centered):
    width, eps = shape[-1], 1e-5
    x = draw(*shape, dtype=dtype) * 3 + 1
    affine = [draw(width, seed=1 + i) if i < gains else None for i in range(2)]
    g = draw(*shape, seed=3, dtype=dtype)

    def ours(x, gain, bias):
        return norms.apply_rows(x, gain, bias, eps, x.shape[-1:], dtype, centered)

    def exact(x, gain, bias):
        return F.layer_norm(x, (width,), gain, bias, eps) if centered else F.rms_norm(x, (width,), gain, eps)

    wide = [None if t is None else t.double() for t in (x, *affine)]
    y, dx, *rest = passes(ours, (x, *affine), g)
    right_y, right_dx, *right_rest = passes(exact, wide, g.double())
    # One rounding to the narrow format, and those of fp32: a sum over a row has at most `width` of them.
    inside = (width + 8) * 2.0**-24
    for value, right in ((y, right_y), (dx, right_dx)):
        assert value.dtype == dtype
        near = right.abs() * torch.finfo(dtype).eps / 2 + right.abs().max() * inside * 8
        assert ((value.double() - right).abs() <= near + torch.finfo(dtype).smallest_normal).all()
    rows = x.numel() // width
    for value, right in zip(rest, right_rest, strict=True):
        assert value.dtype == torch.float32
        terms = (g.double().abs() * 8).flatten(0, -2).sum(0)  # a number of a normalized row is rarely beyond 8
        assert ((value.double() - right).abs() <= terms * (rows + width + 8) * 2.0**-24).all()


def test_rows_of_two_dimensions_and_inputs_that_are_not_contiguous():
    x, gain, bias = draw(6, 4, 3, 5).transpose(0, 1).half(), draw(3, 5, seed=1), draw(3, 5, seed=2)
    ours = norms.apply_rows(x, gain, bias, 1e-5, x.shape[-2:], torch.float16, True)
    assert torch.equal(ours, norms.apply_rows(x.contiguous(), gain, bias, 1e-5, x.shape[-2:], torch.float16, True))
    grads = passes(lambda *t: norms.apply_rows(*t, 1e-5, x.shape[-2:], torch.float16, True), (x, gain, bias), x)
    assert [t.shape for t in grads] == [x.shape, x.shape, gain.shape, bias.shape]


def test_a_gradient_can_be_differentiated_again():
    x, gain = draw(4, 8).half().requires_grad_(), draw(8, seed=1).requires_grad_()
    y = norms.apply_rows(x, gain, None, None, x.shape[-1:], torch.float16, False)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.float().square().sum(), gain)
    right_x, right_gain = x.detach().double().requires_grad_(), gain.detach().double().requires_grad_()
    right = F.rms_norm(right_x, (8,), right_gain, torch.finfo(torch.float32).eps)
    (dx,) = torch.autograd.grad(right.square().sum(), right_x, create_graph=True)
    (right,) = torch.autograd.grad(dx.square().sum(), right_gain)
    assert torch.allclose(second.double(), right, rtol=2.0**-5, atol=right.abs().max().item() * 2.0**-7)


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
def test_layers_of_narrow_inputs_use_the_kernels_unless_they_cannot(monkeypatch):
    monkeypatch.setattr(norms, "LARGE", 1)
    taken = []
    real = norms.apply_rows
    monkeypatch.setattr(norms, "apply_rows", lambda *args: taken.append(1) or real(*args))
    casts = casts_for("bf16-mixed")
    x, gain = draw(3, 64).bfloat16(), draw(64, seed=1)
    y = layer_norm(x, gain, gain, casts)
    z = rms_norm(x, None, casts)
    assert len(taken) == 2
    assert y.dtype == z.dtype == torch.bfloat16
    wide = draw(2, norms.WIDEST + 1).bfloat16()
    assert rms_norm(wide, None, casts).dtype == torch.bfloat16
    assert layer_norm(x[:0], gain, gain, casts).shape == (0, 64)
    torch.func.vmap(lambda row: rms_norm(row, gain, casts))(x)
    bias = gain.clone().requires_grad_()
    layer_norm(x, None, bias, casts).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 3))
    assert len(taken) == 2
